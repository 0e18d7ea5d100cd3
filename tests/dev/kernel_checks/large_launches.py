"""Launches on tensors of more than 2^31 elements: memory is reserved, but only written pages are allocated.

Kernels are launched directly, because the functions that normally launch them allocate their results.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

import torch
import triton
from torch import Tensor

from leanstep.heads import kernels as passes
from leanstep.muon import kernel as products
from recipes.speedrun import kernels as gpt

FP32, BF16, INT8, INT64 = torch.float32, torch.bfloat16, torch.int8, torch.int64
# Linux: address space without a promise of memory.
_NORESERVE = 0x4000
# Three rows of this stride pass 2^31 elements.
STRIDE = 2**30 + 16


def sparse(elements: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros whose pages are allocated when they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    memory = mmap.mmap(-1, elements * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype)


def rows_of(rows: int, columns: int, dtype: torch.dtype, stride: int = STRIDE) -> Tensor:
    """Return [rows, columns] with row stride `stride`; the storage ends with the last row."""
    return sparse((rows - 1) * stride + columns, dtype).as_strided((rows, columns), (stride, 1))


def tiles_of_logits() -> None:
    rows, columns = 3, 5
    vectors = [torch.ones(rows) for _ in range(7)]
    z, ids = rows_of(rows, columns, FP32), torch.tensor([0, 4, 4])
    passes.stats(z, ids, 0, *vectors[:6])
    passes.grads(z, rows_of(rows, columns, BF16), ids, 0, *vectors, 0.1)


def capped_rows() -> None:
    """The last row begins beyond 2^31 elements, in the products and in their gradients."""
    u, grad = rows_of(3, 5, BF16), rows_of(3, 5, BF16)
    gpt.softcap_rows_kernel[(3,)](
        u, grad, torch.zeros(3, 1, dtype=INT64), torch.ones(3, 1), torch.zeros(3), torch.ones(()), 5,
        STRIDE, STRIDE, 0.1, 0.3, 11.5, AHEAD=1, HAS_GRAD=True, HAS_SCALE=True, BLOCK=8,
    )  # fmt: skip


def squares() -> None:
    """Operands and results with a large row stride: 64-bit corners, 32-bit offsets within a tile."""
    stride = 2**26 + 16
    sizes = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "GROUP": 2}
    for backward in (False, True):
        a, b, pre, out = (rows_of(37, n, BF16, stride) for n in (5, 5, 37, 37))
        gpt.relu_product_kernel[(9,)](
            a, b, pre, out, 37, 37, 5, stride, stride, stride, BACKWARD=backward, **sizes
        )


def symmetric_products() -> None:
    tiles = (16, 32, 16)
    # 32-bit steps inside a tile, a 64-bit corner: the last tile begins beyond 2^31.
    stride = 2**26 + 16
    for batch in (1, 2):
        x = rows_of(37, 5, BF16, stride)
        x = x if batch == 1 else torch.as_strided(sparse(STRIDE * 2 + 5 * 8, BF16), (3, 5, 5), (STRIDE, 8, 1))
        products.xxt(x, torch.zeros(*x.shape[:-2], x.size(-2), x.size(-2), dtype=BF16), tiles=tiles)
        products.xtx(x, torch.zeros(*x.shape[:-2], 5, 5, dtype=BF16), tiles=tiles)
    # One step along the rows that are summed: its offsets alone pass 2^31.
    products.xtx(rows_of(16, 5, BF16, 2**28), torch.zeros(5, 5, dtype=BF16), tiles=tiles)
    small = torch.randn(37, 37).to(BF16)
    products.xxt(small, rows_of(37, 37, BF16, stride), tiles=tiles)
    products.xtx(small, rows_of(37, 37, BF16, stride), tiles=tiles)
    products.ba_caa(rows_of(37, 37, BF16, stride), small, 1.0, 1.0, tiles=tiles)
    some = torch.randn(3, 5, 5).to(BF16)
    apart = torch.as_strided(sparse(STRIDE * 2 + 5 * 8, BF16), (3, 5, 5), (STRIDE, 8, 1))
    products.xxt(some, apart, tiles=tiles)
    products.xtx(some, apart, tiles=tiles)


def transposes() -> None:
    stride = 2**26 + 16
    for add in (False, True):
        for src, dst in (
            (rows_of(37, 5, BF16, stride), torch.zeros(5, 37, dtype=BF16)),
            (torch.zeros(5, 37, dtype=BF16), rows_of(37, 5, BF16, stride)),
        ):
            rows, cols = src.shape
            products.transpose_kernel[(triton.cdiv(rows, 16) * triton.cdiv(cols, 16),)](
                src, dst, rows, cols, src.stride(0), dst.stride(0), BLOCK_M=16, BLOCK_N=16, ADD=add
            )


LARGE: list[Callable[[], None]] = [
    tiles_of_logits,
    capped_rows,
    squares,
    symmetric_products,
    transposes,
]
