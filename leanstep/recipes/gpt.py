"""Pretrain the speedrun GPT: stages, tied and then untied head, NorMuon + Adam, or AdamW to compare with.

    leanstep train gpt --preset tiny                       # under a minute on two cores
    leanstep train gpt --preset record-74 --set data=DIR   # .bin shards `*train*` and `*val*` of GPT-2 tokens
    leanstep train gpt --optimizer adamw --lr 3e-3         # same model, data and schedule
    leanstep train gpt --set model.inject=before           # any field of GPTConfig
    leanstep train gpt --ablate inject=before,smear=false --seeds 5

The global batch of a step is cut into micro-batches; ranks share them, so the number of ranks changes the
speed and not the result (beyond the rounding of a sum in another order).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leanstep.gpt import (
    GPT,
    Batch,
    DocumentLoader,
    GPTConfig,
    build_model,
    standard_library_corpus,
    validation_batches,
)
from leanstep.gpt.model import RUNS
from leanstep.logprob.layout import to_device
from leanstep.recipes.captured import CapturedSteps
from leanstep.recipes.checkpoint import seed_python_generators
from leanstep.recipes.distributed import World
from leanstep.recipes.optimizers import make_optimizer
from leanstep.recipes.schedules import Position, Schedule, Stage
from leanstep.recipes.settings import LARGE, check_settings, setting, with_overrides
from leanstep.recipes.training_loop import Cadence


@dataclass(frozen=True)
class Data:
    """Shards and how they are read."""

    train_paths: tuple[Path, ...]
    validation_paths: tuple[Path, ...]
    bos: int
    vocab_size: int


@dataclass(frozen=True)
class Preset:
    """One size of the run.

    Args:
        about: one line for the help page.
        model: name of the model's preset. model_fields: fields of it that are replaced.
        schedule: at its full length.
        micro_batches: pieces of the global batch of a step (at least the number of ranks).
        validation_tokens, validation_batch: tokens of an evaluation, and of one forward pass in it.
        vocab_size: of the default corpus; None = the run needs `data`.
        tuned: options by optimizer that differ from the optimizer's own defaults (`results/` has the sweep).
    """

    about: str
    model: str
    schedule: Schedule
    micro_batches: int
    validation_tokens: int
    validation_batch: int
    vocab_size: int | None = None
    model_fields: dict[str, Any] = field(default_factory=dict)
    cadence: Cadence = field(default_factory=Cadence)
    tuned: dict[str, dict[str, Any]] = field(default_factory=dict)


def _stages(tokens: tuple[int, int, int], max_seq_len: tuple[int, int, int]) -> tuple[Stage, ...]:
    """The record's stages with other batch sizes."""
    record = Schedule.record_74().stages
    sizes = [*zip(tokens, max_seq_len, strict=True), (tokens[-1], max_seq_len[-1])]
    return tuple(replace(s, tokens=t, max_seq_len=m) for s, (t, m) in zip(record, sizes, strict=True))


_TINY = Preset(
    about="4 layers, width 64, the standard library's source: under a minute on two cores",
    model="tiny",
    schedule=Schedule(_stages((1024, 2048, 3072), (256, 512, 512)), scheduled=290, extension=10,
                      momentum_warmup=60, momentum_cooldown=15),
    micro_batches=1,
    validation_tokens=32768,
    validation_batch=8192,
    vocab_size=512,
    cadence=Cadence(log=10, evaluate=20, save=100),
    tuned={"normuon": {"adam_lr": 0.03}, "adamw": {"lr": 0.03, "table_lr_mul": 10.0}},
)  # fmt: skip

_PRESETS = {
    "tiny": _TINY,
    "smoke": replace(
        _TINY,
        about="the same model for twenty steps of 256 tokens: does everything run?",
        schedule=Schedule(_stages((128, 256, 256), (64, 128, 128)), scheduled=17, extension=3,
                          momentum_warmup=5, momentum_cooldown=3),
        validation_tokens=2048,
        validation_batch=1024,
        cadence=Cadence(log=5, evaluate=10, save=5),
    ),
    "record-74": Preset(
        about="the 74th NanoGPT speedrun record; needs data=DIR with token shards, and GPUs",
        model="record-74",
        schedule=Schedule.record_74(),
        micro_batches=8,
        validation_tokens=10485760,
        validation_batch=262144,
        cadence=Cadence(log=10, evaluate=250, save=250),
    ),
}  # fmt: skip

PRESETS = {name: preset.about for name, preset in _PRESETS.items()}


@dataclass(frozen=True)
class GPTSettings:
    """What `--set` may change; None = the preset's or the optimizer's own value.

    Args:
        optimizer: `normuon` (matrices) with Adam (the rest), or `adamw` for everything.
        lr: of the matrices, or of AdamW; default: the tuned one.
        adam_lr: of the rest; normuon only.
        weight_decay: default: the optimizer's own.
        micro_batches: pieces of a step's batch; a multiple of the number of ranks.
        tokens: multiplies the tokens per step of every stage.
        data: folder with `*train*.bin` and `*val*.bin` shards instead of the default corpus.
        vocab_size: of the default corpus' tokenizer, or of the tokens in `data` (default there: GPT-2's).
        bos: the token that starts a document in `data` (default: GPT-2's).
        cuda_graph: capture training steps as CUDA graphs: see `leanstep.recipes.captured`.
        warmup, decay, beta2 (adamw), adam_decay, table_lr_mul (normuon): see `leanstep.recipes.optimizers`.
        run: how the model runs, see `GPT`. It changes rounding only: a run may be resumed with another one.
    """

    optimizer: str = setting("normuon", choices=("normuon", "adamw"))
    lr: float | None = setting(None, above=0)
    adam_lr: float | None = setting(None, above=0)
    weight_decay: float | None = setting(None, least=0)
    micro_batches: int | None = setting(None, least=1, most=LARGE)
    tokens: float | None = setting(None, above=0, most=LARGE)
    data: str | Path | None = None
    # Shards hold 16-bit tokens.
    vocab_size: int | None = setting(None, least=2, most=65536)
    bos: int | None = setting(None, least=0, most=65535)
    warmup: float | None = setting(None, least=0, most=1)
    decay: str | None = setting(None, choices=("record", "cosine"))
    beta2: float | None = setting(None, least=0, below=1)
    adam_decay: float | None = setting(None, least=0)
    table_lr_mul: float | None = setting(None, least=0)
    cuda_graph: bool = False
    run: str = setting("auto", choices=RUNS)

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """Return the options that were set for the optimizer."""
        names = ("lr", "adam_lr", "weight_decay", "warmup", "decay", "beta2", "adam_decay", "table_lr_mul")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


SETTINGS = GPTSettings
# Fields of the model for `--set model.FIELD=VALUE` and `--ablate`.
MODEL = GPTConfig


def build(
    preset: str,
    *,
    seed: int = 0,
    steps: int | None = None,
    world: World | None = None,
    model: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> GPTTraining:
    """A training at step 0.

    Args:
        preset: `tiny`, `smoke` or `record-74`.
        seed: of the initial weights and of where in the data the run starts.
        steps: length; the preset's schedule is stretched to it.
        world: the ranks that share the work.
        model: fields of `GPTConfig` in place of the preset's.
        overrides: fields of `GPTSettings`.
    """
    if preset not in _PRESETS:
        raise ValueError(f"preset: no {preset!r}; there are {', '.join(_PRESETS)}")
    settings = with_overrides(GPTSettings(), overrides)
    chosen, world = _PRESETS[preset], world or World()
    schedule = chosen.schedule if steps is None else chosen.schedule.of_length(steps)
    if settings.tokens is not None:
        stages = (replace(s, tokens=round(s.tokens * settings.tokens)) for s in schedule.stages)
        schedule = replace(schedule, stages=tuple(stages))
    shards = _find_data(chosen, settings.data, settings.vocab_size, settings.bos)
    if model and "vocab_size" in model:
        raise ValueError("model.vocab_size: the data decides it, set vocab_size")
    model_fields = {**chosen.model_fields, **(model or {}), "vocab_size": shards.vocab_size}
    training = GPTTraining(
        GPTConfig.preset(chosen.model, **model_fields),
        schedule,
        shards,
        seed=seed,
        world=world,
        micro_batches=settings.micro_batches or -(-chosen.micro_batches // world.size) * world.size,
        optimizer=settings.optimizer,
        optimizer_options={**chosen.tuned.get(settings.optimizer, {}), **settings.optimizer_options},
        validation_tokens=chosen.validation_tokens,
        validation_batch=chosen.validation_batch,
        cadence=chosen.cadence,
        preset=preset,
    )
    if isinstance(training.model, GPT):
        training.model.run = settings.run
    elif settings.run != "auto":
        raise ValueError(f"run: expected auto with model.flat_forward=false, got {settings.run}")
    if settings.cuda_graph:
        training.capture_steps()
    return training


def _find_data(preset: Preset, folder: str | Path | None, vocab_size: int | None, bos: int | None) -> Data:
    if folder is not None:
        folder = Path(folder)
        train, validation = sorted(folder.glob("*train*.bin")), sorted(folder.glob("*val*.bin"))
        if not train or not validation:
            raise ValueError(f"data: expected *train*.bin and *val*.bin shards in {folder}, found "
                             f"{len(train)} and {len(validation)}")  # fmt: skip
        start, size = 50256 if bos is None else bos, vocab_size or 50257
        if start >= size:
            raise ValueError(f"bos: expected a token below vocab_size {size}, got {start}")
        return Data(tuple(train), tuple(validation), start, size)
    if preset.vocab_size is None:
        raise ValueError("data: this preset needs a folder with token shards, got none")
    corpus = standard_library_corpus(vocab_size=vocab_size or preset.vocab_size)
    return Data(tuple(corpus.train_paths), tuple(corpus.validation_paths), corpus.bos, corpus.vocab_size)


class GPTTraining:
    """The recipe: see `leanstep.recipes.training_loop` for the contract.

    Args:
        config: of the model. schedule: what changes over the steps.
        data: the shards.
        micro_batches: pieces of a step's batch, over all ranks.
        optimizer, optimizer_options: see `leanstep.recipes.optimizers`.
        validation_tokens: of one evaluation. validation_batch: of one forward pass, over all ranks.
    """

    name = "gpt"

    def __init__(
        self,
        config: GPTConfig,
        schedule: Schedule,
        data: Data,
        *,
        validation_tokens: int,
        validation_batch: int,
        seed: int = 0,
        world: World | None = None,
        micro_batches: int = 1,
        optimizer: str = "normuon",
        optimizer_options: Mapping[str, Any] | None = None,
        cadence: Cadence | None = None,
        preset: str = "",
    ) -> None:
        self.world = world or World()
        if micro_batches < 1 or micro_batches % self.world.size:
            raise ValueError(
                f"micro_batches: expected a multiple of the {self.world.size} ranks, got {micro_batches}"
            )
        for stage in schedule.stages:
            if stage.tokens % (16 * micro_batches):
                raise ValueError(
                    f"tokens: expected a multiple of 16 x {micro_batches} micro-batches, got {stage.tokens}"
                )
        # YaRN starts from the first stage's windows: they are no change of windows to it.
        config = replace(config, windows=schedule.stages[0].windows)
        self.config, self.schedule, self.data = config, schedule, data
        self.num_steps, self.cadence = schedule.num_steps, cadence or Cadence()
        self.accumulation = micro_batches // self.world.size
        self.validation_tokens, self.validation_batch = validation_tokens, validation_batch
        self.completed = 0
        self.settings = {
            "preset": preset,
            "seed": seed,
            "steps": self.num_steps,
            "optimizer": optimizer,
            **(optimizer_options or {}),
            "tokens": [stage.tokens for stage in schedule.stages],
            "micro_batches": micro_batches,
            "model": _digest(asdict(config)),
            "data": [path.name for path in data.train_paths],
        }
        torch.manual_seed(seed)
        seed_python_generators(seed)
        self.model = build_model(config, generator=torch.Generator().manual_seed(seed)).to(self.world.device)
        self.loader = DocumentLoader(
            data.train_paths,
            schedule.stages[0].tokens // self.accumulation,
            schedule.stages[0].max_seq_len,
            bos=data.bos,
            rank=self.world.rank,
            world_size=self.world.size,
        )
        _skip_to(self.loader, seed)
        self.optimizer = make_optimizer(
            optimizer, self.model, schedule, self.world, dict(optimizer_options or {})
        )
        self.captured: CapturedSteps | None = None

    def capture_steps(self) -> None:
        """Run the steps from now on as CUDA graphs; the optimizer is part of them on a single rank."""
        if self.world.device.type != "cuda":
            raise ValueError(f"cuda_graph: expected a CUDA device, got {self.world.device.type}")
        if self.config.respect_docs or not self.config.flat_forward:
            raise ValueError("cuda_graph: expected model.respect_docs=false and model.flat_forward=true, got "
                             f"{self.config.respect_docs} and {self.config.flat_forward}")  # fmt: skip
        self.captured = CapturedSteps(
            self.model, self.optimizer, self._accumulate, whole=self.world.size == 1
        )

    def step(self, i: int) -> dict[str, Tensor | float | int]:
        here = self.schedule.at(i)
        self._enter(here)
        if self.captured is None:
            total = self._accumulate(self._micro_batches(), here.mtp_weights)
            self.optimizer.step(here)
        else:
            total = self.captured.step(here, list(self._micro_batches()))
        if self.model.tied and i == self.schedule.untie_step:
            self.model.untie()
            self.optimizer.untie()
        self.completed = i + 1
        # The model's loss is a sum over tokens and prediction weights; the log has means.
        local = here.tokens // (self.accumulation * self.world.size)
        return {
            "loss": total / (local * sum(here.mtp_weights)),
            "lr_mul": here.lr_mul,
            "momentum": here.momentum,
            "tokens": here.tokens,
        }

    def _micro_batches(self) -> Iterator[Batch]:
        for _ in range(self.accumulation):
            batch = self.loader.next_batch()
            self.optimizer.note_batch(batch.inputs, batch.cu_seqlens)
            yield Batch(*self._on_device(batch), batch.cu_seqlens)

    def _accumulate(self, batches: Iterable[Batch], mtp: tuple[Any, ...]) -> Tensor:
        """Run forward and backward of every micro-batch; return the mean loss."""
        total: Tensor | None = None
        for batch in batches:
            loss = self.model(batch.inputs, batch.targets, batch.cu_seqlens, mtp=mtp) / self.accumulation
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total

    def _on_device(self, batch: Batch) -> tuple[Tensor, Tensor]:
        # Checked while the tokens are still on the host; the targets are the inputs moved on by one.
        largest = max(int(batch.inputs[0]), int(batch.targets.max()))
        if largest >= self.data.vocab_size:
            raise ValueError(f"data: found token {largest}, expected all below vocab_size "
                             f"{self.data.vocab_size}")  # fmt: skip
        return to_device(batch.inputs, self.world.device), to_device(batch.targets, self.world.device)

    def _enter(self, here: Position) -> None:
        """Make model and loader follow the schedule."""
        if tuple(self.model.windows) != here.windows:
            self.model.set_windows(*here.windows)
        self.model.plans.longest_document = here.max_seq_len
        micro = here.tokens // self.accumulation
        if (self.loader.num_tokens, self.loader.max_seq_len) != (micro, here.max_seq_len):
            self.loader.resize(micro, here.max_seq_len)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Mean cross-entropy on the validation shards; at the end with the widest window."""
        windows = self.model.windows
        if self.completed == self.num_steps:
            self.model.set_windows(windows[0], max(self.schedule.final_window, windows[1]), yarn=False)
        # Validation batches are not cut at documents' limits; the next step sets its own again.
        self.model.plans.longest_document = None
        try:
            total, count = torch.zeros((), dtype=torch.float64, device=self.world.device), 0
            for batch in validation_batches(
                self.data.validation_paths,
                self.validation_batch,
                self.validation_tokens,
                bos=self.data.bos,
                rank=self.world.rank,
                world_size=self.world.size,
            ):
                inputs, targets = self._on_device(batch)
                total += self.model.mean_loss(inputs, targets, batch.cu_seqlens)
                count += 1
        finally:
            self.model.set_windows(*windows, yarn=False)
        return {"val_loss": float(self.world.mean(total.cpu() / count))}

    def state_dict(self) -> dict[str, Any]:
        # First: it makes the gradients that wait the same on all ranks.
        optimizer = self.optimizer.state_dict()
        return {
            "parameters": dict(self.model.named_parameters()),
            # The gradients of parameters that step every other time wait for their turn.
            "pending": {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None},
            "schedule": self.model.schedule_state(),
            "optimizer": optimizer,
            "loader": self.loader.state_dict(),
            "completed": self.completed,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_schedule_state(state["schedule"])
        for name, parameter in self.model.named_parameters():
            parameter.copy_(state["parameters"][name])
            pending = state["pending"].get(name)
            # Torch refuses a gradient of another shape or dtype.
            parameter.grad = None if pending is None else pending.to(parameter.device)
        self.optimizer.load_state_dict(state["optimizer"])
        self.loader.load_state_dict(state["loader"])
        self.completed = state["completed"]
        if self.captured is not None:
            self.captured.forget()


def _skip_to(loader: DocumentLoader, seed: int) -> None:
    """Another seed starts at another batch, so that seeds differ in data as well as in weights."""
    for _ in range(seed % 64):
        loader.next_batch()


def _digest(config: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:12]
