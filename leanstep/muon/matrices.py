"""How a parameter becomes matrices: banks, convolutions, fused projections, heads. Everything is a view.

[R, C]                     one matrix
[..., R, C]                a bank: one matrix per leading index
flatten="conv"             [O, I, kh, kw] is one O x (I kh kw) matrix
split=(q, k, v)            parts along `split_dim` (0 rows, 1 columns), each orthogonalised alone
heads=n or (n_q, n_k, ..)  each part cut further into n equal matrices along `split_dim`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leanstep.muon.reference import variance_axis


@dataclass(frozen=True)
class Cut:
    """What `matrix_views` does to a parameter; the default leaves it whole."""

    flatten: str | None = None
    split: tuple[int, ...] | None = None
    split_dim: int = 0
    heads: int | tuple[int, ...] | None = None

    @property
    def whole(self) -> bool:
        return self.split is None and self.heads is None


def make_cut(
    flatten: str | None = None,
    split: Sequence[int] | None = None,
    split_dim: int = 0,
    heads: int | Sequence[int] | None = None,
) -> Cut:
    """A checked Cut; sequences become tuples."""
    if flatten not in (None, "conv"):
        raise ValueError(f"flatten: expected None or 'conv', got {flatten!r}")
    if split_dim not in (0, 1):
        raise ValueError(f"split_dim: expected 0 (rows) or 1 (columns), got {split_dim!r}")
    parts = None if split is None else tuple(int(size) for size in split)
    if parts is not None and (not parts or min(parts) < 1):
        raise ValueError(f"split: expected positive sizes, got {list(parts)}")
    counts = heads if heads is None or isinstance(heads, int) else tuple(int(n) for n in heads)
    if isinstance(counts, tuple) and len(counts) != len(parts or (0,)):
        raise ValueError(
            f"heads: expected one count per split part ({len(parts or (0,))}), got {len(counts)}"
        )
    return Cut(flatten, parts, split_dim, counts)


def check_cut(name: str, shape: Sequence[int], cut: Cut) -> None:
    """Raise a ValueError that names the parameter if it cannot be cut this way."""
    shape = tuple(shape)
    if len(shape) < 2:
        raise ValueError(
            f"{name}: expected at least two dimensions for a Muon group, got shape {shape}; use an adam group"
        )
    if cut.flatten == "conv":
        shape = (shape[0], torch.Size(shape[1:]).numel())
    length = shape[-2 + cut.split_dim]
    if cut.split is not None and sum(cut.split) != length:
        raise ValueError(
            f"{name}: expected split sizes that add up to {length} (dimension {cut.split_dim} of {shape}), "
            f"got {list(cut.split)} = {sum(cut.split)}"
        )
    parts = cut.split or (length,)
    for part, count in zip(parts, _head_counts(cut, len(parts)), strict=True):
        if count < 1 or part % count:
            raise ValueError(f"{name}: expected heads that divide {part}, got {count}")


def _head_counts(cut: Cut, num_parts: int) -> tuple[int, ...]:
    if isinstance(cut.heads, tuple):
        return cut.heads
    return (cut.heads or 1,) * num_parts


def matrix_views(tensor: Tensor, cut: Cut) -> list[Tensor]:
    """Views of `tensor`, each [B, R, C], that together cover it exactly once."""
    if cut.flatten == "conv":
        tensor = tensor.view(tensor.size(0), -1)
    bank = tensor.unsqueeze(0) if tensor.ndim == 2 else tensor.view(-1, *tensor.shape[-2:])
    if cut.whole:
        return [bank]
    dim = 1 + cut.split_dim
    parts = bank.split(cut.split, dim) if cut.split else (bank,)
    views = []
    for part, count in zip(parts, _head_counts(cut, len(parts)), strict=True):
        if count == 1:
            views.append(part)
            continue
        # One view per bank entry: entries and heads of a split part do not share one stride.
        for matrix in part:
            heads = matrix.unflatten(cut.split_dim, (count, -1))
            views.append(heads if cut.split_dim == 0 else heads.movedim(1, 0))
    return views


def second_shape(shape: Sequence[int], cut: Cut, per: str) -> tuple[int, ...]:
    """Shape of the variance state: [..., R, 1] or [..., 1, C]; one flat row of lines for a cut parameter."""
    if cut.flatten == "conv":
        shape = (shape[0], torch.Size(shape[1:]).numel())
    if cut.whole:
        kept = list(shape)
        kept[variance_axis(shape[-2], shape[-1], per)] = 1
        return tuple(kept)
    views = matrix_views(
        torch.empty(tuple(shape), device="meta"), Cut(None, cut.split, cut.split_dim, cut.heads)
    )
    return (sum(_lines(view, per) for view in views),)


def _lines(view: Tensor, per: str) -> int:
    batch, rows, cols = view.shape
    return batch * (rows if variance_axis(rows, cols, per) == -1 else cols)


def second_views(second: Tensor, views: list[Tensor], cut: Cut, per: str) -> list[Tensor]:
    """The variance state of each matrix view, [B, R, 1] or [B, 1, C]."""
    if cut.whole:
        return [second.view(-1, *second.shape[-2:])]
    parts = second.split([_lines(view, per) for view in views])
    shaped = []
    for part, (batch, rows, cols) in zip(parts, (view.shape for view in views), strict=True):
        last = variance_axis(rows, cols, per) == -1
        shaped.append(part.view(batch, rows, 1) if last else part.view(batch, 1, cols))
    return shaped
