"""Triton kernels for the two passes over a tile of logits; sums in fp32.

    update_statistics   (m, s, t) of every row over the tile's columns, one read
    scale_exponentials  z <- e^(z-m) (constant + slope (z-m)), one read and one write, in place

One program per row (or row and block of columns), no atomics: the same bits every time. A GPU tile that takes
eager torch six passes takes one here.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# exp of this is exactly 0 in fp32: a finite stand-in for -inf in products (see statistics.py).
_FLOOR = tl.constexpr(-110.0)
STATISTICS_BLOCK = 4096
GRADIENT_BLOCK = 2048


@triton.jit
def update_statistics_kernel(
    z_ptr,
    max_ptr,
    sum_ptr,
    moment_ptr,
    num_columns,
    row_stride,
    HAS_MOMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * row_stride
    m = tl.load(max_ptr + row)
    s = tl.load(sum_ptr + row)
    t = 0.0
    if HAS_MOMENT:
        t = tl.load(moment_ptr + row)
    columns = tl.arange(0, BLOCK)
    for start in range(0, num_columns, BLOCK):
        inside = start + columns < num_columns
        z = tl.load(z_ptr + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
        new_m = tl.maximum(m, tl.max(z, 0))
        # All -inf so far: subtract 0, so that -inf - (-inf) never happens.
        shift = tl.where(new_m == float("-inf"), 0.0, new_m)
        step = tl.maximum(m - shift, _FLOOR)
        shrink = tl.exp(step)
        x = z - shift
        e = tl.exp(x)
        if HAS_MOMENT:
            # Where e is 0 the clamped x is finite: no 0 * -inf.
            t = (t + step * s) * shrink + tl.sum(e * tl.maximum(x, _FLOOR), 0)
        s = s * shrink + tl.sum(e, 0)
        m = new_m
    tl.store(max_ptr + row, m)
    tl.store(sum_ptr + row, s)
    if HAS_MOMENT:
        tl.store(moment_ptr + row, t)


@triton.jit
def scale_exponentials_kernel(
    z_ptr,
    max_ptr,
    constant_ptr,
    slope_ptr,
    num_columns,
    row_stride,
    HAS_SLOPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_columns
    z_ptr += row * row_stride
    x = tl.load(z_ptr + offsets, mask=inside, other=float("-inf")).to(tl.float32) - tl.load(max_ptr + row)
    e = tl.exp(x)
    factor = tl.load(constant_ptr + row)
    if HAS_SLOPE:
        factor = factor + tl.load(slope_ptr + row) * tl.maximum(x, _FLOOR)
    tl.store(z_ptr + offsets, e * factor, mask=inside)


def update_statistics(z: Tensor, maximum: Tensor, total: Tensor, moment: Tensor | None) -> None:
    """Add the columns of `z` [R, W] fp32 to the running m, s and t (None: not kept), in place."""
    rows, columns = z.shape
    if rows and columns:
        block = min(STATISTICS_BLOCK, triton.next_power_of_2(columns))
        update_statistics_kernel[(rows,)](
            z, maximum, total, total if moment is None else moment, columns, z.stride(0),
            HAS_MOMENT=moment is not None, BLOCK=block, num_warps=8,
        )  # fmt: skip


def scale_exponentials(z: Tensor, maximum: Tensor, constant: Tensor, slope: Tensor | None) -> Tensor:
    """z <- e^(z-m) (constant + slope (z-m)) per row, in place; 0 where e^(z-m) is 0."""
    rows, columns = z.shape
    if rows and columns:
        block = min(GRADIENT_BLOCK, triton.next_power_of_2(columns))
        scale_exponentials_kernel[(rows, triton.cdiv(columns, block))](
            z, maximum, constant, constant if slope is None else slope, columns, z.stride(0),
            HAS_SLOPE=slope is not None, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return z


def _entries() -> list[dict]:
    entries = []
    for moment in (False, True):
        entries.append(
            {
                "name": f"update_statistics{'_entropy' if moment else ''}",
                "fn": update_statistics_kernel,
                "signature": {
                    "z_ptr": "*fp32", "max_ptr": "*fp32", "sum_ptr": "*fp32", "moment_ptr": "*fp32",
                    "num_columns": "i32", "row_stride": "i64",
                    "HAS_MOMENT": "constexpr", "BLOCK": "constexpr",
                },
                "constexprs": {"HAS_MOMENT": moment, "BLOCK": STATISTICS_BLOCK},
                "num_warps": 8,
                "num_stages": 3,
            }
        )  # fmt: skip
        entries.append(
            {
                "name": f"scale_exponentials{'_entropy' if moment else ''}",
                "fn": scale_exponentials_kernel,
                "signature": {
                    "z_ptr": "*fp32", "max_ptr": "*fp32", "constant_ptr": "*fp32", "slope_ptr": "*fp32",
                    "num_columns": "i32", "row_stride": "i64", "HAS_SLOPE": "constexpr", "BLOCK": "constexpr",
                },
                "constexprs": {"HAS_SLOPE": moment, "BLOCK": GRADIENT_BLOCK},
                "num_warps": 4,
                "num_stages": 3,
            }
        )  # fmt: skip
    return entries


AOT_KERNELS: list[dict] = _entries()
