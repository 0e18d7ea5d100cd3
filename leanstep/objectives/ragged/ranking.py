"""Losses that need an order within each group: hinge by sort and bisection, Plackett-Luce by suffix sums.

n items · G groups · an upper item i and a lower item j of its group are active if margin - (s_i - s_j) > 0
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leanstep.objectives.ragged.csr_groups import (
    GroupLoss,
    Groups,
    check_items,
    lower_counts,
    make_groups,
    pair_counts,
    reduce_groups,
    sort_in_groups,
    working_dtype,
)


def hinge(
    scores: Tensor,
    labels: Tensor,
    offsets: Tensor | Sequence[int] | Groups,
    *,
    margin: float = 1.0,
    squared: bool = False,
    levels: int | None = None,
    weights: tuple[Tensor | None, Tensor | None] | None = None,
    reduction: str = "mean",
    max_group_size: int | None = None,
) -> Tensor:
    """Compute relu(margin - (s_i - s_j)), or its square, over all pairs in a group with label_i > label_j.

    Equivalent to, for one group:
        gap = scores[:, None] - scores[None, :]
        loss = relu(margin - gap)[labels[:, None] > labels[None, :]].mean()

    Args:
        scores: [n], any float dtype.
        labels: [n]; items with equal labels do not form a pair.
        offsets: [G + 1] host list or tensor.
        levels: a bound of the number of distinct labels in a group, a host integer: 2 for chosen/rejected.
            One prefix pass per level above the lowest. None: the size of the largest group.
        weights: ([n] for the upper item, [n] for the lower item); the weight of a pair is their product.
        reduction: sum | mean (over pairs) | group_mean | none ([G] sums).

    A pair is active exactly where the plain relu (in float32 for 16-bit scores) is above 0: a gap equal to
    the margin has cost 0 and gradient 0.

    The result is exact. Cost: O(n log n + levels * n) time, O(n) memory. Sums are in float64 on scores
    centered per group.
    """
    check_items("labels", labels, scores)
    groups = make_groups(scores, offsets, max_group_size=max_group_size)
    upper_weight, lower_weight = (None, None) if weights is None else weights
    check_items("weights", upper_weight, scores)
    check_items("weights", lower_weight, scores)
    if levels is not None and levels < 1:
        raise ValueError(f"levels: expected at least 1, got {levels}")
    with torch.no_grad():
        sums, grad = _sorted_hinge(
            scores.detach(),
            labels.detach(),
            groups,
            margin,
            squared,
            groups.max_size if levels is None else levels,
            upper_weight,
            lower_weight,
        )
        counts = pair_counts(labels.detach(), groups)
        out = working_dtype(scores)
        sums, grad = sums.to(out), grad.to(out)
    if scores.requires_grad and torch.is_grad_enabled():
        sums = GroupLoss.apply(scores, sums, grad, groups.group)
    return reduce_groups(sums, counts, reduction)


def _label_ranks(labels: Tensor, groups: Groups) -> Tensor:
    """Return the dense rank of each label within its group, [n], 0 = lowest."""
    order, lower = lower_counts(labels, groups)
    if labels.shape[0] == 0:
        return order
    group = groups.group[order]
    fresh = torch.zeros_like(lower)
    fresh[1:] = ((lower[1:] != lower[:-1]) & (group[1:] == group[:-1])).long()
    steps = fresh.cumsum(0)
    ranks = steps - steps[groups.offsets[group].clamp(max=labels.shape[0] - 1)]
    return torch.empty_like(ranks).index_copy_(0, order, ranks)


def _sorted_hinge(
    scores: Tensor,
    labels: Tensor,
    groups: Groups,
    margin: float,
    squared: bool,
    levels: int,
    upper_weight: Tensor | None,
    lower_weight: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return sums [G] and gradient [n] in float64."""
    n = scores.shape[0]
    order = sort_in_groups(scores, groups.group)
    group = groups.group[order]
    start, end = groups.offsets[group], groups.offsets[group + 1]
    plain = scores[order].to(working_dtype(scores))

    def bisect(active_is_behind: bool) -> Tensor:
        """Return the position in the group where `active` changes, [n], for each item as upper or lower item.

        The test uses the same operations and dtype as the plain relu. Rounding is monotonic, so the active
        partners of an upper item are the last of the group, those of a lower item the first.
        """
        low, high = start, end
        for _ in range(groups.max_size.bit_length()):
            middle = (low + high) // 2
            other = plain[middle.clamp(max=n - 1)]
            gap = plain - other if active_is_behind else other - plain
            go_left = ((margin - gap) > 0) == active_is_behind
            searching = low < high
            low, high = (
                torch.where(searching & ~go_left, middle + 1, low),
                torch.where(searching & go_left, middle, high),
            )
        return low

    if n == 0:
        return scores.new_zeros(groups.num_groups, dtype=torch.float64), scores.double()
    first_active, last_active = bisect(True), bisect(False)
    s = scores.double()
    size = (groups.offsets[1:] - groups.offsets[:-1]).clamp(min=1)
    # Center the scores to avoid cancellation in the second moments.
    s = (s - (groups.sums(s) / size)[groups.group])[order]
    a = torch.ones_like(s) if upper_weight is None else upper_weight.detach().double()[order]
    c = torch.ones_like(s) if lower_weight is None else lower_weight.detach().double()[order]
    rank = _label_ranks(labels, groups)[order]
    u = margin - s

    def before(values: Tensor) -> Tensor:
        """Return exclusive prefix sums, [n + 1]."""
        return torch.nn.functional.pad(values.cumsum(0), (1, 0))

    cost, slope = torch.zeros_like(s), torch.zeros_like(s)
    for level in range(1, levels):
        low = torch.where(rank < level, c, 0)
        up = torch.where(rank == level, a, 0)
        count, first = before(low), before(low * s)
        k, s1 = count[end] - count[first_active], first[end] - first[first_active]
        active, reach = before(up), before(up * u)
        d0, d1 = active[last_active] - active[start], reach[last_active] - reach[start]
        if squared:
            second = before(low * s * s)
            s2 = second[end] - second[first_active]
            cost += up * (k * u * u + 2 * u * s1 + s2)
            slope += 2 * low * (d1 + d0 * s) - 2 * up * (k * u + s1)
        else:
            cost += up * (k * u + s1)
            slope += low * d0 - up * k
    # Differences of prefix sums are rounded; clamp, so that a sum of squares is not negative.
    sums = s.new_zeros(groups.num_groups).index_add_(0, group, cost).clamp_(min=0)
    return sums, torch.empty_like(slope).index_copy_(0, order, slope)


def plackett_luce(
    scores: Tensor,
    labels: Tensor,
    offsets: Tensor | Sequence[int] | Groups,
    *,
    scale: float = 1.0,
    top_k: int | None = None,
    reduction: str = "mean",
    max_group_size: int | None = None,
) -> Tensor:
    """Compute the negative log-probability of the ranking by label (descending, ties in item order).

    Equivalent to, for one group:
        z = scale * scores[labels.argsort(descending=True, stable=True)]
        loss = (z.flip(0).logcumsumexp(0).flip(0) - z)[:top_k].sum()

    Args:
        scores: [n], any float dtype.
        labels: [n].
        offsets: [G + 1] host list or tensor.
        top_k: number of ranks that are counted; None: all.
        reduction: sum | mean (over groups) | group_mean (mean over the ranks of a group, then over groups)
            | none ([G] sums).

    For groups of two, this is Bradley-Terry with margin 0. Cost: O(n log n) time, O(n) memory.
    """
    check_items("labels", labels, scores)
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k: expected at least 1, got {top_k}")
    groups = make_groups(scores, offsets, max_group_size=max_group_size)
    with torch.no_grad():
        order = sort_in_groups(labels.detach(), groups.group, descending=True)
        group = groups.group[order]
        z = scores.detach().to(working_dtype(scores))[order] * scale
        position = torch.arange(z.shape[0], device=z.device)
        rank = position - groups.offsets[group]
        counted = torch.ones_like(rank, dtype=torch.bool) if top_k is None else rank < top_k
        tail = _suffix_logsumexp(z, group, groups.max_size)
        cost = torch.where(counted, tail - z, 0)
        sums = z.new_zeros(groups.num_groups).index_add_(0, group, cost)
        # An item is a candidate at every counted rank up to its own.
        chances = _suffix_logsumexp(
            torch.where(counted, -tail, -torch.inf).flip(0), group.flip(0), groups.max_size
        ).flip(0)
        slope = (torch.exp(z + chances) - counted.to(z.dtype)) * scale
        grad = torch.empty_like(slope).index_copy_(0, order, slope)
        size = groups.offsets[1:] - groups.offsets[:-1]
        ranks = size if top_k is None else size.clamp(max=top_k)
    if scores.requires_grad and torch.is_grad_enabled():
        sums = GroupLoss.apply(scores, sums, grad, groups.group)
    if reduction == "mean":
        return reduce_groups(sums, (size > 0).long(), "mean")
    return reduce_groups(sums, ranks, reduction)


def _suffix_logsumexp(z: Tensor, group: Tensor, max_size: int) -> Tensor:
    """Return log-sum-exp of z from each item to the end of its group, by windows of 1, 2, 4, ... items."""
    n, width = z.shape[0], 1
    total = z
    while width < min(max_size, n):
        same = group[width:] == group[:-width]
        partner = torch.where(same, total[width:], -torch.inf)
        total = torch.cat([torch.logaddexp(total[:-width], partner), total[-width:]])
        width *= 2
    return total
