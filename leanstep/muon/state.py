"""State of the optimizer (moments, low bits of a bfloat16 weight) and checks of it.

The bfloat16 parameter is the upper half of a float32 weight; the residual stores the low 16 bits:

    truncate   upper half by truncation, as in the speedrun; the parameter is biased towards zero
    nearest    upper half rounded to nearest, residual a signed int16; no bias, reconstruction still exact

Forward and gathers read 2 bytes per weight; weight plus residual take 4 bytes, like a float32 master weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leanstep.muon.param_groups import Entry, Group, check_group, group_cut, second_shape
from leanstep.muon.polar import PolarPlan
from leanstep.muon.transpose import triton_kernels

State = dict[str, Any]
# Format version of a state dict.
FORMAT = 1

# Device types on which the passes around the products are Triton kernels (`leanstep.muon.fused`).
FUSED_DEVICES = ("cuda",)

_EXPONENT = 0x7F800000


@dataclass(frozen=True)
class Stack:
    """Matrices [B, R, C] of one shape with their gradient and state; updated in place.

    Args:
        second: variance, [B, R, 1] or [B, 1, C], or None. residual: low bits, int16, or None.
        lr, decay: see `update.matrix_rates`. multipliers: [B], factors of the rate, if they differ.
    """

    weight: Tensor
    grad: Tensor
    momentum: Tensor
    second: Tensor | None
    residual: Tensor | None
    plan: PolarPlan
    lr: float
    decay: float
    multipliers: Tensor | None = None

    def __getitem__(self, part: slice) -> Stack:
        tensors = (self.weight, self.grad, self.momentum, self.second, self.residual)
        return Stack(*(None if t is None else t[part] for t in tensors), self.plan, self.lr, self.decay)  # type: ignore[arg-type]


def to_master(weight: Tensor, residual: Tensor, mode: str = "nearest") -> Tensor:
    """Return the float32 weight encoded by `weight` (bfloat16) and `residual` (int16); any shape [...].

    Equivalent to (mode "nearest"):
        high = weight.view(torch.int16).to(torch.int32) << 16
        master = (high + residual.to(torch.int32)).view(torch.float32)
    """
    bits = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    low = residual.to(torch.int32)
    if mode == "truncate":
        bits.bitwise_or_(low.bitwise_and_(0xFFFF))
    else:
        bits.add_(low)
    return bits.view(torch.float32)


def from_master(master: Tensor, mode: str = "nearest") -> tuple[Tensor, Tensor]:
    """Split a float32 tensor [...] into (bfloat16 weight, int16 residual) of its shape.

    Equivalent to (mode "truncate"):
        bits = master.view(torch.int32)
        weight, residual = (bits >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)
    """
    bits = master.contiguous().view(torch.int32)
    if mode == "truncate":
        return (bits >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)
    high = (bits + 0x8000).bitwise_right_shift_(16)
    # Round half away from zero: with half to even, a residual could be +32768.
    residual = bits - (high << 16)
    # A weight next to the largest bfloat16 would round to infinity: use the truncated half. Infinity and NaN
    # keep their upper half and have no residual (NaN is made quiet: its payload may be in the lower half).
    edge = (high & (_EXPONENT >> 16)) == (_EXPONENT >> 16)
    finite = (bits & _EXPONENT) != _EXPONENT
    quiet = ((bits & 0x7FFFFFFF) > _EXPONENT).to(torch.int32) << 6
    truncated = (bits >> 16) | quiet
    special = edge | ~finite
    high = torch.where(special, truncated, high)
    residual = torch.where(special, (bits & 0xFFFF).clamp_max(0x7FFF) * finite, residual)
    return high.to(torch.int16).view(torch.bfloat16), residual.to(torch.int16)


def convert(weight: Tensor, residual: Tensor, source: str, target: str) -> tuple[Tensor, Tensor]:
    """Return the same float32 weights in another residual mode."""
    return from_master(to_master(weight, residual, source), target)


@torch.no_grad()
def convert_state(weight: Tensor, state: State, source: str, target: str) -> None:
    """Convert the low bits in an optimizer state from one mode to another, including `none`, in place.

    The parameter takes the rounding of `target`; the float32 weight has the same bits as before.
    """
    if "residual" not in state:
        if target != "none" and weight.dtype == torch.bfloat16 and state:
            state["residual"] = torch.zeros_like(weight, dtype=torch.int16)
    elif target == "none":
        del state["residual"]
    elif source != target:
        high, low = convert(weight.detach(), state["residual"], source, target)
        weight.copy_(high)
        state["residual"] = low


def fuses(weight: Tensor) -> bool:
    """Return whether the fused kernels step this weight: on a GPU, in float32 or below."""
    known = weight.device.type in FUSED_DEVICES and weight.dtype != torch.float64
    return known and triton_kernels() is not None


def number_on_device(number: float | Tensor) -> bool:
    """Return whether a rate or momentum is a GPU tensor: kernels read it, so a CUDA graph sees changes."""
    return isinstance(number, Tensor) and fuses(number)


def new_state(entry: Entry) -> State:
    """Return zero moments, and zero low bits for a bfloat16 weight."""
    group, param = entry.group, entry.param
    dtype = torch.promote_types(param.dtype, torch.float32)
    if entry.is_adam:
        state: State = {
            # On a GPU the kernels read it, and it does not advance when the device skips a step.
            "step": torch.zeros((), device=param.device if fuses(param) else "cpu"),
            "exp_avg": torch.zeros_like(param, dtype=dtype),
            "exp_avg_sq": torch.zeros_like(param, dtype=dtype),
        }
    else:
        state = {"momentum_buffer": torch.zeros_like(param, dtype=dtype)}
        if entry.second_shape is not None:
            state["second_momentum"] = torch.zeros(entry.second_shape, dtype=dtype, device=param.device)
    if param.dtype == torch.bfloat16 and group["residual"] != "none":
        state["residual"] = torch.zeros_like(param, dtype=torch.int16)
    return state


def check_state(
    name: str, param: Tensor, state: State | None, group: Group, second: tuple[int, ...] | None
) -> None:
    """Raise a ValueError if the state does not belong to a parameter of this shape and algorithm."""
    if not state:
        return
    needed = ("step", "exp_avg", "exp_avg_sq") if group["algorithm"] == "adam" else ("momentum_buffer",)
    for key in needed:
        if key not in state:
            raise ValueError(
                f"{name}: expected state {key!r} for algorithm {group['algorithm']!r}, got {sorted(state)}"
            )
    shapes = {
        key: tuple(param.shape)
        for key in ("momentum_buffer", "exp_avg", "exp_avg_sq", "residual")
        if key in state
    }
    if second is not None:
        shapes["second_momentum"] = second
    for key, expected in shapes.items():
        value = state.get(key)
        if value is not None and not isinstance(value, Tensor):
            raise ValueError(f"{name}: expected a tensor as state {key!r}, got {type(value).__name__}")
        got = None if value is None else tuple(value.shape)
        if value is None or got != expected:
            raise ValueError(f"{name}: expected state {key!r} of shape {expected}, got {got}")
        if value.dtype != torch.int16 if key == "residual" else not value.is_floating_point():
            wanted = "int16" if key == "residual" else "floating-point"
            raise ValueError(f"{name}: expected {wanted} numbers in state {key!r}, got {value.dtype}")


def check_loadable(groups: list[Group], state_dict: dict[str, Any]) -> None:
    """Raise a ValueError if a state dict does not fit the groups."""
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(
                f"state_dict: expected keys 'state' and 'param_groups', got {sorted(state_dict)}"
            )
    saved = state_dict["param_groups"]
    if len(saved) != len(groups):
        raise ValueError(f"state_dict: expected {len(groups)} groups, got {len(saved)}")
    for index, (group, theirs) in enumerate(zip(groups, saved, strict=True)):
        version = theirs.get("format", FORMAT)
        if version != FORMAT:
            raise ValueError(f"state_dict: expected format {FORMAT}, got {version}")
        if len(group["params"]) != len(theirs["params"]):
            raise ValueError(
                f"state_dict: expected {len(group['params'])} parameters in group {index}, "
                f"got {len(theirs['params'])}"
            )
        if theirs.get("algorithm", group["algorithm"]) != group["algorithm"]:
            raise ValueError(
                f"state_dict: expected algorithm {group['algorithm']!r} in group {index}, "
                f"got {theirs['algorithm']!r}"
            )
        mine, names = group.get("param_names"), theirs.get("param_names")
        if mine and names and list(mine) != list(names):
            odd = next((a, b) for a, b in zip(mine, names, strict=True) if a != b)
            raise ValueError(f"state_dict: expected parameter {odd[0]!r} in group {index}, got {odd[1]!r}")
        both = {**{key: value for key, value in group.items() if callable(value)}, **theirs}
        both.setdefault("algorithm", group["algorithm"])
        _check_saved_options(index, both)
        for position, (param, key) in enumerate(zip(group["params"], theirs["params"], strict=True)):
            second = None
            if both["algorithm"] != "adam" and both["variance"] != "off":
                second = second_shape(param.shape, group_cut(both), both["variance"])
            name = mine[position] if mine else f"param_{position}"
            saved_state = state_dict["state"].get(key)
            check_state(name, param, saved_state, both, second)
            _check_finite(name, saved_state or {})


def _check_saved_options(index: int, group: Group) -> None:
    try:
        check_group(group)
    except ValueError as error:
        raise ValueError(f"state_dict: group {index}: {error}") from None


def _check_finite(name: str, state: State) -> None:
    for key, value in state.items():
        if isinstance(value, Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise ValueError(f"{name}: expected finite numbers in state {key!r}, got NaN or infinity")


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


def grads_are_finite(grads: Sequence[Tensor]) -> bool:
    """Return whether all gradients are finite; usually one pass and one host read per device."""
    for group in _by_device(grads):
        # A finite norm proves it; an infinite norm may be an overflow of finite values, so check the values.
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(group)])
        if not torch.isfinite(norms).all() and not all(bool(torch.isfinite(grad).all()) for grad in group):
            return False
    return True


def finite_on_device(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return 1.0 if all gradients are finite, else 0.0, as a tensor [] that the host does not read."""
    largest = []
    for group in _by_device(grads):
        # The maximum magnitude cannot overflow and propagates NaN.
        for members in _by_dtype(group):
            top = torch.stack(torch._foreach_norm(members, float("inf"))).amax()
            largest.append(top.to(device, torch.float32, non_blocking=True))
    if not largest:
        return torch.ones((), device=device)
    return (torch.stack(largest).amax() < float("inf")).float()


def _by_device(grads: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        if grad.numel():
            groups.setdefault(grad.device, []).append(grad)
    return list(groups.values())


def _by_dtype(grads: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        groups.setdefault(grad.dtype, []).append(grad)
    return list(groups.values())
