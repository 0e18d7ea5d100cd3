"""The controller objective as loops: one pair, one entry, one `.item()` at a time.

Every fast path is tested against this file in float64; it is also the baseline of the benchmark. It follows
the formulas in docs/lens.md one to one; nothing here is fast.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from leanstep.lens.batch import LensBatch
from leanstep.lens.lens_config import LensConfig
from leanstep.lens.telemetry import LensResult

Pair = tuple[int, int, int, float]  # sample, better variant, worse variant, delta


def reference_pairs(losses: Tensor, config: LensConfig, sample: int = 0) -> list[Pair]:
    """Preference pairs of one sample from its losses [C]; NaN takes no part."""
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
    better: list[tuple[int, int]], worse: list[tuple[int, int]], delta: float, config: LensConfig
) -> list[float]:
    """Target of every entry of the worse context; contexts are lists of (position, lod)."""
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


def reference_coverage(
    scores: list[Tensor], context: list[tuple[int, int]], tokens: int, config: LensConfig
) -> Tensor:
    """The coverage penalty of one context: tokens that the requested edits would push out."""
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
        # Only an entry that is partly pushed out carries a gradient; fully in or fully out are constants.
        share = share if 0 < share.item() < 1 else share.detach().clamp(0, 1)
        covered = covered + own / tokens
        after = after + own * share / tokens
        used = used + length
    return torch.relu(covered.clamp(max=config.objective.coverage_target) - after)


def _preference(x: Tensor, sign: int, scale: float, config: LensConfig) -> Tensor:
    if config.objective.form == "logistic":
        return torch.nn.functional.softplus(-sign * x * scale)
    hinge = torch.relu(config.objective.hinge_margin - sign * x * scale)
    return hinge if config.objective.form == "hinge" else hinge * hinge


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
    """The objective over a micro-batch, pair by pair; same arguments and result as `lens_loss`.

    Equivalent to the table in docs/lens.md, and to:
        lens_loss(scores, batch, config, backend="eager")

    Args:
        scores: [V, W]; the other arguments as in `lens_loss`.

    Host syncs: one per entry and more. For reading and testing only.
    """
    active = config.objective.active_terms(terms)
    dtype = scores.dtype if scores.dtype in (torch.float32, torch.float64) else torch.float32
    per_sample = min(config.sampling.max_pairs, math.comb(batch.loss.shape[1], 2))
    slots: list[Pair | None] = []
    for sample in range(batch.loss.shape[0]):
        found = reference_pairs(batch.loss[sample], config, sample)
        slots += [*found, *[None] * (per_sample - len(found))]
    if pair_order is not None:
        slots = [slots[k] for k in pair_order.tolist()]

    contexts: list[list[tuple[int, int]]] = []
    entries: list[list[int]] = []
    for v in range(batch.num_contexts):
        rows = zip(batch.pos[v], batch.lod[v], strict=True)
        starts = [(int(p.item()), int(lod.item())) for p, lod in rows]
        # Padding holds the position behind the last token.
        entries.append([j for j, (p, _) in enumerate(starts) if p < batch.num_tokens])
        contexts.append([starts[j] for j in entries[v]])

    total = scores.reshape(-1)[:0].to(dtype).sum()
    ema = torch.as_tensor(state, dtype=dtype)
    values = {name: [torch.zeros((), dtype=dtype)] * len(slots) for name in active}
    kept = [False] * len(slots)
    for k, slot in enumerate(slots):
        if slot is None:
            continue
        sample, better_variant, worse_variant, delta = slot
        better = int(batch.row[sample, better_variant].item())
        worse = int(batch.row[sample, worse_variant].item())
        targets = reference_targets(contexts[better], contexts[worse], delta, config)
        masked = [(i, 1 if t > 0 else -1) for i, t in enumerate(targets) if t != 0]
        if not masked:
            continue
        kept[k] = True
        row = scores[worse].to(dtype)
        whole = ("kl" in active and prev_scores is not None) or "coverage" in active
        wanted = range(len(targets)) if whole else [i for i, _ in masked]
        x = {i: row[entries[worse][i]] for i in wanted}
        scale = max(1.0, delta) / config.objective.tau
        strength = max(math.tanh(delta), 1e-6)
        zero = torch.zeros((), dtype=dtype)
        pair_total = zero
        if "pref" in active:
            pref = zero
            for i, sign in masked:
                weight = config.objective.collapse_weight if sign < 0 else 1.0
                pref = pref + _preference(x[i], sign, scale, config) * strength * weight
            values["pref"][k] = pref / len(masked)
            pair_total = pair_total + values["pref"][k]
        if "rank" in active:
            up = [x[i] for i, sign in masked if sign > 0]
            down = [x[i] for i, sign in masked if sign < 0]
            if up and down:
                gap = torch.stack(up).mean() - torch.stack(down).mean()
                values["rank"][k] = torch.relu(config.objective.margin - gap)
            pair_total = pair_total + config.objective.rank_weight * values["rank"][k]
        if "budget" in active or "smooth" in active:
            positive = negative = zero
            for i, _ in masked:
                span = config.block_size ** contexts[worse][i][1]
                positive = positive + span * torch.relu(x[i])
                negative = negative + span * torch.relu(-x[i])
            imbalance = (positive - negative) / (positive + negative + 1e-6)
            if "budget" in active:
                values["budget"][k] = imbalance**2
                pair_total = pair_total + config.objective.budget_weight * values["budget"][k]
            if "smooth" in active:
                beta = config.objective.budget_smooth_beta
                ema = beta * ema + (1 - beta) * imbalance.detach()
                values["smooth"][k] = (imbalance - ema) ** 2
                pair_total = pair_total + config.objective.budget_smooth_weight * values["smooth"][k]
        if "kl" in active and prev_scores is not None and (prev_valid is None or prev_valid[worse].item()):
            divergence = zero
            for i, j in enumerate(entries[worse]):
                before = prev_scores[worse, j].detach().to(dtype)
                q, q_before = (
                    torch.sigmoid(x[i] / config.objective.tau),
                    torch.sigmoid(before / config.objective.tau),
                )
                divergence = divergence + 0.5 * (q - q_before) * (x[i] - before) / config.objective.tau
            values["kl"][k] = divergence / len(entries[worse])
            pair_total = pair_total + config.objective.kl_weight * values["kl"][k]
        if "coverage" in active:
            tokens = int(batch.tokens[worse].item())
            values["coverage"][k] = reference_coverage(list(x.values()), contexts[worse], tokens, config)
            pair_total = pair_total + config.objective.coverage_weight * values["coverage"][k]
        total = total + pair_total
    stacked = {
        name: torch.stack(row).detach() if row else torch.zeros(0, dtype=dtype)
        for name, row in values.items()
    }
    return LensResult(
        loss=total / max(sum(kept), 1),
        terms=stacked,
        kept=torch.tensor(kept, dtype=torch.bool),
        state=ema.detach(),
    )
