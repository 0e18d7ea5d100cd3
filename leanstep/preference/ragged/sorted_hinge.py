"""Hinge and squared hinge over all pairs of ragged groups in O(n log n): sort once, then prefix sums.

n items · an upper item p is active with every lower item j of its group that has s_j > s_p - margin
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .groups import (
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
    """relu(margin - (s_i - s_j)), or its square, over all pairs of a group with label_i > label_j; exact.

    Equivalent to, for one group:
        gap = scores[:, None] - scores[None, :]
        loss = relu(margin - gap)[labels[:, None] > labels[None, :]].mean()

    Args:
        scores: [n], any float dtype.
        labels: [n]; equal labels make no pair.
        offsets: [G + 1] host list or tensor.
        levels: a bound of the distinct labels in a group, a host integer: 2 for chosen/rejected. One prefix
            pass per level above the lowest. None = the largest group's size.
        weights: ([n] for the upper item, [n] for the lower item); a pair weighs their product.
        reduction: sum | mean (over pairs) | group_mean | none ([G] sums).

    Cost: O(n log n + levels * n) time, O(n) memory. Sums run in float64 on scores centred per group.
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
    """[n] dense rank of the label inside its group, 0 = lowest."""
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
    n = scores.shape[0]
    s = scores.double()
    size = (groups.offsets[1:] - groups.offsets[:-1]).clamp(min=1)
    # Centred scores keep the second moments from cancelling.
    s = s - (groups.sums(s) / size)[groups.group]
    a = torch.ones_like(s) if upper_weight is None else upper_weight.detach().double()
    c = torch.ones_like(s) if lower_weight is None else lower_weight.detach().double()
    rank = _label_ranks(labels, groups)

    # Lower items first: an equal key then lies in front of the upper one, which makes it inactive.
    order = sort_in_groups(torch.cat([s, s - margin]), torch.cat([groups.group, groups.group]))
    is_upper = order >= n
    item = torch.where(is_upper, order - n, order)
    s, a, c, rank, group = s[item], a[item], c[item], rank[item], groups.group[item]
    start, end = 2 * groups.offsets[group], 2 * groups.offsets[group + 1]
    after = torch.arange(1, 2 * n + 1, device=s.device)
    u = margin - s

    def before(values: Tensor) -> Tensor:
        """Exclusive prefix sums, [2n + 1]."""
        return torch.nn.functional.pad(values.cumsum(0), (1, 0))

    cost, slope = torch.zeros_like(s), torch.zeros_like(s)
    for level in range(1, levels):
        low = torch.where(~is_upper & (rank < level), c, 0)
        up = torch.where(is_upper & (rank == level), a, 0)
        count, first = before(low), before(low * s)
        k, s1 = count[end] - count[after], first[end] - first[after]
        active, reach = before(up), before(up * u)
        d0, d1 = active[after] - active[start], reach[after] - reach[start]
        if squared:
            second = before(low * s * s)
            s2 = second[end] - second[after]
            cost += up * (k * u * u + 2 * u * s1 + s2)
            slope += 2 * low * (d1 + d0 * s) - 2 * up * (k * u + s1)
        else:
            cost += up * (k * u + s1)
            slope += low * d0 - up * k
    # Rounding of the differences of prefix sums must not make a sum of squares negative.
    sums = s.new_zeros(groups.num_groups).index_add_(0, group, cost).clamp_(min=0)
    return sums, s.new_zeros(n).index_add_(0, item, slope)
