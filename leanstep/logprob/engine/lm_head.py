"""The LM head one tile at a time: logits forward, gradients of its inputs back.

    u = h . W_v + b_v      a = scale u      q = softcap tanh(a / softcap)      z = q / temperature

A low-rank addition (LoRA) is a second, thin product: u += low_hidden . low_weight_v. Backward, d hidden is
summed over vocabulary tiles and cast once; each tile of dW is written once, or summed over row chunks. A
worker on another core gets a fork of the sums, joined at the end.
"""

# R rows of a chunk · W columns of a tile · T' selected rows · D model · V local vocabulary · r low rank

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leanstep.logprob.engine.tiles import LogitsInGradient, Tiles
from leanstep.logprob.parallel import VocabShard, reduce_hidden_grad

# torch.mm(out_dtype=) came with torch 2.8; before it 16-bit operands are widened, exact and slower.
HAS_OUT_DTYPE = hasattr(torch.ops.aten.mm, "dtype")


@dataclass
class RowSource:
    """Rows of hidden [T, D], gathered chunk by chunk: no [T', D] copy."""

    hidden: Tensor
    rows: Tensor | None
    num_rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_rows = self.hidden.shape[0] if self.rows is None else self.rows.shape[0]

    def part(self, rows: slice) -> RowSource:
        """Some of the rows."""
        if self.rows is None:
            return RowSource(self.hidden[rows], None)
        return RowSource(self.hidden, self.rows[rows])

    def chunk(self, part: slice, dtype: torch.dtype) -> Tensor:
        if self.rows is None:
            return self.hidden[part].to(dtype)
        return self.hidden.index_select(0, self.rows[part]).to(dtype)


@dataclass
class Head:
    """Weight, bias and the transform to logits, over the real columns of one vocabulary shard.

    `vocabulary` is the real size over all shards, where known; `dtype` is that of sums, `operand_dtype` that
    of GEMM inputs; `columns` are the real local ones.
    """

    weight: Tensor
    bias: Tensor | None
    low_weight: Tensor | None
    scale: float
    softcap: float | None
    temperature: float | Tensor
    shard: VocabShard
    vocabulary: int | None
    dtype: torch.dtype
    operand_dtype: torch.dtype = field(init=False)
    columns: int = field(init=False)

    def __post_init__(self) -> None:
        self.columns = self.shard.real
        sixteen_bit = self.weight.dtype in (torch.bfloat16, torch.float16)
        # 16-bit GEMMs keep fp32 sums on a GPU; a CPU would round each tile of logits to 16 bits.
        native = sixteen_bit and self.weight.is_cuda
        self.operand_dtype = self.weight.dtype if native else self.dtype

    def weight_tile(self, columns: slice) -> Tensor:
        return self.weight[columns].to(self.operand_dtype)

    def logits(
        self, h: Tensor, low_h: Tensor | None, weight: Tensor, rows: slice, columns: slice, out: Tensor
    ) -> Tensor:
        """z [R, W] into `out`; `weight` is `weight_tile(columns)`, `h` the chunk of hidden rows."""
        factor = self.scale
        if self.softcap is not None:
            factor /= self.softcap
        elif not isinstance(self.temperature, Tensor):
            factor /= self.temperature
        product(h, weight.t(), out, factor=factor)
        if low_h is not None and self.low_weight is not None:
            low = self.low_weight[columns].to(low_h.dtype)
            product(low_h, low.t(), out, factor=factor, accumulate=True)
        if self.bias is not None:
            out.add_(self.bias[columns].to(self.dtype) * factor)
        if self.softcap is not None:
            out.tanh_()
            if not isinstance(self.temperature, Tensor):
                out.mul_(self.softcap / self.temperature)
            else:
                out.mul_((self.softcap / self.temperature[rows]).unsqueeze(-1))
        elif isinstance(self.temperature, Tensor):
            out.div_(self.temperature[rows].unsqueeze(-1))
        return out

    def row_slope(self, rows: slice) -> float | Tensor:
        """The part of du/dz that is the same for a whole row: scale / temperature."""
        if isinstance(self.temperature, Tensor):
            return self.scale / self.temperature[rows]
        return self.scale / self.temperature

    def cap_slope(self, z: Tensor, rows: slice, out: Tensor | None = None) -> Tensor:
        """1 - tanh(a / softcap)^2, read back from z before z is overwritten."""
        assert self.softcap is not None
        unit = self.temperature
        if isinstance(unit, Tensor):
            unit = unit[rows].unsqueeze(-1)
        tanh = torch.mul(z, unit / self.softcap, out=out)
        return tanh.square_().neg_().add_(1.0)


def product(a: Tensor, b: Tensor, out: Tensor, *, factor: float = 1.0, accumulate: bool = False) -> Tensor:
    """out = factor a @ b (+ out), summed in the dtype of `out`."""
    if a.dtype == out.dtype:
        return torch.addmm(out, a, b, beta=float(accumulate), alpha=factor, out=out)
    if HAS_OUT_DTYPE:
        # CUDA only: 16-bit operands with an fp32 result.
        fresh = torch.mm(a, b, out_dtype=out.dtype)
    else:
        fresh = torch.mm(a.to(out.dtype), b.to(out.dtype))
    if factor != 1.0:
        fresh.mul_(factor)
    return out.add_(fresh) if accumulate else out.copy_(fresh)


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
        source, low: rows of hidden, and those of the LoRA branch.
        wanted: which of hidden, weight, bias, low_hidden, low_weight need a gradient.
        reduce: process group and mode of `reduce_hidden_grad`.
        main_grad: the weight's gradient is added here instead of returned.
        early: the weight's gradient where it was allocated in the forward pass.
    """

    def __init__(
        self,
        head: Head,
        source: RowSource,
        low: RowSource | None,
        tiles: Tiles,
        wanted: Sequence[bool],
        *,
        reduce: tuple[Any, Any] = (None, "none"),
        main_grad: Tensor | None = None,
        early: LogitsInGradient | None = None,
    ) -> None:
        self.head, num_rows = head, source.num_rows
        self.hidden = _HiddenGradient(source, head, tiles, reduce, wanted[0])
        self.weight = _WeightGradient(head.weight, head, tiles, num_rows, wanted[1], main_grad, early)
        self.bias = None
        if wanted[2]:
            self.bias = torch.zeros(head.weight.shape[0], dtype=head.dtype, device=head.weight.device)
        self.low_hidden = self.low_weight = None
        if low is not None and head.low_weight is not None:
            self.low_hidden = _HiddenGradient(low, head, tiles, reduce, wanted[3])
            self.low_weight = _WeightGradient(head.low_weight, head, tiles, num_rows, wanted[4])

    def add(
        self, du: Tensor, h: Tensor, low_h: Tensor | None, weight_tile: Tensor, rows: slice, columns: slice
    ) -> None:
        """Push the gradient of one tile of u = h W^T + b to every input."""
        head = self.head
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
        """The sums for another worker: columns are written where they are, rows into sums of their own."""
        other = copy.copy(self)
        other.hidden, other.weight = self.hidden.fork(), self.weight.fork()
        other.low_hidden = None if self.low_hidden is None else self.low_hidden.fork()
        other.low_weight = None if self.low_weight is None else self.low_weight.fork()
        return other

    def join(self, other: HeadSums) -> None:
        """Add the rows that another worker summed up."""
        self.hidden.join(other.hidden)
        if self.low_hidden is not None and other.low_hidden is not None:
            self.low_hidden.join(other.low_hidden)

    def result(self) -> HeadGradients:
        bias = self.head.bias
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
    selected, those of four workers.
    """

    def __init__(
        self, source: RowSource, head: Head, tiles: Tiles, reduce: tuple[Any, Any], wanted: bool
    ) -> None:
        self.source, self.head, self.reduce = source, head, reduce
        self.out = self.sums = self.chunk = None
        self._rows_taken = 0
        if not wanted:
            return
        hidden, dtype = source.hidden, head.dtype
        self.out = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
        if source.rows is None and hidden.dtype == dtype:
            self.sums, self._rows_taken = self.out, hidden.shape[0]
        elif tiles.order == "vocab" or reduce[0] is not None:
            self.sums = self._new_sums()
        else:
            self.chunk = hidden.new_zeros((min(tiles.rows, source.num_rows), hidden.shape[1]), dtype=dtype)
        self._own_rows = self._rows_taken

    def _new_sums(self) -> Tensor:
        assert self.out is not None
        dtype, first = self.head.dtype, self._rows_taken
        last = first + self.source.num_rows
        if self.out.dtype != dtype or last > self.out.shape[0]:
            return self.out.new_zeros((self.source.num_rows, self.out.shape[1]), dtype=dtype)
        self._rows_taken = last
        return self.out[first:last].zero_()

    def fork(self) -> _HiddenGradient:
        """Fresh sums of the same rows, for another worker; "vocab" order only."""
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
            if columns.stop == self.head.columns:
                self._write(rows, sums)

    def result(self) -> Tensor | None:
        if self.out is None:
            return None
        if self.sums is not None:
            sums = self.sums if self.reduce[0] is None else reduce_hidden_grad(self.sums, *self.reduce)
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
        head: Head,
        tiles: Tiles,
        num_rows: int,
        wanted: bool,
        main_grad: Tensor | None = None,
        early: LogitsInGradient | None = None,
    ) -> None:
        self.head, self.num_rows, self.main_grad = head, num_rows, main_grad
        self.out = self.sums = self.tile = None
        if not wanted:
            return
        dtype = head.dtype
        if main_grad is not None:
            self.sums = main_grad
            return
        if early is None:
            make = torch.empty_like if num_rows and head.columns else torch.zeros_like
            self.out = make(weight, memory_format=torch.contiguous_format)
        else:
            self.out = early.gradient
        self.out[head.columns :] = 0.0
        if weight.dtype == dtype:
            self.sums = self.out
        elif tiles.order == "rows":
            self.sums = weight.new_zeros(weight.shape, dtype=dtype)
        else:
            self.tile = weight.new_zeros((tiles.columns, weight.shape[1]), dtype=dtype)

    def fork(self) -> _WeightGradient:
        """A per-worker view of the same gradient, with a tile of its own to sum in."""
        other = copy.copy(self)
        other.tile = None if self.tile is None else torch.zeros_like(self.tile)
        return other

    def add(self, du: Tensor, h: Tensor, rows: slice, columns: slice) -> None:
        if self.sums is not None:
            accumulate = rows.start > 0 or self.main_grad is not None
            if self.sums.dtype == self.head.dtype:
                product(du.t(), h, self.sums[columns], accumulate=accumulate)
            else:
                self.sums[columns] += du.t() @ h
        elif self.tile is not None and self.out is not None:
            sums = self.tile[: columns.stop - columns.start]
            product(du.t(), h, sums, accumulate=rows.start > 0)
            if rows.stop == self.num_rows:
                self.out[columns] = sums

    def result(self) -> Tensor | None:
        if self.out is not None and self.sums is not None and self.sums is not self.out:
            self.out.copy_(self.sums)
        return self.out
