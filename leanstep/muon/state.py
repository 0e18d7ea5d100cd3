"""What the optimizer keeps beside a weight (moments, low bits of a bfloat16 weight), and checks of it.

The low 16 bits complete the live bfloat16 parameter, the upper 16, to a float32 weight:

    truncate   upper half by truncation (the speedrun's form); the live weight is biased towards zero
    nearest    upper half rounded to nearest, the rest a signed int16; no bias, reconstruction still exact

Forward and gathers read 2 bytes per weight; weight plus residual take the 4 bytes of a float32 master.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from leanstep.muon.param_groups import Entry, Group
from leanstep.muon.polar import Workspace

State = dict[str, Any]

_EXPONENT = 0x7F800000


def to_master(weight: Tensor, residual: Tensor, mode: str = "nearest") -> Tensor:
    """The float32 weight that `weight` (bfloat16) and `residual` (int16) stand for; any shape [...].

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
    # Round half away from zero: half to even would make a residual of +32768 possible.
    residual = bits - (high << 16)
    # A weight next to the largest bfloat16 would round to infinity: keep the truncated half. Infinity and
    # NaN keep their upper half (NaN made quiet, its payload may sit in the lower one) and no residual.
    edge = (high & (_EXPONENT >> 16)) == (_EXPONENT >> 16)
    finite = (bits & _EXPONENT) != _EXPONENT
    quiet = ((bits & 0x7FFFFFFF) > _EXPONENT).to(torch.int32) << 6
    kept = (bits >> 16) | quiet
    special = edge | ~finite
    high = torch.where(special, kept, high)
    residual = torch.where(special, (bits & 0xFFFF).clamp_max(0x7FFF) * finite, residual)
    return high.to(torch.int16).view(torch.bfloat16), residual.to(torch.int16)


def convert(weight: Tensor, residual: Tensor, source: str, target: str) -> tuple[Tensor, Tensor]:
    """The same float32 weights in the other representation."""
    return from_master(to_master(weight, residual, source), target)


@torch.no_grad()
def convert_state(weight: Tensor, state: State, source: str, target: str) -> None:
    """Bring the low bits in an optimizer state from one mode into another, `none` included, in place.

    The live weight moves to the rounding of `target`; the float32 weight stays the same to the bit.
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


def new_state(entry: Entry) -> State:
    """Zero moments, and zero low bits for a bfloat16 weight."""
    group, param = entry.group, entry.param
    dtype = torch.promote_types(param.dtype, torch.float32)
    if entry.is_adam:
        state: State = {
            "step": torch.tensor(0.0),
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
    """Raise a ValueError when the state does not belong to a parameter of this shape and algorithm."""
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
        got = tuple(state[key].shape) if key in state else None
        if got != expected:
            raise ValueError(f"{name}: expected state {key!r} of shape {expected}, got {got}")


def check_grad(name: str, param: Tensor) -> None:
    """Raise a ValueError for a gradient that no step can take."""
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
    """Whether no gradient holds NaN or infinity: one pass and one host read per device in the usual case."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        if grad.numel():
            by_device.setdefault(grad.device, []).append(grad)
    for group in by_device.values():
        # A finite norm is proof; an infinite one may be an overflow of finite values, so look again.
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(group)])
        if not torch.isfinite(norms).all() and not all(bool(torch.isfinite(grad).all()) for grad in group):
            return False
    return True


def join(tensors: Mapping[str, Sequence[Tensor]], workspace: Workspace) -> State:
    """Per role, all tensors one behind the other along dimension 0, copied in one call."""
    joined = {}
    for role, parts in tensors.items():
        sizes = [part.size(0) for part in parts]
        joined[role] = workspace.take(f"joined {role}", (sum(sizes), *parts[0].shape[1:]), parts[0])
        torch._foreach_copy_(list(joined[role].split(sizes)), list(parts))
    return joined


def give_back(joined: State, tensors: Mapping[str, Sequence[Tensor]]) -> None:
    """The way back of `join`."""
    for role, whole in joined.items():
        parts = list(tensors[role])
        torch._foreach_copy_(parts, list(whole.split([part.size(0) for part in parts])))
