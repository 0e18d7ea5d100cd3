"""Preference pairs, chosen on the device: static shapes, no host read.

B samples · C variants per sample · N pair candidates per sample · P pairs of the micro-batch
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import LensConfig
from .constants import kept


@dataclass(frozen=True)
class Pairs:
    """P pairs in processing order.

    Args:
        better, worse: [P] int64, contexts (rows of the score tensor).
        delta: [P] loss of the worse minus loss of the better, in the losses' dtype; 0 where not valid.
        live: [P] bool, the slot holds a pair and its delta is above 0: only these can carry targets.
        valid: [P] bool, the slot holds a pair.
    """

    better: Tensor
    worse: Tensor
    delta: Tensor
    live: Tensor
    valid: Tensor


@kept
def _triangle(num_variants: int, device: torch.device) -> Tensor:
    """All i < j in sorted order, those with i = 0 first: [2N], the i of every pair and then the j."""
    lists = [(i, j) for i in range(num_variants) for j in range(i + 1, num_variants)]
    return torch.tensor([i for i, _ in lists] + [j for _, j in lists], dtype=torch.int64, device=device)


def pairs_per_sample(num_variants: int, config: LensConfig) -> int:
    return min(config.max_pairs, math.comb(num_variants, 2))


def build_pairs(
    loss: Tensor,
    row: Tensor,
    config: LensConfig,
    *,
    order: Tensor | torch.Generator | None = None,
) -> Pairs:
    """Pairs of every sample from its variants' losses.

    Variants are sorted by loss (stable). Pairs with the best variant come first, then all others, each list
    by delta descending (stable); `hard_negative_ratio` trims the second list, `max_pairs` the whole.

    Args:
        loss: [B, C]; NaN takes no part.
        row: [B, C] int64, the context of each variant.
        order: a permutation of the P slots, or a generator that shuffles the pairs inside each sample.
            None: the order above, samples ascending.

    Returns:
        Pairs with P = B * min(max_pairs, C * (C - 1) / 2) slots.
    """
    if loss.dim() != 2 or row.shape != loss.shape:
        raise ValueError(
            f"loss, row: expected two tensors of shape (B, C), got {tuple(loss.shape)} and {tuple(row.shape)}"
        )
    num_samples, num_variants = loss.shape
    slots = pairs_per_sample(num_variants, config)
    first_and_second = _triangle(num_variants, loss.device)
    # NaN sorts last, after every number.
    sorted_loss_BC, rank_BC = torch.sort(loss, dim=1, stable=True)
    first_BN, second_BN = sorted_loss_BC.index_select(1, first_and_second).chunk(2, 1)
    # Minus delta: ascending order is delta descending, and pairs without both losses (NaN) go last.
    gap_BN = first_BN - second_BN
    num_primary = max(num_variants - 1, 0)
    gap, pick = torch.sort(gap_BN[:, :num_primary], dim=1, stable=True)
    if num_variants == 3:
        # One pair is sorted as it is, and the quota keeps at least one.
        gap = torch.cat([gap, gap_BN[:, 2:]], 1)
        pick = torch.nn.functional.pad(pick, (0, 1), value=2)
    elif num_variants > 3:
        late_gap, late_pick = torch.sort(gap_BN[:, num_primary:], dim=1, stable=True)
        if config.hard_negative_ratio < 1:
            num_scored = (sorted_loss_BC == sorted_loss_BC).sum(1, keepdim=True)
            num_late = ((num_scored - 1) * (num_scored - 2) // 2).clamp(min=0)
            quota = (num_late.double() * config.hard_negative_ratio).ceil().clamp(min=1)
            position = torch.arange(late_gap.shape[1], device=loss.device)
            late_gap = torch.where(position < quota, late_gap, torch.nan)
        gap, pick = torch.cat([gap, late_gap], 1), torch.cat([pick, late_pick + num_primary], 1)
        # A sample with missing losses has holes between the two lists; with up to three variants it has not.
        whole = torch.argsort((gap != gap).to(torch.int8), dim=1, stable=True)
        gap, pick = gap.gather(1, whole), pick.gather(1, whole)
    gap, pick = gap[:, :slots], pick[:, :slots]
    context_BC = row.gather(1, rank_BC)
    context_B2N = context_BC.index_select(1, first_and_second).view(num_samples, 2, -1)
    chosen = context_B2N.gather(2, pick[:, None, :].expand(num_samples, 2, slots))
    better, worse = chosen.unbind(1)
    delta = -gap
    valid = delta == delta
    if isinstance(order, torch.Generator):
        shuffle = (
            torch.rand(num_samples, slots, generator=order, device=order.device).argsort(1).to(loss.device)
        )
        better, worse, delta, valid = (t.gather(1, shuffle) for t in (better, worse, delta, valid))
        order = None
    better, worse, delta, valid = (t.reshape(-1) for t in (better, worse, delta, valid))
    if order is not None:
        if tuple(order.shape) != tuple(valid.shape):
            raise ValueError(
                f"pair_order: expected a permutation of shape {tuple(valid.shape)}, got {tuple(order.shape)}"
            )
        better, worse, delta, valid = (t.index_select(0, order) for t in (better, worse, delta, valid))
    # NaN is not above 0 either.
    live = delta > 0
    return Pairs(better, worse, torch.where(live, delta, 0.0), live, valid)


def sample_pairs(pairs: Pairs, config: LensConfig, generator: torch.Generator | None) -> Pairs:
    """Thin the pairs out: those not chosen are no longer live and count for nothing.

    `pairs_per_variant` keeps the largest deltas of each worse context: biased, on purpose.
    `pair_sampling="random"` keeps `pairs_sampled` of the live pairs uniformly: the mean over them is unbiased
    for the mean over all, as long as every live pair has a target.
    """
    live = pairs.live
    if config.pairs_per_variant is not None:
        # Rank among the live pairs with the same worse context: how many come before by (delta, slot).
        slot = torch.arange(live.shape[0], device=live.device)
        same = (pairs.worse[:, None] == pairs.worse[None, :]) & live[None, :]
        ahead = (pairs.delta[None, :] > pairs.delta[:, None]) | (
            (pairs.delta[None, :] == pairs.delta[:, None]) & (slot[None, :] < slot[:, None])
        )
        live = live & ((same & ahead).sum(1) < config.pairs_per_variant)
    if config.pair_sampling == "random":
        assert config.pairs_sampled is not None
        device = generator.device if generator is not None else live.device
        key = torch.rand(live.shape[0], generator=generator, device=device).to(live.device)
        rank = torch.where(live, key, 2.0).argsort().argsort()
        live = live & (rank < config.pairs_sampled)
    if live is pairs.live:
        return pairs
    return Pairs(pairs.better, pairs.worse, pairs.delta, live, pairs.valid)


def check_variant_counts(
    counts: Sequence[int],
    micro_batch: int,
    n_random: int,
    *,
    max_pairs: int = 8,
    num_pairs: int | None = None,
) -> int:
    """Make sure that nothing inflates the number of variants or pairs of a micro-step.

    Args:
        counts: variants per sample, host integers.
        micro_batch: samples per micro-step.
        n_random: random variants per sample; duplicates are dropped, so fewer than 1 + n_random is legal.
        max_pairs: pairs per sample at most.
        num_pairs: pairs really built, checked if given.

    Returns:
        The total number of variants: 39 for 13 samples with 1 + 2 variants each.
    """
    counts = list(counts)
    if len(counts) != micro_batch:
        raise ValueError(f"counts: expected {micro_batch} samples, got {len(counts)}")
    for sample, count in enumerate(counts):
        if not 1 <= count <= 1 + n_random:
            raise ValueError(f"counts: sample {sample} has {count} variants, expected 1..{1 + n_random}")
    total = sum(counts)
    limit = sum(min(max_pairs, math.comb(count, 2)) for count in counts)
    if num_pairs is not None and num_pairs > limit:
        raise ValueError(f"num_pairs: {num_pairs} pairs from {total} variants, expected at most {limit}")
    return total
