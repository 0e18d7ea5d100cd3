"""Bradley-Terry over ragged groups: all pairs in tiles of shifts, or a list of pairs.

n items · R rows (items that can start a pair) · D shifts per tile
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from leanstep.objectives.ragged.csr_groups import (
    GroupLoss,
    Groups,
    check_items,
    make_groups,
    pair_counts,
    reduce_groups,
    working_dtype,
)

TILE_ELEMENTS = 1 << 18


def bradley_terry(
    scores: Tensor,
    labels: Tensor | None = None,
    offsets: Tensor | Sequence[int] | Groups | None = None,
    *,
    pairs: tuple[Tensor, Tensor] | None = None,
    weights: Tensor | None = None,
    margin: float | Tensor = 0.0,
    scale: float = 1.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    max_group_size: int | None = None,
) -> Tensor:
    """Compute -log sigmoid(scale * (s_i - s_j - margin)) over pairs in which item i is preferred to item j.

    Equivalent to, with `pairs`:
        z = scale * (scores[i] - scores[j] - margin)
        loss = (weights * softplus(-z)).mean()

    Args:
        scores: [n], any float dtype.
        labels, offsets: all pairs of a group with label_i > label_j. `offsets` [G + 1] as a host list or a
            tensor.
        pairs: (i, j) int64 [K] each, instead of labels; with `offsets` only for `reduction="group_mean"`.
        weights: [K] per pair with `pairs`, [n] per item otherwise (a pair has weight weights_i * weights_j).
        margin: number, or [K] with `pairs`.
        label_smoothing: fraction of every pair that is counted with reversed preference.
        reduction: sum | mean (over pairs) | group_mean | none ([K] losses, or [G] sums with labels).
        max_group_size: bound of the group size if `offsets` is a tensor; None: n.

    Returns:
        float32 (float64 for float64 scores); 0 if there is no pair.

    Cost: O(sum of n_g^2) time with host offsets, O(n * max_group_size) otherwise; O(n) memory plus one tile.
    """
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing: expected 0..1, got {label_smoothing}")
    if pairs is not None:
        return _listed_pairs(scores, offsets, pairs, weights, margin, scale, label_smoothing, reduction)
    if labels is None or offsets is None:
        raise ValueError("labels, offsets: expected both, or pairs")
    if isinstance(margin, Tensor):
        raise ValueError("margin: expected a number with labels; a margin per pair needs pairs")
    check_items("labels", labels, scores)
    check_items("weights", weights, scores)
    groups = make_groups(scores, offsets, max_group_size=max_group_size)
    with torch.no_grad():
        x = scores.detach().to(working_dtype(scores))
        item = None if weights is None else weights.detach().to(x.dtype)
        sums, grad = _all_pairs(x, labels.detach(), groups, item, float(margin), scale, label_smoothing)
        counts = pair_counts(labels.detach(), groups)
    if scores.requires_grad and torch.is_grad_enabled():
        sums = GroupLoss.apply(scores, sums, grad, groups.group)
    return reduce_groups(sums, counts, reduction)


def _all_pairs(
    x: Tensor,
    labels: Tensor,
    groups: Groups,
    item: Tensor | None,
    margin: float,
    scale: float,
    smoothing: float,
) -> tuple[Tensor, Tensor]:
    """Return sums per group and the gradient per item. Tile cell (d, r) is the pair of rows r and r + d."""
    order: Tensor | None = None
    ends = sizes = None
    if groups.sizes is not None:
        # Largest groups first, so that the rows with a partner at distance d are a prefix.
        by_size = sorted(range(len(groups.sizes)), key=lambda g: -groups.sizes[g])  # type: ignore[index]
        sizes = [groups.sizes[g] for g in by_size]
        starts = groups.offsets[torch.tensor(by_size, dtype=torch.int64, device=x.device)]
        lengths = torch.tensor(sizes, dtype=torch.int64, device=x.device)
        total = sum(sizes)
        first = lengths.cumsum(0) - lengths
        order = torch.arange(total, device=x.device) + (starts - first).repeat_interleave(
            lengths, output_size=total
        )
        ends = [0]
        for size in sizes:
            ends.append(ends[-1] + size)

    def arrange(values: Tensor) -> Tensor:
        return values if order is None else values[order]

    n, largest = x.shape[0], min(groups.max_size, x.shape[0])
    span = max(1, min(largest, TILE_ELEMENTS // max(n, 1)))
    group = arrange(groups.group)
    tail = (0, largest + span)
    s_wide, label_wide, group_wide = (
        pad(arrange(x), tail),
        pad(arrange(labels), tail),
        pad(group, tail, value=-1),
    )
    weight_wide = None if item is None else pad(arrange(item), tail)
    sums, grad_wide = x.new_zeros(groups.num_groups), torch.zeros_like(s_wide)
    for first_shift in range(1, largest, span):
        rows = n
        if sizes is not None and ends is not None:
            rows = ends[sum(size > first_shift for size in sizes)]
        depth = min(span, largest - first_shift)
        if rows == 0:
            break

        tile = (depth, rows, first_shift)
        mine = group_wide[:rows]
        direction = torch.sign(label_wide[:rows] - _window(label_wide, *tile)).to(x.dtype)
        direction = torch.where(_window(group_wide, *tile) == mine, direction, 0)
        z = direction * (s_wide[:rows] - _window(s_wide, *tile))
        z = (z - margin).mul_(scale)
        weight = direction.abs()
        if weight_wide is not None:
            weight = weight * weight_wide[:rows] * _window(weight_wide, *tile)
        cost, slope = softplus(-z), torch.sigmoid(-z)
        if smoothing:
            cost = (1 - smoothing) * cost + smoothing * softplus(z)
            slope = slope - smoothing
        sums.index_add_(0, mine, (cost * weight).sum(0))
        slope = slope.mul_(weight).mul_(direction).mul_(scale)
        grad_wide[:rows] -= slope.sum(0)
        # The partner of (d, r) is row r + d: viewed with one column less per row, anti-diagonals become
        # columns.
        skewed = slope.new_zeros(depth * (rows + depth))
        skewed.view(depth, rows + depth)[:, :rows] = slope
        partner = skewed.as_strided((depth, rows + depth - 1), (rows + depth - 1, 1)).sum(0)
        grad_wide[first_shift : first_shift + rows + depth - 1] += partner
    grad = grad_wide[:n]
    if order is not None:
        grad = torch.empty_like(grad).index_copy_(0, order, grad)
    return sums, grad


def _window(values: Tensor, depth: int, rows: int, first: int) -> Tensor:
    """Return a [depth, rows] view in which cell (d, r) is item r + first + d."""
    return values.as_strided((depth, rows), (1, 1), first)


class _PairLoss(torch.autograd.Function):
    """Losses [K] of listed pairs; the forward pass computes their slopes."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, i: Tensor, j: Tensor, weights, margin, scale: float, smoothing: float
    ) -> Tensor:
        z = scores.to(working_dtype(scores))
        z = z.index_select(0, i).sub_(z.index_select(0, j))
        if isinstance(margin, Tensor) or margin != 0:
            z -= margin
        wrong = z.mul_(-scale)
        cost = softplus(wrong)
        slope = torch.sigmoid(wrong)
        if smoothing:
            cost = (1 - smoothing) * cost + smoothing * softplus(-wrong)
            slope -= smoothing
        if scale != 1:
            slope *= scale
        if weights is not None:
            cost, slope = cost * weights, slope.mul_(weights)
        ctx.save_for_backward(slope, i, j)
        ctx.scores = scores.shape, scores.dtype
        return cost

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple:
        slope, i, j = ctx.saved_tensors
        shape, dtype = ctx.scores
        push = slope * upstream
        grad = push.new_zeros(shape).index_add_(0, j, push).index_add_(0, i, push, alpha=-1)
        return grad.to(dtype), None, None, None, None, None, None


def _listed_pairs(
    scores: Tensor,
    offsets: Tensor | Sequence[int] | Groups | None,
    pairs: tuple[Tensor, Tensor],
    weights: Tensor | None,
    margin: float | Tensor,
    scale: float,
    smoothing: float,
    reduction: str,
) -> Tensor:
    i, j = pairs
    if scores.dim() != 1 or not scores.is_floating_point():
        raise ValueError(
            f"scores: expected a floating tensor of shape (n,), got {scores.dtype} {tuple(scores.shape)}"
        )
    if i.dim() != 1 or i.shape != j.shape:
        raise ValueError(
            f"pairs: expected two tensors of shape (K,), got {tuple(i.shape)} and {tuple(j.shape)}"
        )
    for name, value in (("weights", weights), ("margin", margin)):
        if isinstance(value, Tensor) and value.dim() and value.shape != i.shape:
            raise ValueError(
                f"{name}: expected shape {tuple(i.shape)} to match pairs, got {tuple(value.shape)}"
            )
    losses = _PairLoss.apply(scores, i, j, weights, margin, scale, smoothing)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    if reduction == "mean":
        return losses.mean() if losses.shape[0] else losses.sum()
    if offsets is None:
        raise ValueError(f"offsets: expected group offsets for reduction={reduction!r}, got None")
    groups = make_groups(scores, offsets)
    group = groups.group[i]
    sums = losses.new_zeros(groups.num_groups).index_add(0, group, losses)
    counts = torch.zeros_like(groups.offsets[1:]).index_add(0, group, torch.ones_like(group))
    return reduce_groups(sums, counts, reduction)
