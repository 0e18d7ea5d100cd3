"""The terms of the objective as differentiable row operations: the eager path, and the compiled one.

P pairs · W padded length; row sums run over the masked entries of the worse context
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .batch import LensBatch
from .config import LensConfig
from .coverage import coverage
from .pairs import Pairs
from .targets import span_table


def compute_dtype(scores: Tensor) -> torch.dtype:
    """Half-precision scores are summed in float32: spans reach 1024 and rows have hundreds of terms."""
    return scores.dtype if scores.dtype in (torch.float32, torch.float64) else torch.float32


def pair_factors(pairs: Pairs, config: LensConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale s = max(1, delta) / tau and strength a = max(tanh(delta), 1e-6) of each pair, [P]."""
    # In the losses' own dtype first: delta may be far below what float32 resolves at the size of a loss.
    scale = pairs.delta.clamp(min=1).to(dtype)
    if config.tau != 1:
        scale = scale / config.tau
    strength = torch.tanh(pairs.delta).clamp(min=1e-6).to(dtype)
    return scale, strength


def preference_cost(aligned: Tensor, config: LensConfig) -> Tensor:
    """Cost of `aligned` = sign * score * scale: low when the score points the right way, strongly."""
    if config.form == "logistic":
        return torch.nn.functional.softplus(-aligned)
    hinge = torch.relu(config.hinge_margin - aligned)
    return hinge if config.form == "hinge" else hinge * hinge


def smooth_budget(imbalance: Tensor, kept: Tensor, state: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Moving average of the imbalance after each kept pair [P], and after the last one, in closed form.

    E_k = beta^k E_0 + (1 - beta) sum_{i <= k} beta^(k - i) d_i, with k counting kept pairs only: one
    lower-triangular product instead of a scan.
    """
    count = kept.to(imbalance.dtype).cumsum(0)
    gap = count[:, None] - count[None, :]
    # exp(k log beta) in the working dtype; the clamp keeps the upper triangle from overflowing.
    weight = torch.exp(gap.clamp(min=0) * math.log(beta)) * (1 - beta)
    slot = torch.arange(kept.shape[0], device=kept.device)
    weight = torch.where((slot[:, None] >= slot[None, :]) & kept[None, :], weight, 0)
    averages = torch.exp(count * math.log(beta)) * state + weight @ torch.where(kept, imbalance, 0)
    last = averages[-1] if averages.shape[0] else state
    return averages, last


def divergence(
    scores: Tensor, previous: Tensor, previous_valid: Tensor | None, batch: LensBatch, tau: float
) -> Tensor:
    """[V] symmetric KL between the Bernoulli policies sigmoid(x / tau) of two score tensors, mean over
    entries.
    """
    x = torch.where(batch.valid, scores, 0)
    before = torch.where(batch.valid, previous.detach().to(scores.dtype), 0)
    pointwise = 0.5 * (torch.sigmoid(x / tau) - torch.sigmoid(before / tau)) * (x - before) / tau
    mean = pointwise.sum(1) / batch.valid.sum(1).clamp(min=1)
    return mean if previous_valid is None else torch.where(previous_valid, mean, 0)


def eager_terms(
    scores: Tensor,
    sign: Tensor,
    batch: LensBatch,
    pairs: Pairs,
    config: LensConfig,
    active: tuple[str, ...],
    state: Tensor,
    prev_scores: Tensor | None,
    prev_valid: Tensor | None,
    span_weights: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Every active term of every pair.

    Args:
        scores: [V, W] in the compute dtype.
        sign: [P, W] int8 targets' signs.
        span_weights: weight of each masked entry in the preference term (replacing 1 / n) and in the sums of
            rank and budget (replacing 1), both [P, W]; from `sample_spans`.

    Returns:
        terms [P] each, kept [P], state after the last kept pair.
    """
    dtype = scores.dtype
    x = scores.index_select(0, pairs.worse)
    up, down = sign > 0, sign < 0
    masked = sign != 0
    x = torch.where(masked, x, 0)
    num_masked = masked.sum(1)
    kept = num_masked > 0
    scale, strength = pair_factors(pairs, config, dtype)
    if span_weights is None:
        share, weight = masked.to(dtype) / num_masked.clamp(min=1)[:, None], None
    else:
        share, weight = span_weights
    terms: dict[str, Tensor] = {}
    if "pref" in active:
        aligned = sign.to(dtype) * x * scale[:, None]
        cost = preference_cost(aligned, config) * share
        if config.collapse_weight != 1:
            # A Python number inside torch.where would become float32.
            cost = torch.where(down, cost * config.collapse_weight, cost)
        terms["pref"] = torch.where(masked, cost, 0).sum(1) * strength
    if "rank" in active:
        num_up, num_down = up.sum(1), down.sum(1)
        x_weighted = x if weight is None else x * weight
        mean_up = torch.where(up, x_weighted, 0).sum(1) / num_up.clamp(min=1)
        mean_down = torch.where(down, x_weighted, 0).sum(1) / num_down.clamp(min=1)
        gap = torch.relu(config.margin - (mean_up - mean_down))
        terms["rank"] = torch.where((num_up > 0) & (num_down > 0), gap, 0)
    if "budget" in active or "smooth" in active:
        spans = span_table(config.block_size, config.max_lod, scores.device, dtype)
        span = spans[batch.lod.index_select(0, pairs.worse).long()]
        if weight is not None:
            span = span * weight
        positive = (span * torch.relu(x)).sum(1)
        negative = (span * torch.relu(-x)).sum(1)
        imbalance = (positive - negative) / (positive + negative + 1e-6)
        if "budget" in active:
            terms["budget"] = imbalance * imbalance
        if "smooth" in active:
            averages, state = smooth_budget(imbalance.detach(), kept, state, config.budget_smooth_beta)
            terms["smooth"] = torch.where(kept, (imbalance - averages) ** 2, 0)
    if "kl" in active and prev_scores is not None:
        per_context = divergence(scores, prev_scores, prev_valid, batch, config.tau)
        terms["kl"] = torch.where(kept, per_context.index_select(0, pairs.worse), 0)
    if "coverage" in active:
        terms["coverage"] = torch.where(kept, coverage(scores, batch, config).index_select(0, pairs.worse), 0)
    return terms, kept, state


def total_of(terms: dict[str, Tensor], config: LensConfig) -> Tensor | None:
    """Weighted sum of the terms, [P], in the fixed order of the names."""
    total, weights = None, config.weights
    for name, value in terms.items():
        if total is None:
            total = value if weights[name] == 1 else value * weights[name]
        else:
            total = torch.add(total, value, alpha=weights[name])
    return total
