"""A frozen head: the forward pass computes the hidden gradients, and the backward pass has no GEMM.

With kappa_v = (scale / temperature)(1 - tanh^2) and mu = t / s, the forward loop accumulates

    A = sum e^(z-m) kappa_v W_v            B = sum e^(z-m) (z-m-mu) kappa_v W_v

    d logp / dh = kappa_y W_y - A / s      d H / dh = -B / s       d lse / dh = A / s

B is centered on the running mean, because the textbook E[xW] - E[x]E[W] cancels digits. When m or mu changes,
B <- alpha (B + (d + mu - mu') A) and A <- alpha A, with d = m - m'. On a GPU, rescaling A and B would cost as
much as a tile, so the logits of a chunk of rows are stored until their statistics are final.
"""

# R rows of a chunk · T' selected rows · D model

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leanstep.logprob.engine.gpu.gpu_tiles import GPU_ALIGNMENT, gpu_chunk_rows
from leanstep.logprob.engine.kl_topk import TopK
from leanstep.logprob.engine.lm_head import HeadSums, RowSource, product
from leanstep.logprob.engine.softmax import (
    EXPONENT_FLOOR,
    RowGradients,
    RowStatistics,
    exponentials,
    finite_shift,
    first_order_only,
    read_targets_,
    tile_ids,
)
from leanstep.logprob.engine.tile_loop import Call, backward_tiles, forward_tiles
from leanstep.logprob.engine.tiles import (
    ChunkBuffer,
    SavedLogits,
    Scratch,
    Tiles,
    arrange,
    even_slices,
    on_gpu,
)
from leanstep.logprob.parallel import combine_statistics, reduce_hidden_grad


class RowJacobians(NamedTuple):
    """d logp / dh, d H / dh and d lse / dh, [T', D] each, in hidden's dtype, over this shard's columns."""

    logp: Tensor
    entropy: Tensor | None
    lse: Tensor | None


class _ChunkSums(NamedTuple):
    """A and B of a chunk, [R, D], and the slope of the softcap at the rows' targets, [R].

    B is None without entropy; the slope is None without softcap.
    """

    first: Tensor
    second: Tensor | None
    own_slope: Tensor | None


class FrozenLinearLogProbs(torch.autograd.Function):
    """Log-probs of a frozen head: the forward loop computes the rows' Jacobians."""

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, low_hidden, low_weight, call: Call):  # type: ignore[override, no-untyped-def]
        ctx.set_materialize_grads(False)
        stats, best, jacobians = frozen_forward(call, call.entropy == "grad", call.lse)
        best = None if best is None else best.over_ranks(call.group)
        final = stats.final()
        ctx.save_for_backward(call.source.rows, *jacobians)
        ctx.call, ctx.hidden_shape = call, hidden.shape
        values, ids = (None, None) if best is None else (best.values, best.ids)
        metric = final.entropy if call.entropy == "metric" else None
        ctx.mark_non_differentiable(*(t for t in (values, ids, metric) if t is not None))
        lse = final.log_sum_exp() if call.lse else None
        return final.log_prob(stats.target), final.entropy, lse, None, None, values, ids

    @staticmethod
    @first_order_only
    def backward(ctx: Any, g_logp, g_entropy, g_lse, *_unused):  # type: ignore[no-untyped-def]
        rows, *jacobians = ctx.saved_tensors
        call: Call = ctx.call
        dtype, num_rows = call.head.dtype, call.num_rows
        upstream = [
            (g.to(dtype).unsqueeze(-1), jacobian)
            for g, jacobian in zip((g_logp, g_entropy, g_lse), jacobians, strict=True)
            if g is not None and jacobian is not None
        ]
        out = jacobians[0].new_zeros(ctx.hidden_shape)
        # Ranks add their contributions before rounding, so all rows at once; a single rank works in chunks.
        parts = call.row_slices if call.group is None else [slice(0, num_rows)]
        for part in parts:
            grad = jacobians[0].new_zeros(jacobians[0][part].shape, dtype=dtype)
            for g, jacobian in upstream:
                grad.addcmul_(jacobian[part].to(dtype), g[part])
            grad = reduce_hidden_grad(grad, call.group, call.reduce_grad).to(out.dtype)
            if rows is None:
                out[part] = grad
            else:
                out.index_add_(0, rows[part], grad)
        return out, None, None, None, None, None


def frozen_forward(
    call: Call, needs_entropy: bool, needs_lse: bool
) -> tuple[RowStatistics, TopK | None, RowJacobians]:
    """Return statistics over the whole vocabulary (2 collectives with a group) and the rows' Jacobians."""
    hidden = call.source.hidden
    if on_gpu(hidden.device):
        assert call.group is None and not (needs_entropy or needs_lse or call.top_k)
        return _frozen_on_gpu(call)
    width = hidden.shape[1]
    stats = RowStatistics.empty(
        call.num_rows, dtype=call.head.dtype, device=hidden.device, moment=call.moment
    )
    best = TopK.empty(call.num_rows, call.top_k, call.head.dtype, hidden.device) if call.top_k else None
    jacobians = [
        hidden.new_zeros((call.num_rows, width)) if wanted else None
        for wanted in (True, needs_entropy, needs_lse)
    ]
    pending = []
    scratch = call.scratch()
    for rows in call.row_slices:
        part = stats.rows(rows.start, rows.stop)
        sums = _project_chunk(call, part, best, rows, scratch, needs_entropy)
        if call.group is None:
            _write(call, part, rows, sums, jacobians)
        else:
            pending.append((rows, sums))
    if call.group is not None:
        local, stats = stats, combine_statistics(stats, call.group)
        for rows, sums in pending:
            before, after = (s.rows(rows.start, rows.stop) for s in (local, stats))
            step = (before.max - finite_shift(after.max)).clamp_(min=EXPONENT_FLOOR[call.head.dtype])
            _move_(sums.first, sums.second, step, _mean(before), _mean(after))
            _write(call, after, rows, sums, jacobians)
    return stats, best, RowJacobians(*jacobians)  # type: ignore[arg-type]


def _frozen_on_gpu(call: Call) -> tuple[RowStatistics, None, RowJacobians]:
    """Return statistics and d logp / dh in 2 GEMMs: per row chunk, the logits and their gradient for ones."""
    head, hidden = call.head, call.source.hidden
    shape = (call.num_rows, head.columns, hidden.shape[1])
    itemsize = call.logit_dtype.itemsize
    most = min(gpu_chunk_rows(shape[1:], hidden, itemsize), max(call.num_rows, 1))
    if call.fused:
        # Gradients overwrite their logits, so each chunk is one tile.
        tiles = Tiles(most, max(head.columns, 1), "rows")
    else:
        tiles = replace(arrange(*shape, hidden.device, call.kernels, chunk_rows=most).tiles, order="rows")
    call = replace(call, tiles=tiles)
    rows_like = RowSource(hidden.new_empty(()).expand(call.num_rows, hidden.shape[1]), None)
    sums = HeadSums(head, rows_like, None, call.tiles, (True, False, False, False, False))
    stats = RowStatistics.empty(call.num_rows, dtype=head.dtype, device=hidden.device, moment=call.moment)
    memory = ChunkBuffer(hidden, call.logit_dtype, most, head.columns)
    for rows in even_slices(call.num_rows, most, GPU_ALIGNMENT):
        some, saved = call.rows(rows), SavedLogits(hidden, call.logit_dtype, memory)
        chunk = forward_tiles(some, saved)[0]
        part = stats.rows(rows.start, rows.stop)
        for target, value in ((part.max, chunk.max), (part.sum, chunk.sum), (part.target, chunk.target)):
            target.copy_(value)
        if part.moment is not None and chunk.moment is not None:
            part.moment.copy_(chunk.moment)
        ones = RowGradients(logp=torch.ones_like(chunk.sum))
        backward_tiles(some, chunk.final(), None, ones, sums, saved, first_row=rows.start)
    jacobian = sums.hidden.result()
    assert jacobian is not None
    return stats, None, RowJacobians(jacobian, None, None)


def _project_chunk(
    call: Call, part: RowStatistics, best: TopK | None, rows: slice, scratch: Scratch, centered: bool
) -> _ChunkSums:
    head, targets = call.head, call.targets[rows]
    size = rows.stop - rows.start
    h, low_h = call.chunks(rows)
    first = h.new_zeros((size, head.weight.shape[1]), dtype=head.dtype)
    second = torch.zeros_like(first) if centered else None
    own_slope = None if head.softcap is None else torch.zeros_like(part.target)
    for columns in [c for part in call.column_parts for c in part]:
        z, work = scratch.tiles(2, size, columns.stop - columns.start)
        weight = head.weight_tile(columns)
        head.bounded(h, low_h, weight, rows, columns, z)
        cap, first_id = None, head.shard.start + columns.start
        if own_slope is not None:
            cap = head.cap_slope(z)
            read_targets_(own_slope, cap, targets, first_id)
        head.logits_of(z, rows, z)
        read_targets_(part.target, z, targets, first_id)
        if best is not None:
            best.update_(z, rows, first_id)
        mean = _mean(part)
        shift, step, shrink = part.raise_max_(z.amax(-1))
        e = exponentials(z.sub_(shift.unsqueeze(-1)), work)
        part.sum.mul_(shrink).add_(e.sum(-1))
        if part.moment is not None:
            z.clamp_(min=EXPONENT_FLOOR[z.dtype])
            part.moment.add_(torch.linalg.vecdot(e, z))
        _move_(first, second, step, mean, _mean(part))
        if cap is not None:
            e.mul_(cap)
        product(e.to(head.operand_dtype), weight, first, accumulate=True)
        if second is not None:
            z.sub_(_mean(part).unsqueeze(-1)).mul_(e)
            product(z.to(head.operand_dtype), weight, second, accumulate=True)
    return _ChunkSums(first, second, own_slope)


def _move_(first: Tensor, second: Tensor | None, step: Tensor, mean: Tensor, new_mean: Tensor) -> None:
    shrink = step.exp().unsqueeze(-1)
    if second is not None:
        second.addcmul_(first, (step + mean - new_mean).unsqueeze(-1)).mul_(shrink)
    first.mul_(shrink)


def _mean(part: RowStatistics) -> Tensor:
    if part.moment is None:
        return torch.zeros_like(part.sum)
    return part.moment / torch.where(part.sum == 0, 1.0, part.sum)


def _write(
    call: Call,
    part: RowStatistics,
    rows: slice,
    sums: _ChunkSums,
    jacobians: list[Tensor | None],
) -> None:
    head = call.head
    slope = head.row_slope(rows)
    slope = slope.unsqueeze(-1) if isinstance(slope, Tensor) else slope
    inverse = torch.where(part.sum == 0, 0.0, 1.0 / part.sum).unsqueeze(-1)
    mean_weight = sums.first.mul_(inverse).mul_(slope)
    local, held = tile_ids(call.targets[rows], head.shard.start, max(head.columns, 1))
    alive = held.logical_and_(part.sum != 0)
    own = head.weight.index_select(0, local).to(head.dtype) * slope
    if sums.own_slope is not None:
        own.mul_(sums.own_slope.unsqueeze(-1))
    logp, entropy, lse = jacobians
    assert logp is not None
    logp[rows] = torch.where(alive.unsqueeze(-1), own, 0.0).sub_(mean_weight).to(logp.dtype)
    if entropy is not None and sums.second is not None:
        entropy[rows] = sums.second.mul_(inverse).mul_(slope).neg_().to(entropy.dtype)
    if lse is not None:
        lse[rows] = mean_weight.to(lse.dtype)
