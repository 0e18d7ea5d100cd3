"""Process groups: vocabulary shards, sequence shards, context shards, DTensor weights.

The number of collectives is part of each function's contract and does not depend on local data (rows,
values): ranks without work issue the same collectives in the same order.

    vocabulary parallel   1 gather of row statistics in the forward pass, 1 all-reduce of the hidden gradient
    sequence parallel     1 gather of selected rows forward, 1 reduce-scatter backward (instead of that above)
    context parallel      0; 1 all-reduce each in forward and backward to return allgather results as zigzag
"""

# N selected rows · D model · K ranks

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from leanstep.heads.rows import RowPlan, place_response, slice_response


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


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Reject `create_graph=True`: a gradient detached from its graph would silently lose a term."""

    @wraps(backward)
    def checked(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("no second derivatives here (create_graph=True): use leanstep.heads.reference")
        return backward(ctx, *gradients)

    return checked


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
    total = torch.stack([f for f in flat if f is not None])
    process_group = resolve_group(group, "cp")
    if process_group is not None:
        total = _AllReduceSum.apply(total, process_group)
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


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, local, order, padded, group):  # type: ignore[override]
        ctx.save_for_backward(local, order)
        ctx.padded, ctx.block, ctx.group = padded, len(hidden), group
        mine = hidden.new_zeros(padded, hidden.shape[1])
        mine[: len(local)] = hidden.index_select(0, local)
        return all_gather(mine, group).index_select(0, order)

    @staticmethod
    def backward(ctx, grad_ND):  # type: ignore[override]
        local, order = ctx.saved_tensors
        padded = grad_ND.new_zeros(ctx.padded * ctx.group.size(), grad_ND.shape[1])
        padded.index_add_(0, order, grad_ND)
        mine = padded.new_empty(ctx.padded, grad_ND.shape[1])
        # torch 2.13 renamed the function and warns about the older name.
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        scatter(mine, padded, op=dist.ReduceOp.SUM, group=ctx.group)
        grad = grad_ND.new_zeros(ctx.block, grad_ND.shape[1])
        return grad.index_add_(0, local, mine[: len(local)]), None, None, None, None


def gather_hidden_rows(hidden: Tensor, rows: Tensor | None, group: dist.ProcessGroup) -> Tensor:
    """Gather rows of a sequence-parallel hidden [T / K, D] in the given order: [N, D] on every rank.

    `rows` are global and on the host (None: all T), so that every rank knows the plan without a collective.
    The backward pass sums the ranks' contributions and returns each rank its own rows, so the op that
    consumes the result must not reduce the hidden gradient again.

    Collectives: 1 forward (padded to the largest share), 1 backward.
    """
    size, block = group.size(), len(hidden)
    rows = torch.arange(size * block) if rows is None else rows
    if rows.device.type != "cpu":
        raise ValueError(f"rows: expected host indices with sequence_parallel, got {rows.device}")
    owner = rows.div(max(block, 1), rounding_mode="floor")
    counts = torch.bincount(owner, minlength=size)
    padded = int(counts.max()) if len(rows) else 0
    # The position of each row within its owner's contribution.
    by_owner = torch.argsort(owner, stable=True)
    first = torch.cumsum(counts, 0) - counts
    within = torch.empty_like(rows)
    within[by_owner] = torch.arange(len(rows)) - first[owner[by_owner]]
    local = (rows[owner == group.rank()] - group.rank() * block).to(hidden.device)
    return _GatherRows.apply(hidden, local, (owner * padded + within).to(hidden.device), padded, group)  # type: ignore[return-value]


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return all ranks' `x` concatenated along the first dimension. Collectives: 1."""
    out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, x.contiguous(), group=group)
    return out


def gather_weight(weight: Any) -> Tensor:
    """Return the full weight of a DTensor; its gradient has the same placements and is averaged over ranks.

    FSDP averages data-parallel gradients in the same way; averaging does not affect ranks with equal data.
    Collectives: one all-gather forward, one reduce-scatter backward per sharded mesh dimension.
    """
    for placement in weight.placements:
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
