"""The low 16 bits of a float32 weight whose upper 16 bits are the live bfloat16 parameter.

    truncate   upper half by truncation (the speedrun's form); the live weight is biased towards zero
    nearest    upper half rounded to nearest, the rest a signed int16; no bias, reconstruction still exact

Forward and gathers read 2 bytes per weight; weight plus residual take the 4 bytes of a float32 master.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MODES = ("nearest", "truncate", "none")

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
def convert_state(weight: Tensor, state: dict[str, Any], source: str, target: str) -> None:
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
