"""One step of a set of parameters: momentum, polar factor, variance, write; Adam for the rest.

`step_matrices` is the algorithm for matrices of one shape. The functions above it group a step's parameters
into such calls; the functions below it are its four passes. Whole parameters on one rank, the parameters that
a rank owns (`sharded.py`) and rows of DTensors (`fsdp.py`) all use this module.

On a CPU every pass processes blocks of rows that stay in the cache from the first operation to the last, so a
step reads and writes each large tensor once instead of ten times.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from leanstep.muon.param_groups import Entry, Group, matrix_views, second_views
from leanstep.muon.polar import PolarPlan, Workspace, iterate, normalize_into, run_side_by_side
from leanstep.muon.reference import variance_axis
from leanstep.muon.state import Stack, State, from_master, fuses, new_state, number_on_device, to_master

# Elements per block: four float32 temporaries of this size fit in the L2 cache of two cores.
BLOCK_ELEMENTS = 96 * 1024
# Maximum number of elements that are stacked into one batched product.
MAX_STACK_ELEMENTS = 1 << 26

Scalar = float | Tensor
States = MutableMapping[Tensor, State]


def update_parameters(
    work: Iterable[tuple[Entry, Tensor]], states: States, workspace: Workspace, go: Tensor | None = None
) -> None:
    """Step whole parameters, each with its gradient; create missing state.

    go: a number on the device; if it is 0, nothing changes (GPU kernels only).
    """
    stacks: dict[int, list[Stack]] = {}
    groups: dict[int, Group] = {}
    adam: list[tuple[Entry, Tensor, State]] = []
    for entry, grad in work:
        state = states[entry.param]
        if not state:
            state.update(new_state(entry))
        if entry.is_adam:
            adam.append((entry, grad, state))
        else:
            groups[id(entry.group)] = entry.group
            stacks.setdefault(id(entry.group), []).extend(
                stacks_of(entry, entry.param.detach(), grad, state, entry.group["lr_mul"])
            )
    step_adams([(entry.group, entry.param.detach(), grad, state) for entry, grad, state in adam], go)
    for key, members in stacks.items():
        update_matrices(members, groups[key], workspace, go)


def stacks_of(
    entry: Entry, weight: Tensor, grad: Tensor, state: State, multipliers: float | Sequence[float]
) -> list[Stack]:
    """Return the matrices of a parameter, or of whole leading entries of a bank, as views with their rates.

    Args:
        multipliers: factors of the learning rate: one number, or one per matrix of a bank.
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
        elif fuses(w):
            key = (tuple(values), w.device)
            if key not in entry.constants:
                entry.constants[key] = torch.tensor(values, device=w.device)
            rates = matrix_rates(group, form.rate, 1.0)
            stacks.append(Stack(w, g, m, v, r, form.plan, *rates, entry.constants[key]))
        else:
            for i, value in enumerate(values):
                rates = matrix_rates(group, form.rate, float(value))
                stacks.append(Stack(w, g, m, v, r, form.plan, *rates)[i : i + 1])
    return stacks


def matrix_rates(group: Group, factor: float, multiplier: float) -> tuple[float, float]:
    """Return (rate with all multipliers, decay factor) of a matrix with this learning-rate factor."""
    lr = base_rate(group)
    rate = lr * multiplier * factor
    decay = float(group["weight_decay"]) * group["wd_mul"] * lr
    if group["decay"] == "decoupled":
        decay = decay / rate if rate else 0.0
    return rate, decay


def base_rate(group: Group) -> float:
    """Return the group's `lr`, or 1 if it is a GPU tensor, which the kernels multiply in."""
    lr = group["lr"]
    return 1.0 if isinstance(lr, Tensor) and number_on_device(lr) else float(lr)


def update_matrices(
    stacks: Sequence[Stack], group: Group, workspace: Workspace, go: Tensor | None = None
) -> None:
    """Step matrices of any shapes; their order does not change the results.

    Small equal shapes are stacked into one batched product (all equal shapes on an accelerator). On a CPU
    each large matrix is a separate job, and the jobs run in parallel on the cores.
    """
    kinds: dict[tuple, list[Stack]] = {}
    for stack in stacks:
        if stack.weight.numel():
            kinds.setdefault((stack.plan, stack.weight.device), []).append(stack)
    alone: list[Stack] = []
    for (plan, *_), members in kinds.items():
        if not plan.batched:
            alone += [stack[i : i + 1] for stack in members for i in range(stack.weight.size(0))]
            continue
        chunk: list[Stack] = []
        size, limit = 0, max(1, MAX_STACK_ELEMENTS // (plan.rows * plan.cols))
        for stack in members:
            if chunk and size + stack.weight.size(0) > limit:
                step_matrices(chunk, plan, group, workspace, go)
                chunk, size = [], 0
            chunk.append(stack)
            size += stack.weight.size(0)
        step_matrices(chunk, plan, group, workspace, go)
    # Largest first, so that the last jobs to finish are short.
    alone.sort(key=lambda stack: -stack.plan.flops())
    jobs = [functools.partial(step_matrices, [stack], stack.plan, group) for stack in alone]
    run_side_by_side(jobs, workspace)


def step_matrices(
    stacks: Sequence[Stack], plan: PolarPlan, group: Group, workspace: Workspace, go: Tensor | None = None
) -> None:
    """Make the Muon step of matrices of one shape: momentum, polar factor, variance, write.

    Equivalent to, for each matrix:
        weight, momentum, second = reference.normuon(weight, grad, momentum, second, lr=..., ...)
    """
    if fuses(stacks[0].weight):
        fused, go = fused_passes(), on_device_of(stacks[0].weight, go)
        stacks, copies = fused.in_order(fused.side_by_side(stacks))
        x = fused.normalized_updates(stacks, plan, group, workspace, go)
        fused.write_stacks(stacks, iterate(x, plan, group["coefficients"], workspace), group, workspace, go)
        fused.give_back(copies)
        return
    sizes = [stack.weight.size(0) for stack in stacks]
    update = workspace.take("update", (sum(sizes), plan.rows, plan.cols), stacks[0].momentum)
    for stack, part in zip(stacks, update.split(sizes), strict=True):
        fill_update(stack.grad, stack.momentum, float(group["momentum"]), part, nesterov=group["nesterov"])
    factor = orthogonalise(update, plan, group, workspace)
    for stack, part in zip(stacks, factor.split(sizes), strict=True):
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


def on_device_of(weight: Tensor, go: Tensor | None) -> Tensor | None:
    """Return `go` on the weight's device; a model may use several devices."""
    return None if go is None else go.to(weight.device, non_blocking=True)


@functools.cache
def fused_passes() -> Any:
    """Return the module that launches the fused kernels; imported only if Triton is available."""
    from leanstep.muon.fused import launches

    return launches


def row_blocks(shape: torch.Size, device: torch.device) -> Iterator[slice]:
    """Yield slices of the second-to-last dimension that fit in the cache; one slice on other devices."""
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
    """Advance `buffer` (float32) by `grad` and write the update to `out`, in the dtype of `out`.

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
    """Return the polar factor of `update` [B, R, C] in the plan's dtype; `update` is overwritten."""
    shape = (update.size(0), plan.rows, plan.cols)
    x = update if plan.dtype == update.dtype else workspace.take("input", shape, update, plan.dtype)
    normalize_into(update, x, group["eps_mode"])
    # Pass a single matrix as [R, C]: symmetric panels and in-place products need plain matrices.
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
    # Compute both norms from the line sums, without reading the factor again.
    norm = mean_square.sum((-2, -1), keepdim=True).mul_(length).sqrt_()
    scaled = (mean_square * scale.square()).sum((-2, -1), keepdim=True).mul_(length).sqrt_()
    return scale.mul_(norm / scaled.clamp_min_(1e-10))


def _decay_and_step(weight: Tensor, update: Tensor, lr: Scalar, decay: Scalar, cautious: bool) -> None:
    # Change weight (float32) in place; `update` is overwritten. The order of the products fixes the last bit.
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
    """weight <- weight - cautious decay - lr * factor * scale, in place.

    Equivalent to:
        weight[:] = reference.cautious_decay(weight, factor * scale, lr, decay)

    Args:
        weight: [..., R, C]; with `residual` (int16, same shape) a bfloat16 weight is a full float32 one.
        factor: the polar factor, any float dtype.
        lr: learning rate with all multipliers. decay: weight_decay * base lr.
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
    """Make one Adam step in place; `decay` multiplies the weight directly (lr * lr * weight_decay * wd_mul).

    Equivalent to:
        reference.adam(weight, grad, first, second, step, ...)
    """
    beta1, beta2 = betas
    rate = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    tensors = [weight, grad, first, second] + ([residual] if residual is not None else [])
    # The arithmetic is elementwise, so any common view works; one with rows allows blocks of rows.
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


def step_adams(work: Sequence[tuple[Group, Tensor, Tensor, State]], go: Tensor | None = None) -> None:
    """Step Adam on (group, weight, grad, state): parameters, or rows of them with their part of the state."""
    kinds: dict[tuple, list[tuple[Tensor, Tensor, State]]] = {}
    groups: dict[int, Group] = {}
    advance([state for *_, state in work], go)
    for group, weight, grad, state in work:
        if weight.numel():
            groups[id(group)] = group
            key = (id(group), weight.dtype, grad.dtype, weight.device)
            kinds.setdefault(key, []).append((weight, grad, state))
    for (group, *_), members in kinds.items():
        if not fuses(members[0][0]):
            for weight, grad, state in members:
                step_adam(groups[group], weight, grad, state)
            continue
        go = on_device_of(members[0][0], go)
        fused_passes().step_adams(members, groups[group], adam_rates(groups[group]), go)


def advance(states: Sequence[State], go: Tensor | None) -> None:
    """Count a step in every Adam state, unless `go` is 0."""
    steps: dict[torch.device, list[Tensor]] = {}
    for state in states:
        steps.setdefault(state["step"].device, []).append(state["step"])
    for device, counts in steps.items():
        # One tensor per state: with a single shared tensor _foreach_add_ reads its value on the host.
        more = 1.0 if go is None else [go.to(device, non_blocking=True)] * len(counts)
        torch._foreach_add_(counts, more)


def adam_rates(group: Group) -> tuple[float, float]:
    """Return (rate, decay factor) of an Adam group; cautious decay scales with the square of the rate."""
    base = base_rate(group)
    lr = base * float(group["lr_mul"])
    strength = float(group["weight_decay"]) * group["wd_mul"]
    return lr, (lr * lr if group["decay"] == "cautious" else base) * strength


def step_adam(group: Group, weight: Tensor, grad: Tensor, state: State) -> None:
    """Make one Adam step of a parameter, or of rows of it, with the matching part of its state."""
    lr, decay = adam_rates(group)
    adam_(
        weight,
        grad,
        state["exp_avg"],
        state["exp_avg_sq"],
        step=int(state["step"]),
        lr=lr,
        betas=tuple(group["betas"]),
        eps=group["eps"],
        decay=decay,
        cautious=group["decay"] == "cautious",
        residual=state.get("residual"),
        mode=group["residual"],
    )
