"""A focus controller end to end: `python -m recipes.lens.train`.

Every step draws sequences, reads each one as a baseline and a few random working contexts (raw tokens and
gists), and takes the base model's NLL of every variant. First the base model learns; then it is frozen, and
LensNet learns from the preferences between the variants. Evaluation asks two questions on held-out sequences:
do the scores agree with the base model's preferences, and does the base model predict better when LensNet
decides what to collapse than when chance does, at the same length.

The task: sequences in which focus matters. A fact token names a key and a value at once; the tail of the
    sequence is
`question(key) answer(value)` pairs. A gist over a block of facts mixes their values, so a reader that
collapsed the wrong block cannot answer.

B sequences · T tokens · V contexts · W entries · D width
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from leanstep.lens import (
    LensBatch,
    LensConfig,
    LensObjective,
    ObjectiveConfig,
    SamplingConfig,
    Variant,
    check_variant_counts,
    lens_loss,
)
from recipes.lens.contexts import (
    AllocatorConfig,
    ContextReader,
    LensNet,
    allocate_focus,
    baseline_variant,
    reachable_length,
    sample_variants,
)
from recipes.run import Run, start


@dataclass
class Settings:
    steps: int = 1000
    seed: int = 0
    # The base model and the controller.
    width: int = 48
    layers: int = 1
    lens_width: int = 32
    gist_bottleneck: int = 2  # dimensions that a gist may pass on; few, so that collapsing facts loses them
    # The task: facts come in whole blocks and name `fact_blocks * block` different keys.
    tokens: int = 64
    block: int = 4
    fact_blocks: int = 2
    values: int = 4
    fillers: int = 64
    questions: int = 4
    # Sequences per rank and step, contexts beside the baseline, and the share of a sequence's length that one
    # may have.
    samples: int = 16
    random_variants: int = 2
    budget: float = 0.7
    warm_fraction: float = 0.7  # of the steps, in which the base model learns
    lr: float = 3e-3
    lens_lr: float = 4e-3
    # Raw tokens only ever get collapse targets, so every score would end at -1. The pull towards a policy
    # that asks for no edits makes a score show how often and how strongly the base model preferred the
    # collapse.
    kl_weight: float = 4.0
    # Both balance expanding against collapsing inside a pair, and so work against such a score.
    rank_weight: float = 0.0
    budget_weight: float = 0.0
    evaluation_samples: int = 96

    def __post_init__(self) -> None:
        if not 0 < self.budget < 1:
            raise ValueError(f"budget: expected a share between 0 and 1, got {self.budget}")
        if self.body % self.block or self.body // self.block < self.fact_blocks:
            raise ValueError(
                f"tokens: expected whole blocks of {self.block} before the questions, got {self.body}"
            )
        if self.questions > self.keys:
            raise ValueError(f"questions: expected at most one per key, {self.keys}, got {self.questions}")

    @property
    def keys(self) -> int:
        return self.fact_blocks * self.block

    @property
    def body(self) -> int:
        """Tokens before the questions."""
        return self.tokens - 2 * self.questions

    @property
    def vocab(self) -> int:
        return self.fillers + self.keys * self.values + self.keys + self.values

    @property
    def length(self) -> int:
        """Entries of every context."""
        return reachable_length(self.tokens, round(self.budget * self.tokens), self.block)

    @property
    def config(self) -> LensConfig:
        return LensConfig(
            block_size=self.block,
            objective=ObjectiveConfig(
                kl_weight=self.kl_weight, rank_weight=self.rank_weight, budget_weight=self.budget_weight
            ),
            sampling=SamplingConfig(
                num_random_variants=self.random_variants, recent_tokens=2 * self.questions
            ),
        )


PRESETS = {
    "tiny": {},  # minutes on two cores
    "small": {
        "steps": 6000, "width": 256, "layers": 4, "lens_width": 64, "samples": 32, "evaluation_samples": 256,
        "tokens": 1024, "block": 16, "fact_blocks": 4, "values": 16, "questions": 32,
    },
}  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    s, run = start(__doc__, Settings, PRESETS, arguments, eval_every=200, save_every=200)
    torch.manual_seed(s.seed)  # the same weights on every rank
    reader, lens = models(s, run.device)
    objective = LensObjective(s.config)
    reader_optimizer = torch.optim.AdamW(reader.parameters(), lr=s.lr, betas=(0.9, 0.98))
    # The controller has its own optimizer: its gradients never mix with the base model's.
    lens_optimizer = torch.optim.AdamW(lens.parameters(), lr=s.lens_lr, weight_decay=0.1)
    parts = {
        "reader": reader,
        "lens": lens,
        "objective": objective,
        "reader_optimizer": reader_optimizer,
        "lens_optimizer": lens_optimizer,
    }
    if (state := run.load()) is not None:
        for name, part in parts.items():
            part.load_state_dict(state[name])
    if run.step == 0:
        run.evaluation(**evaluate(reader, lens, s))

    warm_steps = round(s.steps * s.warm_fraction)
    for step in run.steps():
        # Stateless draws: a function of seed, step and rank, so that a resumed run draws the same.
        draw = torch.Generator().manual_seed(s.seed * 1_000_003 + step * run.world_size + run.rank)
        tokens, answers = sequences(s, s.samples, draw)
        batch = contexts(s, random_contexts(s, s.samples, draw), run.device)
        if step < warm_steps:
            _, nll = read(reader, batch, tokens, answers)
            nll.mean().backward()
            update(reader, reader_optimizer, s.lr * decay(step, 0, warm_steps), run)
            run.log(loss=nll.mean(), tokens=batch.pos.numel())
        else:
            with torch.no_grad():
                entries, nll = read(reader, batch, tokens, answers)
            batch = batch.with_losses(nll)
            inputs = (entries, batch.pos, batch.lod, batch.valid, batch.num_tokens)
            no_edits = torch.zeros(batch.pos.shape, device=run.device)
            result = objective(lens, batch, inputs=inputs, prev_scores=no_edits)
            result.loss.backward()
            update(lens, lens_optimizer, s.lens_lr * decay(step, warm_steps, s.steps), run)
            run.log(loss=nll.mean(), lens_loss=result.loss, tokens=batch.pos.numel())
        if run.eval_due:
            run.evaluation(**evaluate(reader, lens, s))
        if run.save_due:
            run.save({name: part.state_dict() for name, part in parts.items()})


def models(s: Settings, device: torch.device) -> tuple[ContextReader, LensNet]:
    geometry: dict[str, Any] = {"block_size": s.block, "max_lod": s.config.max_lod}
    reader = ContextReader(
        s.vocab,
        s.width,
        max_tokens=s.tokens,
        num_blocks=s.layers,
        gist_bottleneck=s.gist_bottleneck,
        **geometry,
    )
    return reader.to(device), LensNet(s.width, s.lens_width, **geometry).to(device)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, lr: float, run: Run) -> None:
    """Take one step at `lr` with gradients averaged over ranks and clipped."""
    if run.world_size > 1:
        for gradient in [p.grad for p in model.parameters() if p.grad is not None]:
            dist.all_reduce(gradient)
            gradient /= run.world_size
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()


def decay(step: int, first: int, last: int) -> float:
    """Return the factor of the learning rate: short warm-up, then linear to a tenth."""
    return min(1.0, (step - first + 1) / 20) * (1 - 0.9 * (step - first) / max(last - first, 1))


def sequences(s: Settings, count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return token ids [count, T] and which of them are answers [count, T]."""
    first_fact, first_question = s.fillers, s.fillers + s.keys * s.values
    first_answer = first_question + s.keys
    tokens = torch.randint(s.fillers, (count, s.tokens), generator=draw)
    where = torch.rand(count, s.body // s.block, generator=draw).argsort(1)[:, : s.fact_blocks]
    cell = (where[:, :, None] * s.block + torch.arange(s.block)).flatten(1)
    keys = torch.rand(count, s.keys, generator=draw).argsort(1)
    values = torch.randint(s.values, (count, s.keys), generator=draw)
    tokens.scatter_(1, cell, first_fact + keys * s.values + values)
    asked = torch.rand(count, s.keys, generator=draw).argsort(1)[:, : s.questions]
    tokens[:, s.body :: 2] = first_question + keys.gather(1, asked)
    tokens[:, s.body + 1 :: 2] = first_answer + values.gather(1, asked)
    answers = torch.zeros_like(tokens, dtype=torch.bool)
    answers[:, s.body + 1 :: 2] = True
    return tokens, answers


def random_contexts(s: Settings, count: int, draw: torch.Generator) -> list[list[Variant]]:
    """Return the baseline and random contexts of `count` sequences."""
    variants = [
        sample_variants(
            s.tokens,
            s.block,
            s.config.max_lod,
            s.random_variants,
            s.length,
            draw,
            recent_tokens=2 * s.questions,
        )
        for _ in range(count)
    ]
    check_variant_counts([len(v) for v in variants], count, s.random_variants)
    return variants


def contexts(s: Settings, variants: list[list[Variant]], device: torch.device) -> LensBatch:
    return LensBatch.from_variants(variants, s.config, num_tokens=s.tokens, device=device)


def read(reader: ContextReader, batch: LensBatch, tokens: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
    """Return entry embeddings [V, W, D] and the mean NLL of the answers [V] of every context."""
    device = batch.pos.device
    tokens, answers = tokens.to(device), answers.to(device)
    sequence = torch.arange(len(tokens)).repeat_interleave(torch.tensor(batch.counts)).to(device)
    entries = reader.embed(tokens, sequence, batch.pos, batch.lod)
    nll = reader.losses(entries, batch.pos, batch.lod, batch.valid, tokens, sequence, answers)
    return entries, nll


@torch.no_grad()
def evaluate(reader: ContextReader, lens: LensNet, s: Settings) -> dict[str, float]:
    """Return held-out agreement with the base model's preferences, and the answers' NLL by focus.

    All contexts that are compared have the same length.
    """
    device = lens.head.weight.device
    draw = torch.Generator().manual_seed(s.seed + 777_777)
    tokens, answers = sequences(s, s.evaluation_samples, draw)
    variants = random_contexts(s, len(tokens), draw)
    batch = contexts(s, variants, device)
    entries, nll = read(reader, batch, tokens, answers)
    batch = batch.with_losses(nll)
    scores = lens(entries, batch.pos, batch.lod, batch.valid, batch.num_tokens)
    coin = torch.rand(scores.shape, generator=draw).to(device) * 2 - 1
    mine, chance = (read_metrics(x, batch, s) for x in (scores, coin))
    by_focus = {
        "lens": lens_focus(reader, lens, s, tokens),
        "best": best_focus(s, tokens),
        "random": [v[-1] for v in variants],
        "recent": [v[0] for v in variants],
    }
    by_nll = {
        f"val_nll_{name}_focus": float(
            read(reader, contexts(s, [[v] for v in focus], device), tokens, answers)[1].mean()
        )
        for name, focus in by_focus.items()
    }
    return {
        **by_nll,
        "preference_agreement": mine["mc/preference_agreement"] or 0.0,
        "agreement_by_chance": chance["mc/preference_agreement"] or 0.0,
        "pref_span_corr": mine["mc/pref_span_corr"] or 0.0,
        "context_length": float(max(len(v.positions) for v in by_focus["lens"])),
    }


def read_metrics(scores: Tensor, batch: LensBatch, s: Settings) -> dict[str, float | None]:
    metrics = lens_loss(scores, batch, s.config).metrics
    assert metrics is not None
    return metrics.read()


def lens_focus(reader: ContextReader, lens: LensNet, s: Settings, tokens: Tensor) -> list[Variant]:
    """Return the context that LensNet chooses: raw tokens, then blocks collapsed, the lowest score first."""
    device = lens.head.weight.device
    whole = contexts(s, [[baseline_variant(s.tokens, s.tokens)] for _ in tokens], device)
    sequence = torch.arange(len(tokens), device=device)
    entries = reader.embed(tokens.to(device), sequence, whole.pos, whole.lod)
    scores = lens(entries, whole.pos, whole.lod, whole.valid, whole.num_tokens).cpu()
    # The budget decides how many edits, the scores decide which: shifted, every score asks for a collapse.
    edits = (s.tokens - s.length) // (s.block - 1)
    chosen = []
    for row in scores:
        positions, lods = allocate_focus(
            torch.arange(s.tokens),
            torch.zeros(s.tokens, dtype=torch.int8),
            row - row.max() - 0.2,
            block_size=s.block,
            max_lod=s.config.max_lod,
            budget=s.tokens,
            num_tokens=s.tokens,
            config=AllocatorConfig(protected_entries=2 * s.questions, max_edits=edits),
        )
        chosen.append(Variant(positions, lods))
    return chosen


def best_focus(s: Settings, tokens: Tensor) -> list[Variant]:
    """Return the context of one who knows the task: filler blocks collapsed, facts kept."""
    edits = (s.tokens - s.length) // (s.block - 1)
    chosen = []
    for row in tokens:
        body = row[: s.body].view(-1, s.block)
        keep, lods = torch.ones(s.tokens, dtype=torch.bool), torch.zeros(s.tokens, dtype=torch.int8)
        for block in (body < s.fillers).all(1).nonzero()[:edits, 0].tolist():
            lods[block * s.block] = 1
            keep[block * s.block + 1 : (block + 1) * s.block] = False
        chosen.append(Variant(torch.arange(s.tokens)[keep], lods[keep]))
    return chosen


if __name__ == "__main__":
    main()
