"""The LM head one tile at a time: hidden rows times weight columns, scale, softcap, temperature.

    u = h . W_v + b_v      a = scale u      q = softcap tanh(a / softcap)      z = q / temperature

A low-rank addition (LoRA) is a second, thin product: u += low_hidden . low_weight_v.
"""

# R rows of a chunk · W columns of a tile · D model · r low rank

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from leanstep.logprob.parallel import VocabShard

# torch.mm(out_dtype=) came with torch 2.8; before it 16-bit operands are widened, exact and slower.
HAS_OUT_DTYPE = hasattr(torch.ops.aten.mm, "dtype")


@dataclass
class RowSource:
    """Rows of hidden [T, D], gathered chunk by chunk: no [T', D] copy."""

    hidden: Tensor
    rows: Tensor | None

    @property
    def num_rows(self) -> int:
        return self.hidden.shape[0] if self.rows is None else self.rows.shape[0]

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
    of GEMM inputs.
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

    def __post_init__(self) -> None:
        sixteen_bit = self.weight.dtype in (torch.bfloat16, torch.float16)
        # 16-bit GEMMs keep fp32 sums on a GPU; a CPU would round each tile of logits to 16 bits.
        native = sixteen_bit and self.weight.is_cuda
        self.operand_dtype = self.weight.dtype if native else self.dtype

    @property
    def columns(self) -> int:
        return self.shard.real

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


class Scratch:
    """Tiles for one core, each allocated when it is first asked for and then used again."""

    def __init__(self, like: Tensor, dtype: torch.dtype, num_elements: int) -> None:
        self._device, self._dtype, self._size = like.device, dtype, num_elements
        self._storage: dict[int, Tensor] = {}

    def tile(self, number: int, rows: int, columns: int) -> Tensor:
        if number not in self._storage:
            self._storage[number] = torch.empty(self._size, dtype=self._dtype, device=self._device)
        return self._storage[number][: rows * columns].view(rows, columns)

    def tiles(self, count: int, rows: int, columns: int) -> list[Tensor]:
        return [self.tile(number, rows, columns) for number in range(count)]
