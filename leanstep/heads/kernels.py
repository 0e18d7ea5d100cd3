"""The two passes of passes.py in Triton, for fp32 or 16-bit tiles and gradients.

One program per row: no atomics, the same bits every time. The only file of the folder that imports Triton.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

STATS_BLOCK, GRADS_BLOCK = 4096, 2048
# exp of this is exactly 0 in fp32: a finite replacement for -inf in products.
_LOWEST = tl.constexpr(-110.0)


@triton.jit
def _logits(u, bias_ptr, columns, inside, inner, cap, HAS_BIAS: tl.constexpr, CAPS: tl.constexpr):
    """Return the logits of products: cap tanh(inner (u + bias)), or u + bias."""
    if HAS_BIAS:
        u += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if CAPS:
        # e^(-2|x|) never overflows.
        e = tl.exp(-2.0 * tl.abs(inner * u))
        t = (1.0 - e) / (1.0 + e)
        u = cap * tl.where(u < 0, -t, t)
    return u


@triton.jit
def stats_kernel(
    z_ptr, ids_ptr, k_ptr, max_ptr, sum_ptr, sum_x_ptr, target_ptr, argmax_ptr, bias_ptr,
    first_id, num_columns, row_stride, inner, cap,
    HAS_BIAS: tl.constexpr, CAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * row_stride
    k = tl.load(k_ptr + row)
    column = tl.load(ids_ptr + row) - first_id
    here = (column >= 0) & (column < num_columns)
    read = tl.load(z_ptr + column, mask=here, other=0.0).to(tl.float32)
    read = _logits(read, bias_ptr, column, here, inner, cap, HAS_BIAS, CAPS)
    tl.store(target_ptr + row, tl.where(here, read, float("-inf")))
    m = float("-inf")
    s = 0.0
    t = 0.0
    first = 0
    columns = tl.arange(0, BLOCK)
    for start in range(0, num_columns, BLOCK):
        inside = start + columns < num_columns
        u = tl.load(z_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
        u = _logits(u, bias_ptr, start + columns, inside, inner, cap, HAS_BIAS, CAPS)
        z = tl.where(inside, u, float("-inf"))
        block_m = tl.max(z, 0)
        at = tl.min(tl.where(z == block_m, start + columns, num_columns - 1), 0)
        first = tl.where(block_m > m, at, first)
        new_m = tl.maximum(m, block_m)
        # If all logits so far are -inf, subtract 0, so that -inf - (-inf) never occurs.
        shift = tl.where(new_m == float("-inf"), 0.0, new_m)
        step = tl.maximum(k * (m - shift), _LOWEST)
        shrink = tl.exp(step)
        x = k * (z - shift)
        e = tl.exp(x)
        # Where e is 0 the clamped x is finite: no 0 * -inf.
        t = (t + step * s) * shrink + tl.sum(e * tl.maximum(x, _LOWEST), 0)
        s = s * shrink + tl.sum(e, 0)
        m = new_m
    tl.store(max_ptr + row, m)
    tl.store(sum_ptr + row, s)
    tl.store(sum_x_ptr + row, t)
    tl.store(argmax_ptr + row, first.to(tl.float32))


@triton.jit
def grads_kernel(
    z_ptr, out_ptr, ids_ptr, k_ptr, m_ptr, log_s_ptr, entropy_ptr, a_ptr, b_ptr, g_ptr, bias_ptr,
    first_id, num_columns, row_stride, out_stride, inv_cap, inner, cap,
    IS_CAPPED: tl.constexpr, HAS_BIAS: tl.constexpr, CAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * row_stride
    out_ptr += row * out_stride
    column = tl.load(ids_ptr + row) - first_id
    k, m, log_s = tl.load(k_ptr + row), tl.load(m_ptr + row), tl.load(log_s_ptr + row)
    entropy, a = tl.load(entropy_ptr + row), tl.load(a_ptr + row)
    b, g = tl.load(b_ptr + row), tl.load(g_ptr + row)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < num_columns
        u = tl.load(z_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        z = _logits(u, bias_ptr, columns, inside, inner, cap, HAS_BIAS, CAPS)
        x = k * (z - m) - log_s
        du = -tl.exp(x) * (a + b * (tl.maximum(x, _LOWEST) + entropy))
        du += tl.where(columns == column, g, 0.0)
        if IS_CAPPED:
            du *= (1.0 - z * inv_cap) * (1.0 + z * inv_cap)
        # 16-bit gradients may overwrite the fp32 logits of this block or earlier ones: every thread must
        # have read its logits.
        tl.debug_barrier()
        tl.store(out_ptr + columns, du.to(out_ptr.dtype.element_ty), mask=inside)


def launches_are_recorded() -> bool:
    """Whether a rehearsal has replaced Triton's launcher; kernels may then launch on fake tensors."""
    return getattr(triton.runtime.jit.JITFunction.run, "records_only", False)


# What a pass does to products that it reads: (bias [W] or None, inner, cap or None), see `_logits`.
Finish = tuple[Tensor | None, float, float | None]
NOTHING: Finish = (None, 1.0, None)


def stats(z: Tensor, ids: Tensor, first_id: int, *vectors: Tensor, finish: Finish = NOTHING) -> None:
    rows, columns = z.shape
    bias, inner, cap = finish
    if rows:
        block = min(STATS_BLOCK, triton.next_power_of_2(columns))
        with _device_of(z):
            stats_kernel[(rows,)](
                z, ids, *vectors, ids if bias is None else bias, first_id, columns, z.stride(0), inner,
                cap or 0.0, HAS_BIAS=bias is not None, CAPS=cap is not None, BLOCK=block, num_warps=8,
            )  # fmt: skip


def grads(
    z: Tensor, out: Tensor, ids: Tensor, first_id: int, *vectors_and_inv_cap: Any, finish: Finish = NOTHING
) -> None:
    *vectors, inv_cap = vectors_and_inv_cap
    rows, columns = z.shape
    bias, inner, cap = finish
    if rows:
        block = min(GRADS_BLOCK, triton.next_power_of_2(columns))
        with _device_of(z):
            grads_kernel[(rows,)](
                z, out, ids, *vectors, ids if bias is None else bias, first_id, columns, z.stride(0),
                out.stride(0), inv_cap, inner, cap or 0.0, IS_CAPPED=inv_cap != 0,
                HAS_BIAS=bias is not None, CAPS=cap is not None, BLOCK=block, num_warps=4,
            )  # fmt: skip


def _device_of(tensor: Tensor) -> Any:
    """Make the tensor's device current: Triton launches on the current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


# Compiled ahead of time by dev/kernel_checks: fp32 logits with 16-bit gradients, and 16-bit logits.
_TYPES = {
    "ids_ptr": "*i64",
    "first_id": "i32",
    "num_columns": "i32",
    "row_stride": "i64",
    "out_stride": "i64",
    "inner": "fp32",
    "cap": "fp32",
    "inv_cap": "fp32",
}


def _entry(name: str, fn: Any, num_warps: int, constants: dict[str, Any], **types: str) -> dict:
    types = {**_TYPES, **types}
    signature = {a: "constexpr" if a in constants else types.get(a, "*fp32") for a in fn.arg_names}
    shape = {"num_warps": num_warps, "num_stages": 3}
    return {"name": name, "fn": fn, "signature": signature, "constexprs": constants, **shape}


AOT_KERNELS: list[dict] = []
for _suffix, _tile, _finish in (("", "*fp32", False), ("_finish", "*fp32", True), ("_bf16", "*bf16", False)):
    _flags = {"HAS_BIAS": _finish, "CAPS": _finish}
    _types = {"z_ptr": _tile, "bias_ptr": "*fp32"}
    _grads = {"IS_CAPPED": _finish, **_flags, "BLOCK": GRADS_BLOCK}
    AOT_KERNELS += [
        _entry(f"stats{_suffix}", stats_kernel, 8, {**_flags, "BLOCK": STATS_BLOCK}, **_types),
        _entry(f"grads{_suffix}", grads_kernel, 4, _grads, out_ptr="*bf16", **_types),
    ]
