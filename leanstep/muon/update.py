"""One step of the parameters at hand: momentum, polar factor, variance, write; Adam for the rest.

`step_matrices` is the algorithm, on matrices of one shape; what stands above it sorts a step's parameters
into such calls, what stands below it are its four passes. Whole parameters on one rank, a rank's own
parameters (`sharded.py`) and rows of DTensors (`fsdp.py`) all end up here.

On a CPU every pass works on blocks of rows that stay in the cache from the first operation to the last, so a
step reads and writes each big tensor once where operation-by-operation code does so ten times.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from leanstep.muon.param_groups import Entry, Group, matrix_views, second_views
from leanstep.muon.polar import PolarPlan, Workspace, iterate, normalize_into, run_side_by_side
from leanstep.muon.reference import variance_axis
from leanstep.muon.state import State, from_master, give_back, join, new_state, to_master

# Elements per block: four float32 temporaries of this size fit into the second-level cache of two cores.
BLOCK_ELEMENTS = 96 * 1024
# Elements that are stacked into one batched product at most.
MAX_STACK_ELEMENTS = 1 << 26
# Adam's tensors up to this size are joined on an accelerator; above it copying costs more than launching.
MAX_JOINED_ELEMENTS = 1 << 20

Scalar = float | Tensor
States = MutableMapping[Tensor, State]


@dataclass(frozen=True)
class Stack:
    """Matrices [B, R, C] of one shape and one rate, with their gradient and state; updated in place."""

    weight: Tensor
    grad: Tensor
    momentum: Tensor
    second: Tensor | None
    residual: Tensor | None
    plan: PolarPlan
    lr: Scalar
    decay: Scalar

    def __getitem__(self, part: slice) -> Stack:
        tensors = (self.weight, self.grad, self.momentum, self.second, self.residual)
        return Stack(*(None if t is None else t[part] for t in tensors), self.plan, self.lr, self.decay)  # type: ignore[arg-type]


def update_parameters(work: Iterable[tuple[Entry, Tensor]], states: States, workspace: Workspace) -> None:
    """One step of whole parameters, each with its gradient; state that is missing is made."""
    stacks: dict[int, list[Stack]] = {}
    groups: dict[int, Group] = {}
    adam: list[tuple[Entry, Tensor, State]] = []
    for entry, grad in work:
        state = states[entry.param]
        if not state:
            state.update(new_state(entry))
        if entry.is_adam:
            state["step"] += 1
            adam.append((entry, grad, state))
        else:
            groups[id(entry.group)] = entry.group
            stacks.setdefault(id(entry.group), []).extend(
                stacks_of(entry, entry.param.detach(), grad, state, entry.group["lr_mul"])
            )
    _step_adams(adam, workspace)
    for key, members in stacks.items():
        update_matrices(members, groups[key], workspace)


def stacks_of(
    entry: Entry, weight: Tensor, grad: Tensor, state: State, multipliers: float | Sequence[float]
) -> list[Stack]:
    """The matrices of a parameter, or of whole leading entries of a bank, as views with their rates.

    Args:
        multipliers: of the learning rate; one, or one per matrix of a bank.
    """
    assert entry.cut is not None and entry.forms is not None
    cut, group, stacks = entry.cut, entry.group, []
    weights = matrix_views(weight, cut)
    seconds: list[Any] = [None] * len(weights)
    if group["variance"] != "off":
        seconds = second_views(state["second_momentum"], weights, cut, group["variance"])
    low = state.get("residual")
    residuals: list[Any] = [None] * len(weights) if low is None else matrix_views(low, cut)
    tensors = (weights, matrix_views(grad, cut), matrix_views(state["momentum_buffer"], cut))
    for w, g, m, v, r in zip(*tensors, seconds, residuals, strict=True):
        form = entry.forms[w.size(1), w.size(2)]
        values = [float(multipliers)] if isinstance(multipliers, int | float) else list(multipliers)
        if len(set(values)) == 1:
            stacks.append(Stack(w, g, m, v, r, form.plan, *matrix_rates(group, form.rate, float(values[0]))))
        elif joins(w.device):
            key = (tuple(values), w.device)
            if key not in entry.constants:
                entry.constants[key] = torch.tensor(values, device=w.device).view(-1, 1, 1)
            lr, decay = matrix_rates(group, form.rate, 1.0)
            each = entry.constants[key]
            decays = decay / each if group["decay"] == "decoupled" else decay
            stacks.append(Stack(w, g, m, v, r, form.plan, each * lr, decays))
        else:
            for i, value in enumerate(values):
                rates = matrix_rates(group, form.rate, float(value))
                stacks.append(Stack(w, g, m, v, r, form.plan, *rates)[i : i + 1])
    return stacks


def matrix_rates(group: Group, factor: float, multiplier: float) -> tuple[float, float]:
    """(rate with all multipliers, decay factor) of a matrix whose shape has this learning-rate factor."""
    lr = float(group["lr"])
    rate = lr * multiplier * factor
    decay = float(group["weight_decay"]) * group["wd_mul"] * lr
    if group["decay"] == "decoupled":
        decay = decay / rate if rate else 0.0
    return rate, decay


def update_matrices(stacks: Sequence[Stack], group: Group, workspace: Workspace) -> None:
    """Step matrices of any shapes; their order does not change a result.

    Small equal shapes are stacked into one batched product (all equal shapes on an accelerator); on a CPU the
    large ones go one by one, side by side on the cores.
    """
    kinds: dict[tuple, list[Stack]] = {}
    for stack in stacks:
        if stack.weight.numel():
            # Joined tensors need one dtype.
            kind = (stack.weight.dtype, stack.residual is None) if joins(stack.weight.device) else ()
            kinds.setdefault((stack.plan, stack.weight.device, *kind), []).append(stack)
    alone: list[Stack] = []
    for (plan, *_), members in kinds.items():
        if not plan.batched:
            alone += [stack[i : i + 1] for stack in members for i in range(stack.weight.size(0))]
            continue
        chunk: list[Stack] = []
        size, limit = 0, max(1, MAX_STACK_ELEMENTS // (plan.rows * plan.cols))
        for stack in members:
            if chunk and size + stack.weight.size(0) > limit:
                step_matrices(chunk, plan, group, workspace)
                chunk, size = [], 0
            chunk.append(stack)
            size += stack.weight.size(0)
        step_matrices(chunk, plan, group, workspace)
    # Biggest first: the last jobs to finish are then short ones.
    alone.sort(key=lambda stack: -stack.plan.flops())
    jobs = [functools.partial(step_matrices, [stack], stack.plan, group) for stack in alone]
    run_side_by_side(jobs, workspace)


def step_matrices(stacks: Sequence[Stack], plan: PolarPlan, group: Group, workspace: Workspace) -> None:
    """The Muon step of matrices of one shape: momentum, polar factor, variance, write.

    Equivalent to, for each matrix:
        weight, momentum, second = reference.normuon(weight, grad, momentum, second, lr=..., ...)
    """
    sizes = [stack.weight.size(0) for stack in stacks]
    update = workspace.take("update", (sum(sizes), plan.rows, plan.cols), stacks[0].momentum)
    fill_updates(stacks, update.split(sizes), group["momentum"], nesterov=group["nesterov"])
    factor = orthogonalise(update, plan, group, workspace)
    for stack, part in _together(stacks, factor, workspace):
        scale = None
        if stack.second is not None:
            scale = variance_scale(part, stack.second, group["beta2"], group["variance"])
        write_weight(
            stack.weight,
            part,
            lr=stack.lr,
            decay=stack.decay,
            scale=scale,
            residual=stack.residual,
            mode=group["residual"],
            cautious=group["decay"] == "cautious",
        )


def joins(device: torch.device) -> bool:
    """Whether launches are what costs: then the passes around the products work on all tensors at once."""
    return device.type != "cpu"


def _together(
    stacks: Sequence[Stack], factor: Tensor, workspace: Workspace
) -> Iterator[tuple[Stack, Tensor]]:
    """Every stack with its part of the factor; on an accelerator one joined stack, given back afterwards."""
    sizes = [stack.weight.size(0) for stack in stacks]
    if len(stacks) == 1 or not joins(factor.device):
        yield from zip(stacks, factor.split(sizes), strict=True)
        return
    tensors = {role: [getattr(s, role) for s in stacks] for role in ("weight", "second", "residual")}
    joined = join({role: found for role, found in tensors.items() if found[0] is not None}, workspace)
    rates = {role: _per_matrix([getattr(s, role) for s in stacks], sizes, factor) for role in ("lr", "decay")}
    yield replace(stacks[0], **joined, **rates), factor
    give_back(joined, tensors)


def _per_matrix(values: Sequence[Scalar], sizes: Sequence[int], like: Tensor) -> Scalar:
    """One rate for all matrices, or a tensor [B, 1, 1]; filled on the device, nothing is copied there."""
    if not any(isinstance(value, Tensor) for value in values) and len(set(values)) == 1:
        return values[0]
    wide, rates = torch.promote_types(like.dtype, torch.float32), []
    for value, size in zip(values, sizes, strict=True):
        fresh = not isinstance(value, Tensor)
        rates.append(like.new_full((size, 1, 1), value, dtype=wide) if fresh else value)
    return torch.cat(rates)


def fill_updates(
    stacks: Sequence[Stack], parts: Sequence[Tensor], momentum: float, *, nesterov: bool
) -> None:
    """`fill_update` of every stack; on an accelerator in three launches for all of them."""
    if len(stacks) == 1 or not joins(parts[0].device):
        for stack, part in zip(stacks, parts, strict=True):
            fill_update(stack.grad, stack.momentum, momentum, part, nesterov=nesterov)
        return
    updates, buffers = list(parts), [stack.momentum for stack in stacks]
    torch._foreach_copy_(updates, [stack.grad for stack in stacks])
    torch._foreach_lerp_(buffers, updates, 1 - momentum)
    torch._foreach_lerp_(updates, buffers, momentum) if nesterov else torch._foreach_copy_(updates, buffers)


def row_blocks(shape: torch.Size, device: torch.device) -> Iterator[slice]:
    """Slices of the second-to-last dimension, each about one cache-full (all rows at once off the CPU)."""
    rows = shape[-2]
    if device.type != "cpu":
        yield slice(0, rows)
        return
    per_row = max(1, math.prod(shape) // max(1, rows))
    size = max(1, BLOCK_ELEMENTS // per_row)
    for begin in range(0, rows, size):
        yield slice(begin, min(rows, begin + size))


def fill_update(
    grad: Tensor, buffer: Tensor, momentum: Scalar, out: Tensor, *, nesterov: bool = True
) -> Tensor:
    """Advance `buffer` (float32) by `grad` and write the update, cast to the dtype of `out`, into `out`.

    Equivalent to:
        update, buffer[:] = reference.nesterov(grad, buffer, momentum)
    """
    for rows in row_blocks(grad.shape, grad.device):
        g, m = grad[..., rows, :].to(buffer.dtype), buffer[..., rows, :]
        m.lerp_(g, 1 - momentum)
        target = out[..., rows, :]
        if not nesterov:
            target.copy_(m)
        elif out.dtype == buffer.dtype:
            torch.lerp(g, m, momentum, out=target)
        else:
            target.copy_(torch.lerp(g, m, momentum))
    return out


def orthogonalise(update: Tensor, plan: PolarPlan, group: Group, workspace: Workspace) -> Tensor:
    """The polar factor of `update` [B, R, C] in the plan's dtype; `update` is scratch afterwards."""
    shape = (update.size(0), plan.rows, plan.cols)
    x = update if plan.dtype == update.dtype else workspace.take("input", shape, update, plan.dtype)
    normalize_into(update, x, group["eps_mode"])
    # A single matrix as [R, C]: symmetric panels and in-place products work on plain matrices.
    factor = iterate(x[0] if shape[0] == 1 else x, plan, group["coefficients"], workspace)
    return factor.view(shape)


def variance_scale(factor: Tensor, second: Tensor, beta2: Scalar, per: str = "long") -> Tensor:
    """Advance `second` and return the scale of each line, so that factor * scale is the NorMuon update.

    Equivalent to:
        update, second[:] = reference.reduce_variance(factor, second, beta2, per); update = factor * scale
    """
    rows, cols = factor.shape[-2:]
    axis = variance_axis(rows, cols, per)
    length = factor.shape[axis]
    square = torch.zeros(second.shape, dtype=second.dtype, device=second.device)
    for block in row_blocks(factor.shape, factor.device):
        part = factor[..., block, :].to(second.dtype).square()
        if axis == -1:
            square[..., block, :] = part.sum(-1, keepdim=True)
        else:
            square += part.sum(-2, keepdim=True)
    mean_square = square.div_(length)
    second.lerp_(mean_square, 1 - beta2)
    scale = 1 / (second.sqrt() + 1e-8) if per == "row" else second.clamp_min(1e-10).rsqrt_()
    # Both norms follow from the line sums, so the factor is not read again.
    norm = mean_square.sum((-2, -1), keepdim=True).mul_(length).sqrt_()
    scaled = (mean_square * scale.square()).sum((-2, -1), keepdim=True).mul_(length).sqrt_()
    return scale.mul_(norm / scaled.clamp_min_(1e-10))


def _decay_and_step(weight: Tensor, update: Tensor, lr: Scalar, decay: Scalar, cautious: bool) -> None:
    # weight (float32) in place, `update` is scratch. The order of the products fixes the last bit.
    if isinstance(decay, Tensor) or decay != 0:
        shrink = torch.mul(update, weight).ge_(0).mul_(weight) if cautious else weight.clone()
        weight.sub_(shrink.mul_(decay).mul_(lr))
    weight.sub_(update.mul_(lr))


def write_weight(
    weight: Tensor,
    factor: Tensor,
    *,
    lr: Scalar,
    decay: Scalar,
    scale: Tensor | None = None,
    residual: Tensor | None = None,
    mode: str = "nearest",
    cautious: bool = True,
) -> None:
    """weight <- weight - decay where it helps - lr * factor * scale, in place.

    Equivalent to:
        weight[:] = reference.cautious_decay(weight, factor * scale, lr, decay)

    Args:
        weight: [..., R, C]; with `residual` (int16, same shape) a bfloat16 weight is a full float32 one.
        factor: the polar factor, any float dtype.
        lr: with all multipliers. decay: weight_decay * base lr.
        scale: [..., R, 1] or [..., 1, C] from `variance_scale`.
    """
    for rows in row_blocks(weight.shape, weight.device):
        live, part = weight[..., rows, :], factor[..., rows, :]
        update = part.to(torch.promote_types(part.dtype, torch.float32), copy=True)
        if scale is not None:
            update.mul_(scale[..., rows, :] if scale.size(-2) > 1 else scale)
        if residual is not None:
            low = residual[..., rows, :]
            master = to_master(live, low, mode)
            _decay_and_step(master, update, lr, decay, cautious)
            high, rest = from_master(master, mode)
            live.copy_(high)
            low.copy_(rest)
        elif live.dtype == update.dtype:
            _decay_and_step(live, update, lr, decay, cautious)
        else:
            master = live.to(update.dtype)
            _decay_and_step(master, update, lr, decay, cautious)
            live.copy_(master)


def adam_(
    weight: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    cautious: bool = True,
    residual: Tensor | None = None,
    mode: str = "nearest",
) -> None:
    """One Adam step in place; `decay` multiplies the weight directly (lr * lr * weight_decay * wd_mul).

    Equivalent to:
        reference.adam(weight, grad, first, second, step, ...)
    """
    beta1, beta2 = betas
    rate = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    tensors = [weight, grad, first, second] + ([residual] if residual is not None else [])
    # The arithmetic is elementwise: any common view will do, one with rows lets it go block by block.
    tensors = [t.unsqueeze(0) if t.ndim == 1 else t.reshape(1, 1) if t.ndim == 0 else t for t in tensors]
    for rows in row_blocks(tensors[0].shape, weight.device):
        live, g, m, v = (t[..., rows, :] for t in tensors[:4])
        g = g.to(m.dtype)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        update = (m * rate).div_(v.sqrt().add_(eps))
        low = tensors[4][..., rows, :] if residual is not None else None
        master = to_master(live, low, mode) if low is not None else live.to(m.dtype)
        if decay:
            shrink = torch.mul(update, master).gt_(0).mul_(master) if cautious else master
            update.add_(shrink * decay)
        if low is not None:
            high, rest = from_master(master.sub_(update), mode)
            live.copy_(high)
            low.copy_(rest)
        elif live.dtype == m.dtype:
            live.sub_(update)
        else:
            live.copy_(master.sub_(update))


def _step_adams(work: Sequence[tuple[Entry, Tensor, State]], workspace: Workspace) -> None:
    """Adam on every parameter; on an accelerator small ones with equal options go as one flat tensor."""
    kinds: dict[tuple, list[tuple[Entry, Tensor, State]]] = {}
    for entry, grad, state in work:
        param, key = entry.param, (id(entry),)
        if joins(param.device) and param.numel() <= MAX_JOINED_ELEMENTS and param.is_contiguous():
            key = (id(entry.group), int(state["step"]), param.dtype, grad.dtype, param.device)
        kinds.setdefault(key, []).append((entry, grad, state))
    for members in kinds.values():
        group, state = members[0][0].group, members[0][2]
        if len(members) == 1:
            step_adam(group, members[0][0].param.detach(), members[0][1], state)
            continue
        tensors = {key: [s[key].view(-1) for *_, s in members] for key in state if key != "step"}
        tensors["weight"] = [entry.param.detach().view(-1) for entry, *_ in members]
        flat = join(tensors, workspace)
        grads = join({"grad": [grad.reshape(-1) for _, grad, _ in members]}, workspace)
        step_adam(group, flat["weight"], grads["grad"], {**flat, "step": state["step"]})
        give_back(flat, tensors)


def step_adam(group: Group, weight: Tensor, grad: Tensor, state: State) -> None:
    """One Adam step of a parameter, or of rows of it, with the matching part of its state."""
    base = float(group["lr"])
    lr = base * float(group["lr_mul"])
    strength = float(group["weight_decay"]) * group["wd_mul"]
    cautious = group["decay"] == "cautious"
    adam_(
        weight,
        grad,
        state["exp_avg"],
        state["exp_avg_sq"],
        step=int(state["step"]),
        lr=lr,
        betas=tuple(group["betas"]),
        eps=group["eps"],
        decay=(lr * lr if cautious else base) * strength,
        cautious=cautious,
        residual=state.get("residual"),
        mode=group["residual"],
    )
