"""Stack equal matrices of a step into batches and call `step.py` on them, compiled on a GPU.

Parameters on one rank, the shares that a rank owns (`sharded.py`) and shards of DTensors (`fsdp.py`) all come
here as `Work`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leanstep.muon.groups import (
    Group,
    adam_lr_and_decay,
    layout_of,
    matrix_views,
    rate_and_decay,
    second_views,
)
from leanstep.muon.polar import product_dtype, stack_limit
from leanstep.muon.step import step_adam, step_matrices
from leanstep.muon.transpose import triton_kernels

State = dict[str, Any]


class Work(NamedTuple):
    """A parameter of this step, or consecutive entries of one, with its gradient and state.

    multipliers: factors of the learning rate, one per entry of a bank; None: only the group's number.
    """

    group: Group
    weight: Tensor
    grad: Tensor
    state: State
    multipliers: Sequence[float] | None = None


def compiles(tensor: Tensor) -> bool:
    """Return whether steps of this tensor are compiled: on a GPU, if Triton works there."""
    return tensor.is_cuda and triton_kernels() is not None


def new_state(group: Group, weight: Tensor, second_shape: Sequence[int]) -> State:
    """Return zero moments, and zero low bits of a bfloat16 weight; `second_shape`: of the variance."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    like = functools.partial(torch.zeros_like, weight, memory_format=torch.contiguous_format)
    if group["algorithm"] == "adam":
        # On a GPU the graph reads the count, which does not advance when the device skips a step.
        count = torch.zeros((), device=weight.device if compiles(weight) else "cpu")
        state = {"step": count, "exp_avg": like(dtype=wide), "exp_avg_sq": like(dtype=wide)}
    else:
        state = {"momentum_buffer": like(dtype=wide)}
        if group["variance"] != "off":
            state["second_momentum"] = torch.zeros(tuple(second_shape), dtype=wide, device=weight.device)
    if weight.dtype == torch.bfloat16 and group["residual"] != "none":
        state["residual"] = like(dtype=torch.int16)
    return state


def update(work: Iterable[Work], go: Tensor | None = None) -> None:
    """Step parameters in place; their order does not change the results.

    go: a number on the device; if it is 0, nothing changes (compiled steps only).
    """
    matrices: dict[tuple, list[tuple]] = {}
    adam: dict[tuple, list[Work]] = {}
    for item in work:
        group, weight = item.group, item.weight
        if not weight.numel():
            continue
        if group["algorithm"] == "adam":
            adam.setdefault((id(group), weight.dtype, weight.device), []).append(item)
            continue
        for view in views_of(item):
            key = (id(group), view[0].shape[1:], weight.dtype, view[1].dtype, weight.device)
            matrices.setdefault(key, []).append((group, *view))
    for views in matrices.values():
        _, first, *_ = views[0]
        limit = stack_limit(first.size(-2), first.size(-1), first.device)
        batch: list[tuple] = []
        for group, weight, *others in views:
            for begin in range(0, weight.size(0), limit):
                piece = (group, *(t if t is None else t[begin : begin + limit] for t in (weight, *others)))
                if batch and sum(b[1].size(0) for b in batch) + piece[1].size(0) > limit:  # type: ignore[union-attr]
                    _step_batch(batch, go)
                    batch = []
                batch.append(piece)
        _step_batch(batch, go)
    for members in adam.values():
        _step_adam(members, go)


def views_of(item: Work) -> list[tuple]:
    """Return (weight, grad, momentum, second, residual, multipliers) of all matrices, [b, r, c]."""
    group, weight, state = item.group, item.weight.detach(), item.state
    layout = layout_of(weight.shape, group)
    weights, views = matrix_views(weight, layout), []
    for tensor in (item.grad.contiguous(), state["momentum_buffer"], state.get("residual")):
        like = None if tensor is None else tensor.view(weight.shape)
        views.append([None] * len(weights) if like is None else matrix_views(like, layout))
    second = state.get("second_momentum")
    seconds: list[Any] = [None] * len(weights) if second is None else second_views(second, layout)
    factors: list[Any] = [None] * len(weights)
    if item.multipliers is not None:
        factors = [_constant(tuple(map(float, item.multipliers)), views[1][0].dtype, weight.device)]
    return list(zip(weights, *views[:2], seconds, views[2], factors, strict=True))


@functools.lru_cache(maxsize=64)
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device).view(-1, 1, 1)


def matrix_options(group: Group, matrix: Tensor) -> dict[str, Any]:
    """Return the keyword arguments of `step_matrices` for matrices like this one [b, R, C]."""
    rate, decay = rate_and_decay(group, matrix.size(-2), matrix.size(-1))
    cautious = group["decay"] == "cautious"
    return {
        "rate": rate,
        "decay": decay,
        "momentum": float(group["momentum"]),
        "nesterov": bool(group["nesterov"]),
        "beta2": float(group["beta2"]),
        "variance": group["variance"],
        "cautious": cautious,
        "mode": group["residual"],
        "dtype": product_dtype(matrix, group["compute_dtype"], group.get("cpu_half")),
        "eps_mode": group["eps_mode"],
        "coefficients": group["coefficients"],
    }


def _step_batch(batch: list[tuple], go: Tensor | None) -> None:
    """Step matrices of one shape: (group, weight, grad, momentum, second, residual, multipliers) each."""
    columns = [list(column) for column in zip(*batch, strict=True)]
    run(step_matrices, columns[1:], go, **matrix_options(batch[0][0], batch[0][1]))


def _step_adam(members: list[Work], go: Tensor | None) -> None:
    """Step the parameters of one Adam group."""
    group, states = members[0].group, [item.state for item in members]
    steps = [state["step"] for state in states]
    # One tensor per state: with a single shared tensor _foreach_add_ reads its value on the host.
    torch._foreach_add_(steps, 1.0 if go is None else [go.to(steps[0].device)] * len(steps))
    lr, decay = adam_lr_and_decay(group)
    columns = [[item.weight.detach() for item in members], [item.grad for item in members]]
    columns += [[state.get(key) for state in states] for key in ("exp_avg", "exp_avg_sq", "residual", "step")]
    cautious = group["decay"] == "cautious"
    options = {
        "betas": tuple(group["betas"]),
        "eps": group["eps"],
        "mode": group["residual"],
        "cautious": cautious,
    }
    run(step_adam, columns, go, lr=lr, decay=decay, **options)


NUMBERS = ("rate", "decay", "momentum", "beta2", "lr")  # a schedule changes them


def run(
    function: Callable[..., Any], columns: Sequence[Sequence[Any]], go: Tensor | None, **options: Any
) -> Any:
    """Call a function of `step.py` on lists of tensors; on a GPU, compile it once per shapes and options."""
    first = columns[0][0]
    if not compiles(first):
        return function(*columns, go, **options)
    # Numbers that change enter the graph as tensors, so that nothing is recompiled.
    numbers = {key: torch.tensor(options.pop(key)) for key in NUMBERS if key in options}
    layout = tuple(
        None if t is None else (t.shape, t.stride(), t.dtype) for column in columns for t in column
    )
    key = (layout, first.device, go is None, *((k, _hashable(v)) for k, v in options.items()))
    go = None if go is None else go.to(first.device, non_blocking=True)
    return _compiled(function, key)(*columns, go, **numbers, **options)


@functools.cache
def _compiled(function: Callable[..., Any], key: tuple) -> Callable[..., Any]:
    """Return the function compiled for one kind of arguments.

    Dynamo limits the graphs per code object to eight, so each kind gets a copy of the code.
    """
    copy = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return torch.compile(copy, fullgraph=True, dynamic=False)


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value
