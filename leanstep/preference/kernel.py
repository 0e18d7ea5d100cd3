"""The row terms and their gradient in one Triton launch: one program per worse context.

V contexts · W padded length · P pairs
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from leanstep.preference.closed_form import ClosedForm, context_terms
from leanstep.preference.lens_terms import LossCall, compute_dtype, smooth_budget, total_of
from leanstep.preference.pairs import build_targets, pair_factors, span_table

FORMS = {"logistic": 0, "hinge": 1, "squared_hinge": 2}
MAX_TILE = 8192


def _num_warps(block: int) -> int:
    # With 8 warps a tile of 2048 spills on sm_100; short rows do not fill 16.
    return 16 if block >= 2048 else 8


@triton.jit
def _preference(wrong, hinge_margin, FORM: tl.constexpr):
    """Cost and slope of the preference term at `wrong` = -sign * score * scale."""
    if FORM == 0:
        e = tl.exp(-tl.abs(wrong))
        u = 1.0 + e
        # log1p: where 1 + e rounds to 1, the logarithm is e itself.
        log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
        cost = tl.maximum(wrong, 0.0) + log1p
        slope = tl.where(wrong >= 0, 1.0, e) / u
    else:
        hinge = tl.maximum(wrong + hinge_margin, 0.0)
        cost = hinge
        slope = tl.where(hinge > 0, 1.0, 0.0).to(wrong.dtype)
        if FORM == 2:
            cost = hinge * hinge
            slope = 2.0 * hinge
    return cost, slope


@triton.jit
def lens_rows_kernel(
    scores_ptr,
    sign_ptr,
    lod_ptr,
    span_ptr,
    share_ptr,
    weight_ptr,
    pair_ptr,
    start_ptr,
    scale_ptr,
    strength_ptr,
    factor_ptr,
    offset_ptr,
    pref_ptr,
    rank_ptr,
    imbalance_ptr,
    grad_ptr,
    num_entries,
    scores_stride,
    margin,
    rank_weight,
    budget_weight,
    collapse_weight,
    hinge_margin,
    FORM: tl.constexpr,
    PREF: tl.constexpr,
    RANK: tl.constexpr,
    BUDGET: tl.constexpr,
    SMOOTH: tl.constexpr,
    SHARED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    NEED_GRAD: tl.constexpr,
    DOUBLE: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Terms of every pair whose worse context is this program's, and the gradient of its row.

    Two sweeps over the row per pair: sums first, then the gradient that needs them. A row of up to BLOCK_W
    entries is one tile, and the second sweep finds it in cache.
    """
    context = tl.program_id(0)
    acc = tl.float64 if DOUBLE else tl.float32
    columns = tl.arange(0, BLOCK_W)
    scores_row = scores_ptr + context.to(tl.int64) * scores_stride
    entry_row = context.to(tl.int64) * num_entries
    if NEED_GRAD:
        for tile in range(0, num_entries, BLOCK_W):
            inside = tile + columns < num_entries
            tl.store(grad_ptr + entry_row + tile + columns, tl.zeros([BLOCK_W], dtype=acc), mask=inside)
    first = tl.load(start_ptr + context)
    last = tl.load(start_ptr + context + 1)
    for slot in range(first, last):
        pair = tl.load(pair_ptr + slot)
        pair_row = pair * num_entries
        scale = tl.load(scale_ptr + pair)
        strength = tl.load(strength_ptr + pair)
        factor = tl.load(factor_ptr + pair)
        zero = tl.sum(tl.zeros([BLOCK_W], dtype=acc), 0)
        num_up = zero
        num_down = zero
        sum_up = zero
        sum_down = zero
        cost_sum = zero
        signed = zero
        size = zero
        for tile in range(0, num_entries, BLOCK_W):
            entry = tile + columns
            inside = entry < num_entries
            sign = tl.load(sign_ptr + pair_row + entry, mask=inside, other=0).to(acc)
            masked = sign != 0
            x = tl.load(scores_row + entry, mask=masked, other=0).to(acc)
            up = tl.where(sign > 0, 1.0, 0.0).to(acc)
            down = tl.where(sign < 0, 1.0, 0.0).to(acc)
            num_up += tl.sum(up, 0)
            num_down += tl.sum(down, 0)
            counted = x
            if WEIGHTED:
                counted = x * tl.load(weight_ptr + pair_row + entry, mask=masked, other=0)
            if PREF:
                cost, slope = _preference(-sign * x * scale, hinge_margin, FORM)
                mass = up + down * collapse_weight
                if SHARED:
                    mass = mass * tl.load(share_ptr + pair_row + entry, mask=masked, other=0)
                cost_sum += tl.sum(cost * mass, 0)
            if RANK:
                sum_up += tl.sum(up * counted, 0)
                sum_down += tl.sum(down * counted, 0)
            if BUDGET:
                lod = tl.load(lod_ptr + entry_row + entry, mask=masked, other=0)
                span = tl.load(span_ptr + lod, mask=masked, other=0)
                signed += tl.sum(span * counted, 0)
                size += tl.sum(span * tl.abs(counted), 0)
        num = num_up + num_down
        amount = strength
        if not SHARED:
            amount = strength / tl.maximum(num, 1.0)
        per_up = 1.0 / tl.maximum(num_up, 1.0)
        per_down = 1.0 / tl.maximum(num_down, 1.0)
        both = (num_up > 0) & (num_down > 0)
        shortfall = tl.where(both, tl.maximum(margin - (sum_up * per_up - sum_down * per_down), 0.0), 0.0)
        size += 1e-6
        imbalance = signed / size
        if PREF:
            tl.store(pref_ptr + pair, cost_sum * amount)
        if RANK:
            tl.store(rank_ptr + pair, shortfall)
        if BUDGET:
            tl.store(imbalance_ptr + pair, imbalance)
        if NEED_GRAD:
            push = tl.where(shortfall > 0, factor * rank_weight, 0.0)
            pull = 2.0 * budget_weight * imbalance
            if SMOOTH:
                pull += tl.load(offset_ptr + pair)
            pull = pull * factor / size
            steep = scale * amount * factor
            for tile in range(0, num_entries, BLOCK_W):
                entry = tile + columns
                inside = entry < num_entries
                sign = tl.load(sign_ptr + pair_row + entry, mask=inside, other=0).to(acc)
                masked = sign != 0
                x = tl.load(scores_row + entry, mask=masked, other=0).to(acc)
                up = tl.where(sign > 0, 1.0, 0.0).to(acc)
                down = tl.where(sign < 0, 1.0, 0.0).to(acc)
                grad = tl.zeros([BLOCK_W], dtype=acc)
                aux = tl.zeros([BLOCK_W], dtype=acc)
                if PREF:
                    cost, slope = _preference(-sign * x * scale, hinge_margin, FORM)
                    mass = up + down * collapse_weight
                    if SHARED:
                        mass = mass * tl.load(share_ptr + pair_row + entry, mask=masked, other=0)
                    grad -= sign * slope * mass * steep
                if RANK:
                    aux += (down * per_down - up * per_up) * push
                if BUDGET:
                    lod = tl.load(lod_ptr + entry_row + entry, mask=masked, other=0)
                    span = tl.load(span_ptr + lod, mask=masked, other=0)
                    side = tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0)).to(acc)
                    aux += span * side * side * (pull - side * imbalance * pull)
                if WEIGHTED:
                    aux = aux * tl.load(weight_ptr + pair_row + entry, mask=masked, other=0)
                grad += aux
                cell = grad_ptr + entry_row + entry
                tl.store(cell, tl.load(cell, mask=inside, other=0) + grad, mask=inside)


def triton_loss(call: LossCall) -> ClosedForm:
    """`closed_form_loss` in Triton; scores in any float dtype, sums in float32 (float64 for float64).

    Launches: one, or two around the scan when the budget is smoothed, and what builds pairs and targets.
    """
    scores, batch, pairs, config, active = call.scores, call.batch, call.pairs, call.config, call.active
    state, need_grad = call.state, call.need_grad
    dtype = compute_dtype(scores)
    sign = build_targets(batch, pairs, config) if call.sign is None else call.sign
    call.built()
    num_pairs, width = sign.shape
    kept = (sign != 0).any(1)
    factor = kept / call.denominator(kept).to(dtype)
    scale, strength = pair_factors(pairs, config, dtype)
    # Pairs grouped by their worse context, in processing order inside a context.
    worse, order = torch.sort(pairs.worse, stable=True)
    start = torch.searchsorted(worse, torch.arange(scores.shape[0] + 1, device=scores.device))
    spans = span_table(config, scores.device, dtype)
    share, weight = call.span_weights if call.span_weights is not None else (None, None)
    pref, rank, imbalance, offset = torch.zeros(4, num_pairs, dtype=dtype, device=scores.device).unbind(0)
    grad = torch.zeros_like(scores, dtype=dtype, memory_format=torch.contiguous_format)
    scores = scores if scores.stride(-1) == 1 else scores.contiguous()
    budget = "budget" in active or "smooth" in active

    block = min(triton.next_power_of_2(width), MAX_TILE)

    def launch(with_grad: bool, with_offset: bool) -> None:
        if num_pairs == 0 or width == 0:
            return
        lens_rows_kernel[(scores.shape[0],)](
            scores,
            sign,
            batch.lod,
            spans,
            share if share is not None else spans,
            weight if weight is not None else spans,
            order,
            start,
            scale,
            strength,
            factor,
            offset,
            pref,
            rank,
            imbalance,
            grad,
            width,
            scores.stride(0),
            config.objective.margin,
            config.objective.rank_weight,
            config.objective.budget_weight if "budget" in active else 0.0,
            config.objective.collapse_weight,
            config.objective.hinge_margin,
            FORM=FORMS[config.objective.form],
            PREF="pref" in active,
            RANK="rank" in active,
            BUDGET=budget,
            SMOOTH=with_offset,
            SHARED=share is not None,
            WEIGHTED=weight is not None,
            NEED_GRAD=with_grad,
            DOUBLE=dtype == torch.float64,
            BLOCK_W=block,
            num_warps=_num_warps(block),
        )

    smooth = "smooth" in active
    launch(need_grad and not smooth, False)
    terms: dict[str, Tensor] = {}
    if "pref" in active:
        terms["pref"] = pref
    if "rank" in active:
        terms["rank"] = rank
    if "budget" in active:
        terms["budget"] = imbalance * imbalance
    if smooth:
        averages, state = smooth_budget(imbalance, kept, state, config.objective.budget_smooth_beta)
        distance = torch.where(kept, imbalance - averages, 0)
        terms["smooth"] = distance * distance
        offset.copy_(distance * (2 * config.objective.budget_smooth_weight))
        if need_grad:
            launch(True, True)
    x = scores.to(dtype)
    context_terms(call, x, terms, kept, factor, grad if need_grad else None)
    total = total_of(terms, config)
    loss = x.new_zeros(()) if total is None else (total * factor).sum()
    return ClosedForm(loss, terms, kept, state, grad if need_grad else None)


def _shipped(name: str, score_type: str, block: int, smooth: bool) -> dict:
    floats = ("span_ptr", "share_ptr", "weight_ptr", "scale_ptr", "strength_ptr", "factor_ptr", "offset_ptr")
    floats += ("pref_ptr", "rank_ptr", "imbalance_ptr", "grad_ptr")
    signature = {
        "scores_ptr": score_type,
        "sign_ptr": "*i8",
        "lod_ptr": "*i8",
        "pair_ptr": "*i64",
        "start_ptr": "*i64",
    }
    signature |= dict.fromkeys(floats, "*fp32")
    signature |= {"num_entries": "i32", "scores_stride": "i64"}
    numbers = ("margin", "rank_weight", "budget_weight", "collapse_weight", "hinge_margin")
    signature |= dict.fromkeys(numbers, "fp32")
    constexprs = {"FORM": 0, "PREF": True, "RANK": True, "BUDGET": True, "SMOOTH": smooth, "SHARED": False}
    constexprs |= {"WEIGHTED": False, "NEED_GRAD": True, "DOUBLE": False, "BLOCK_W": block}
    return {
        "name": name,
        "fn": lens_rows_kernel,
        "signature": signature,
        "constexprs": constexprs,
        "num_warps": _num_warps(block),
        "num_stages": 2,
    }


AOT_KERNELS: list[dict] = [
    _shipped("lens_rows_fp32_2048", "*fp32", 2048, False),
    _shipped("lens_rows_bf16_2048", "*bf16", 2048, False),
    _shipped("lens_rows_fp16_2048", "*fp16", 2048, False),
    _shipped("lens_rows_fp32_8192_smooth", "*fp32", 8192, True),
]
