"""Triton kernels for the passes over a tile of logits; sums in fp32, tiles in fp32 or 16 bits.

    update_statistics    (m, s, t) of every row over the tile's columns, one read
    scale_exponentials   out <- e^(z-m) (constant + slope (z-m)), one read and one write; 16-bit gradients may
                         overwrite the fp32 logits that they are computed from
    divergence_sums      D, sum S and entropy of two heads' rows, one read of both
    divergence_gradient  out <- factor (S - p sum S), one read of both and one write

Bias, softcap and a temperature per row (`Finish`) are applied to the loaded values and need no separate pass.
There is one program per row (or row and block of columns) and there are no atomics: the same bits every time.
Each kernel needs one pass over a tile where eager torch needs six.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from leanstep.logprob.engine.pass_interface import Compared, Finish, LabelGradient

# exp of this is exactly 0 in fp32: a finite replacement for -inf in products (see softmax.py).
_FLOOR = tl.constexpr(-110.0)
STATISTICS_BLOCK = 4096
GRADIENT_BLOCK = 2048
# Rows that one program sums for the bias gradient.
SUMMED_ROWS = 32
# These passes accept a `Finish`, read 16-bit logits and write 16-bit gradients.
FINISHES_LOGITS = True
# A rehearsal replaces Triton's launcher by one with this attribute; kernels may then launch on fake tensors.
LAUNCHES_ARE_RECORDED = getattr(triton.runtime.jit.JITFunction.run, "records_only", False)


@triton.jit
def _tanh(u):
    # e^(-2|u|) never overflows.
    e = tl.exp(-2.0 * tl.abs(u))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(u < 0, -t, t)


@triton.jit
def _finished(
    u, bias_ptr, columns, inside, factor, scale,
    HAS_BIAS: tl.constexpr, IS_CAPPED: tl.constexpr, HAS_SCALE: tl.constexpr,
):  # fmt: skip
    """Return the logit of a product, -inf outside the tile, and its tanh."""
    if HAS_BIAS:
        u += factor * tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tanh = u
    if IS_CAPPED:
        tanh = _tanh(u)
    z = tanh
    if HAS_SCALE:
        z = tanh * scale
    return tl.where(inside, z, float("-inf")), tanh


@triton.jit
def update_statistics_kernel(
    z_ptr, tokens_ptr, target_ptr, max_ptr, sum_ptr, moment_ptr, bias_ptr, scale_ptr, first_column,
    num_columns, row_stride, factor,
    HAS_TARGET: tl.constexpr, HAS_MOMENT: tl.constexpr, HAS_BIAS: tl.constexpr, IS_CAPPED: tl.constexpr,
    HAS_SCALE: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * row_stride
    scale = 1.0
    if HAS_SCALE:
        scale = tl.load(scale_ptr + row)
    if HAS_TARGET:
        token = tl.load(tokens_ptr + row) - first_column
        held = (token >= 0) & (token < num_columns)
        # Separate names: a compiled loop must not change the shape of the variables below.
        read = tl.load(z_ptr + token, mask=held, other=0.0).to(tl.float32)
        logit, _bent = _finished(read, bias_ptr, token, held, factor, scale, HAS_BIAS, IS_CAPPED, HAS_SCALE)
        tl.store(target_ptr + row, logit, mask=held)
        if KEEP:
            tl.debug_barrier()  # every thread has read the product before any overwrites it
    m = tl.load(max_ptr + row)
    s = tl.load(sum_ptr + row)
    t = 0.0
    if HAS_MOMENT:
        t = tl.load(moment_ptr + row)
    columns = tl.arange(0, BLOCK)
    for start in range(0, num_columns, BLOCK):
        inside = start + columns < num_columns
        u = tl.load(z_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
        z, _ = _finished(u, bias_ptr, start + columns, inside, factor, scale, HAS_BIAS, IS_CAPPED, HAS_SCALE)
        if KEEP:
            tl.store(z_ptr + start + columns, z, mask=inside)
        new_m = tl.maximum(m, tl.max(z, 0))
        # If all logits so far are -inf, subtract 0, so that -inf - (-inf) never occurs.
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
def _gradient(
    u, bias_ptr, columns, inside, token, target, m, constant, slope, factor, scale,
    HAS_TARGET: tl.constexpr, HAS_SLOPE: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_CAPPED: tl.constexpr, HAS_SCALE: tl.constexpr,
):  # fmt: skip
    """Return e^(z-m) (constant + slope (z-m)), with `target` added at column `token`."""
    z, tanh = _finished(u, bias_ptr, columns, inside, factor, scale, HAS_BIAS, IS_CAPPED, HAS_SCALE)
    x = z - m
    weight = constant
    if HAS_SLOPE:
        weight = constant + slope * tl.maximum(x, _FLOOR)
    dz = tl.exp(x) * weight
    if HAS_TARGET:
        dz += tl.where(columns == token, target, 0.0)
    if IS_CAPPED:
        dz *= 1.0 - tanh * tanh
    return dz


@triton.jit
def _row_factors(
    tokens_ptr, target_ptr, max_ptr, constant_ptr, slope_ptr, scale_ptr, row, real, first_column,
    HAS_TARGET: tl.constexpr, HAS_SLOPE: tl.constexpr, HAS_SCALE: tl.constexpr,
):  # fmt: skip
    """Load the factors of a row's gradient; zeros if the row is not `real`."""
    token, target, slope, scale = -1, 0.0, 0.0, 1.0
    if HAS_TARGET:
        token = tl.load(tokens_ptr + row, mask=real, other=-1) - first_column
        target = tl.load(target_ptr + row, mask=real, other=0.0)
    if HAS_SLOPE:
        slope = tl.load(slope_ptr + row, mask=real, other=0.0)
    if HAS_SCALE:
        scale = tl.load(scale_ptr + row, mask=real, other=0.0)
    m = tl.load(max_ptr + row, mask=real, other=0.0)
    return token, target, m, tl.load(constant_ptr + row, mask=real, other=0.0), slope, scale


@triton.jit
def scale_exponentials_kernel(
    z_ptr, out_ptr, tokens_ptr, target_ptr, max_ptr, constant_ptr, slope_ptr, bias_ptr, scale_ptr, sums_ptr,
    first_column, num_rows, num_columns, row_stride, out_stride, factor,
    HAS_TARGET: tl.constexpr, HAS_SLOPE: tl.constexpr, HAS_BIAS: tl.constexpr, IS_CAPPED: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_SUMS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(ROWS):
        row = tl.program_id(0).to(tl.int64) * ROWS + i
        real = row < num_rows
        inside = offsets < tl.where(real, num_columns, 0)  # Triton 3.9 interprets `& real` wrongly
        u = tl.load(z_ptr + row * row_stride + offsets, mask=inside, other=0.0).to(tl.float32)
        token, target, m, constant, slope, scale = _row_factors(
            tokens_ptr, target_ptr, max_ptr, constant_ptr, slope_ptr, scale_ptr, row, real, first_column,
            HAS_TARGET, HAS_SLOPE, HAS_SCALE,
        )  # fmt: skip
        dz = _gradient(
            u, bias_ptr, offsets, inside, token, target, m, constant, slope, factor, scale,
            HAS_TARGET, HAS_SLOPE, HAS_BIAS, IS_CAPPED, HAS_SCALE,
        )  # fmt: skip
        if HAS_SUMS:
            total += tl.where(inside, dz, 0.0)
        tl.store(out_ptr + row * out_stride + offsets, dz.to(out_ptr.dtype.element_ty), mask=inside)
    if HAS_SUMS:
        sums_ptr += tl.program_id(0).to(tl.int64) * num_columns
        tl.store(sums_ptr + offsets, total, mask=offsets < num_columns)


@triton.jit
def overwrite_exponentials_kernel(
    z_ptr, out_ptr, tokens_ptr, target_ptr, max_ptr, constant_ptr, slope_ptr, bias_ptr, scale_ptr,
    first_column, num_columns, row_stride, out_stride, factor,
    HAS_TARGET: tl.constexpr, HAS_SLOPE: tl.constexpr, HAS_BIAS: tl.constexpr, IS_CAPPED: tl.constexpr,
    HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token, target, m, constant, slope, scale = _row_factors(
        tokens_ptr, target_ptr, max_ptr, constant_ptr, slope_ptr, scale_ptr, row, row >= 0, first_column,
        HAS_TARGET, HAS_SLOPE, HAS_SCALE,
    )  # fmt: skip
    z_ptr += row * row_stride
    out_ptr += row * out_stride
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < num_columns
        u = tl.load(z_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        dz = _gradient(
            u, bias_ptr, columns, inside, token, target, m, constant, slope, factor, scale,
            HAS_TARGET, HAS_SLOPE, HAS_BIAS, IS_CAPPED, HAS_SCALE,
        )  # fmt: skip
        # A narrower result overwrites logits of this block or earlier ones; every thread must have read them.
        tl.debug_barrier()
        tl.store(out_ptr + columns, dz.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _term(z, y, z_max, z_log_sum, y_max, y_log_sum, a, b, mix, MODE: tl.constexpr):
    """Return one column's contribution to D, its S, p and log p (formulas: objectives/divergences.py)."""
    log_p = (z - z_max) - z_log_sum
    p = tl.exp(log_p)
    log_q = y
    q = y
    if MODE != 4:
        log_q = (y - y_max) - y_log_sum
        q = tl.exp(log_q)
    if MODE == 1:
        value = tl.where(p == 0, 0.0, b * (p * (log_p - log_q)))
        slope = value
    elif MODE == 2:
        m = tl.maximum(mix * q + (1.0 - mix) * p, 1.1754944e-38)
        log_m = tl.log(m)
        share = b * mix - a * (1.0 - mix)
        of_p = tl.maximum(log_p, _FLOOR) - log_m
        of_q = tl.maximum(log_q, _FLOOR) - log_m
        value = a * (q * of_q) + b * (p * of_p)
        # e^(log q - log m) is q / m; the division itself makes sm_90's assembler spill registers.
        slope = p * (b * of_p + share * tl.exp(of_q))
    else:
        gap = -log_p
        if MODE == 0:
            gap = log_q - log_p
        value = tl.where(q == 0, 0.0, a * (q * gap))
        slope = -a * q
    return value, slope, p, log_p


@triton.jit
def divergence_sums_kernel(
    z_ptr, y_ptr, z_max_ptr, z_log_sum_ptr, y_max_ptr, y_log_sum_ptr, value_ptr, slope_ptr, entropy_ptr,
    num_columns, z_stride, y_stride, a, b, mix, MODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z_max, z_log_sum = tl.load(z_max_ptr + row), tl.load(z_log_sum_ptr + row)
    y_max, y_log_sum = tl.load(y_max_ptr + row), tl.load(y_log_sum_ptr + row)
    columns = tl.arange(0, BLOCK)
    d, s, h = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK):
        inside = start + columns < num_columns
        z = tl.load(z_ptr + row * z_stride + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
        # Outside the tile, q is 0, both as a probability and as a logit.
        other: tl.constexpr = 0.0 if MODE == 4 else float("-inf")
        y = tl.load(y_ptr + row * y_stride + start + columns, mask=inside, other=other).to(tl.float32)
        value, slope, p, log_p = _term(z, y, z_max, z_log_sum, y_max, y_log_sum, a, b, mix, MODE)
        d += value
        s += slope
        h -= p * tl.maximum(log_p, _FLOOR)
    tl.store(value_ptr + row, tl.load(value_ptr + row) + tl.sum(d, 0))
    tl.store(slope_ptr + row, tl.load(slope_ptr + row) + tl.sum(s, 0))
    tl.store(entropy_ptr + row, tl.load(entropy_ptr + row) + tl.sum(h, 0))


@triton.jit
def divergence_gradient_kernel(
    z_ptr, y_ptr, out_ptr, z_max_ptr, z_log_sum_ptr, y_max_ptr, y_log_sum_ptr, slope_ptr, factor_ptr,
    tokens_ptr, hard_factor_ptr, hard_log_sum_ptr,
    first_column, num_columns, z_stride, y_stride, out_stride, a, b, mix, inverse_cap, temperature,
    MODE: tl.constexpr, IS_CAPPED: tl.constexpr, HAS_LABELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    z_max, z_log_sum = tl.load(z_max_ptr + row), tl.load(z_log_sum_ptr + row)
    y_max, y_log_sum = tl.load(y_max_ptr + row), tl.load(y_log_sum_ptr + row)
    z = tl.load(z_ptr + row * z_stride + columns, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row * y_stride + columns, mask=inside, other=0.0).to(tl.float32)
    _, slope, p, _ = _term(z, y, z_max, z_log_sum, y_max, y_log_sum, a, b, mix, MODE)
    factor = tl.load(factor_ptr + row)
    # A row without weight or with an infinite divergence gets 0, even if the other operand is not finite.
    du = tl.where(factor == 0, 0.0, factor * (slope - p * tl.load(slope_ptr + row)))
    if HAS_LABELS:
        hard_factor = tl.load(hard_factor_ptr + row)
        one = tl.exp((z - z_max) * temperature - tl.load(hard_log_sum_ptr + row))
        one -= tl.where(columns == tl.load(tokens_ptr + row) - first_column, 1.0, 0.0)
        du += tl.where(hard_factor == 0, 0.0, hard_factor * one)
    if IS_CAPPED:
        tanh = z * inverse_cap
        du *= (1.0 - tanh) * (1.0 + tanh)
    tl.store(out_ptr + row * out_stride + columns, du.to(out_ptr.dtype.element_ty), mask=inside)


def update_statistics(
    z: Tensor, maximum: Tensor, total: Tensor, moment: Tensor | None, targets: Tensor | None = None,
    first: int = 0, target: Tensor | None = None, finish: Finish | None = None, keep: bool = False,
) -> None:  # fmt: skip
    """Add the columns of `z` [R, W] to the running m, s and t (None: not computed), in place.

    With `targets` [R], write the logits of the targets within the tile, which begins at id `first`, to
    `target`. `keep`: overwrite the products in `z` with the logits that `finish` gives.
    """
    rows, columns = z.shape
    if rows and columns:
        block, reads = min(STATISTICS_BLOCK, triton.next_power_of_2(columns)), targets is not None
        # Pointers that are not read may be any pointer of the right type.
        with on_device_of(z):
            update_statistics_kernel[(rows,)](
                z, targets if reads else total, target if reads else total,
                maximum, total, total if moment is None else moment, *_pointers(finish, total),
                first, columns, z.stride(0), 1.0 if finish is None else finish.factor, HAS_TARGET=reads,
                HAS_MOMENT=moment is not None, **_flags(finish), KEEP=keep, BLOCK=block, num_warps=8,
            )  # fmt: skip


def scale_exponentials(
    z: Tensor, out: Tensor, maximum: Tensor, constant: Tensor, slope: Tensor | None,
    targets: Tensor | None = None, first: int = 0, target: Tensor | None = None,
    finish: Finish | None = None, column_sums: Tensor | None = None, overlaps: bool = False,
) -> Tensor:  # fmt: skip
    """Compute out = e^(z-m) (constant + slope (z-m)) per row; 0 where e^(z-m) is 0. `out` may be `z`.

    `target` [R], if set, is added at the targets within the tile, which begins at id `first`. The sum of
    every column is added to `column_sums` [W] fp32, if set. `overlaps`: `out` has a narrower dtype in the
    memory of `z`, with the same row starts.
    """
    rows, columns = z.shape
    if rows and columns:
        block = min(GRADIENT_BLOCK, triton.next_power_of_2(columns))
        adds, summed = target is not None, 1 if column_sums is None else SUMMED_ROWS
        programs, sums = triton.cdiv(rows, summed), None
        if column_sums is not None:
            sums = torch.empty((programs, columns), dtype=torch.float32, device=z.device)
        tensors = (
            z, out, targets if adds else constant, target if adds else constant,
            maximum, constant, constant if slope is None else slope, *_pointers(finish, constant),
        )  # fmt: skip
        sizes = (columns, z.stride(0), out.stride(0), 1.0 if finish is None else finish.factor)
        flags = {"HAS_TARGET": adds, "HAS_SLOPE": slope is not None, **_flags(finish), "BLOCK": block}
        with on_device_of(z):
            if overlaps:
                assert sums is None
                overwrite_exponentials_kernel[(rows,)](*tensors, first, *sizes, **flags, num_warps=4)
                return out
            scale_exponentials_kernel[(programs, triton.cdiv(columns, block))](
                *tensors, constant if sums is None else sums, first, rows, *sizes, **flags,
                HAS_SUMS=sums is not None, ROWS=summed, num_warps=4,
            )  # fmt: skip
        if column_sums is not None and sums is not None:
            column_sums.add_(sums.sum(0))
    return out


def divergence_sums(z: Tensor, y: Tensor, compared: Compared, sums: Tensor) -> None:
    """Add the columns of a student's tile `z` and a teacher's `y` to `sums` [3, R]: D, sum S, entropy."""
    rows, columns = z.shape
    if rows and columns:
        block = min(GRADIENT_BLOCK, triton.next_power_of_2(columns))
        with on_device_of(z):
            divergence_sums_kernel[(rows,)](
                z, y, *compared.statistics, *sums, columns, z.stride(0), y.stride(0),
                compared.a, compared.b, compared.mix, MODE=compared.mode, BLOCK=block, num_warps=8,
            )  # fmt: skip


def divergence_gradient(
    z: Tensor, y: Tensor, out: Tensor, compared: Compared, slope: Tensor, factor: Tensor,
    cap: float = 0.0, labels: LabelGradient | None = None, first: int = 0,
) -> Tensor:  # fmt: skip
    """Compute out = factor (S - p slope) like `NativePasses.divergence_gradient`; `out` may have 16 bits."""
    rows, columns = z.shape
    if rows and columns:
        block = min(GRADIENT_BLOCK, triton.next_power_of_2(columns))
        label = labels or LabelGradient(slope, slope, slope, 1.0)
        flags: dict[str, Any] = {"IS_CAPPED": cap != 0, "HAS_LABELS": labels is not None, "BLOCK": block}
        with on_device_of(z):
            divergence_gradient_kernel[(rows, triton.cdiv(columns, block))](
                z, y, out, *compared.statistics, slope, factor, *label[:3],
                first, columns, z.stride(0), y.stride(0), out.stride(0),
                compared.a, compared.b, compared.mix, 1.0 / cap if cap else 0.0, label.temperature,
                MODE=compared.mode, **flags, num_warps=4,
            )  # fmt: skip
    return out


def on_device_of(tensor: Tensor) -> Any:
    """Make the tensor's device current: Triton launches on the current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _pointers(finish: Finish | None, unread: Tensor) -> tuple[Tensor, Tensor]:
    bias, scale = (None, None) if finish is None else (finish.bias, finish.scale)
    return unread if bias is None else bias, unread if scale is None else scale


def _flags(finish: Finish | None) -> dict[str, bool]:
    bias, _, capped, scale = finish or (None, 1.0, False, None)
    return {"HAS_BIAS": bias is not None, "IS_CAPPED": capped, "HAS_SCALE": scale is not None}


# Types of arguments that are not fp32 vectors.
_TYPES = {"tokens_ptr": "*i64", "bias_ptr": "*bf16", "factor": "fp32"}
_TYPES |= dict.fromkeys(("first_column", "num_rows", "num_columns"), "i32")
_TYPES |= dict.fromkeys(("row_stride", "out_stride"), "i64")


def entry(name: str, fn: Any, num_warps: int, constants: dict[str, Any], **types: str) -> dict:
    """Return one configuration for `AOT_KERNELS`; `types` adds arguments that are not fp32 vectors."""
    types = {**_TYPES, **types}
    signature = {a: "constexpr" if a in constants else types.get(a, "*fp32") for a in fn.arg_names}
    shape = {"num_warps": num_warps, "num_stages": 3}
    return {"name": name, "fn": fn, "signature": signature, "constexprs": constants, **shape}


def _entries() -> list[dict]:
    """Return the default launches: 16-bit weights or logits, with and without an entropy gradient."""
    entries, names, always = [], ("HAS_BIAS", "IS_CAPPED", "HAS_SCALE"), {"HAS_TARGET": True}
    none, every = always | dict.fromkeys(names, False), always | dict.fromkeys(names, True)
    variants = [
        ("", "*fp32", False, none),
        ("_entropy", "*fp32", True, none),
        ("_finish", "*fp32", True, every),
        ("_bf16", "*bf16", True, {**none, "HAS_SCALE": True}),
    ]
    for suffix, tile, moment, flags in variants:
        constants = {"HAS_MOMENT": moment, **flags, "KEEP": False, "BLOCK": STATISTICS_BLOCK}
        kernels = [("update_statistics", update_statistics_kernel, 8, constants, {"z_ptr": tile})]
        types, summed = {"z_ptr": tile, "out_ptr": "*bf16"}, flags["HAS_BIAS"]
        constants = {"HAS_SLOPE": moment, **flags, "BLOCK": GRADIENT_BLOCK}
        if tile == "*fp32":
            kernels.append(("overwrite_exponentials", overwrite_exponentials_kernel, 4, constants, types))
        constants = {**constants, "HAS_SUMS": summed, "ROWS": SUMMED_ROWS if summed else 1}
        kernels.append(("scale_exponentials", scale_exponentials_kernel, 4, constants, types))
        entries.extend(entry(name + suffix, *rest, **types) for name, *rest, types in kernels)
    return entries


def _divergence_entries() -> list[dict]:
    """Return the launches of forward KL, reverse KL and mixtures, with 16-bit gradients and kept logits."""
    entries, flags = [], {"IS_CAPPED": False, "HAS_LABELS": False}
    types = dict.fromkeys(("a", "b", "mix", "inverse_cap", "temperature"), "fp32")
    types |= {"out_ptr": "*bf16", "z_stride": "i64", "y_stride": "i64"}
    for mode, name in enumerate(("forward", "reverse", "between")):
        for fn, more, warps in ((divergence_sums_kernel, {}, 8), (divergence_gradient_kernel, flags, 4)):
            constants = {"MODE": mode, **more, "BLOCK": GRADIENT_BLOCK}
            entries.append(entry(f"{fn.__name__[:-7]}_{name}", fn, warps, constants, **types))
    constants = dict.fromkeys(("HAS_TARGET", "HAS_BIAS", "IS_CAPPED", "HAS_SCALE", "KEEP"), True)
    constants |= {"HAS_MOMENT": False, "BLOCK": STATISTICS_BLOCK}
    return [*entries, entry("update_statistics_keep", update_statistics_kernel, 8, constants)]


AOT_KERNELS: list[dict] = _entries() + _divergence_entries()
