"""A few pairs per group instead of all of them: unbiased random draws and biased top-k selections.

n items · G groups · K draws per group
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leanstep.objectives.ragged.csr_groups import Groups, lower_counts, make_groups, pair_counts


@dataclass(frozen=True)
class SampledPairs:
    """G * K pairs, item i preferred to item j.

    Example:
        drawn = draw_pairs(labels, offsets, 16, reduction="sum")
        estimate = (drawn.weight * softplus(scores[drawn.j] - scores[drawn.i])).sum()

    Args:
        i, j: [G * K] int64; both 0 if the group has no pair (its weight is 0).
        weight: [G * K] float64; the weighted sum over the draws estimates the loss.
    """

    i: Tensor
    j: Tensor
    weight: Tensor


def draw_pairs(
    labels: Tensor,
    offsets: Tensor | Sequence[int] | Groups,
    num_draws: int,
    *,
    by: str = "uniform",
    reduction: str = "mean",
    generator: torch.Generator | None = None,
) -> SampledPairs:
    """Draw pairs with replacement, with weights that make the weighted sum unbiased for `reduction`.

    Example:
        drawn = draw_pairs(labels, offsets, 16, reduction="group_mean", generator=generator)
        loss = bradley_terry(scores, pairs=(drawn.i, drawn.j), weights=drawn.weight, reduction="sum")

    Args:
        labels: [n].
        offsets: [G + 1] host list or tensor.
        num_draws: K, per group.
        by: `uniform` over the pairs of the group, or `gap`: proportional to label_i - label_j.
        reduction: sum | mean | group_mean: the loss over all pairs that the weighted sum estimates.
    """
    if num_draws < 1:
        raise ValueError(f"num_draws: expected at least 1, got {num_draws}")
    if by not in ("uniform", "gap"):
        raise ValueError(f"by: expected uniform or gap, got {by!r}")
    groups = make_groups(labels.double(), offsets)
    device = labels.device
    uniform = torch.rand(
        groups.num_groups,
        num_draws,
        generator=generator,
        dtype=torch.float64,
        device=generator.device if generator else device,
    ).to(device)
    n = labels.shape[0]
    order, lower = lower_counts(labels, groups)
    counts = pair_counts(labels, groups)
    sorted_group, first = groups.group[order], groups.offsets[:-1, None]
    some = (counts > 0)[:, None]
    if n == 0:
        empty = torch.zeros(groups.num_groups * num_draws, dtype=torch.int64, device=device)
        return SampledPairs(empty, empty, empty.double())
    values = labels.double()[order]
    if by == "uniform":
        cumulative = torch.nn.functional.pad(lower.cumsum(0), (1, 0))
        pick = torch.minimum((uniform * counts[:, None]).long(), counts[:, None] - 1).clamp(min=0)
        target = cumulative[first] + pick
        upper = (torch.searchsorted(cumulative, target, right=True) - 1).clamp(0, n - 1)
        other = (first + target - cumulative[upper]).clamp(0, n - 1)
        density = counts.clamp(min=1).double().reciprocal()[:, None].expand(-1, num_draws)
    else:
        # Sum of label gaps to all lower items, in label order. Centered, because prefix sums are subtracted.
        size = (groups.offsets[1:] - groups.offsets[:-1]).clamp(min=1)
        values = values - (groups.sums(labels.double()) / size)[sorted_group]
        prefix = torch.nn.functional.pad(values.cumsum(0), (1, 0))
        begin = groups.offsets[sorted_group]
        mass = (lower * values - (prefix[begin + lower] - prefix[begin])).clamp(min=0)
        mass = torch.where(lower > 0, mass, 0)
        total = groups.sums(torch.empty_like(mass).index_copy_(0, order, mass))[:, None]
        upper = _search(mass, first, groups.offsets[1:, None], uniform * total)
        remaining = uniform * total - _mass_before(mass, first, upper)
        count, top = lower[upper], values[upper]
        low, high = torch.zeros_like(count), (count - 1).clamp(min=0)
        # Bisect the running sum of the selected upper item's gaps.
        for _ in range(max(n, 2).bit_length()):
            middle = (low + high) // 2
            inside = (middle + 1) * top - (prefix[(first + middle + 1).clamp(max=n)] - prefix[first])
            low, high = (
                torch.where(inside > remaining, low, middle + 1),
                torch.where(inside > remaining, middle, high),
            )
            low = torch.minimum(low, high)
        other = (first + low).clamp(0, n - 1)
        density = (top - values[other]).clamp(min=0) / torch.where(total > 0, total, 1)
        density = torch.where(density > 0, density, torch.inf)
    weight = 1.0 / (num_draws * density)
    if reduction == "mean":
        weight = weight / counts.sum().clamp(min=1)
    elif reduction == "group_mean":
        weight = weight / counts[:, None].clamp(min=1) / (counts > 0).sum().clamp(min=1)
    elif reduction != "sum":
        raise ValueError(f"reduction: expected sum, mean or group_mean, got {reduction!r}")
    weight = torch.where(some, weight, 0)
    i = torch.where(some, order[upper], 0)
    j = torch.where(some, order[other], 0)
    return SampledPairs(i.reshape(-1), j.reshape(-1), weight.reshape(-1))


def _search(mass: Tensor, first: Tensor, last: Tensor, target: Tensor) -> Tensor:
    """Return the index in [first, last) where the running sum of `mass` exceeds `target`; its mass is > 0."""
    cumulative = mass.cumsum(0)
    base = torch.nn.functional.pad(cumulative, (1, 0))[first]
    position = torch.searchsorted(cumulative, (base + target).contiguous(), right=True)
    position = torch.minimum(torch.maximum(position, first), (last - 1).clamp(min=0))
    position = position.clamp(max=mass.shape[0] - 1)
    # Rounding may select an item without lower partners; take the nearest following item with mass.
    index = torch.arange(mass.shape[0], device=mass.device)
    following = torch.where(mass > 0, index, mass.shape[0] - 1).flip(0).cummin(0).values.flip(0)
    return following[position]


def _mass_before(mass: Tensor, first: Tensor, position: Tensor) -> Tensor:
    cumulative = torch.nn.functional.pad(mass.cumsum(0), (1, 0))
    return cumulative[position] - cumulative[first]


def top_pairs(
    scores: Tensor,
    labels: Tensor,
    offsets: Sequence[int],
    k: int,
    *,
    by: str = "gap",
) -> SampledPairs:
    """Select the k pairs of each group with the largest label gap, or the largest violation s_j - s_i.

    The selection is biased on purpose: training on it is not training on the full loss. Weights are 1 /
        (number
    of selected pairs). Needs host offsets; holds the n_g x n_g gaps of one group at a time.

    Equivalent to, for one group:
        gap = labels[:, None] - labels[None, :]
        best = gap.flatten().topk(k).indices                     # i = best // n, j = best % n

    Args:
        scores, labels: [n].
        offsets: [G + 1] host integers.

    Returns:
        SampledPairs with at most G * k pairs; weight 0 if a group has fewer than k.
    """
    if by not in ("gap", "violation"):
        raise ValueError(f"by: expected gap or violation, got {by!r}")
    groups = make_groups(scores, offsets)
    if groups.sizes is None:
        raise ValueError("offsets: expected a host list of integers")
    chosen_i, chosen_j = [], []
    begin = 0
    for size in groups.sizes:
        label, score = labels[begin : begin + size].double(), scores.detach()[begin : begin + size].double()
        gap = label[:, None] - label[None, :]
        key = gap if by == "gap" else score[None, :] - score[:, None]
        key = torch.where(gap > 0, key, -torch.inf).reshape(-1)
        best = key.topk(min(k, key.shape[0]))
        flat = torch.where(best.values > -torch.inf, best.indices, -1)
        chosen_i.append(torch.where(flat >= 0, begin + flat // max(size, 1), -1))
        chosen_j.append(torch.where(flat >= 0, begin + flat % max(size, 1), -1))
        begin += size
    i, j = torch.cat(chosen_i), torch.cat(chosen_j)
    real = i >= 0
    weight = real.double() / real.sum().clamp(min=1)
    return SampledPairs(i.clamp(min=0), j.clamp(min=0), weight)
