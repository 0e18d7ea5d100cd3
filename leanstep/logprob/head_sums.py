"""Gradients of the head's inputs while a backward sweep adds tile after tile to them.

d hidden is summed over vocabulary tiles and cast once; each tile of dW is written once, or summed over row
chunks; another core gets a fork, whose rows are joined at the end.
"""

# R rows of a chunk · W columns of a tile · T' selected rows · D model · V local vocabulary

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from leanstep.logprob.head import RowSource, product
from leanstep.logprob.kept_logits import LentGradient
from leanstep.logprob.parallel import reduce_hidden_grad

if TYPE_CHECKING:
    from leanstep.logprob.sweep import Problem


class HeadGradients(NamedTuple):
    """Gradients of the head's inputs; None where not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    low_hidden: Tensor | None
    low_weight: Tensor | None


class HeadSums:
    """Gradients of the head's inputs while tiles are added to them.

    Args:
        wanted: which of hidden, weight, bias, low_hidden, low_weight need a gradient.
        main_grad: the weight's gradient is added here instead of returned.
        lent: the weight's gradient where it was allocated early.
    """

    def __init__(
        self,
        p: Problem,
        wanted: Sequence[bool],
        main_grad: Tensor | None = None,
        lent: LentGradient | None = None,
    ) -> None:
        head = p.head
        self.p = p
        self.hidden = _HiddenGradient(p.source, p, wanted[0])
        self.weight = _WeightGradient(head.weight, p, wanted[1], main_grad, lent)
        self.bias = None
        if wanted[2]:
            self.bias = torch.zeros(head.weight.shape[0], dtype=head.dtype, device=head.weight.device)
        self.low_hidden = self.low_weight = None
        if p.low is not None and head.low_weight is not None:
            self.low_hidden = _HiddenGradient(p.low, p, wanted[3])
            self.low_weight = _WeightGradient(head.low_weight, p, wanted[4], None)

    def add(
        self, du: Tensor, h: Tensor, low_h: Tensor | None, weight_tile: Tensor, rows: slice, columns: slice
    ) -> None:
        """Push the gradient of one tile of u = h W^T + b to every input."""
        head = self.p.head
        if self.bias is not None:
            self.bias[columns].add_(du.sum(0))
        du = du.to(head.operand_dtype)
        self.hidden.add(du, weight_tile, rows, columns)
        self.weight.add(du, h, rows, columns)
        if low_h is not None and self.low_hidden is not None and self.low_weight is not None:
            assert head.low_weight is not None
            self.low_hidden.add(du, head.low_weight[columns].to(du.dtype), rows, columns)
            self.low_weight.add(du, low_h, rows, columns)

    def fork(self) -> HeadSums:
        """The same sums for another core: columns are written where they are, rows into sums of their own."""
        other = copy.copy(self)
        other.hidden, other.weight = self.hidden.fork(), self.weight.fork()
        other.low_hidden = None if self.low_hidden is None else self.low_hidden.fork()
        other.low_weight = None if self.low_weight is None else self.low_weight.fork()
        return other

    def join(self, other: HeadSums) -> None:
        """Add the rows that another core summed up."""
        self.hidden.join(other.hidden)
        if self.low_hidden is not None and other.low_hidden is not None:
            self.low_hidden.join(other.low_hidden)

    def result(self) -> HeadGradients:
        bias = self.p.head.bias
        return HeadGradients(
            self.hidden.result(),
            self.weight.result(),
            None if self.bias is None or bias is None else self.bias.to(bias.dtype),
            None if self.low_hidden is None else self.low_hidden.result(),
            None if self.low_weight is None else self.low_weight.result(),
        )


class _HiddenGradient:
    """Rows of d hidden, summed over vocabulary tiles in the accumulation dtype and cast once.

    The sums of selected rows lie in the result's own memory while there is room: with a quarter of the rows
    selected, those of four cores.
    """

    def __init__(self, source: RowSource, p: Problem, wanted: bool) -> None:
        self.source, self.p = source, p
        self.out = self.sums = self.chunk = None
        self._rows_taken = 0
        if not wanted:
            return
        hidden, dtype = source.hidden, p.head.dtype
        self.out = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
        if source.rows is None and hidden.dtype == dtype:
            self.sums, self._rows_taken = self.out, hidden.shape[0]
        elif p.tiles.order == "vocab" or p.group is not None:
            self.sums = self._new_sums()
        else:
            self.chunk = hidden.new_zeros((min(p.tiles.rows, source.num_rows), hidden.shape[1]), dtype=dtype)
        self._own_rows = self._rows_taken

    def _new_sums(self) -> Tensor:
        assert self.out is not None
        dtype, first = self.p.head.dtype, self._rows_taken
        last = first + self.source.num_rows
        if self.out.dtype != dtype or last > self.out.shape[0]:
            return self.out.new_zeros((self.source.num_rows, self.out.shape[1]), dtype=dtype)
        self._rows_taken = last
        return self.out[first:last].zero_()

    def fork(self) -> _HiddenGradient:
        """Fresh sums of the same rows, for another core; "vocab" order only."""
        other = copy.copy(self)
        other.sums = None if self.sums is None else self._new_sums()
        return other

    def join(self, other: _HiddenGradient) -> None:
        if self.sums is not None and other.sums is not None:
            self.sums.add_(other.sums)
            # Forks are joined together: the memory of all of them is free again.
            self._rows_taken = self._own_rows

    def add(self, du: Tensor, weight_tile: Tensor, rows: slice, columns: slice) -> None:
        if self.sums is not None:
            product(du, weight_tile, self.sums[rows], accumulate=True)
        elif self.chunk is not None:
            sums = self.chunk[: rows.stop - rows.start]
            product(du, weight_tile, sums, accumulate=columns.start > 0)
            if columns.stop == self.p.head.columns:
                self._write(rows, sums)

    def result(self) -> Tensor | None:
        if self.out is None:
            return None
        if self.sums is not None:
            sums = reduce_hidden_grad(self.sums, self.p.group, self.p.reduce_grad)  # type: ignore[arg-type]
            if sums is not self.out:
                if self._own_rows:
                    # The rows' places may be taken by other rows' sums.
                    sums = sums.clone()
                    self.out.zero_()
                self._write(slice(0, self.source.num_rows), sums)
        return self.out

    def _write(self, part: slice, sums: Tensor) -> None:
        assert self.out is not None
        if self.source.rows is None:
            self.out[part] = sums
        else:
            # Adding, not copying: a row may be selected twice.
            self.out.index_add_(0, self.source.rows[part], sums.to(self.out.dtype))


class _WeightGradient:
    """dW, each tile written once in "vocab" order, or summed over row chunks in "rows" order."""

    def __init__(
        self,
        weight: Tensor,
        p: Problem,
        wanted: bool,
        main_grad: Tensor | None,
        lent: LentGradient | None = None,
    ) -> None:
        self.p, self.main_grad = p, main_grad
        self.out = self.sums = self.tile = None
        if not wanted:
            return
        dtype = p.head.dtype
        if main_grad is not None:
            self.sums = main_grad
            return
        if lent is None:
            make = torch.empty_like if p.num_rows and p.head.columns else torch.zeros_like
            self.out = make(weight, memory_format=torch.contiguous_format)
        else:
            self.out = lent.gradient
        self.out[p.head.columns :] = 0.0
        if weight.dtype == dtype:
            self.sums = self.out
        elif p.tiles.order == "rows":
            self.sums = weight.new_zeros(weight.shape, dtype=dtype)
        else:
            self.tile = weight.new_zeros((p.tiles.columns, weight.shape[1]), dtype=dtype)

    def fork(self) -> _WeightGradient:
        """Another core's hand on the same gradient, with a tile of its own to sum in."""
        other = copy.copy(self)
        other.tile = None if self.tile is None else torch.zeros_like(self.tile)
        return other

    def add(self, du: Tensor, h: Tensor, rows: slice, columns: slice) -> None:
        if self.sums is not None:
            accumulate = rows.start > 0 or self.main_grad is not None
            if self.sums.dtype == self.p.head.dtype:
                product(du.t(), h, self.sums[columns], accumulate=accumulate)
            else:
                self.sums[columns] += du.t() @ h
        elif self.tile is not None and self.out is not None:
            sums = self.tile[: columns.stop - columns.start]
            product(du.t(), h, sums, accumulate=rows.start > 0)
            if rows.stop == self.p.num_rows:
                self.out[columns] = sums

    def result(self) -> Tensor | None:
        if self.out is not None and self.sums is not None and self.sums is not self.out:
            self.out.copy_(self.sums)
        return self.out
