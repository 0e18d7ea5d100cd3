"""The controller objective as loops over pairs and entries, one `.item()` at a time.

Every fast path is tested against this file in float64; it is also the baseline of the benchmark. It follows
the formulas in docs/lens.md, one function each, and is not meant to be fast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leanstep.lens.batch import LensBatch
from leanstep.lens.config import LensConfig
from leanstep.lens.metrics import LensResult

Pair = tuple[int, int, int, float]  # sample, better variant, worse variant, delta
Entry = tuple[int, int]  # position, lod


def reference_pairs(losses: Tensor, config: LensConfig, sample: int = 0) -> list[Pair]:
    """Return the preference pairs of one sample from its losses [C]; NaN excludes a variant."""
    scored = [(losses[v].item(), v) for v in range(len(losses)) if not math.isnan(losses[v].item())]
    order = [v for _, v in sorted(scored, key=lambda item: item[0])]

    def pair(better: int, worse: int) -> Pair:
        return sample, better, worse, (losses[worse] - losses[better]).item()

    primary = [pair(order[0], v) for v in order[1:]]
    additional = [pair(order[i], order[j]) for i in range(1, len(order)) for j in range(i + 1, len(order))]
    primary.sort(key=lambda p: -p[3])
    additional.sort(key=lambda p: -p[3])
    if config.sampling.hard_negative_ratio < 1:
        additional = additional[: max(1, math.ceil(config.sampling.hard_negative_ratio * len(additional)))]
    return (primary + additional)[: config.sampling.max_pairs]


def reference_targets(
    better: list[Entry], worse: list[Entry], delta: float, config: LensConfig
) -> list[float]:
    """Return the target of every entry of the worse context; contexts are lists of (position, lod)."""
    strength = math.tanh(abs(delta))
    lod_at = dict(better)
    targets = [0.0] * len(worse)
    for j, (p, lod) in enumerate(worse):
        if lod_at.get(p, lod) < lod and lod > 0:
            targets[j] = strength
    for p, lod in worse:
        if lod_at.get(p, lod) > lod and lod < config.max_lod:
            parent = config.block_size ** (lod + 1)
            for i, (q, other) in enumerate(worse):
                if other == lod and q // parent == p // parent:
                    targets[i] = -strength
    return targets


def reference_coverage(scores: list[Tensor], context: list[Entry], tokens: int, config: LensConfig) -> Tensor:
    """Return the coverage penalty of one context: the share of tokens that the requested edits push out."""
    b = config.block_size
    owns, lengths, end = [], [], 0
    for x, (p, lod) in zip(scores, context, strict=True):
        stop = min(p + b**lod, tokens)
        owns.append(max(0, stop - max(p, end, 0)))
        end = max(end, stop)
        expand = torch.relu(x).clamp(max=1) if lod > 0 else torch.zeros_like(x)
        collapse = torch.relu(-x).clamp(max=1) if lod < config.max_lod else torch.zeros_like(x)
        lengths.append(1 + (b - 1) * expand - (1 - 1 / b) * collapse)
    capacity = (
        len(context) if config.objective.coverage_capacity is None else config.objective.coverage_capacity
    )
    covered = after = torch.zeros_like(scores[0])
    used = torch.zeros_like(scores[0])
    for own, length in zip(reversed(owns), reversed(lengths), strict=True):
        share = (capacity - used) / length
        # Only an entry that is partly pushed out has a gradient; fully in or fully out is constant.
        share = share if 0 < share.item() < 1 else share.detach().clamp(0, 1)
        covered = covered + own / tokens
        after = after + own * share / tokens
        used = used + length
    return torch.relu(covered.clamp(max=config.objective.coverage_target) - after)


@dataclass(frozen=True)
class Context:
    """One working context without its padding.

    Args:
        columns: columns of its entries in the padded [V, W] tensors.
        entries: (position, lod) of each entry.
    """

    columns: list[int]
    entries: list[Entry]


@dataclass(frozen=True)
class Comparison:
    """One pair with a target: the inputs of its loss terms. Entries are those of the worse context.

    Args:
        delta: loss of the worse context minus loss of the better one.
        signs: entry -> +1 (expand) or -1 (collapse), for the masked entries.
        entries: (position, lod) of every entry.
        x: entry -> score, for the entries that a term reads.
        previous: scores of a previous policy, one per entry, or None.
        tokens: 0-d, tokens in the sequence.
    """

    delta: float
    signs: dict[int, int]
    entries: list[Entry]
    x: dict[int, Tensor]
    previous: Tensor | None
    tokens: Tensor


def _zero(pair: Comparison) -> Tensor:
    return torch.zeros((), dtype=next(iter(pair.x.values())).dtype)


def preference_term(pair: Comparison, config: LensConfig) -> Tensor:
    """Return the cost of scores with the wrong sign, mean over the masked entries."""
    scale = max(1.0, pair.delta) / config.objective.tau
    strength = max(math.tanh(pair.delta), 1e-6)
    total = _zero(pair)
    for i, sign in pair.signs.items():
        weight = config.objective.collapse_weight if sign < 0 else 1.0
        total = total + _preference_cost(pair.x[i], sign, scale, config) * strength * weight
    return total / len(pair.signs)


def _preference_cost(x: Tensor, sign: int, scale: float, config: LensConfig) -> Tensor:
    if config.objective.form == "logistic":
        return torch.nn.functional.softplus(-sign * x * scale)
    hinge = torch.relu(config.objective.hinge_margin - sign * x * scale)
    return hinge if config.objective.form == "hinge" else hinge * hinge


def rank_term(pair: Comparison, config: LensConfig) -> Tensor:
    """Return the shortfall of (mean score to expand - mean score to collapse) from `margin`."""
    up = [pair.x[i] for i, sign in pair.signs.items() if sign > 0]
    down = [pair.x[i] for i, sign in pair.signs.items() if sign < 0]
    if not up or not down:
        return _zero(pair)
    gap = torch.stack(up).mean() - torch.stack(down).mean()
    return torch.relu(config.objective.margin - gap)


def budget_imbalance(pair: Comparison, config: LensConfig) -> Tensor:
    """Return (P - N) / (P + N), where P and N are the tokens under positive and negative scores."""
    positive = negative = _zero(pair)
    for i in pair.signs:
        span = config.block_size ** pair.entries[i][1]
        positive = positive + span * torch.relu(pair.x[i])
        negative = negative + span * torch.relu(-pair.x[i])
    return (positive - negative) / (positive + negative + 1e-6)


def kl_term(pair: Comparison, config: LensConfig) -> Tensor:
    """Return the symmetric KL between Bernoulli policies with logits x / tau, mean over all entries."""
    assert pair.previous is not None
    tau, total = config.objective.tau, _zero(pair)
    for i in range(len(pair.entries)):
        x, before = pair.x[i], pair.previous[i]
        q, q_before = torch.sigmoid(x / tau), torch.sigmoid(before / tau)
        total = total + 0.5 * (q - q_before) * (x - before) / tau
    return total / len(pair.entries)


def pair_terms(
    pair: Comparison, active: Sequence[str], state: Tensor, config: LensConfig
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the active terms of one pair and the moving average of the imbalance after it."""
    terms = {}
    if "pref" in active:
        terms["pref"] = preference_term(pair, config)
    if "rank" in active:
        terms["rank"] = rank_term(pair, config)
    if "budget" in active or "smooth" in active:
        imbalance = budget_imbalance(pair, config)
        if "budget" in active:
            terms["budget"] = imbalance**2
        if "smooth" in active:
            beta = config.objective.budget_smooth_beta
            state = beta * state + (1 - beta) * imbalance.detach()
            terms["smooth"] = (imbalance - state) ** 2
    if "kl" in active and pair.previous is not None:
        terms["kl"] = kl_term(pair, config)
    if "coverage" in active:
        tokens = int(pair.tokens.item())
        terms["coverage"] = reference_coverage(list(pair.x.values()), pair.entries, tokens, config)
    return terms, state


def pair_slots(batch: LensBatch, config: LensConfig, order: Tensor | None) -> list[Pair | None]:
    """Return the pairs of all samples in processing order; None pads each sample to the same number."""
    per_sample = min(config.sampling.max_pairs, math.comb(batch.loss.shape[1], 2))
    slots: list[Pair | None] = []
    for sample in range(batch.loss.shape[0]):
        pairs = reference_pairs(batch.loss[sample], config, sample)
        slots += [*pairs, *[None] * (per_sample - len(pairs))]
    return slots if order is None else [slots[k] for k in order.tolist()]


def read_context(batch: LensBatch, context: int) -> Context:
    rows = zip(batch.pos[context], batch.lod[context], strict=True)
    entries = [(int(p.item()), int(lod.item())) for p, lod in rows]
    # Padding has the position after the last token.
    columns = [j for j, (p, _) in enumerate(entries) if p < batch.num_tokens]
    return Context(columns, [entries[j] for j in columns])


def lens_loss_reference(
    scores: Tensor,
    batch: LensBatch,
    config: LensConfig,
    *,
    state: Tensor | float = 0.0,
    prev_scores: Tensor | None = None,
    prev_valid: Tensor | None = None,
    pair_order: Tensor | None = None,
    terms: set[str] | None = None,
) -> LensResult:
    """Compute the objective over a micro-batch, pair by pair; same arguments and result as `lens_loss`.

    Equivalent to the table in docs/lens.md, and to:
        lens_loss(scores, batch, config)

    Args:
        scores: [V, W]; the other arguments as in `lens_loss`.

    Host syncs: at least one per entry. For reading and testing only.
    """
    active = config.objective.active_terms(terms)
    dtype = scores.dtype if scores.dtype in (torch.float32, torch.float64) else torch.float32
    contexts = [read_context(batch, v) for v in range(batch.num_contexts)]
    # KL and coverage read every entry of a context, the other terms only the masked ones.
    reads_all = ("kl" in active and prev_scores is not None) or "coverage" in active

    def compare(pair: Pair) -> Comparison | None:
        """Return the scores and signs of one pair; None if it has no target."""
        sample, better_variant, worse_variant, delta = pair
        better, worse = (int(batch.row[sample, v].item()) for v in (better_variant, worse_variant))
        columns, entries = contexts[worse].columns, contexts[worse].entries
        targets = reference_targets(contexts[better].entries, entries, delta, config)
        signs = {i: 1 if target > 0 else -1 for i, target in enumerate(targets) if target != 0}
        if not signs:
            return None
        row = scores[worse].to(dtype)
        x = {i: row[columns[i]] for i in (range(len(entries)) if reads_all else signs)}
        previous = None
        if "kl" in active and prev_scores is not None and (prev_valid is None or prev_valid[worse].item()):
            previous = prev_scores[worse, columns].detach().to(dtype)
        return Comparison(delta, signs, entries, x, previous, batch.tokens[worse])

    total = scores.reshape(-1)[:0].to(dtype).sum()
    ema, zero = torch.as_tensor(state, dtype=dtype), torch.zeros((), dtype=dtype)
    has_target: list[bool] = []
    per_pair: dict[str, list[Tensor]] = {name: [] for name in active}
    for slot in pair_slots(batch, config, pair_order):
        pair = None if slot is None else compare(slot)
        has_target.append(pair is not None)
        values: dict[str, Tensor] = {}
        if pair is not None:
            values, ema = pair_terms(pair, active, ema, config)
            weighted = (config.objective.weights[name] * value for name, value in values.items())
            total = total + sum(weighted, zero)
        for name in active:
            per_pair[name].append(values.get(name, zero).detach())
    return LensResult(
        loss=total / max(sum(has_target), 1),
        terms={n: torch.stack(v) if v else torch.zeros(0, dtype=dtype) for n, v in per_pair.items()},
        kept=torch.tensor(has_target, dtype=torch.bool),
        state=ema.detach(),
    )
