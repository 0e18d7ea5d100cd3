"""The objective in three Triton kernels: pairs per sample, targets per pair, terms and gradient per context.

V contexts · W padded length · P pairs · B samples · C variants per sample · T tokens
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

import leanstep.lens.pairs as pairing
from leanstep.lens.batch import LensBatch
from leanstep.lens.closed_form import ClosedForm, context_terms
from leanstep.lens.lens_config import LensConfig
from leanstep.lens.lens_terms import LossCall, compute_dtype, smooth_budget, total_of

FORMS = {"logistic": 0, "hinge": 1, "squared_hinge": 2}
MAX_TILE = 8192
# All pairs of a sample are compared with each other in one tile: 64 x 64 for 8 variants.
MAX_VARIANTS = 8


def _num_warps(block: int) -> int:
    # With 8 warps a row of 2048 spills on sm_100, with 16 its targets spill on sm_80; short rows underuse 16.
    return 16 if block >= 2048 else 8


@triton.jit
def lens_pairs_kernel(
    loss_ptr,
    row_ptr,
    better_ptr,
    worse_ptr,
    delta_ptr,
    live_ptr,
    valid_ptr,
    num_variants,
    num_slots,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Pairs of one sample in the order of `build_pairs`: a rank is the number of elements that precede."""
    sample = tl.program_id(0).to(tl.int64)
    loss_row = loss_ptr + sample * num_variants
    row_row = row_ptr + sample * num_variants
    cell = tl.arange(0, BLOCK_C * BLOCK_C)
    u = cell // BLOCK_C
    v = cell % BLOCK_C
    c = tl.arange(0, BLOCK_C)
    inside = (u < num_variants) & (v < num_variants)
    x_u = tl.load(loss_row + u, mask=inside, other=float("nan"))
    x_v = tl.load(loss_row + v, mask=inside, other=float("nan"))
    x_c = tl.load(loss_row + c, mask=c < num_variants, other=float("nan"))[None, :]
    before_u = (x_c < x_u[:, None]) | ((x_c == x_u[:, None]) & (c[None, :] < u[:, None]))
    before_v = (x_c < x_v[:, None]) | ((x_c == x_v[:, None]) & (c[None, :] < v[:, None]))
    rank_u = tl.sum(before_u.to(tl.int32), 1)
    rank_v = tl.sum(before_v.to(tl.int32), 1)
    # NaN equals nothing, itself included.
    pair = inside & (x_u == x_u) & (x_v == x_v) & (rank_u < rank_v)
    delta = tl.where(pair, x_v - x_u, 0.0)
    late = (rank_u > 0).to(tl.int32)
    listed = rank_u * BLOCK_C + rank_v
    larger = delta[None, :] > delta[:, None]
    earlier = (delta[None, :] == delta[:, None]) & (listed[None, :] < listed[:, None])
    same_list = pair[None, :] & (late[None, :] == late[:, None])
    place = tl.sum((same_list & (larger | earlier)).to(tl.int32), 1)
    place += late * tl.sum((pair & (late == 0)).to(tl.int32), 0)
    slot = tl.arange(0, BLOCK_S)
    hit = pair[None, :] & (place[None, :] == slot[:, None])
    filled = tl.sum(hit.to(tl.int32), 1) > 0
    context_u = tl.load(row_row + u, mask=inside, other=0)
    context_v = tl.load(row_row + v, mask=inside, other=0)
    # Unused slots compare the first context with itself.
    first = tl.load(row_row)
    better = tl.where(filled, tl.sum(tl.where(hit, context_u[None, :], 0), 1), first)
    worse = tl.where(filled, tl.sum(tl.where(hit, context_v[None, :], 0), 1), first)
    chosen = tl.sum(tl.where(hit, delta[None, :], 0.0), 1)
    out = sample * num_slots + slot
    used = slot < num_slots
    tl.store(better_ptr + out, better, mask=used)
    tl.store(worse_ptr + out, worse, mask=used)
    tl.store(delta_ptr + out, tl.where(chosen > 0, chosen, 0.0), mask=used)
    tl.store(live_ptr + out, (chosen > 0).to(tl.int8), mask=used)
    tl.store(valid_ptr + out, filled.to(tl.int8), mask=used)


@triton.jit
def _entries(pos_ptr, lod_ptr, valid_ptr, table, cell, inside, num_tokens, block_size, MAX_LOD: tl.constexpr):
    """Which cells are entries; LOD, the better context's LOD there (-1: none), index of the parent block."""
    here = tl.load(valid_ptr + cell, mask=inside, other=0) != 0
    pos = tl.load(pos_ptr + cell, mask=here, other=0)
    lod = tl.load(lod_ptr + cell, mask=here, other=0).to(tl.int32)
    block = pos * 0
    parent = tl.full((), 1, tl.int64) * block_size
    offset = parent * 0
    for level in tl.static_range(MAX_LOD):
        block = tl.where(lod == level, pos // parent + offset, block)
        offset += (num_tokens + parent) // parent
        parent *= block_size
    return here, lod, tl.load(table + pos, mask=here, other=-1).to(tl.int32), block


@triton.jit
def lens_targets_kernel(
    pos_ptr,
    lod_ptr,
    valid_ptr,
    table_ptr,
    hits_ptr,
    better_ptr,
    worse_ptr,
    live_ptr,
    sign_ptr,
    kept_ptr,
    num_entries,
    num_tokens,
    num_blocks,
    block_size,
    MAX_LOD: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Signs of one pair's targets: requests mark their parent block, then every entry reads its own block."""
    pair = tl.program_id(0).to(tl.int64)
    row = tl.load(worse_ptr + pair) * num_entries
    table = table_ptr + tl.load(better_ptr + pair) * (num_tokens + 1)
    bound = tl.where(tl.load(live_ptr + pair) != 0, num_entries, 0)  # Triton 3.9 interprets `& live` wrongly
    hits = hits_ptr + pair * num_blocks
    columns = tl.arange(0, BLOCK_W)
    for tile in range(0, num_entries, BLOCK_W):
        inside = tile + columns < bound
        cell = row + tile + columns
        here, lod, want, block = _entries(
            pos_ptr, lod_ptr, valid_ptr, table, cell, inside, num_tokens, block_size, MAX_LOD
        )
        tl.store(hits + block, (want >= 0).to(tl.int8), mask=here & (want > lod) & (lod < MAX_LOD))
    tl.debug_barrier()
    count = tl.sum(tl.zeros([BLOCK_W], dtype=tl.int32), 0)
    for tile in range(0, num_entries, BLOCK_W):
        inside = tile + columns < num_entries
        cell = row + tile + columns
        here, lod, want, block = _entries(
            pos_ptr, lod_ptr, valid_ptr, table, cell, tile + columns < bound, num_tokens, block_size, MAX_LOD
        )
        reached = tl.load(hits + block, mask=here & (lod < MAX_LOD), other=0) != 0
        expand = here & (want >= 0) & (want < lod)
        sign = tl.where(reached, -1, tl.where(expand, 1, 0))
        tl.store(sign_ptr + pair * num_entries + tile + columns, sign.to(tl.int8), mask=inside)
        count += tl.sum((sign != 0).to(tl.int32), 0)
    tl.store(kept_ptr + pair, (count > 0).to(tl.int8))


@triton.jit
def _preference(wrong, hinge_margin, FORM: tl.constexpr):
    """Cost and slope of the preference term at `wrong` = -sign * score * scale."""
    if FORM == 0:
        e = tl.exp(-tl.abs(wrong))
        u = 1.0 + e
        # log1p: if 1 + e rounds to 1, the logarithm is e itself.
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
def _signs(sign_ptr, inside, acc: tl.constexpr):
    """Signs, which are masked, and 1 or 0 for expand and for collapse."""
    sign = tl.load(sign_ptr, mask=inside, other=0).to(acc)
    return sign, sign != 0, tl.maximum(sign, 0.0), tl.maximum(-sign, 0.0)


@triton.jit
def _span(lod_ptr, masked, BLOCK_SIZE: tl.constexpr, MAX_LOD: tl.constexpr, acc: tl.constexpr):
    """Tokens per entry, block_size ** lod."""
    lod = tl.load(lod_ptr, mask=masked, other=0)
    span = tl.where(lod > 0, BLOCK_SIZE, 1).to(acc)
    for level in tl.static_range(1, MAX_LOD):
        span = tl.where(lod > level, BLOCK_SIZE ** (level + 1), span)
    return span


@triton.jit
def lens_rows_kernel(
    scores_ptr,
    sign_ptr,
    lod_ptr,
    share_ptr,
    weight_ptr,
    worse_ptr,
    scale_ptr,
    strength_ptr,
    factor_ptr,
    offset_ptr,
    pref_ptr,
    rank_ptr,
    imbalance_ptr,
    grad_ptr,
    num_pairs,
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
    BLOCK_SIZE: tl.constexpr,
    MAX_LOD: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Terms of every pair whose worse context is this program's, and the gradient of its row.

    Each pair takes two passes over the row: sums first, then the gradient, which needs them. A row of up to
    BLOCK_W entries is one tile, which the second pass reads from the cache.
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
    slots = tl.arange(0, BLOCK_P)
    for chunk in range(0, num_pairs, BLOCK_P):
        # This context's pairs in processing order: the next one is the smallest index above the last.
        numbers = chunk + slots
        mine = tl.load(worse_ptr + numbers, mask=numbers < num_pairs, other=-1) == context
        last = chunk - 1
        for _ in range(tl.sum(mine.to(tl.int32), 0)):
            last = tl.min(tl.where(mine & (numbers > last), numbers, num_pairs), 0)
            pair = last.to(tl.int64)
            pair_row = pair * num_entries
            scale = tl.load(scale_ptr + pair)
            strength = tl.load(strength_ptr + pair)
            factor = tl.load(factor_ptr + pair)
            zero = tl.sum(tl.zeros([BLOCK_W], dtype=acc), 0)
            num_up, num_down, sum_up, sum_down = zero, zero, zero, zero
            cost_sum, signed, size = zero, zero, zero
            for tile in range(0, num_entries, BLOCK_W):
                entry = tile + columns
                sign, masked, up, down = _signs(sign_ptr + pair_row + entry, entry < num_entries, acc)
                x = tl.load(scores_row + entry, mask=masked, other=0).to(acc)
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
                    span = _span(lod_ptr + entry_row + entry, masked, BLOCK_SIZE, MAX_LOD, acc)
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
                    sign, masked, up, down = _signs(sign_ptr + pair_row + entry, inside, acc)
                    x = tl.load(scores_row + entry, mask=masked, other=0).to(acc)
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
                        span = _span(lod_ptr + entry_row + entry, masked, BLOCK_SIZE, MAX_LOD, acc)
                        side = tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0)).to(acc)
                        aux += span * side * side * (pull - side * imbalance * pull)
                    if WEIGHTED:
                        aux = aux * tl.load(weight_ptr + pair_row + entry, mask=masked, other=0)
                    grad += aux
                    cell = grad_ptr + entry_row + entry
                    tl.store(cell, tl.load(cell, mask=inside, other=0) + grad, mask=inside)


def triton_pairs(loss: Tensor, row: Tensor, config: LensConfig) -> pairing.Pairs:
    """Run `build_pairs` in one launch; in torch for many variants or if some pairs are dropped."""
    num_samples, num_variants = loss.shape
    slots = pairing.pairs_per_sample(num_variants, config)
    total, device = num_samples * slots, loss.device
    if total == 0 or num_variants > MAX_VARIANTS or config.sampling.hard_negative_ratio < 1:
        return pairing.build_pairs(loss, row, config)
    better, worse = torch.empty(2, total, dtype=torch.int64, device=device).unbind(0)
    live, valid = torch.empty(2, total, dtype=torch.int8, device=device).unbind(0)
    delta = torch.empty(total, dtype=loss.dtype, device=device)
    blocks = {"BLOCK_C": triton.next_power_of_2(num_variants), "BLOCK_S": triton.next_power_of_2(slots)}
    inputs, outputs = (loss.contiguous(), row.contiguous()), (better, worse, delta, live, valid)
    with torch.cuda.device_of(loss):
        lens_pairs_kernel[(num_samples,)](*inputs, *outputs, num_variants, slots, **blocks, num_warps=4)
    return pairing.Pairs(better, worse, delta, live.view(torch.bool), valid.view(torch.bool))


def triton_targets(batch: LensBatch, pairs: pairing.Pairs, config: LensConfig) -> tuple[Tensor, Tensor]:
    """Return `build_targets` [P, W] and which pairs have a target [P]: one launch after the table's two."""
    num_pairs, width, num_tokens = pairs.worse.shape[0], batch.pos.shape[1], batch.num_tokens
    if num_pairs * width == 0 or batch.num_contexts * (num_tokens + 1) > pairing.TABLE_LIMIT_BYTES:
        sign = pairing.build_targets(batch, pairs, config)
        return sign, (sign != 0).any(1)
    byte = {"dtype": torch.int8, "device": batch.pos.device}
    # Padding writes to the last column, which no valid entry reads.
    table = torch.full((batch.num_contexts, num_tokens + 1), -1, **byte).scatter_(1, batch.pos, batch.lod)
    blocks = sum(-(-(num_tokens + 1) // span) for span in config.spans()[1:])
    hits = torch.zeros(num_pairs, blocks, **byte)
    sign, has_target = torch.empty(num_pairs, width, **byte), torch.empty(num_pairs, **byte)
    contexts = batch.pos.contiguous(), batch.lod.contiguous(), batch.valid.contiguous().view(torch.int8)
    listed = pairs.better, pairs.worse, pairs.live.view(torch.int8)
    sizes = width, num_tokens, blocks, config.block_size
    block = min(triton.next_power_of_2(width), MAX_TILE)
    blocks_of = {"MAX_LOD": config.max_lod, "BLOCK_W": block, "num_warps": _num_warps(block // 2)}
    with torch.cuda.device_of(sign):
        lens_targets_kernel[(num_pairs,)](
            *contexts, table, hits, *listed, sign, has_target, *sizes, **blocks_of
        )
    return sign, has_target.view(torch.bool)


def triton_loss(call: LossCall) -> ClosedForm:
    """Run `closed_form_loss` in Triton; scores in any float dtype, sums in float32 (float64 for float64).

    Launches with the default terms: 20 for the whole objective, including pairs; none depends on a cache.
    """
    scores, batch, pairs, config, active = call.scores, call.batch, call.pairs, call.config, call.active
    state, need_grad, options = call.state, call.need_grad, config.objective
    dtype, sign = compute_dtype(scores), call.sign
    sign, has_target = triton_targets(batch, pairs, config) if sign is None else (sign, (sign != 0).any(1))
    call.built()
    num_pairs, width = sign.shape
    factor = has_target / call.denominator(has_target).to(dtype)
    scale, strength = pairing.pair_factors(pairs, config, dtype)
    share, weight = call.span_weights if call.span_weights is not None else (None, None)
    pref, rank, imbalance, offset = torch.zeros(4, num_pairs, dtype=dtype, device=scores.device).unbind(0)
    # The kernel writes every row of the gradient; rows of contexts without a pair are zero.
    make = torch.zeros_like if sign.numel() == 0 else torch.empty_like
    grad = make(scores, dtype=dtype, memory_format=torch.contiguous_format)
    scores = scores if scores.stride(-1) == 1 else scores.contiguous()
    smooth, block = "smooth" in active, min(triton.next_power_of_2(width), MAX_TILE)
    # Pointers that a constexpr disables may point anywhere.
    inputs = [scores, sign, batch.lod, *(factor if t is None else t for t in (share, weight))]
    inputs += [pairs.worse, scale, strength, factor, offset, pref, rank, imbalance, grad]
    inputs += [num_pairs, width, scores.stride(0), options.margin, options.rank_weight]
    inputs += [options.budget_weight if "budget" in active else 0.0]
    inputs += [options.collapse_weight, options.hinge_margin]
    fixed = {"FORM": FORMS[options.form], "PREF": "pref" in active, "RANK": "rank" in active}
    fixed |= {"BUDGET": smooth or "budget" in active, "DOUBLE": dtype == torch.float64, "BLOCK_W": block}
    fixed |= {"SHARED": share is not None, "WEIGHTED": weight is not None, "MAX_LOD": config.max_lod}
    fixed |= {"BLOCK_SIZE": config.block_size, "BLOCK_P": min(triton.next_power_of_2(num_pairs), 1024)}

    def launch(**switches: bool) -> None:
        with torch.cuda.device_of(scores):
            lens_rows_kernel[(scores.shape[0],)](*inputs, **fixed, **switches, num_warps=_num_warps(block))

    if sign.numel():
        launch(NEED_GRAD=need_grad and not smooth, SMOOTH=False)
    terms = {name: value for name, value in (("pref", pref), ("rank", rank)) if name in active}
    if "budget" in active:
        terms["budget"] = imbalance * imbalance
    if smooth:
        averages, state = smooth_budget(imbalance, has_target, state, config.objective.budget_smooth_beta)
        distance = torch.where(has_target, imbalance - averages, 0)
        terms["smooth"] = distance * distance
        offset.copy_(distance * (2 * options.budget_smooth_weight))
        if need_grad and sign.numel():
            launch(NEED_GRAD=True, SMOOTH=True)
    context_terms(call, scores, terms, has_target, factor, grad if need_grad else None)
    total = total_of(terms, config)
    loss = factor.new_zeros(()) if total is None else torch.dot(total, factor)
    return ClosedForm(loss, terms, has_target, state, grad if need_grad else None)


def _shipped(name: str, fn, types: dict[str, str], constexprs: dict, num_warps: int) -> dict:
    """Return one ahead-of-time entry; arguments not in `types` are int32."""
    signature = {n: types.get(n, "i32") for n in fn.arg_names if n not in constexprs}
    entry = {"name": name, "fn": fn, "signature": signature, "constexprs": constexprs}
    return entry | {"num_warps": num_warps, "num_stages": 2, "tied": ("DOUBLE",)}


def _rows(name: str, score_type: str, block: int, smooth: bool) -> dict:
    floats = ("share", "weight", "scale", "strength", "factor", "offset", "pref", "rank", "imbalance", "grad")
    numbers = ("margin", "rank_weight", "budget_weight", "collapse_weight", "hinge_margin")
    types = {f"{n}_ptr": "*fp32" for n in floats} | dict.fromkeys(numbers, "fp32")
    types |= {"scores_ptr": score_type, "scores_stride": "i64"} | _TYPES
    fixed = {"FORM": 0, "PREF": True, "RANK": True, "BUDGET": True, "SMOOTH": smooth, "SHARED": False}
    fixed |= {"WEIGHTED": False, "NEED_GRAD": True, "DOUBLE": False, "BLOCK_SIZE": 32, "MAX_LOD": 2}
    fixed |= {"BLOCK_P": 64, "BLOCK_W": block}
    return _shipped(name, lens_rows_kernel, types, fixed, _num_warps(block))


_TYPES = {f"{n}_ptr": "*i8" for n in ("live", "valid", "lod", "table", "hits", "sign", "kept")}
_TYPES |= {f"{n}_ptr": "*i64" for n in ("row", "better", "worse", "pos")}
_LOSSES = _TYPES | {"loss_ptr": "*fp32", "delta_ptr": "*fp32"}
AOT_KERNELS: list[dict] = [
    _rows("lens_rows_fp32_2048", "*fp32", 2048, False),
    _rows("lens_rows_bf16_2048", "*bf16", 2048, False),
    _rows("lens_rows_fp16_2048", "*fp16", 2048, False),
    _rows("lens_rows_fp32_8192_smooth", "*fp32", 8192, True),
    _shipped("lens_pairs_fp32_8", lens_pairs_kernel, _LOSSES, {"BLOCK_C": 8, "BLOCK_S": 8}, 4),
    _shipped("lens_targets_2048", lens_targets_kernel, _TYPES, {"MAX_LOD": 2, "BLOCK_W": 2048}, 8),
]
