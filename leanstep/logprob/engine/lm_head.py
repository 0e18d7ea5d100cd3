"""The LM head one tile at a time: logits in the forward pass, input gradients in the backward pass.

    u = h . W_v + b_v      a = scale u      q = softcap tanh(a / softcap)      z = q / temperature

A low-rank addition (LoRA) is a second, small product: u += low_hidden . low_weight_v. In the backward pass,
d hidden is summed over vocabulary tiles and cast once; each tile of dW is written once, or summed over row
chunks. Each further core gets a fork of the sums, which is joined at the end. On a GPU, 16-bit operands are
multiplied into fp32 sums, which the GEMM itself reads and writes.
"""

# R rows of a chunk · W columns of a tile · T' selected rows · D model · V local vocabulary · r low rank

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leanstep.logprob.engine.pass_interface import Finish
from leanstep.logprob.engine.passes import aligned, gathered, mixed_product
from leanstep.logprob.engine.tiles import LogitsInGradient, Tiles, on_gpu, row_stride
from leanstep.logprob.parallel import VocabShard, reduce_hidden_grad

SIXTEEN_BIT = (torch.bfloat16, torch.float16)


@dataclass
class RowSource:
    """Rows of hidden [T, D], gathered chunk by chunk without a [T', D] copy."""

    hidden: Tensor
    rows: Tensor | None
    num_rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_rows = self.hidden.shape[0] if self.rows is None else self.rows.shape[0]

    def part(self, rows: slice) -> RowSource:
        """Return a slice of the rows."""
        if self.rows is None:
            return RowSource(self.hidden[rows], None)
        return RowSource(self.hidden, self.rows[rows])

    def chunk(self, part: slice, dtype: torch.dtype) -> Tensor:
        if self.rows is None:
            return self.hidden[part].to(dtype)
        if self.hidden.is_cuda:
            rows = self.rows[part]
            out = self.hidden.new_empty((len(rows), self.hidden.shape[1]), dtype=dtype)
            return gathered(self.hidden, rows, out)
        return self.hidden.index_select(0, self.rows[part]).to(dtype)


@dataclass
class Head:
    """Weight, bias and the transform to logits, over the real columns of one vocabulary shard.

    `vocabulary` is the real size over all shards, if known; `dtype` is the dtype of sums, `operand_dtype`
    that of GEMM inputs; `columns` is the number of real local columns. `narrow` is the 16-bit dtype of
    autocast or of hidden: a GPU multiplies fp32 weights in it. `block_rows` is the number of rows per
    product, 0 for all rows of a tile; None: the bits of a row may depend on the other rows.
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
    narrow: torch.dtype | None = None
    block_rows: int | None = None
    operand_dtype: torch.dtype = field(init=False)
    columns: int = field(init=False)

    def __post_init__(self) -> None:
        self.columns = self.shard.real
        self.is_on_gpu = on_gpu(self.weight.device)
        self.operand_dtype = self.dtype
        # On a GPU, 16-bit GEMMs accumulate in fp32; a CPU would round each tile of logits to 16 bits.
        if self.is_on_gpu and self.dtype == torch.float32:
            is_narrow = self.weight.dtype in SIXTEEN_BIT
            self.operand_dtype = self.weight.dtype if is_narrow else self.narrow or self.dtype

    def weight_tile(self, columns: slice, low: bool = False) -> Tensor:
        """Return rows of the (`low`) weight, [W, D]; on a GPU, zero rows pad W to a multiple of 8."""
        weight = self.low_weight if low and self.low_weight is not None else self.weight
        if not self.is_on_gpu:
            tile = weight[columns].to(self.operand_dtype)
            return tile if self.block_rows is None else aligned(tile)
        width = columns.stop - columns.start
        padded = row_stride(width, weight.device)
        if padded == width:
            return weight[columns].to(self.operand_dtype)
        tile = weight.new_zeros((padded, weight.shape[1]), dtype=self.operand_dtype)
        tile[:width] = weight[columns]
        return tile

    @property
    def factor(self) -> float:
        """Return the product's factor: scale, divided by the softcap or else by a common temperature."""
        if self.softcap is not None:
            return self.scale / self.softcap
        return self.scale if isinstance(self.temperature, Tensor) else self.scale / self.temperature

    def finish(self, rows: slice, columns: slice) -> Finish | None:
        """Return what kernels must still apply to the result of `product_tile`; None: nothing."""
        scale = None
        if isinstance(self.temperature, Tensor):
            scale = (self.softcap or 1.0) / self.temperature[rows]
        elif self.softcap is not None:
            size = rows.stop - rows.start
            value = self.softcap / self.temperature
            scale = torch.full((size,), value, dtype=self.dtype, device=self.weight.device)
        if self.bias is None and scale is None:
            return None
        bias = None if self.bias is None else self.bias[columns]
        return Finish(bias, self.factor, self.softcap is not None, scale)

    def product_tile(
        self, h: Tensor, low_h: Tensor | None, weight: Tensor, columns: slice, out: Tensor
    ) -> Tensor:
        """Write factor (h W^T + low_h low_W^T) to `out` [R, W]; `weight` is `weight_tile(columns)`."""
        wide = widened(out, len(weight))
        product(h, weight.t(), wide, factor=self.factor, high=self.block_rows)
        if low_h is not None and self.low_weight is not None:
            low = self.weight_tile(columns, low=True)
            product(low_h, low.t(), wide, factor=self.factor, accumulate=True)
        return out

    @property
    def has_tanh(self) -> bool:
        """Whether `bounded` differs from z."""
        return self.softcap is not None

    def logits(
        self, h: Tensor, low_h: Tensor | None, weight: Tensor, rows: slice, columns: slice, out: Tensor
    ) -> Tensor:
        """Write z [R, W] to `out`; `weight` is `weight_tile(columns)`, `h` the chunk of hidden rows."""
        bounded = self.bounded(h, low_h, weight, rows, columns, out)
        return self.logits_of(bounded, rows, bounded)

    def bounded(
        self, h: Tensor, low_h: Tensor | None, weight: Tensor, rows: slice, columns: slice, out: Tensor
    ) -> Tensor:
        """Write tanh(a / softcap) [R, W] to `out`, for `logits_of` and `cap_slope`; without softcap, z."""
        self.product_tile(h, low_h, weight, columns, out)
        if self.bias is not None:
            out.add_(self.bias[columns].to(self.dtype) * self.factor)
        if self.softcap is not None:
            out.tanh_()
        elif isinstance(self.temperature, Tensor):
            out.div_(self.temperature[rows].unsqueeze(-1))
        return out

    def logits_of(self, bounded: Tensor, rows: slice, out: Tensor) -> Tensor:
        """Write z of a tile to `out`, computed from `bounded`; without softcap, return the tile itself."""
        return torch.mul(bounded, self.height(rows), out=out) if self.has_tanh else bounded

    def height(self, rows: slice) -> float | Tensor:
        """Return the largest possible logit, softcap / temperature."""
        assert self.softcap is not None
        if not isinstance(self.temperature, Tensor):
            return self.softcap / self.temperature
        return (self.softcap / self.temperature[rows]).unsqueeze(-1)

    def row_slope(self, rows: slice) -> float | Tensor:
        """Return the part of dz/du that is the same for a whole row: scale / temperature."""
        if isinstance(self.temperature, Tensor):
            return self.scale / self.temperature[rows]
        return self.scale / self.temperature

    def cap_slope(self, bounded: Tensor) -> Tensor:
        """Return 1 - tanh^2 of a tile from `bounded`; computed from z, it would be mostly rounding near 1."""
        return (1.0 - bounded).mul_(1.0 + bounded)


def narrow_dtype(hidden: Tensor) -> torch.dtype | None:
    """Return the 16-bit dtype of products with an fp32 weight: autocast's, else hidden's; None: fp32."""
    device_type = hidden.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return hidden.dtype if hidden.dtype in SIXTEEN_BIT else None


def widened(tile: Tensor, columns: int) -> Tensor:
    """Return a tile [R, W] including the padding of its rows: [R, columns]."""
    if tile.shape[1] == columns:
        return tile
    assert tile.stride(0) >= columns, f"a tile of {columns} columns, but {tile.stride(0)} elements per row"
    return tile.as_strided((len(tile), columns), tile.stride())


def cast_tile(tile: Tensor, dtype: torch.dtype, columns: int) -> Tensor:
    """Cast a tile [R, W] to `dtype` with rows padded to `columns`; a plain cast would drop the padding."""
    if tile.dtype == dtype:
        return tile
    return tile.new_empty((len(tile), columns), dtype=dtype)[:, : tile.shape[1]].copy_(tile)


def product(
    a: Tensor, b: Tensor, out: Tensor, *, factor: float = 1.0, accumulate: bool = False, high: int | None = 0
) -> Tensor:
    """Compute out = factor a @ b (+ out), summed in the dtype of `out`; `high` rows at a time, unless 0."""
    if high and len(a) > high:
        for some, part in zip(a.split(high), out.split(high), strict=True):
            product(some, b, part, factor=factor, accumulate=accumulate)
        return out
    if a.dtype == out.dtype:
        return torch.addmm(out, a, b, beta=float(accumulate), alpha=factor, out=out)
    method = mixed_product(a.dtype, out.dtype, a.device)
    if method == "addmm":
        return torch.addmm(out, a, b, out_dtype=out.dtype, beta=float(accumulate), alpha=factor, out=out)
    if method == "mm":
        result = torch.mm(a, b, out_dtype=out.dtype)
    else:
        result = torch.mm(a.to(out.dtype), b.to(out.dtype))
    result = result if factor == 1.0 else result.mul_(factor)
    return out.add_(result) if accumulate else out.copy_(result)


def main_grad_mark(weight: Any) -> Tensor | None:
    """Return the gradient for autograd after the real one was added to main_grad: None, or Megatron's mark.

    Megatron's reducers wait for a gradient; the mark tells them not to read it. They do read that of a shared
    embedding (`zero_out_wgrad`), because autograd has added the embedding's own gradient to it.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    is_read = getattr(weight, "zero_out_wgrad", False)
    return torch.zeros_like(weight) if is_read else torch.empty_like(weight)


class HeadGradients(NamedTuple):
    """Gradients of the head's inputs; None where not needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    low_hidden: Tensor | None
    low_weight: Tensor | None


class HeadSums:
    """Accumulators for the gradients of the head's inputs.

    Args:
        source, low: rows of hidden, and those of the LoRA branch.
        wanted: which of hidden, weight, bias, low_hidden, low_weight need a gradient.
        reduce: process group and mode of `reduce_hidden_grad`.
        main_grad: the weight's gradient is added here instead of returned.
        early: the weight's gradient if the forward pass allocated it.
        factor: factor of all added gradients.
    """

    def __init__(
        self, head: Head, source: RowSource, low: RowSource | None, tiles: Tiles, wanted: Sequence[bool],
        *, reduce: tuple[Any, Any] = (None, "none"), main_grad: Tensor | None = None,
        early: LogitsInGradient | None = None, factor: float = 1.0,
    ) -> None:  # fmt: skip
        self.head, self.factor, num_rows = head, factor, source.num_rows
        self.hidden = _HiddenGradient(source, head, tiles, reduce, wanted[0])
        self.weight = _WeightGradient(head.weight, head, tiles, num_rows, wanted[1], main_grad, early)
        self.bias, self.bias_is_added = None, False
        if wanted[2]:
            self.bias = torch.zeros(head.weight.shape[0], dtype=head.dtype, device=head.weight.device)
        self.low_hidden = self.low_weight = None
        if low is not None and head.low_weight is not None:
            self.low_hidden = _HiddenGradient(low, head, tiles, reduce, wanted[3])
            self.low_weight = _WeightGradient(head.low_weight, head, tiles, num_rows, wanted[4])
        for part in (self.hidden, self.weight, self.low_hidden, self.low_weight):
            if part is not None:
                part.factor = factor

    def hold_rows(self, source: RowSource) -> RowSource:
        """Return `source` with its rows gathered once into the memory of d hidden, if they fit there."""
        return self.hidden.hold_rows(source)

    def add(
        self, du: Tensor, h: Tensor, low_h: Tensor | None, weight_tile: Tensor, rows: slice, columns: slice
    ) -> None:
        """Add the gradient of one tile of u = h W^T + b to every input; the bias may be done already."""
        head = self.head
        if self.bias is not None and not self.bias_is_added:
            self.bias[columns].add_(du.sum(0))
        du = cast_tile(du, head.operand_dtype, len(weight_tile))
        whole = widened(du, len(weight_tile))
        if whole is not du:
            whole[:, du.shape[1] :] = 0.0
        self.hidden.add(whole, weight_tile, rows, columns)
        self.weight.add(du, h, rows, columns)
        if low_h is not None and self.low_hidden is not None and self.low_weight is not None:
            assert head.low_weight is not None
            self.low_hidden.add(du, head.low_weight[columns].to(du.dtype), rows, columns)
            self.low_weight.add(du, low_h, rows, columns)

    def fork(self) -> HeadSums:
        """Return the sums for another worker: columns are shared, rows have separate sums."""
        other = copy.copy(self)
        other.hidden, other.weight = self.hidden.fork(), self.weight.fork()
        other.low_hidden = None if self.low_hidden is None else self.low_hidden.fork()
        other.low_weight = None if self.low_weight is None else self.low_weight.fork()
        return other

    def join(self, other: HeadSums) -> None:
        """Add the row sums of another worker."""
        self.hidden.join(other.hidden)
        if self.low_hidden is not None and other.low_hidden is not None:
            self.low_hidden.join(other.low_hidden)

    def result(self) -> HeadGradients:
        bias = self.head.bias
        return HeadGradients(
            self.hidden.result(),
            self.weight.result(),
            None if self.bias is None or bias is None else (self.bias * self.factor).to(bias.dtype),
            None if self.low_hidden is None else self.low_hidden.result(),
            None if self.low_weight is None else self.low_weight.result(),
        )


class _HiddenGradient:
    """Rows of d hidden, summed over vocabulary tiles in the accumulation dtype and cast once.

    The sums of selected rows are stored in the result's own memory while they fit: with a quarter of the rows
    selected, those of four workers. On a GPU, the gathered rows are stored there too.
    """

    def __init__(
        self, source: RowSource, head: Head, tiles: Tiles, reduce: tuple[Any, Any], wanted: bool
    ) -> None:
        self.source, self.head, self.reduce, self.factor = source, head, reduce, 1.0
        self.out = self.sums = self.chunk = None
        self._taken_bytes, self.starts_fresh, self.at_once = 0, head.is_on_gpu and head.columns > 0, False
        if not wanted:
            return
        hidden, dtype = source.hidden, head.dtype
        whole = self.starts_fresh and tiles.columns >= head.columns and reduce[0] is None
        whole = whole and head.block_rows is None
        if whole and source.rows is None and hidden.dtype == head.operand_dtype:
            # One tile per row: the product accumulates in fp32 and rounds once.
            self.out, self.at_once = torch.empty_like(hidden, memory_format=torch.contiguous_format), True
        elif source.rows is None and hidden.dtype == dtype:
            self.out = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
            self.sums, self._taken_bytes = self.out, hidden.numel() * hidden.element_size()
        elif tiles.order == "vocab" or reduce[0] is not None:
            self.out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
            self.sums = self._new_sums(self.starts_fresh)
        else:
            self.out = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
            self.chunk = hidden.new_zeros((min(tiles.rows, source.num_rows), hidden.shape[1]), dtype=dtype)
        self._own_bytes = self._taken_bytes

    def _take_memory(self, dtype: torch.dtype) -> Tensor | None:
        """Return a [T', D] tensor in the memory of the result, or None if it does not fit."""
        assert self.out is not None
        shape = (self.source.num_rows, self.out.shape[1])
        first, memory = self._taken_bytes, self.out.view(-1).view(torch.uint8)
        last = first + shape[0] * shape[1] * dtype.itemsize
        if last > len(memory) or first % dtype.itemsize:
            return None
        self._taken_bytes = last
        return memory[first:last].view(dtype).view(shape)

    def _new_sums(self, starts_fresh: bool) -> Tensor:
        assert self.out is not None
        sums = self._take_memory(self.head.dtype)
        if sums is None:
            sums = self.out.new_empty((self.source.num_rows, self.out.shape[1]), dtype=self.head.dtype)
        # On a GPU, the first tile of columns is written, not added.
        return sums if starts_fresh else sums.zero_()

    def hold_rows(self, source: RowSource) -> RowSource:
        rows, dtype = source.rows, self.head.operand_dtype
        if self.sums is None or rows is None or not on_gpu(source.hidden.device):
            return source
        memory = self._take_memory(dtype)
        if memory is None:
            return source
        self._own_bytes = self._taken_bytes
        return RowSource(gathered(source.hidden, rows, memory), None)

    def fork(self) -> _HiddenGradient:
        """Return new sums of the same rows for another worker; "vocab" order only."""
        other = copy.copy(self)
        # The fork's first tile of columns is not the first tile overall.
        other.starts_fresh = False
        other.sums = None if self.sums is None else self._new_sums(False)
        return other

    def join(self, other: _HiddenGradient) -> None:
        if self.sums is not None and other.sums is not None:
            self.sums.add_(other.sums)
            # All forks are joined together, so the memory of all of them is free again.
            self._taken_bytes = self._own_bytes

    def add(self, du: Tensor, weight_tile: Tensor, rows: slice, columns: slice) -> None:
        high = self.head.block_rows
        if self.at_once and self.out is not None:
            product(du, weight_tile, self.out[rows], factor=self.factor, high=high)
        elif self.sums is not None:
            adds = columns.start > 0 or not self.starts_fresh or self.sums is self.out
            product(du, weight_tile, self.sums[rows], factor=self.factor, accumulate=adds, high=high)
        elif self.chunk is not None:
            sums = self.chunk[: rows.stop - rows.start]
            product(du, weight_tile, sums, factor=self.factor, accumulate=columns.start > 0)
            if columns.stop == self.head.columns:
                self._write(rows, sums)

    def result(self) -> Tensor | None:
        if self.out is None:
            return None
        if self.sums is not None:
            sums = self.sums if self.reduce[0] is None else reduce_hidden_grad(self.sums, *self.reduce)
            if sums is not self.out:
                if self._own_bytes:
                    # The sums may occupy the memory that other rows are written to.
                    sums = sums.to(self.out.dtype, copy=True)
                if self.source.rows is not None:
                    self.out.zero_()
                self._write(slice(0, self.source.num_rows), sums)
        return self.out

    def _write(self, part: slice, sums: Tensor) -> None:
        assert self.out is not None
        if self.source.rows is None:
            self.out[part] = sums
        else:
            # Add instead of copying: a row may be selected twice.
            self.out.index_add_(0, self.source.rows[part], sums.to(self.out.dtype))


class _WeightGradient:
    """dW, each tile written once in "vocab" order, or summed over row chunks in "rows" order."""

    def __init__(
        self, weight: Tensor, head: Head, tiles: Tiles, num_rows: int, wanted: bool,
        main_grad: Tensor | None = None, early: LogitsInGradient | None = None,
    ) -> None:  # fmt: skip
        self.head, self.num_rows, self.main_grad, self.factor = head, num_rows, main_grad, 1.0
        self.out = self.sums = self.tile = self.rounded = None
        if not wanted:
            return
        dtype = head.dtype
        if main_grad is not None:
            self.sums = main_grad
            return
        if tiles.order == "rows" and weight.dtype != dtype and early is None:
            # The result in the weight's dtype is allocated at the end.
            allocate = weight.new_empty if num_rows and head.columns else weight.new_zeros
            self.sums, self.rounded = allocate(weight.shape, dtype=dtype), weight.dtype
            self.sums[head.columns :] = 0.0
            return
        if early is None:
            allocate = torch.empty_like if num_rows and head.columns else torch.zeros_like
            self.out = allocate(weight, memory_format=torch.contiguous_format)
        else:
            self.out = early.gradient
        self.out[head.columns :] = 0.0
        # A 16-bit product over all rows accumulates in fp32 internally and needs no fp32 sums.
        at_once = weight.dtype == head.operand_dtype and tiles.rows >= num_rows
        if weight.dtype == dtype or (at_once and tiles.order == "vocab"):
            self.sums = self.out
        else:
            self.tile = weight.new_zeros((tiles.columns, weight.shape[1]), dtype=dtype)

    def fork(self) -> _WeightGradient:
        """Return a per-worker view of the same gradient with a separate tile for sums."""
        other = copy.copy(self)
        other.tile = None if self.tile is None else torch.zeros_like(self.tile)
        return other

    def add(self, du: Tensor, h: Tensor, rows: slice, columns: slice) -> None:
        if self.sums is not None:
            accumulate = rows.start > 0 or self.main_grad is not None
            if self.sums.dtype in (self.head.dtype, self.head.operand_dtype):
                product(du.t(), h, self.sums[columns], factor=self.factor, accumulate=accumulate)
            else:
                self.sums[columns] += self.factor * (du.t() @ h)
        elif self.tile is not None and self.out is not None:
            sums = self.tile[: columns.stop - columns.start]
            product(du.t(), h, sums, factor=self.factor, accumulate=rows.start > 0)
            if rows.stop == self.num_rows:
                self.out[columns] = sums

    def result(self) -> Tensor | None:
        return self.out if self.rounded is None or self.sums is None else self.sums.to(self.rounded)
