"""Terms of the objective as differentiable row operations: the readable version, which torch.compile traces.

V contexts · W padded length · P pairs; row sums run over the masked entries of the worse context
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from leanstep.lens.batch import LensBatch
from leanstep.lens.lens_config import LensConfig
from leanstep.lens.pairs import Pairs, pair_factors, span_table

Denominator = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LossCall:
    """Inputs of one call of the objective, once its pairs are known; shared by all implementations.

    Args:
        scores: [V, W] in the compute dtype (the kernel takes any).
        batch, pairs, config: the contexts, the pairs to compare, and the options.
        active: names of the terms to compute, in order.
        state: 0-d moving average of the budget imbalance before this call.
        prev_scores, prev_valid: [V, W] and [V] of a previous policy, or None.
        denominator: maps has_target [P] to the number of pairs to divide by.
        sign: [P, W] int8 from `build_targets`; None lets the closed form choose its layout.
        span_weights: weight of each masked entry in the preference term (replacing 1 / n) and in the sums of
            rank and budget (replacing 1), both [P, W]; from `sample_spans`.
        need_grad: whether the closed form also computes d loss / d scores.
        on_built: called when the targets are built.
    """

    scores: Tensor
    batch: LensBatch
    pairs: Pairs
    config: LensConfig
    active: tuple[str, ...]
    state: Tensor
    prev_scores: Tensor | None
    prev_valid: Tensor | None
    denominator: Denominator
    sign: Tensor | None = None
    span_weights: tuple[Tensor, Tensor | None] | None = None
    need_grad: bool = True
    on_built: Callable[[], None] | None = None

    def built(self) -> None:
        if self.on_built is not None:
            self.on_built()


def compute_dtype(scores: Tensor) -> torch.dtype:
    """Return the dtype of sums: float32 for half precision; spans reach 1024 and rows hundreds of terms."""
    return scores.dtype if scores.dtype in (torch.float32, torch.float64) else torch.float32


def preference_cost(aligned: Tensor, config: LensConfig) -> Tensor:
    """Return the cost of `aligned` = sign * score * scale: low for large scores with the right sign."""
    if config.objective.form == "logistic":
        return torch.nn.functional.softplus(-aligned)
    hinge = torch.relu(config.objective.hinge_margin - aligned)
    return hinge if config.objective.form == "hinge" else hinge * hinge


def smooth_budget(imbalance: Tensor, has_target: Tensor, state: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the moving average of the imbalance after each pair with a target [P], and after the last one.

    E_k = beta^k E_0 + (1 - beta) sum_{i <= k} beta^(k - i) d_i, where k counts only pairs with a target: one
    lower-triangular product instead of a scan.
    """
    count = has_target.to(imbalance.dtype).cumsum(0)
    gap = count[:, None] - count[None, :]
    # exp(k log beta) in the working dtype; the clamp prevents overflow in the upper triangle.
    weight = torch.exp(gap.clamp(min=0) * math.log(beta)) * (1 - beta)
    slot = torch.arange(has_target.shape[0], device=has_target.device)
    weight = torch.where((slot[:, None] >= slot[None, :]) & has_target[None, :], weight, 0)
    averages = torch.exp(count * math.log(beta)) * state + weight @ torch.where(has_target, imbalance, 0)
    last = averages[-1] if averages.shape[0] else state
    return averages, last


def divergence(
    scores: Tensor, previous: Tensor, previous_valid: Tensor | None, batch: LensBatch, tau: float
) -> Tensor:
    """Return the symmetric KL [V] between the Bernoulli policies sigmoid(x / tau), mean over entries."""
    x = torch.where(batch.valid, scores, 0)
    before = torch.where(batch.valid, previous.detach().to(scores.dtype), 0)
    pointwise = 0.5 * (torch.sigmoid(x / tau) - torch.sigmoid(before / tau)) * (x - before) / tau
    mean = pointwise.sum(1) / batch.valid.sum(1).clamp(min=1)
    return mean if previous_valid is None else torch.where(previous_valid, mean, 0)


def eager_terms(call: LossCall) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Compute every active term of every pair, differentiable in `call.scores`; needs `call.sign`.

    Returns:
        Terms [P] each, whether each pair has a target [P], and the state after the last such pair.
    """
    scores, sign, batch, pairs, config = call.scores, call.sign, call.batch, call.pairs, call.config
    active, state, span_weights = call.active, call.state, call.span_weights
    assert sign is not None
    dtype = scores.dtype
    x = scores.index_select(0, pairs.worse)
    up, down = sign > 0, sign < 0
    masked = sign != 0
    x = torch.where(masked, x, 0)
    num_masked = masked.sum(1)
    has_target = num_masked > 0
    scale, strength = pair_factors(pairs, config, dtype)
    if span_weights is None:
        share, weight = masked.to(dtype) / num_masked.clamp(min=1)[:, None], None
    else:
        share, weight = span_weights
    terms: dict[str, Tensor] = {}
    if "pref" in active:
        aligned = sign.to(dtype) * x * scale[:, None]
        cost = preference_cost(aligned, config) * share
        if config.objective.collapse_weight != 1:
            # A Python number inside torch.where would become float32.
            cost = torch.where(down, cost * config.objective.collapse_weight, cost)
        terms["pref"] = torch.where(masked, cost, 0).sum(1) * strength
    if "rank" in active:
        num_up, num_down = up.sum(1), down.sum(1)
        x_weighted = x if weight is None else x * weight
        mean_up = torch.where(up, x_weighted, 0).sum(1) / num_up.clamp(min=1)
        mean_down = torch.where(down, x_weighted, 0).sum(1) / num_down.clamp(min=1)
        gap = torch.relu(config.objective.margin - (mean_up - mean_down))
        terms["rank"] = torch.where((num_up > 0) & (num_down > 0), gap, 0)
    if "budget" in active or "smooth" in active:
        spans = span_table(config, scores.device, dtype)
        span = spans[batch.lod.index_select(0, pairs.worse).long()]
        if weight is not None:
            span = span * weight
        positive = (span * torch.relu(x)).sum(1)
        negative = (span * torch.relu(-x)).sum(1)
        imbalance = (positive - negative) / (positive + negative + 1e-6)
        if "budget" in active:
            terms["budget"] = imbalance * imbalance
        if "smooth" in active:
            averages, state = smooth_budget(
                imbalance.detach(), has_target, state, config.objective.budget_smooth_beta
            )
            terms["smooth"] = torch.where(has_target, (imbalance - averages) ** 2, 0)
    if "kl" in active and call.prev_scores is not None:
        per_context = divergence(scores, call.prev_scores, call.prev_valid, batch, config.objective.tau)
        terms["kl"] = torch.where(has_target, per_context.index_select(0, pairs.worse), 0)
    if "coverage" in active:
        terms["coverage"] = torch.where(
            has_target, coverage(scores, batch, config).index_select(0, pairs.worse), 0
        )
    return terms, has_target, state


def total_of(terms: dict[str, Tensor], config: LensConfig) -> Tensor | None:
    """Return the weighted sum of the terms, [P], in the fixed order of the names."""
    total, weights = None, config.objective.weights
    for name, value in terms.items():
        if total is None:
            total = value if weights[name] == 1 else value * weights[name]
        else:
            total = torch.add(total, value, alpha=weights[name])
    return total


def owned_tokens(batch: LensBatch, config: LensConfig) -> Tensor:
    """Return [V, W] int64: tokens that each entry covers first; a row sums to the distinct tokens."""
    spans = span_table(config, batch.pos.device, torch.int64)
    stop_VW = torch.minimum(batch.pos + spans[batch.lod.long()], batch.tokens[:, None])
    stop_VW = torch.where(batch.valid, stop_VW, 0)
    reach_VW = stop_VW.cummax(1).values if stop_VW.numel() else stop_VW
    before_VW = torch.nn.functional.pad(reach_VW, (1, 0))[:, :-1]
    return torch.where(batch.valid, (stop_VW - torch.maximum(batch.pos, before_VW)).clamp(min=0), 0)


def expected_lengths(scores: Tensor, batch: LensBatch, config: LensConfig) -> Tensor:
    """Return [V, W]: the number of entries that each entry becomes, 1/b (collapse) to b (expansion)."""
    b = config.block_size
    expand = torch.relu(scores).clamp(max=1) * (batch.lod > 0)
    collapse = torch.relu(-scores).clamp(max=1) * (batch.lod < config.max_lod)
    return torch.where(batch.valid, 1 + (b - 1) * expand - (1 - 1 / b) * collapse, 0)


def _surviving_shares(
    scores: Tensor, batch: LensBatch, config: LensConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what remains of each entry after the edits.

    [V, W]: share that remains (not clamped), length, tokens it owns. [V]: tokens of the sequence, required
    coverage.
    """
    length_VW = expected_lengths(scores, batch, config)
    behind_VW = length_VW.flip(1).cumsum(1).flip(1) - length_VW
    if config.objective.coverage_capacity is None:
        capacity = batch.valid.sum(1, keepdim=True).to(scores.dtype)
    else:
        capacity = torch.full_like(scores[:, :1], config.objective.coverage_capacity)
    safe_VW = torch.where(batch.valid, length_VW, 1)
    own_VW = owned_tokens(batch, config).to(scores.dtype)
    tokens = batch.tokens.to(scores.dtype)
    covered = (own_VW.sum(1) / tokens).clamp(max=config.objective.coverage_target)
    return (capacity - behind_VW) / safe_VW, safe_VW, own_VW, tokens, covered


def coverage(scores: Tensor, batch: LensBatch, config: LensConfig) -> Tensor:
    """Return the share of the sequence [V] that the edits push out beyond what `coverage_target` allows.

    The oldest entries are pushed out first, once the expected length exceeds the capacity. The penalty is
    zero for zero scores and for pure collapse, unless the capacity is below the current length.

    Equivalent to, for one context (see `reference_coverage` in reference.py):
        reference_coverage(list(scores[v]), list(zip(pos[v].tolist(), lod[v].tolist())), num_tokens, config)

    Args:
        scores: [V, W], any float dtype.

    Cost: O(V W). Differentiable in the scores.
    """
    scores = torch.where(batch.valid, scores, 0)
    share_VW, _, own_VW, tokens, covered = _surviving_shares(scores, batch, config)
    # Only an entry that is partly pushed out has a gradient.
    inside = (share_VW > 0) & (share_VW < 1)
    share_VW = torch.where(inside, share_VW, share_VW.detach().clamp(0, 1))
    return torch.relu(covered - (own_VW * share_VW).sum(1) / tokens)


def coverage_gradient(scores: Tensor, batch: LensBatch, config: LensConfig) -> tuple[Tensor, Tensor]:
    """Return the penalty [V] and its gradient [V, W] in closed form."""
    b = config.block_size
    scores = torch.where(batch.valid, scores, 0)
    share_VW, safe_VW, own_VW, tokens, covered = _surviving_shares(scores, batch, config)
    penalty = torch.relu(covered - (own_VW * share_VW.clamp(0, 1)).sum(1) / tokens)
    edge_VW = (share_VW > 0) & (share_VW < 1) & batch.valid
    rate_VW = torch.where(edge_VW, own_VW / (safe_VW * tokens[:, None]), 0)
    # An entry affects every partly pushed-out entry before it, and itself by its own share.
    slope_VW = rate_VW.cumsum(1) - rate_VW + rate_VW * share_VW
    up = (scores > 0) & (scores <= 1) & (batch.lod > 0)
    down = (scores < 0) & (scores >= -1) & (batch.lod < config.max_lod)
    growth_VW = (b - 1) * up.to(scores.dtype) + (1 - 1 / b) * down.to(scores.dtype)
    alive = (penalty > 0).to(scores.dtype)[:, None]
    return penalty, alive * slope_VW * growth_VW * batch.valid
