"""Groups of items in CSR form, and the reduction of sums per group to one loss.

n items · G groups · item q belongs to group g if offsets[g] <= q < offsets[g + 1]
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

REDUCTIONS = ("sum", "mean", "group_mean", "none")


@dataclass(frozen=True)
class Groups:
    """CSR offsets and derived data that the losses need.

    Equivalent to, for group g:
        items = torch.arange(groups.offsets[g], groups.offsets[g + 1])       # groups.group[items] == g

    Args:
        offsets: [G + 1] int64, ascending from 0 to n.
        group: [n] int64, the group of each item.
        max_size: an upper bound of the group size, a host integer.
        sizes: group sizes as host integers if the offsets are on the host, otherwise None.
    """

    offsets: Tensor
    group: Tensor
    max_size: int
    sizes: tuple[int, ...] | None

    @property
    def num_groups(self) -> int:
        return self.offsets.shape[0] - 1

    def sums(self, values: Tensor) -> Tensor:
        """Return the sums per group, [G], of an [n] tensor."""
        return values.new_zeros(self.num_groups).index_add(0, self.group, values)


def make_groups(
    scores: Tensor, offsets: Tensor | Sequence[int] | Groups, *, max_group_size: int | None = None
) -> Groups:
    """Build `Groups`. Offsets as a host list give exact tile sizes; a tensor of offsets is never read.

    >>> make_groups(torch.zeros(5), [0, 2, 5]).group
    tensor([0, 0, 1, 1, 1])

    Args:
        scores: [n].
        offsets: [G + 1] tensor on the scores' device, or a host list of integers.
        max_group_size: bound of the group size for a tensor of offsets; None: n.
    """
    if scores.dim() != 1 or not scores.is_floating_point():
        raise ValueError(
            f"scores: expected a floating tensor of shape (n,), got {scores.dtype} {tuple(scores.shape)}"
        )
    if isinstance(offsets, Groups):
        return offsets
    n, sizes = scores.shape[0], None
    if not isinstance(offsets, Tensor):
        sizes = tuple(b - a for a, b in itertools.pairwise(offsets))
        if not offsets or offsets[0] != 0 or offsets[-1] != n or min(sizes, default=0) < 0:
            raise ValueError(
                f"offsets: expected ascending integers from 0 to {n}, got {list(offsets)[:4]}..."
            )
        max_group_size = max(sizes, default=0)
        offsets = torch.tensor(list(offsets), dtype=torch.int64, device=scores.device)
    if offsets.dim() != 1 or offsets.shape[0] < 1 or offsets.is_floating_point():
        raise ValueError(
            f"offsets: expected integers of shape (G + 1,), got {offsets.dtype} {tuple(offsets.shape)}"
        )
    if max_group_size is None:
        max_group_size = n
    group = torch.searchsorted(offsets[1:].contiguous(), torch.arange(n, device=scores.device), right=True)
    return Groups(offsets.long(), group, max_group_size, sizes)


def check_items(name: str, values: Tensor | None, scores: Tensor) -> None:
    """Check that `values` has one entry per score; a trailing dimension of 1 would broadcast to n x n."""
    if scores.dim() != 1 or not scores.is_floating_point():
        raise ValueError(
            f"scores: expected a floating tensor of shape (n,), got {scores.dtype} {tuple(scores.shape)}"
        )
    if values is not None and tuple(values.shape) != tuple(scores.shape):
        raise ValueError(
            f"{name}: expected shape {tuple(scores.shape)} to match scores, got {tuple(values.shape)}"
        )


def sort_in_groups(values: Tensor, group: Tensor, *, descending: bool = False) -> Tensor:
    """Return the permutation of a stable sort by (group, value).

    It takes two stable sorts, because adding group offsets to the values would round them.
    """
    by_value = torch.argsort(values, dim=0, descending=descending, stable=True)
    return by_value[torch.argsort(group[by_value], dim=0, stable=True)]


def lower_counts(labels: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """Return items sorted by (group, label), and the number of lower labels in their group; [n] both."""
    order = sort_in_groups(labels, groups.group)
    sorted_labels, sorted_group = labels[order], groups.group[order]
    position = torch.arange(labels.shape[0], device=labels.device)
    fresh = torch.ones_like(position, dtype=torch.bool)
    fresh[1:] = (sorted_labels[1:] != sorted_labels[:-1]) | (sorted_group[1:] != sorted_group[:-1])
    if position.numel() == 0:
        return order, position
    run_start = torch.where(fresh, position, 0).cummax(0).values
    return order, run_start - groups.offsets[sorted_group]


def pair_counts(labels: Tensor, groups: Groups) -> Tensor:
    """Return the number of pairs with different labels within each group, [G] int64."""
    order, lower = lower_counts(labels, groups)
    return lower.new_zeros(groups.num_groups).index_add(0, groups.group[order], lower)


def reduce_groups(sums: Tensor, counts: Tensor, reduction: str) -> Tensor:
    """Reduce sums per group [G] and pairs (or ranks) per group [G] to one loss; 0 if there is no pair."""
    if reduction == "none":
        return sums
    if reduction == "sum":
        return sums.sum()
    if reduction == "mean":
        return sums.sum() / counts.sum().clamp(min=1)
    if reduction == "group_mean":
        return (sums / counts.clamp(min=1)).sum() / (counts > 0).sum().clamp(min=1)
    raise ValueError(f"reduction: expected one of {', '.join(REDUCTIONS)}, got {reduction!r}")


class GroupLoss(torch.autograd.Function):
    """Sums per group with a known gradient per item; each item belongs to a single group."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, sums: Tensor, grad: Tensor, group: Tensor) -> Tensor:
        ctx.save_for_backward(grad, group)
        ctx.dtype = scores.dtype
        return sums.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        grad, group = ctx.saved_tensors
        return (grad * upstream.to(grad.dtype)[group]).to(ctx.dtype), None, None, None


def working_dtype(scores: Tensor) -> torch.dtype:
    return scores.dtype if scores.dtype in (torch.float32, torch.float64) else torch.float32
