"""A bfloat16 weight as the upper half of a float32 one; an int16 residual stores the lower half.

    truncate   upper half by truncation, as in the speedrun; the parameter is biased towards zero
    nearest    upper half rounded to nearest, residual a signed int16; no bias, reconstruction still exact

Forward and gathers read 2 bytes per weight; weight plus residual take 4 bytes, like a float32 master weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

MODES = ("nearest", "truncate", "none")
# From here on bfloat16 rounds to infinity, bits 0x7F7F8000.
_LIMIT = 3.39617752923046e38


def to_master(weight: Tensor, residual: Tensor, mode: str = "nearest") -> Tensor:
    """Return the float32 weight encoded by `weight` (bfloat16) and `residual` (int16); any shape [...].

    Equivalent to (mode "nearest"):
        high = weight.view(torch.int16).to(torch.int32) << 16
        master = (high + residual.to(torch.int32)).view(torch.float32)
    """
    high = weight.view(torch.int16).to(torch.int32) << 16
    low = residual.to(torch.int32)
    return (high | (low & 0xFFFF) if mode == "truncate" else high + low).view(torch.float32)


def from_master(master: Tensor, mode: str = "nearest") -> tuple[Tensor, Tensor]:
    """Split a float32 tensor [...] into (bfloat16 weight, int16 residual) of its shape.

    Equivalent to (mode "truncate"):
        bits = master.view(torch.int32)
        weight, residual = (bits >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)
    """
    bits = master.contiguous().view(torch.int32)
    if mode == "truncate":
        return (bits >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)
    # Round half away from zero: with half to even, a residual could be +32768. The signed rest is the lower
    # half.
    high, low = (bits + 0x8000) >> 16, bits.to(torch.int16)
    on_cpu = master.device.type == "cpu" and not torch.compiler.is_compiling()
    magnitude = master.abs()
    if not (on_cpu and master.numel() and magnitude.amax() < _LIMIT):
        # A weight next to the largest bfloat16 would round to infinity: it keeps the truncated half, and as
        # much of the rest as fits. Infinity and NaN have no residual (NaN is made quiet: its payload may be
        # in the lower half).
        finite, special = magnitude < torch.inf, ~(magnitude < _LIMIT)
        truncated = (bits >> 16) | (master.isnan().to(torch.int32) << 6)
        high = torch.where(special, truncated, high)
        low = torch.where(special, (bits & 0xFFFF).clamp_max(0x7FFF) * finite, low).to(torch.int16)
    return high.to(torch.int16).view(torch.bfloat16), low
