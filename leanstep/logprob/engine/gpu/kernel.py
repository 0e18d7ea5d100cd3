"""Triton kernels for rows: the work before the first and after the last tile of a tile loop.

    gather_rows   selected rows of hidden states, 16 bytes per thread; torch computes an address per element
    policy_rows   softmax statistics -> a policy objective's losses and the factors of its logit gradients

One launch of `policy_rows` replaces about a hundred small launches per chunk of rows: those of the objective
differentiated by autograd (objective.py), which is its reference in tests.
"""

# R rows · D model

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from leanstep.logprob.engine.kernel import entry, on_device_of

GATHER_BLOCK = 1024
POLICY_BLOCK = 256


@triton.jit
def gather_rows_kernel(
    x_ptr, rows_ptr, out_ptr, num_rows, num_columns, row_stride, out_stride, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(rows_ptr + row).to(tl.int64)
    # A row index out of range gives a row of NaN; memory outside of x is never read.
    # Broadcast over the columns: the interpreter of Triton 3.9 ignores a mask of a single number.
    sources = columns * 0 + source
    inside = columns < num_columns
    real = inside & (sources >= 0) & (sources < num_rows)
    x = tl.load(x_ptr + source * row_stride + columns, mask=real, other=float("nan"))
    tl.store(out_ptr + row * out_stride + columns, x.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def policy_rows_kernel(
    max_ptr, sum_ptr, moment_ptr, target_ptr, old_ptr, advantage_ptr, mask_ptr, ref_ptr, weight_ptr,
    slope_ptr, logp_ptr, entropy_ptr, loss_ptr, ratio_ptr, clipped_ptr, factors_ptr,
    num_rows, low, high, dual, kl_coef, entropy_coef, slope,
    IS_CISPO: tl.constexpr, HAS_DUAL: tl.constexpr, KL: tl.constexpr, HAS_BONUS: tl.constexpr,
    HAS_MOMENT: tl.constexpr, HAS_MASK: tl.constexpr, HAS_SLOPES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = rows < num_rows
    m = tl.load(max_ptr + rows, mask=real, other=0.0)
    m = tl.where(m == float("-inf"), 0.0, m)
    s = tl.load(sum_ptr + rows, mask=real, other=1.0)
    alive = s != 0.0
    s = tl.where(alive, s, 1.0)
    log_s = tl.log(s)
    logp = tl.where(alive, (tl.load(target_ptr + rows, mask=real, other=0.0) - m) - log_s, float("-inf"))
    tl.store(logp_ptr + rows, logp, mask=real)
    mean = tl.zeros([BLOCK], dtype=tl.float32)
    if HAS_MOMENT:
        mean = tl.load(moment_ptr + rows, mask=real, other=0.0) / s
        tl.store(entropy_ptr + rows, log_s - mean, mask=real)
    w = tl.load(weight_ptr + rows, mask=real, other=0.0)
    entropy, unmasked = log_s - mean, real
    if HAS_MASK:
        # A masked row may hold any values: they enter no computation.
        unmasked = tl.load(mask_ptr + rows, mask=real, other=0.0) != 0.0
        logp, entropy = tl.where(unmasked, logp, 0.0), tl.where(unmasked, entropy, 0.0)
    advantage = tl.load(advantage_ptr + rows, mask=unmasked, other=0.0)
    ratio = tl.exp(logp - tl.load(old_ptr + rows, mask=unmasked, other=0.0))
    bounded = tl.minimum(tl.maximum(ratio, low), high)
    if IS_CISPO:
        clipped = bounded != ratio
        slope_of_loss = -bounded * advantage
        loss = slope_of_loss * logp
    else:
        clipped = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
        loss = tl.where(clipped, -bounded * advantage, -ratio * advantage)
        slope_of_loss = tl.where(clipped, 0.0, loss)
        if HAS_DUAL:
            floored = (advantage < 0) & (ratio > dual)
            loss = tl.where(floored, -dual * advantage, loss)
            slope_of_loss = tl.where(floored, 0.0, slope_of_loss)
            clipped = clipped | floored
    if KL > 0:
        d = tl.load(ref_ptr + rows, mask=unmasked, other=0.0) - logp
        if KL == 1:
            loss -= kl_coef * d
            slope_of_loss += kl_coef
        elif KL == 2:
            loss += kl_coef * (d * d / 2)
            slope_of_loss -= kl_coef * d
        else:
            loss += kl_coef * (tl.exp(d) - 1.0 - d)
            slope_of_loss -= kl_coef * (tl.exp(d) - 1.0)
    if HAS_BONUS:
        loss -= entropy_coef * entropy
    tl.store(loss_ptr + rows, loss, mask=real)
    tl.store(ratio_ptr + rows, ratio, mask=real)
    tl.store(clipped_ptr + rows, clipped.to(tl.uint8), mask=real)
    common = slope
    if HAS_SLOPES:
        common = slope * tl.load(slope_ptr + rows, mask=real, other=0.0)
    counts = (w != 0.0) & unmasked
    target = tl.where(counts & alive, w * slope_of_loss * common, 0.0)
    constant = -target
    if HAS_BONUS:
        g_entropy = tl.where(counts, -entropy_coef * w * common, 0.0)
        constant += g_entropy * mean
        tl.store(factors_ptr + 3 * num_rows + rows, -g_entropy / s, mask=real)
    tl.store(factors_ptr + rows, m, mask=real)
    tl.store(factors_ptr + num_rows + rows, constant / s, mask=real)
    tl.store(factors_ptr + 2 * num_rows + rows, target, mask=real)


def gather_rows(x: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    """Write x[rows] to `out` [R, D] in the dtype of `out`; NaN if an index is not a row of `x` [T, D]."""
    count, columns = out.shape
    if count and columns:
        assert x.stride(1) == 1 and out.stride(1) == 1
        block = min(GATHER_BLOCK, triton.next_power_of_2(columns))
        with on_device_of(x):
            gather_rows_kernel[(count, triton.cdiv(columns, block))](
                x, rows.contiguous(), out, len(x), columns, x.stride(0), out.stride(0),
                BLOCK=block, num_warps=4,
            )  # fmt: skip
    return out


def policy_rows(
    statistics: Sequence[Tensor | None],
    batch: Sequence[Tensor | None],
    weights: Tensor,
    objective: Any,
    results: Sequence[Tensor | None],
    slope: tuple[float, Tensor | None],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Compute a policy objective and its derivatives on the rows of a chunk in one launch.

    Args:
        statistics: m, s, t (None: not computed), the targets' logits, [R] each.
        batch: old_logp, advantages, mask, ref_logp, [R] each; the last two may be None.
        weights: mask / normalizer, [R].
        objective: a `PolicyObjective` of kind "clip" or "cispo".
        results: output tensors: logp, entropy (None without t), losses, ratio, clipped.
        slope: factors of the gradients: a number, and one value per row or None.

    Returns: the fields of `RowFactors`; slope is None without an entropy bonus.
    """
    rows, inputs = len(weights), [None if t is None else t.contiguous() for t in (*statistics, *batch)]
    factors = torch.empty((4, rows), dtype=torch.float32, device=weights.device)
    bonus, kl = bool(objective.entropy_coef), int(objective.kl[1]) if objective.kl_coef else 0
    clipped = results[4].view(torch.uint8) if results[4] is not None else None
    tensors = (*inputs, weights.contiguous(), slope[1], *results[:4], clipped, factors)
    if rows:
        with on_device_of(weights):
            policy_rows_kernel[(triton.cdiv(rows, POLICY_BLOCK),)](
                *(factors if t is None else t for t in tensors),
                rows, 1.0 - objective.clip_low, 1.0 + objective.clip_high, objective.dual_clip or 0.0,
                objective.kl_coef, objective.entropy_coef, slope[0],
                IS_CISPO=objective.kind == "cispo", HAS_DUAL=objective.dual_clip is not None, KL=kl,
                HAS_BONUS=bonus, HAS_MOMENT=inputs[2] is not None, HAS_MASK=inputs[6] is not None,
                HAS_SLOPES=slope[1] is not None, BLOCK=POLICY_BLOCK, num_warps=4,
            )  # fmt: skip
    maximum, constant, target, entropy_slope = factors.unsqueeze(-1).unbind()
    return maximum, constant, entropy_slope if bonus else None, target[:, 0]


def _entries() -> list[dict]:
    """Return the configurations that a policy loss launches by default."""
    types = {"x_ptr": "*bf16", "rows_ptr": "*i64", "out_ptr": "*bf16", "num_rows": "i32"}
    entries = [entry("gather_rows", gather_rows_kernel, 4, {"BLOCK": GATHER_BLOCK}, **types)]
    flags = dict.fromkeys(("HAS_DUAL", "HAS_BONUS", "HAS_MOMENT", "HAS_MASK", "HAS_SLOPES"), True)
    types = dict.fromkeys(("low", "high", "dual", "kl_coef", "entropy_coef", "slope"), "fp32")
    for suffix, cispo, kl in (("", False, 3), ("_cispo", True, 0)):
        constants = {"IS_CISPO": cispo, "KL": kl, **flags, "BLOCK": POLICY_BLOCK}
        name = f"policy_rows{suffix}"
        entries.append(entry(name, policy_rows_kernel, 4, constants, **types, clipped_ptr="*u8"))
    return entries


AOT_KERNELS: list[dict] = _entries()
