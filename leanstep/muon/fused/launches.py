"""Launches of the passes of a step: up to eight tensors of one layout share a launch.

`update.step_matrices` calls `normalized_updates` before the polar factor and `write_stacks` after it;
`step_adams` is the whole Adam step. Tensors without contiguous rows (a transposed parameter) are stepped in
copies. Nothing here reads a device value on the host.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from leanstep.muon.fused import kernel as triton_passes
from leanstep.muon.param_groups import Group
from leanstep.muon.polar import PolarPlan, Workspace
from leanstep.muon.reference import variance_axis
from leanstep.muon.state import Stack, State, number_on_device

# A type checker cannot follow kernel launches.
kernel: Any = triton_passes


def normalized_updates(
    stacks: Sequence[Stack], plan: PolarPlan, group: Group, workspace: Workspace, go: Tensor | None
) -> Tensor:
    """Advance the momentum of every stack; return the normalised updates [B, R, C] in the plan's dtype."""
    items, like = sum(stack.weight.size(0) for stack in stacks), stacks[0].momentum
    out = workspace.take("input", (items, plan.rows, plan.cols), like, plan.dtype)
    norms = fill_updates(stacks, out, group, go, workspace)
    size, programs = plan.rows * plan.cols, norms.size(2)
    blocks = -(-size // kernel.FLAT_BLOCK)
    with torch.cuda.device_of(out):
        kernel.normalize_kernel[(items * blocks,)](
            out, norms, norms if go is None else go, size, blocks, programs, norms.stride(0),
            RELATIVE=group["eps_mode"] == "relative", HAS_GO=go is not None,
            BLOCK=kernel.FLAT_BLOCK, BLOCK_P=_power(programs), num_warps=kernel.WARPS,
        )  # fmt: skip
    return out


def fill_updates(
    stacks: Sequence[Stack], out: Tensor, group: Group, go: Tensor | None, workspace: Workspace
) -> Tensor:
    """Advance the momentum and write updates to `out` [B, R, C]; return partial norms [2, B, programs]."""
    items, rows, cols = out.shape
    tiles = -(-rows // kernel.TILE[0]) * -(-cols // kernel.TILE[1])
    programs = -(-tiles // -(-tiles // kernel.MAX_PROGRAMS))
    norms = workspace.take("norms", (2, items, programs), out, torch.float32)
    momentum, is_read = group["momentum"], number_on_device(group["momentum"])
    for first, members in _launches(stacks, ("grad", "momentum")):
        lead, held = members[0], sum(stack.weight.size(0) for stack in members)
        with torch.cuda.device_of(out):
            kernel.momentum_kernel[(held * programs,)](
                *_slots([stack.grad for stack in members]), *_slots([stack.momentum for stack in members]),
                out[first:], norms[0, first:], momentum if is_read else norms, norms if go is None else go,
                rows, cols, lead.weight.size(0), programs, norms.stride(0),
                *lead.grad.stride()[:2], *lead.momentum.stride()[:2], 0.0 if is_read else momentum,
                NESTEROV=group["nesterov"], HAS_MOMENTUM=is_read, HAS_GO=go is not None,
                BLOCK_R=kernel.TILE[0], BLOCK_C=kernel.TILE[1], num_warps=kernel.WARPS,
            )  # fmt: skip
    return norms


def write_stacks(
    stacks: Sequence[Stack], factor: Tensor, group: Group, workspace: Workspace, go: Tensor | None
) -> None:
    """Apply variance, decay and the update to every stack; `factor` is [B, R, C], contiguous, in stack order.

    A stack without variance state is written with the unscaled factor.
    """
    scaling = None
    if stacks[0].second is not None:
        seconds = [stack.second for stack in stacks if stack.second is not None]
        scaling = _variance(seconds, factor, group, workspace, go)
    _, rows, cols = factor.shape
    tiles = -(-rows // kernel.TILE[0]) * -(-cols // kernel.TILE[1])
    by_row = variance_axis(rows, cols, group["variance"]) == -1
    lr = group["lr"] if number_on_device(group["lr"]) else None
    for first, members in _launches(stacks, ("weight", "residual"), rates=True):
        lead, held = members[0], sum(stack.weight.size(0) for stack in members)
        weights, low = [stack.weight for stack in members], lead.residual
        mode = 0 if low is None else kernel.RESIDUAL_MODES[group["residual"]]
        scale, norms = (factor, factor) if scaling is None else (scaling[0][first:], scaling[1][0, first:])
        blocks, plane = (1, 0) if scaling is None else (scaling[1].size(2), scaling[1].stride(0))
        with torch.cuda.device_of(factor):
            kernel.write_kernel[(held * tiles,)](
                *_slots(weights), *_slots(weights if low is None else [stack.residual for stack in members]),
                factor[first:], scale, norms, factor if lead.multipliers is None else lead.multipliers,
                factor if lr is None else lr, factor if go is None else go,
                rows, cols, lead.weight.size(0), *lead.weight.stride()[:2],
                *(lead.weight if low is None else low).stride()[:2], blocks, plane, lead.lr, lead.decay,
                HAS_SCALE=scaling is not None, BY_ROW=by_row, HAS_MULTIPLIER=lead.multipliers is not None,
                HAS_LR=lr is not None, HAS_GO=go is not None, CAUTIOUS=group["decay"] == "cautious",
                MODE=mode, BLOCK_R=kernel.TILE[0], BLOCK_C=kernel.TILE[1], BLOCK_P=_power(blocks),
                num_warps=kernel.WARPS,
            )  # fmt: skip


def scaled_factor(
    seconds: Sequence[Tensor], factor: Tensor, group: Group, workspace: Workspace, go: Tensor | None
) -> Tensor:
    """Advance the variance of matrices [B, R, C]; return their NorMuon updates, in `factor`."""
    scale, norms = _variance(seconds, factor, group, workspace, go)
    before, after = norms.sum(-1).sqrt_()
    axis = variance_axis(factor.size(1), factor.size(2), group["variance"])
    root = factor.size(axis) ** 0.5
    scale = scale * (before * root / (after * root).clamp_min_(1e-10))[:, None]
    return factor.mul_(scale.unsqueeze(axis))


def _variance(
    seconds: Sequence[Tensor], factor: Tensor, group: Group, workspace: Workspace, go: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Advance the variance; return the scale of each line [B, L] and partial norms [2, B, blocks]."""
    items, rows, cols = factor.shape
    by_row = variance_axis(rows, cols, group["variance"]) == -1
    lines, length = (rows, cols) if by_row else (cols, rows)
    block, step = kernel.LINE_TILE if by_row else kernel.COLUMN_TILE
    # Long matrices have more lines per program, which bounds the number of partial norms.
    block = max(block, _power(-(-lines // kernel.MAX_PROGRAMS)))
    blocks = -(-lines // block)
    scale = workspace.take("scale", (items, lines), factor, torch.float32)
    norms = workspace.take("line norms", (2, items, blocks), factor, torch.float32)
    first = 0
    for count, members in itertools.groupby(seconds, key=lambda second: second.size(0)):
        for part in _eights(list(members)):
            with torch.cuda.device_of(factor):
                kernel.variance_kernel[(len(part) * count * blocks,)](
                    *_slots(part), factor[first:], scale[first:], norms[0, first:],
                    norms if go is None else go, lines, length, count, blocks, norms.stride(0),
                    group["beta2"], BY_ROW=by_row, PER_ROW=group["variance"] == "row", HAS_GO=go is not None,
                    BLOCK_L=block, BLOCK_K=step, num_warps=kernel.WARPS,
                )  # fmt: skip
            first += len(part) * count
    return scale, norms


def in_order(stacks: Sequence[Stack]) -> tuple[list[Stack], list[tuple[Tensor, Tensor]]]:
    """Return the stacks with contiguous rows, and pairs (tensor, its copy) for `give_back`."""
    copies: list[tuple[Tensor, Tensor]] = []

    def ordered(tensor: Tensor | None, written: bool) -> Tensor | None:
        if tensor is None or tensor.stride(-1) == 1 or tensor.size(-1) == 1:
            return tensor
        copy = tensor.contiguous()
        if written:
            copies.append((tensor, copy))
        return copy

    with_rows = [
        replace(
            stack,
            grad=ordered(stack.grad, False),
            **{role: ordered(getattr(stack, role), True) for role in ("weight", "momentum", "residual")},
        )
        for stack in stacks
    ]
    return with_rows, copies


def side_by_side(stacks: Sequence[Stack]) -> list[Stack]:
    """Sort stacks so that equal layouts are adjacent, which needs fewer launches."""
    return sorted(stacks, key=lambda stack: str(_layout(stack, ("weight", "grad", "momentum"), True)))


def _layout(stack: Stack, roles: Iterable[str], rates: bool) -> tuple:
    tensors = [getattr(stack, role) for role in roles]
    layouts = tuple(None if t is None else (t.stride(0), t.stride(1), t.dtype) for t in tensors)
    constants = (stack.lr, stack.decay, stack.multipliers is not None and id(stack)) if rates else ()
    return (stack.weight.size(0), stack.second is None, *layouts, *constants)


def _launches(
    stacks: Sequence[Stack], roles: Iterable[str], rates: bool = False
) -> list[tuple[int, list[Stack]]]:
    """Return (first matrix, stacks) of every launch: at most eight neighbours of one layout (and rate)."""
    launches: list[tuple[int, list[Stack]]] = []
    first, last = 0, None
    for stack in stacks:
        layout = _layout(stack, roles, rates)
        if layout != last or len(launches[-1][1]) == kernel.SLOTS:
            launches.append((first, []))
        launches[-1][1].append(stack)
        first, last = first + stack.weight.size(0), layout
    return launches


def _eights(members: Sequence[Any]) -> list[Sequence[Any]]:
    return [members[begin : begin + kernel.SLOTS] for begin in range(0, len(members), kernel.SLOTS)]


def _slots(tensors: Sequence[Any]) -> list[Any]:
    # Unused slots repeat the first tensor.
    return [*tensors, *[tensors[0]] * (kernel.SLOTS - len(tensors))]


def _power(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def step_adams(
    members: Sequence[tuple[Tensor, Tensor, State]],
    group: Group,
    rates: tuple[float, float],
    go: Tensor | None,
) -> None:
    """Step Adam on (weight, grad, state) of one group: any shapes, one weight and one gradient dtype."""
    copies: list[tuple[Tensor, Tensor]] = []

    def flat(tensor: Tensor, written: bool = True) -> Tensor:
        if tensor.is_contiguous():
            return tensor.view(-1)
        copy = tensor.contiguous()
        if written:
            copies.append((tensor, copy))
        return copy.view(-1)

    lr = group["lr"] if number_on_device(group["lr"]) else None
    rate, decay = rates
    beta1, beta2 = group["betas"]
    # Largest first, so that the tensors of a launch have similar sizes.
    ordered = sorted(members, key=lambda member: -member[0].numel())
    for part in _eights(ordered):
        weights = [flat(weight) for weight, *_ in part]
        low = "residual" in part[0][2]
        lows = [flat(state["residual"]) for *_, state in part] if low else weights
        moments = [[flat(state[key]) for *_, state in part] for key in ("exp_avg", "exp_avg_sq")]
        grads = [flat(grad, written=False) for _, grad, _ in part]
        blocks = -(-weights[0].numel() // kernel.FLAT_BLOCK)
        first = weights[0]
        with torch.cuda.device_of(first):
            kernel.adam_kernel[(len(part) * blocks,)](
                *_slots(weights), *_slots(lows), *_slots(grads), *_slots(moments[0]), *_slots(moments[1]),
                *_slots([state["step"] for *_, state in part]), *_slots([w.numel() for w in weights]),
                first if lr is None else lr, first if go is None else go,
                blocks, rate, beta1, beta2, math.log(max(beta1, 1e-38)), math.log(max(beta2, 1e-38)),
                group["eps"], decay,
                HAS_LR=lr is not None, HAS_GO=go is not None, CAUTIOUS=group["decay"] == "cautious",
                MODE=kernel.RESIDUAL_MODES[group["residual"]] if low else 0,
                BLOCK=kernel.FLAT_BLOCK, num_warps=kernel.WARPS,
            )  # fmt: skip
        give_back(copies)
        copies.clear()


def give_back(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy tensors that were stepped in copies back to their originals."""
    for tensor, copy in copies:
        tensor.copy_(copy)
