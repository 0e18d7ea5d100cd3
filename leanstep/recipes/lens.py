"""`leanstep train lens`: a focus controller end to end, on a small base model that learns beside it.

Every step draws sequences, reads each one as a baseline and a few random working contexts (raw tokens and
gists), takes the base model's NLL of every variant, and trains LensNet from the preferences between them.
Evaluation asks two questions on held-out sequences: do the scores agree with the base model's preferences,
and does the base model predict better when LensNet decides what to collapse than when chance does, at the
same length.

    recipe = build("tiny", seed=0)
    run(recipe, Path("out"))                 # agreement and NLL by focus in out/metrics.jsonl
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leanstep.lens import (
    AllocatorConfig,
    ContextReader,
    GateConfig,
    LensBatch,
    LensConfig,
    LensNet,
    LensObjective,
    ObjectiveConfig,
    SamplingConfig,
    Variant,
    allocate_focus,
    baseline_variant,
    check_variant_counts,
    lens_loss,
    reachable_length,
    sample_variants,
)
from leanstep.recipes.checkpoint import load_optimizer
from leanstep.recipes.distributed import World
from leanstep.recipes.metrics import Metrics
from leanstep.recipes.settings import LARGE, check_settings, from_preset, setting
from leanstep.recipes.tasks import FactTask, WarmStarted
from leanstep.recipes.training_loop import Cadence


@dataclass(frozen=True)
class LensSettings:
    """Everything that decides a run.

    Args:
        width, layers: of the base model; lens_width: of the controller.
        samples: sequences per rank and step.
        random_variants: working contexts per sequence beside the baseline.
        budget: share of the sequence's length that a working context may have.
        warm_fraction: part of the steps in which the base model learns; then it is frozen, and the
            controller learns from its preferences.
        lr, lens_lr: of the base model and of the controller.
        gist_bottleneck: dimensions a gist may pass on; few, so that collapsing facts loses them.
        kl_weight: pull towards a policy that asks for no edits. Raw tokens only ever get collapse targets,
            so without it every score ends at -1; with it a score shows how often and how strongly the
            base model preferred the collapse.
        rank_weight, budget_weight: 0 here. Both balance expanding against collapsing inside a pair and so
            work against a score that says how much a collapse is worth.
        evaluation_samples: held-out sequences.
        gate_every: run the objective on every so many steps.
    """

    width: int = setting(48, least=1, most=LARGE)
    layers: int = setting(1, least=1, most=1024)
    lens_width: int = setting(32, least=1, most=LARGE)
    samples: int = setting(16, least=1, most=LARGE)
    random_variants: int = setting(2, least=1, most=1024)
    budget: float = setting(0.7, above=0, below=1)
    warm_fraction: float = setting(0.7, least=0, below=1)
    lr: float = setting(3e-3, above=0)
    lens_lr: float = setting(4e-3, above=0)
    gist_bottleneck: int = setting(2, least=1, most=LARGE)
    kl_weight: float = setting(4.0, least=0)
    rank_weight: float = setting(0.0, least=0)
    budget_weight: float = setting(0.0, least=0)
    evaluation_samples: int = setting(96, least=1, most=LARGE)
    gate_every: int = setting(1, least=1, most=LARGE)

    def __post_init__(self) -> None:
        check_settings(self)


SETTINGS = LensSettings
PRESETS: dict[str, str] = {
    "tiny": "48-wide base model, 64 tokens in blocks of 4: minutes on two cores",
    "small": "256-wide base model, 1,024 tokens in blocks of 16: for one GPU",
}
_SIZES: dict[str, tuple[LensSettings, FactTask, int]] = {
    "tiny": (LensSettings(), FactTask(), 1000),
    "small": (
        LensSettings(width=256, layers=4, lens_width=64, samples=32, evaluation_samples=256),
        FactTask(tokens=1024, block=16, fact_blocks=4, values=16, questions=32),
        6000,
    ),
}


def build(
    preset: str, *, seed: int = 0, steps: int | None = None, world: World | None = None, **overrides: Any
) -> Lens:
    """The recipe of a preset; `overrides` replaces fields of its `LensSettings`."""
    settings, task, steps = from_preset(_SIZES, preset, steps, overrides)
    return Lens(settings, task, seed=seed, steps=steps, preset=preset, world=world or World())


class Lens(WarmStarted):
    """The recipe; see `leanstep.recipes.training_loop` for the contract."""

    name = "lens"
    cadence = Cadence(log=10, evaluate=200, save=200)
    options: LensSettings
    task: FactTask

    def __init__(
        self, settings: LensSettings, task: FactTask, *, seed: int, steps: int, preset: str, world: World
    ) -> None:
        super().__init__(settings, task, seed=seed, steps=steps, preset=preset, world=world)
        self.config = LensConfig(
            block_size=task.block,
            objective=ObjectiveConfig(
                kl_weight=settings.kl_weight,
                rank_weight=settings.rank_weight,
                budget_weight=settings.budget_weight,
            ),
            sampling=SamplingConfig(
                num_random_variants=settings.random_variants, recent_tokens=2 * task.questions
            ),
            gate=GateConfig(every=settings.gate_every),
        )
        self.length = reachable_length(task.tokens, round(settings.budget * task.tokens), task.block)
        geometry = {"block_size": task.block, "max_lod": self.config.max_lod}
        with torch.random.fork_rng(devices=[]):
            # The same weights on every rank.
            torch.manual_seed(seed)
            self.reader = ContextReader(
                task.vocab,
                settings.width,
                max_tokens=task.tokens,
                num_blocks=settings.layers,
                gist_bottleneck=settings.gist_bottleneck,
                **geometry,
            ).to(world.device)
            self.lens = LensNet(settings.width, settings.lens_width, **geometry).to(world.device)
        self.objective = LensObjective(self.config)
        self.reader_optimizer = torch.optim.AdamW(self.reader.parameters(), lr=settings.lr, betas=(0.9, 0.98))
        # The controller has its own optimizer: its gradients never mix with the base model's.
        self.lens_optimizer = torch.optim.AdamW(self.lens.parameters(), lr=settings.lens_lr, weight_decay=0.1)

    def step(self, i: int) -> Metrics:
        tokens, answers = self.task.draw(self.options.samples, self.generator)
        batch = self.contexts(self.variants(len(tokens), self.generator))
        if i >= self.warm_steps:
            with torch.no_grad():
                entries, losses = self.read(batch, tokens, answers)
            metrics = self._lens_step(i, batch.with_losses(losses), entries)
            return {"loss": losses.mean(), "tokens": batch.pos.numel(), **metrics}
        _, losses = self.read(batch, tokens, answers)
        loss = losses.mean()
        loss.backward()
        lr = self.options.lr * self._decay(i, 0, self.warm_steps)
        self.update(self.reader_optimizer, lr)
        return {"loss": loss.detach(), "lr": lr, "tokens": batch.pos.numel()}

    def _lens_step(self, i: int, batch: LensBatch, entries: Tensor) -> dict[str, Any]:
        inputs = (entries, batch.pos, batch.lod, batch.valid, batch.num_tokens)
        no_edits = torch.zeros(batch.pos.shape, device=self.world.device)
        result = self.objective(self.lens, batch, inputs=inputs, prev_scores=no_edits)
        if result.active:
            result.loss.backward()
            self.update(
                self.lens_optimizer, self.options.lens_lr * self._decay(i, self.warm_steps, self.num_steps)
            )
        self.objective.optimizer_step()
        return {"lens_loss": result.loss.detach()} if result.active else {}

    @staticmethod
    def _decay(i: int, first: int, last: int) -> float:
        """Short warm-up, then linear to a tenth."""
        progress = (i - first) / max(last - first, 1)
        return min(1.0, (i - first + 1) / 20) * (1 - 0.9 * progress)

    def variants(self, count: int, generator: torch.Generator) -> list[list[Variant]]:
        """Baseline and random contexts of `count` sequences."""
        samples = [
            sample_variants(
                self.task.tokens,
                self.task.block,
                self.config.max_lod,
                self.options.random_variants,
                self.length,
                generator,
                recent_tokens=self.config.sampling.recent_tokens,
            )
            for _ in range(count)
        ]
        check_variant_counts([len(v) for v in samples], count, self.options.random_variants)
        return samples

    def contexts(self, samples: list[list[Variant]]) -> LensBatch:
        return LensBatch.from_variants(
            samples, self.config, num_tokens=self.task.tokens, device=self.world.device
        )

    def read(self, batch: LensBatch, tokens: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
        """Entry embeddings [V, W, D] and mean NLL of the answers [V] of every context."""
        assert batch.counts is not None
        tokens, answers = tokens.to(self.world.device), answers.to(self.world.device)
        sequence = torch.repeat_interleave(torch.arange(len(batch.counts)), torch.tensor(batch.counts))
        sequence = sequence.to(self.world.device)
        entries = self.reader.embed(tokens, sequence, batch.pos, batch.lod)
        return entries, self.reader.losses(
            entries, batch.pos, batch.lod, batch.valid, tokens, sequence, answers
        )

    def focus(self, tokens: Tensor) -> list[Variant]:
        """The context that LensNet chooses for each sequence.

        All raw tokens, then blocks collapsed to the budget, the one with the lowest score first.
        """
        whole = self.contexts([[baseline_variant(self.task.tokens, self.task.tokens)] for _ in tokens])
        tokens = tokens.to(self.world.device)
        sequence = torch.arange(len(tokens), device=self.world.device)
        entries = self.reader.embed(tokens, sequence, whole.pos, whole.lod)
        scores = self.lens(entries, whole.pos, whole.lod, whole.valid, whole.num_tokens).cpu()
        chosen = []
        for row in scores:
            positions, lods = torch.arange(self.task.tokens), torch.zeros(self.task.tokens, dtype=torch.int8)
            edits = (self.task.tokens - self.length) // (self.task.block - 1)
            # The budget decides how many edits, the scores decide which: shifted, every score asks for a
            # collapse.
            positions, lods = allocate_focus(
                positions,
                lods,
                row - row.max() - 0.2,
                block_size=self.task.block,
                max_lod=self.config.max_lod,
                budget=self.task.tokens,
                num_tokens=self.task.tokens,
                config=AllocatorConfig(protected_entries=self.config.sampling.recent_tokens, max_edits=edits),
            )
            chosen.append(Variant(positions, lods))
        return chosen

    def best_focus(self, tokens: Tensor) -> list[Variant]:
        """The context of one who knows the task: filler blocks collapsed, facts kept; the NLL to aim for."""
        task = self.task
        edits = (task.tokens - self.length) // (task.block - 1)
        chosen = []
        for row in tokens:
            body = row[: task.body].view(-1, task.block)
            filler = (body < task.fillers).all(1).nonzero()[:edits, 0].tolist()
            keep = torch.ones(task.tokens, dtype=torch.bool)
            lods = torch.zeros(task.tokens, dtype=torch.int8)
            for block in filler:
                lods[block * task.block] = 1
                keep[block * task.block + 1 : (block + 1) * task.block] = False
            chosen.append(Variant(torch.arange(task.tokens)[keep], lods[keep]))
        return chosen

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Held-out agreement with the base model's preferences, and the answers' NLL by focus.

        All contexts that are compared have the same length.
        """
        generator = torch.Generator().manual_seed(self.seed + 777_777)
        tokens, answers = self.task.draw(self.options.evaluation_samples, generator)
        samples = self.variants(len(tokens), generator)
        batch = self.contexts(samples)
        entries, losses = self.read(batch, tokens, answers)
        scores = self.lens(entries, batch.pos, batch.lod, batch.valid, batch.num_tokens)
        batch = batch.with_losses(losses)
        read = self._agreement(scores, batch)
        coin = torch.rand(scores.shape, generator=generator).to(scores.device) * 2 - 1
        by_focus = {
            "best": self.best_focus(tokens),
            "lens": self.focus(tokens),
            "random": [v[-1] for v in samples],
            "recent": [v[0] for v in samples],
        }
        nll = {}
        for name, variants in by_focus.items():
            _, values = self.read(self.contexts([[v] for v in variants]), tokens, answers)
            nll[name] = float(values.mean())
        lengths = {len(v.positions) for v in by_focus["lens"]}
        return {
            "val_loss": nll["lens"],
            "val_nll_lens_focus": nll["lens"],
            "val_nll_random_focus": nll["random"],
            "val_nll_recent_focus": nll["recent"],
            "val_nll_best_focus": nll["best"],
            "preference_agreement": read["mc/preference_agreement"] or 0.0,
            "agreement_by_chance": self._agreement(coin, batch)["mc/preference_agreement"] or 0.0,
            "pref_span_corr": read["mc/pref_span_corr"] or 0.0,
            "context_length": float(max(lengths)),
        }

    def _agreement(self, scores: Tensor, batch: LensBatch) -> dict[str, float | None]:
        result = lens_loss(scores, batch, self.config)
        assert result.metrics is not None
        return result.metrics.read()

    def state_dict(self) -> dict[str, Any]:
        return {
            "reader": self.reader.state_dict(),
            "lens": self.lens.state_dict(),
            "objective": {"ema": self.objective.budget_ema, **self.objective.get_extra_state()},
            "reader_optimizer": self.reader_optimizer.state_dict(),
            "lens_optimizer": self.lens_optimizer.state_dict(),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reader.load_state_dict(state["reader"])
        self.lens.load_state_dict(state["lens"])
        objective = dict(state["objective"])
        self.objective.budget_ema.copy_(objective.pop("ema"))
        self.objective.set_extra_state(objective)
        load_optimizer(self.reader_optimizer, state["reader_optimizer"])
        load_optimizer(self.lens_optimizer, state["lens_optimizer"])
        self.generator.set_state(state["generator"])
