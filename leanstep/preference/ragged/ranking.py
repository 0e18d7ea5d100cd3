"""Plackett-Luce over ragged groups: the probability of the whole ranking.

n items in rank order inside each group; suffix sums by doubling, so nothing cancels and nothing is padded
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .groups import GroupLoss, Groups, check_items, make_groups, reduce_groups, sort_in_groups, working_dtype


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
    """Negative log-probability of the ranking by label (descending, ties in item order).

    Equivalent to, for one group:
        z = scale * scores[labels.argsort(descending=True, stable=True)]
        loss = (z.flip(0).logcumsumexp(0).flip(0) - z)[:top_k].sum()

    Args:
        scores: [n], any float dtype.
        labels: [n].
        offsets: [G + 1] host list or tensor.
        top_k: only the first ranks count; None = all.
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
        # An item is a candidate in every counted rank up to its own.
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
    """log of the sum of exp(z) from each item to the end of its group: windows of 1, 2, 4, ... items."""
    n, width = z.shape[0], 1
    total = z
    while width < min(max_size, n):
        same = group[width:] == group[:-width]
        partner = torch.where(same, total[width:], -torch.inf)
        total = torch.cat([torch.logaddexp(total[:-width], partner), total[-width:]])
        width *= 2
    return total
