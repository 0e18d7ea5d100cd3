"""Launches on tensors of more than 2^31 elements: memory is reserved, but only written pages are allocated.

Kernels are launched directly, because the functions that normally launch them allocate their results.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from leanstep.gpt import kernel as gpt
from leanstep.lens.kernel import lens_pairs_kernel, lens_rows_kernel, lens_targets_kernel
from leanstep.logprob.engine import kernel as passes
from leanstep.logprob.engine.gpu.kernel import gather_rows_kernel
from leanstep.logprob.engine.tiles import laid_over
from leanstep.muon import kernel as products
from leanstep.muon.fused import kernel as fused

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
    vector = [torch.ones(rows) for _ in range(6)]
    z, y = rows_of(rows, columns, FP32), rows_of(rows, columns, FP32)
    targets = torch.tensor([0, 4, 4])
    passes.update_statistics(z, *vector[:3], targets, 0, vector[3])
    passes.scale_exponentials(z, rows_of(rows, columns, BF16), *vector[:3], targets, 0, vector[3])
    compared = passes.Compared((vector[0], vector[1], vector[2], vector[3]), 0, 1.0, 1.0, 0.5)
    passes.divergence_sums(z, y, compared, torch.zeros(3, rows))
    passes.divergence_gradient(z, y, rows_of(rows, columns, BF16), compared, vector[4], vector[5])
    passes.scale_exponentials(z, laid_over(z, BF16), *vector[:3], targets, 0, vector[3], overlaps=True)


def column_sums() -> None:
    """One row of sums per program and 2^20 columns: the sums themselves exceed 2^31 elements."""
    rows, columns, block = 2**11 + 1, 2**20, 16
    z, out = sparse(columns, FP32).expand(rows, columns), rows_of(rows, columns, BF16, columns)
    vectors = [torch.zeros(rows)] * 3
    passes.scale_exponentials_kernel[(rows, columns // block)](
        z, out, torch.zeros(rows, dtype=INT64), *vectors, *vectors, rows_of(rows, columns, FP32, columns),
        0, rows, columns, 0, columns, 1.0, HAS_TARGET=False, HAS_SLOPE=False, HAS_BIAS=False, IS_CAPPED=False,
        HAS_SCALE=False, HAS_SUMS=True, ROWS=1, BLOCK=block,
    )  # fmt: skip


def gathered_rows() -> None:
    x, out = rows_of(3, 5, FP32), rows_of(3, 5, BF16)
    gather_rows_kernel[(3, 1)](x, torch.tensor([0, 1, 2]), out, 3, 5, STRIDE, STRIDE, BLOCK=8)
    # Indices of 32 bits take the same offsets.
    rows = torch.tensor([0, 1, 2], dtype=torch.int32)
    gather_rows_kernel[(3, 1)](x, rows, out, 3, 5, STRIDE, STRIDE, BLOCK=8)


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


def slots(tensor: Any) -> list[Any]:
    return [tensor] * fused.SLOTS


# Matrices [items, rows, cols] of one parameter: 2^31 elements are passed by the number of matrices, then by
# the rows of one. That one is alone: with another before it, an offset that wraps would land in the other.
STACKS = ((2**22 + 3, 16, 33), (1, 2**25 + 16, 80))


def momentum_steps() -> None:
    tile = {"BLOCK_R": 16, "BLOCK_C": 64}
    for items, rows, cols in STACKS:
        grad, buffer, out = (sparse(items * rows * cols, dtype) for dtype in (BF16, FP32, BF16))
        # One tile per program: the last program has the last tile.
        programs = triton.cdiv(rows, 16) * triton.cdiv(cols, 64)
        norms = sparse(2 * items * programs, FP32)
        fused.momentum_kernel[(items * programs,)](
            *slots(grad), *slots(buffer), out, norms, norms, norms, rows, cols, items, programs,
            items * programs, rows * cols, cols, rows * cols, cols, 0.9,
            NESTEROV=True, HAS_MOMENTUM=False, HAS_GO=False, **tile,
        )  # fmt: skip


def normalizations() -> None:
    items, size, block = 2**22 + 3, 16 * 33, 64
    blocks = triton.cdiv(size, block)
    x, norms = sparse(items * size, BF16), sparse(2 * items, FP32)
    fused.normalize_kernel[(items * blocks,)](
        x, norms, norms, size, blocks, 1, items, RELATIVE=True, HAS_GO=False, BLOCK=block, BLOCK_P=1
    )


def variances() -> None:
    for by_row in (False, True):
        shape = (1, 2**28 + 16, 16) if by_row else (2, 40, 2**26)
        for items, rows, cols in (STACKS[0], shape):
            lines, length = (rows, cols) if by_row else (cols, rows)
            blocks = triton.cdiv(lines, 16)
            factor, scale = sparse(items * rows * cols, BF16), sparse(items * lines, FP32)
            norms = sparse(2 * items * blocks, FP32)
            fused.variance_kernel[(items * blocks,)](
                *slots(sparse(items * lines, FP32)), factor, scale, norms, norms, lines, length, items,
                blocks, items * blocks, 0.9,
                BY_ROW=by_row, PER_ROW=False, HAS_GO=False, BLOCK_L=16, BLOCK_K=64,
            )  # fmt: skip


def many_lines() -> None:
    """State and scales of lines, more than 2^31 of them."""
    items, lines = 2**23 + 3, 300
    blocks = triton.cdiv(lines, 16)
    factor, scale, norms = (sparse(items * n, FP32) for n in (lines, lines, 2 * blocks))
    fused.variance_kernel[(items * blocks,)](
        *slots(sparse(items * lines, FP32)), factor, scale, norms, norms, lines, 1, items, blocks,
        items * blocks, 0.9, BY_ROW=True, PER_ROW=True, HAS_GO=False, BLOCK_L=16, BLOCK_K=16,
    )  # fmt: skip


def writes() -> None:
    for (items, rows, cols), by_row in (
        *((shape, True) for shape in STACKS),
        ((2**23 + 3, 1, 300), False),
        ((2**23 + 3, 300, 1), True),
    ):
        tiles = triton.cdiv(rows, 16) * triton.cdiv(cols, 64)
        weight, low, factor = (sparse(items * rows * cols, dtype) for dtype in (BF16, torch.int16, BF16))
        scale, norms = sparse(items * (rows if by_row else cols), FP32), sparse(2 * items, FP32)
        fused.write_kernel[(items * tiles,)](
            *slots(weight), *slots(low), factor, scale, norms, norms, norms, norms, rows, cols, items,
            rows * cols, cols, rows * cols, cols, 1, items, 0.1, 0.1, HAS_SCALE=True, BY_ROW=by_row,
            HAS_MULTIPLIER=False, HAS_LR=False, HAS_GO=False, CAUTIOUS=True, MODE=1,
            BLOCK_R=16, BLOCK_C=64, BLOCK_P=1,
        )  # fmt: skip


def adam_steps() -> None:
    size, block = 2**31 + 77, 64
    blocks = triton.cdiv(size, block)
    weight, low, grad, first, second = (sparse(size, t) for t in (BF16, torch.int16, BF16, FP32, FP32))
    step = torch.tensor(3.0)
    fused.adam_kernel[(blocks,)](
        *slots(weight), *slots(low), *slots(grad), *slots(first), *slots(second), *slots(step), *slots(size),
        step, step, blocks, 0.1, 0.9, 0.99, -0.1, -0.01, 1e-8, 0.1,
        HAS_LR=False, HAS_GO=False, CAUTIOUS=True, MODE=1, BLOCK=block,
    )  # fmt: skip


def many_pairs() -> None:
    samples, variants, used = 2**28 + 3, 8, 7
    loss, row = sparse(samples * variants, FP32), sparse(samples * variants, INT64)
    better, worse = (sparse(samples * used, INT64) for _ in range(2))
    delta, live, valid = (sparse(samples * used, dtype) for dtype in (FP32, INT8, INT8))
    lens_pairs_kernel[(samples,)](
        loss, row, better, worse, delta, live, valid, variants, used, BLOCK_C=8, BLOCK_S=8
    )


def many_slots() -> None:
    """More than 2^31 slots, of few losses each."""
    samples, variants, used = 2**25 + 3, 2, 65
    loss, row = sparse(samples * variants, FP32), sparse(samples * variants, INT64)
    better, worse = (sparse(samples * used, INT64) for _ in range(2))
    delta, live, valid = (sparse(samples * used, dtype) for dtype in (FP32, INT8, INT8))
    lens_pairs_kernel[(samples,)](
        loss, row, better, worse, delta, live, valid, variants, used, BLOCK_C=2, BLOCK_S=128
    )


def many_targets() -> None:
    """Pairs by entries, pairs by blocks, contexts by entries and contexts by tokens, all beyond 2^31."""
    contexts, entries, tokens, blocks = 2**27, 17, 20, 18
    pos, lod, valid = (sparse(contexts * entries, dtype) for dtype in (INT64, INT8, INT8))
    table, hits = sparse(contexts * (tokens + 1), INT8), sparse(contexts * blocks, INT8)
    better, worse, live = sparse(contexts, INT64), sparse(contexts, INT64), sparse(contexts, INT8)
    sign, kept_pairs = sparse(contexts * entries, INT8), sparse(contexts, INT8)
    for pair in (0, contexts - 1):
        better[pair] = worse[pair] = contexts - 1
        live[pair] = 1
    valid[-entries:] = 1
    lens_targets_kernel[(contexts,)](
        pos, lod, valid, table, hits, better, worse, live, sign, kept_pairs, entries, tokens, blocks, 4,
        MAX_LOD=2, BLOCK_W=8,
    )  # fmt: skip


def many_rows() -> None:
    contexts, entries = 2**27, 17
    scores, grad, lod = (sparse(contexts * entries, dtype) for dtype in (BF16, FP32, INT8))
    few = 4
    # They end with the last entry of the last pair.
    sign, share, weight = (torch.ones(few * entries, dtype=dtype) for dtype in (INT8, FP32, FP32))
    worse = torch.full((few,), contexts - 1)
    vectors = [torch.ones(few) for _ in range(7)]
    flags = dict.fromkeys(("PREF", "RANK", "BUDGET", "SMOOTH", "SHARED", "WEIGHTED", "NEED_GRAD"), True)
    lens_rows_kernel[(contexts,)](
        scores, sign, lod, share, weight, worse, *vectors, grad, few, entries, entries,
        1.0, 1.0, 1.0, 1.0, 1.0, FORM=0, **flags, DOUBLE=False, BLOCK_SIZE=4, MAX_LOD=2, BLOCK_P=4, BLOCK_W=8,
    )  # fmt: skip


def late_pair() -> None:
    """One context whose only pair has its entries beyond 2^31."""
    entries, pairs = 2**14, 2**17 + 1
    scores, grad, lod = (sparse(entries, dtype) for dtype in (BF16, FP32, INT8))
    sign, share, weight = (sparse(pairs * entries, dtype) for dtype in (INT8, FP32, FP32))
    sign[-entries:] = 1
    worse = torch.full((pairs,), -1)
    worse[-1] = 0
    vectors = [torch.ones(pairs) for _ in range(7)]
    terms = ("PREF", "RANK", "BUDGET", "SMOOTH", "SHARED", "WEIGHTED", "NEED_GRAD")
    flags = {term: term in ("PREF", "WEIGHTED") for term in terms}
    lens_rows_kernel[(1,)](
        scores, sign, lod, share, weight, worse, *vectors, grad, pairs, entries, entries,
        1.0, 1.0, 1.0, 1.0, 1.0, FORM=0, **flags, DOUBLE=False, BLOCK_SIZE=4, MAX_LOD=2,
        BLOCK_P=2**18, BLOCK_W=2**14,
    )  # fmt: skip


LARGE: list[Callable[[], None]] = [
    tiles_of_logits,
    column_sums,
    gathered_rows,
    capped_rows,
    squares,
    symmetric_products,
    transposes,
    momentum_steps,
    normalizations,
    variances,
    many_lines,
    writes,
    adam_steps,
    many_pairs,
    many_slots,
    many_targets,
    many_rows,
    late_pair,
]
