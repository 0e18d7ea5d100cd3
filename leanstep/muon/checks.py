"""Checks of gradients, states and state dicts: bad input raises before anything changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from leanstep.muon.groups import Group, check_group, layout_of

# Format version of a state dict.
FORMAT = 2


def check_grad(name: str, param: Tensor) -> None:
    """Raise a ValueError for a gradient of the wrong kind, shape or device."""
    grad = param.grad
    assert grad is not None
    if grad.layout != torch.strided or not grad.is_floating_point():
        raise ValueError(f"{name}: expected a dense real gradient, got {grad.dtype} {grad.layout}")
    if grad.shape != param.shape or grad.device != param.device:
        raise ValueError(
            f"{name}: expected a gradient of shape {tuple(param.shape)} on {param.device}, "
            f"got {tuple(grad.shape)} on {grad.device}"
        )


def check_state(name: str, param: Tensor, state: dict[str, Any] | None, group: Group) -> None:
    """Raise a ValueError if the state does not belong to a parameter of this shape and algorithm."""
    if not state:
        return
    needed: dict[str, Any]
    if group["algorithm"] == "adam":
        needed = {"exp_avg": param.shape, "exp_avg_sq": param.shape, "step": ()}
    else:
        needed = {"momentum_buffer": param.shape}
        if group["variance"] != "off":
            needed["second_momentum"] = layout_of(param.shape, group).second_shape
    if "residual" in state:
        needed["residual"] = param.shape
    for key, shape in needed.items():
        value = state.get(key)
        if value is not None and not isinstance(value, Tensor):
            raise ValueError(f"{name}: expected a tensor as state {key!r}, got {type(value).__name__}")
        if value is None or tuple(value.shape) != tuple(shape):
            got = f"none, state has {sorted(state)}" if value is None else tuple(value.shape)
            raise ValueError(f"{name}: expected state {key!r} of shape {tuple(shape)}, got {got}")
        if value.dtype != torch.int16 if key == "residual" else not value.is_floating_point():
            wanted = "int16" if key == "residual" else "floating-point"
            raise ValueError(f"{name}: expected {wanted} numbers in state {key!r}, got {value.dtype}")


def check_loadable(groups: list[Group], state_dict: dict[str, Any]) -> None:
    """Raise a ValueError if a state dict does not fit the groups."""
    for key in ("state", "param_groups"):
        if key not in state_dict:
            got = sorted(state_dict)
            raise ValueError(f"state_dict: expected keys 'state' and 'param_groups', got {got}")
    saved = state_dict["param_groups"]
    if len(saved) != len(groups):
        raise ValueError(f"state_dict: expected {len(groups)} groups, got {len(saved)}")
    for index, (group, theirs) in enumerate(zip(groups, saved, strict=True)):
        _check_group_fits(f"state_dict: group {index}", group, theirs)
        for position, key in enumerate(theirs["params"]):
            name = (group.get("param_names") or {position: f"param_{position}"})[position]
            state = state_dict["state"].get(key) or {}
            check_state(name, group["params"][position], state, {**group, **theirs})
            for item, value in state.items():
                if isinstance(value, Tensor) and value.is_floating_point() and not value.isfinite().all():
                    raise ValueError(
                        f"{name}: expected finite numbers in state {item!r}, got NaN or infinity"
                    )


def _check_group_fits(where: str, group: Group, theirs: Group) -> None:
    if theirs.get("format", FORMAT) != FORMAT:
        raise ValueError(f"{where}: expected format {FORMAT}, got {theirs['format']}")
    if len(group["params"]) != len(theirs["params"]):
        raise ValueError(f"{where}: expected {len(group['params'])} parameters, got {len(theirs['params'])}")
    if theirs.get("algorithm", group["algorithm"]) != group["algorithm"]:
        raise ValueError(f"{where}: expected algorithm {group['algorithm']!r}, got {theirs['algorithm']!r}")
    for mine, other in zip(group.get("param_names") or (), theirs.get("param_names") or (), strict=False):
        if mine != other:
            raise ValueError(f"{where}: expected parameter {mine!r}, got {other!r}")
    callables = {key: value for key, value in group.items() if callable(value)}
    try:
        check_group({"algorithm": group["algorithm"], **callables, **theirs})
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def finite(grads: Sequence[Tensor], on_device: bool = False) -> bool | Tensor:
    """Return whether all gradients are finite: a bool, or `on_device` 1.0 or 0.0 without a host read."""
    kinds: dict[tuple, list[Tensor]] = {}
    for grad in grads:
        if grad.numel():
            kinds.setdefault((grad.device, grad.dtype), []).append(grad)
    if on_device and kinds:
        device = grads[0].device
        # The maximum magnitude cannot overflow and propagates NaN.
        tops = [torch.stack(torch._foreach_norm(members, float("inf"))).amax() for members in kinds.values()]
        largest = torch.stack([top.to(device, torch.float32, non_blocking=True) for top in tops])
        return (largest.amax() < float("inf")).float()
    for members in kinds.values():
        # A finite norm proves it; an infinite norm may be an overflow of finite values, so check the values.
        norms = torch.stack(torch._foreach_norm(members))
        if not norms.isfinite().all() and not all(bool(grad.isfinite().all()) for grad in members):
            return False
    return True
