"""Log-probs over process groups: vocabulary shards, sequence shards, context shards.

The number of collectives is part of each function's contract and does not depend on local data (rows,
values): ranks without work issue the same collectives in the same order.

    vocabulary parallel   2 in the forward pass (MAX, packed SUM), 1 in the backward pass (hidden gradient)
    sequence parallel     1 gather of selected rows forward, 1 reduce-scatter backward (instead of that above)
    context parallel      0; 1 all-reduce each in forward and backward to return allgather results as zigzag
"""

# N selected rows · D model · K ranks

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from leanstep.logprob.engine.softmax import RowStatistics, first_order_only
from leanstep.logprob.rows import RowPlan, place_response, slice_response

ReduceGrad = Literal["all_reduce", "reduce_scatter", "none"]


def resolve_group(group: Any, axis: str = "tp") -> dist.ProcessGroup | None:
    """Return the process group of `group`, or None for a single rank.

    Args:
        group: a ProcessGroup; a 1-D DeviceMesh; an object with groups as attributes, such as Megatron-Core's
            ProcessGroupCollection (`axis` names the attribute); or None: size 1, no collectives, even if
            torch.distributed is initialized.

    A group of one rank also returns None, so that it takes the single-process path with identical bits.
    """
    if group is None:
        return None
    if hasattr(group, "get_group") and hasattr(group, "ndim"):
        if group.ndim != 1:
            raise ValueError(
                f"group: expected a 1-D DeviceMesh, got {group.ndim} dimensions; pass mesh['{axis}']"
            )
        group = group.get_group()
    elif not isinstance(group, dist.ProcessGroup) and hasattr(group, axis):
        group = getattr(group, axis)
        if group is None:
            return None
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: this rank is not a member")
    if not isinstance(group, dist.ProcessGroup):
        expected = f"a ProcessGroup, a 1-D DeviceMesh, an object with .{axis}, or None"
        raise ValueError(f"group: expected {expected}, got {type(group).__name__}")
    return group if group.size() > 1 else None


@dataclass(frozen=True)
class VocabShard:
    """The columns of the vocabulary that one rank holds.

    Attributes:
        start: global id of the first local column.
        width: number of local columns including padding.
        real: number of local columns in the vocabulary; the others are padding: excluded from every sum, with
            zero gradient.
    """

    start: int
    width: int
    real: int


def vocab_shard(
    width: int, group: Any = None, *, start: int | None = None, total: int | None = None
) -> tuple[VocabShard, int | None]:
    """Return this rank's shard of `width` columns, and the vocabulary size (None: no single rank knows it).

    Without `start`, all shards have equal width. Columns from `total`, the real vocabulary size, on are
    padding, on whichever rank they are; a shard may consist of padding only.
    """
    process_group = resolve_group(group)
    vocabulary = total
    if total is None and process_group is None:
        vocabulary = (start or 0) + width
    elif total is None and process_group is not None and start is None:
        vocabulary = width * process_group.size()
    if start is None:
        start = 0 if process_group is None else process_group.rank() * width
    if start < 0:
        raise ValueError(f"shards.start: expected 0 or more, got {start}")
    if total is not None and total < 1:
        raise ValueError(f"shards.total: expected at least 1, got {total}")
    real = width if total is None else min(max(total - start, 0), width)
    return VocabShard(start, width, real), vocabulary


def gather_vocab_starts(width: int, group: Any) -> list[int]:
    """Return the first column of each rank for shards of different widths, then the total: [ranks + 1].

    Equivalent to, on one rank:
        starts = [0, width]

    Collectives: 1. Call it once, at startup.
    """
    process_group = resolve_group(group)
    if process_group is None:
        return [0, width]
    widths: list[Any] = [None] * process_group.size()
    dist.all_gather_object(widths, int(width), group=process_group)
    starts = [0]
    for each in widths:
        starts.append(starts[-1] + each)
    return starts


def combine_statistics(stats: RowStatistics, group: Any) -> RowStatistics:
    """Combine statistics of local columns into those of the whole vocabulary; all ranks get the same bits.

    Collectives: always 2: MAX of all maxima, then one packed SUM of the other rescaled statistics.
    A shard without real columns (m = -inf) adds nothing.
    """
    process_group = resolve_group(group)
    if process_group is None:
        return stats
    maxima = stats.maxima().contiguous()
    dist.all_reduce(maxima, dist.ReduceOp.MAX, group=process_group)
    sums = stats.sums_under(maxima).contiguous()
    dist.all_reduce(sums, dist.ReduceOp.SUM, group=process_group)
    return stats.replaced(maxima, sums)


def all_reduce_(values: Tensor, group: Any, op: Any) -> None:
    """All-reduce in place; does nothing without a group."""
    if group is not None:
        dist.all_reduce(values, op, group=group)


def reduce_hidden_grad(grad_ND: Tensor, group: Any, mode: ReduceGrad = "all_reduce") -> Tensor:
    """Add the shards' contributions to the hidden gradient.

    `all_reduce`: every rank gets all rows, in place. `reduce_scatter`: rank r gets the r-th of K equal blocks
    of rows. `none`: the caller's layer reduces. Pass the fp32 accumulator and cast the result.

    Collectives: 1, or 0 with `none` or a group of one.
    """
    if mode not in ("all_reduce", "reduce_scatter", "none"):
        raise ValueError(f"reduce_grad: got {mode!r}, expected all_reduce, reduce_scatter or none")
    process_group = resolve_group(group)
    if process_group is None or mode == "none":
        return grad_ND
    if mode == "reduce_scatter":
        return _reduce_scatter(grad_ND, process_group)
    if not grad_ND.is_contiguous():
        grad_ND = grad_ND.contiguous()
    dist.all_reduce(grad_ND, dist.ReduceOp.SUM, group=process_group)
    return grad_ND


def gather_over_ranks(x: Tensor, group: Any) -> Tensor:
    """Return all ranks' `x` in rank order, [K, *x.shape], for top-k over shards. Collectives: 1."""
    process_group = resolve_group(group)
    if process_group is None:
        return x.unsqueeze(0)
    return _all_gather(x, process_group).view(process_group.size(), *x.shape)


class _AllReduceSum(torch.autograd.Function):
    """Sum over ranks. Every rank's loss depends on every input, so the backward pass also sums over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[override]
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, dist.ReduceOp.SUM, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, dist.ReduceOp.SUM, group=ctx.group)
        return total, None


def all_reduce_sum(x: Tensor, group: Any, axis: str = "cp") -> Tensor:
    """Return the differentiable sum over ranks. Collectives: 1 forward, 1 backward."""
    process_group = resolve_group(group, axis)
    return x if process_group is None else _AllReduceSum.apply(x, process_group)  # type: ignore[return-value]


def gather_response(
    parts: Sequence[Tensor] | Sequence[Sequence[Tensor]], plan: RowPlan, group: Any
) -> list[Tensor] | list[list[Tensor]]:
    """Gather local parts, one per sample, into whole responses [R] on every rank; inverts `slice_response`.

    Equivalent to, on one rank:
        whole = list(parts)

    Several outputs (a list of lists) share the collectives: 1 forward, 1 backward.
    """
    single = len(parts) == 0 or isinstance(parts[0], Tensor)
    outputs: list[Sequence[Tensor]] = [parts] if single else list(parts)  # type: ignore[list-item]
    flat = [torch.cat(place_response(output, plan)) if len(output) else None for output in outputs]
    if any(f is None for f in flat):
        # No samples at all: this follows from the plan, so all ranks return here.
        empty: list[list[Tensor]] = [[] for _ in outputs]
        return empty[0] if single else empty
    total = all_reduce_sum(torch.stack([f for f in flat if f is not None]), group)
    lengths = list(plan.response_lengths)
    # Metrics stay detached: an output requires grad only if its input does.
    rows = [x if any(p.requires_grad for p in o) else x.detach() for x, o in zip(total, outputs, strict=True)]
    gathered = [list(row.split(lengths)) for row in rows]
    return gathered[0] if single else gathered


def return_parts(plan: RowPlan, group: Any, *values: Tensor) -> list[list[Tensor]]:
    """Convert per-row results to per-sample local parts, in the split that downstream code expects.

    That is `plan.split` for every layout except allgather, whose results are returned in the zigzag split.

    Equivalent to, for `values` [T'] of the other layouts:
        parts = [plan.split(x) for x in values]

    Collectives: 0; allgather with more than one rank: 1 forward, 1 backward for all `values` together.
    """
    parts = [plan.split(v) for v in values]
    if plan.layout != "allgather" or resolve_group(group, "cp") is None:
        return parts
    back = plan.returned()
    return [slice_response(whole, back) for whole in gather_response(parts, plan, group)]  # type: ignore[arg-type]


@dataclass(frozen=True)
class SequenceShards:
    """How selected rows are distributed over K equal blocks of a sequence-parallel hidden tensor.

    Attributes:
        local: [n_r] int64, selected rows of this rank's block.
        order: [N] int64, position of each selected row in the K padded contributions.
        padded: rows per contribution (the largest n_r), equal on all ranks.
        block: rows per rank.
    """

    local: Tensor
    order: Tensor
    padded: int
    block: int


def shard_rows(
    rows_N: Tensor, total_rows: int, group: Any, device: torch.device | str = "cpu"
) -> SequenceShards:
    """Plan a sequence-parallel gather from host indices (`RowPlan.rows_host`): no collective, no sync."""
    process_group = resolve_group(group)
    size, rank = (1, 0) if process_group is None else (process_group.size(), process_group.rank())
    if rows_N.device.type != "cpu":
        raise ValueError(f"rows: expected host indices, got a tensor on {rows_N.device}")
    if total_rows % size:
        raise ValueError(f"total_rows: {total_rows} rows do not divide over {size} sequence-parallel ranks")
    block = total_rows // size
    owner = rows_N.div(max(block, 1), rounding_mode="floor")
    counts = torch.bincount(owner, minlength=size)
    padded = int(counts.max()) if rows_N.numel() else 0
    # Position of each selected row within its owner's contribution, in plan order.
    by_owner = torch.argsort(owner, stable=True)
    first = torch.cumsum(counts, 0) - counts
    within = torch.empty_like(rows_N)
    within[by_owner] = torch.arange(rows_N.numel()) - first[owner[by_owner]]
    order = owner * padded + within
    local = rows_N[owner == rank] - rank * block
    return SequenceShards(local.to(device), order.to(device), padded, block)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, shards: SequenceShards, group: dist.ProcessGroup) -> Tensor:  # type: ignore[override]
        ctx.shards, ctx.group = shards, group
        mine = hidden.new_zeros(shards.padded, hidden.shape[1])
        mine[: shards.local.numel()] = hidden.index_select(0, shards.local)
        return _all_gather(mine, group).index_select(0, shards.order)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        shards, group = ctx.shards, ctx.group
        padded = grad_ND.new_zeros(shards.padded * group.size(), grad_ND.shape[1])
        padded[shards.order] = grad_ND
        mine = _reduce_scatter(padded, group)[: shards.local.numel()]
        grad = grad_ND.new_zeros(shards.block, grad_ND.shape[1])
        return grad.index_copy_(0, shards.local, mine), None, None


def gather_hidden_rows(hidden: Tensor, shards: SequenceShards, group: Any) -> Tensor:
    """Gather the selected rows of a sequence-parallel hidden [T/K, D] in plan order: [N, D] on every rank.

    The backward pass sums the ranks' contributions and returns each rank its own rows, so the op that
    consumes the result must not reduce the hidden gradient again (`reduce_grad="none"`).

    Collectives: 1 forward (padded to the largest share), 1 backward.
    """
    if hidden.ndim != 2 or hidden.shape[0] != shards.block:
        raise ValueError(f"hidden: expected [{shards.block}, D] local rows, got {tuple(hidden.shape)}")
    process_group = resolve_group(group)
    if process_group is None:
        return hidden.index_select(0, shards.local)
    return _GatherRows.apply(hidden, shards, process_group)  # type: ignore[return-value]


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(group.size() * x.shape[0], *x.shape[1:]) if x.ndim else x.new_empty(group.size())
    # torch 2.13 renamed the function and warns about the older name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, x.contiguous(), group=group)
    return out


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    if x.shape[0] % group.size():
        raise ValueError(f"rows: {x.shape[0]} do not divide over {group.size()} sequence-parallel ranks")
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(out, x.contiguous(), op=dist.ReduceOp.SUM, group=group)
    return out


def gather_weight(weight: Tensor) -> Tensor:
    """Return the full weight of a DTensor; its gradient has the same placements and is averaged over ranks.

    FSDP averages data-parallel gradients in the same way; averaging does not affect ranks with equal data.
    Collectives: one all-gather forward, one reduce-scatter backward per sharded mesh dimension.
    """
    for placement in weight.placements:  # type: ignore[attr-defined]
        if not (placement.is_replicate() or (placement.is_shard() and placement.dim == 0)):
            raise ValueError(
                f"weight: expected a DTensor with Shard(0) or Replicate placements, got {placement}"
            )
    return _GatherWeight.apply(weight)  # type: ignore[return-value]


class _GatherWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Any) -> Tensor:  # type: ignore[override]
        ctx.mesh, ctx.placements = weight.device_mesh, weight.placements
        full = weight.full_tensor()
        # The full tensor of a replicated weight is the weight itself; autograd needs a separate tensor.
        return full.view_as(full)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> Any:
        from torch.distributed.tensor import DTensor, Partial

        grad = grad / ctx.mesh.size()
        partial = DTensor.from_local(grad, ctx.mesh, [Partial()] * ctx.mesh.ndim, run_check=False)
        return partial.redistribute(placements=ctx.placements)
