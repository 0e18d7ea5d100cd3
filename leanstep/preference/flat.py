"""The same objective over one flat list of entries: pair after pair, no padding inside.

P pairs · F = P * W flat slots; slots behind the last entry belong to pair P, which is thrown away
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .batch import LensBatch
from .config import LensConfig
from .coverage import coverage
from .pairs import Pairs
from .targets import span_table
from .terms import divergence, pair_factors, preference_cost, smooth_budget


@dataclass(frozen=True)
class FlatEntries:
    """Entries of the worse contexts of all pairs.

    Args:
        scores_flat: [F], carries the gradient.
        targets_flat: [F] sign of the target; 0 = none.
        weights_flat: [F] weight in the preference sum: strength / n, times `collapse_weight` for collapse.
        scale_flat: [F] max(1, delta) / tau of the pair.
        span_tokens_flat: [F] tokens under the entry.
        pair_id: [F] int64 in 0..P; P collects unused slots.
    """

    scores_flat: Tensor
    targets_flat: Tensor
    weights_flat: Tensor
    scale_flat: Tensor
    span_tokens_flat: Tensor
    pair_id: Tensor
    num_pairs: int

    def sum(self, values: Tensor) -> Tensor:
        """[P] sums per pair, in a fixed order."""
        return values.new_zeros(self.num_pairs + 1).index_add(0, self.pair_id, values)[:-1]


def flatten_pairs(
    scores: Tensor, sign: Tensor, batch: LensBatch, pairs: Pairs, config: LensConfig
) -> FlatEntries:
    """Lay the worse contexts out one behind the other: static total, lengths stay on the device."""
    num_pairs, width = sign.shape
    dtype, device = scores.dtype, scores.device
    valid = batch.valid.index_select(0, pairs.worse)
    length = valid.sum(1)
    first = valid.to(torch.int8).argmax(1) if width else length
    slots = num_pairs * width
    repeats = torch.cat([length, (slots - length.sum())[None]])
    pair_id = torch.arange(num_pairs + 1, device=device).repeat_interleave(repeats, output_size=slots)
    start = torch.cat([length.new_zeros(1), length.cumsum(0)])
    pair = pair_id.clamp(max=max(num_pairs - 1, 0))
    entry = (torch.arange(slots, device=device) - start[pair_id] + first[pair]).clamp(max=max(width - 1, 0))
    cell = pair * width + entry
    used = pair_id < num_pairs
    targets_flat = torch.where(used, sign.reshape(-1)[cell], 0)
    scores_flat = torch.where(targets_flat != 0, scores.reshape(-1)[pairs.worse[pair] * width + entry], 0)
    scale, strength = pair_factors(pairs, config, dtype)
    num_masked = (sign != 0).sum(1).clamp(min=1)
    weights_flat = (strength / num_masked)[pair] * (targets_flat != 0)
    if config.collapse_weight != 1:
        weights_flat = torch.where(targets_flat < 0, weights_flat * config.collapse_weight, weights_flat)
    spans = span_table(config.block_size, config.max_lod, device, dtype)
    span_tokens_flat = spans[batch.lod.reshape(-1)[pairs.worse[pair] * width + entry].long()]
    return FlatEntries(
        scores_flat, targets_flat, weights_flat, scale[pair], span_tokens_flat, pair_id, num_pairs
    )


def flat_terms(
    scores: Tensor,
    sign: Tensor,
    batch: LensBatch,
    pairs: Pairs,
    config: LensConfig,
    active: tuple[str, ...],
    state: Tensor,
    prev_scores: Tensor | None,
    prev_valid: Tensor | None,
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Every active term of every pair from the flat list; same results as `eager_terms`."""
    flat = flatten_pairs(scores, sign, batch, pairs, config)
    x, dtype = flat.scores_flat, scores.dtype
    up, down = (flat.targets_flat > 0).to(dtype), (flat.targets_flat < 0).to(dtype)
    num_up, num_down = flat.sum(up), flat.sum(down)
    kept = num_up + num_down > 0
    terms: dict[str, Tensor] = {}
    if "pref" in active:
        cost = preference_cost(flat.targets_flat.to(dtype) * x * flat.scale_flat, config)
        terms["pref"] = flat.sum(cost * flat.weights_flat)
    if "rank" in active:
        gap = flat.sum(up * x) / num_up.clamp(min=1) - flat.sum(down * x) / num_down.clamp(min=1)
        terms["rank"] = torch.where((num_up > 0) & (num_down > 0), torch.relu(config.margin - gap), 0)
    if "budget" in active or "smooth" in active:
        positive = flat.sum(flat.span_tokens_flat * torch.relu(x))
        negative = flat.sum(flat.span_tokens_flat * torch.relu(-x))
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
