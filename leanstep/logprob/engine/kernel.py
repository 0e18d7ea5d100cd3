"""Triton kernels for the two passes over a tile of logits; sums in fp32.

    update_statistics   (m, s, t) of every row over the tile's columns, one read
    scale_exponentials  out <- e^(z-m) (constant + slope (z-m)), one read and one write

One program per row (or row and block of columns), no atomics: the same bits every time. A GPU tile that takes
eager torch six passes takes one here.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# exp of this is exactly 0 in fp32: a finite stand-in for -inf in products (see softmax.py).
_FLOOR = tl.constexpr(-110.0)
STATISTICS_BLOCK = 4096
GRADIENT_BLOCK = 2048


@triton.jit
def update_statistics_kernel(
    z_ptr,
    tokens_ptr,
    target_ptr,
    max_ptr,
    sum_ptr,
    moment_ptr,
    first_column,
    num_columns,
    row_stride,
    HAS_TARGET: tl.constexpr,
    HAS_MOMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * row_stride
    if HAS_TARGET:
        token = tl.load(tokens_ptr + row) - first_column
        held = (token >= 0) & (token < num_columns)
        tl.store(target_ptr + row, tl.load(z_ptr + token, mask=held, other=0.0).to(tl.float32), mask=held)
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
    out_ptr,
    tokens_ptr,
    target_ptr,
    max_ptr,
    constant_ptr,
    slope_ptr,
    first_column,
    num_columns,
    row_stride,
    out_stride,
    HAS_TARGET: tl.constexpr,
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
    dz = e * factor
    if HAS_TARGET:
        token = tl.load(tokens_ptr + row) - first_column
        dz += tl.where(offsets == token, tl.load(target_ptr + row), 0.0)
    tl.store(out_ptr + row * out_stride + offsets, dz, mask=inside)


def update_statistics(
    z: Tensor,
    maximum: Tensor,
    total: Tensor,
    moment: Tensor | None,
    targets: Tensor | None = None,
    first: int = 0,
    target: Tensor | None = None,
) -> None:
    """Add the columns of `z` [R, W] fp32 to the running m, s and t (None: not kept), in place.

    With `targets` [R], `target` gets the logits of those that the tile, which begins at id `first`, holds.
    """
    rows, columns = z.shape
    if rows and columns:
        block = min(STATISTICS_BLOCK, triton.next_power_of_2(columns))
        reads = targets is not None
        # Where nothing is read, any pointer of the right type will do.
        update_statistics_kernel[(rows,)](
            z, targets if reads else total, target if reads else total,
            maximum, total, total if moment is None else moment, first, columns, z.stride(0),
            HAS_TARGET=reads, HAS_MOMENT=moment is not None, BLOCK=block, num_warps=8,
        )  # fmt: skip


def scale_exponentials(
    z: Tensor,
    out: Tensor,
    maximum: Tensor,
    constant: Tensor,
    slope: Tensor | None,
    targets: Tensor | None = None,
    first: int = 0,
    target: Tensor | None = None,
) -> Tensor:
    """out <- e^(z-m) (constant + slope (z-m)) per row; 0 where e^(z-m) is 0. `out` may be `z`.

    With `target` [R] that is added at the targets that the tile, which begins at id `first`, holds.
    """
    rows, columns = z.shape
    if rows and columns:
        block = min(GRADIENT_BLOCK, triton.next_power_of_2(columns))
        adds = target is not None
        scale_exponentials_kernel[(rows, triton.cdiv(columns, block))](
            z, out, targets if adds else constant, target if adds else constant,
            maximum, constant, constant if slope is None else slope,
            first, columns, z.stride(0), out.stride(0),
            HAS_TARGET=adds, HAS_SLOPE=slope is not None, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


def _entries() -> list[dict]:
    entries = []
    head = {"tokens_ptr": "*i64", "target_ptr": "*fp32", "max_ptr": "*fp32"}
    tail = {"first_column": "i32", "num_columns": "i32", "row_stride": "i64"}
    for moment in (False, True):
        entries.append(
            {
                "name": f"update_statistics{'_entropy' if moment else ''}",
                "fn": update_statistics_kernel,
                "signature": {
                    "z_ptr": "*fp32", **head, "sum_ptr": "*fp32", "moment_ptr": "*fp32", **tail,
                    "HAS_TARGET": "constexpr", "HAS_MOMENT": "constexpr", "BLOCK": "constexpr",
                },
                "constexprs": {"HAS_TARGET": True, "HAS_MOMENT": moment, "BLOCK": STATISTICS_BLOCK},
                "num_warps": 8,
                "num_stages": 3,
            }
        )  # fmt: skip
        entries.append(
            {
                "name": f"scale_exponentials{'_entropy' if moment else ''}",
                "fn": scale_exponentials_kernel,
                "signature": {
                    "z_ptr": "*fp32", "out_ptr": "*fp32", **head,
                    "constant_ptr": "*fp32", "slope_ptr": "*fp32", **tail, "out_stride": "i64",
                    "HAS_TARGET": "constexpr", "HAS_SLOPE": "constexpr", "BLOCK": "constexpr",
                },
                "constexprs": {"HAS_TARGET": True, "HAS_SLOPE": moment, "BLOCK": GRADIENT_BLOCK},
                "num_warps": 4,
                "num_stages": 3,
            }
        )  # fmt: skip
    return entries


AOT_KERNELS: list[dict] = _entries()
