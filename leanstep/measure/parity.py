"""Parity: a fast path may be at most k times as far from the fp64 reference as the plain code in its dtype.

    truth     = reference(inputs in fp64)
    plain     = reference(inputs)                 same dtype as the candidate
    candidate = fast(inputs)
    error(candidate, truth) <= k * error(plain, truth) + floor

A tolerance without the baseline's own error means little: it is either so wide that a bug passes, or so
narrow that a correct reordering of a sum fails. The error of a tensor is max |x - truth| / max |truth|.
"""

from __future__ import annotations

import torch
from torch import Tensor

FACTOR = {torch.float64: 2.0, torch.float32: 2.0, torch.float16: 3.0, torch.bfloat16: 3.0}
# In units of max |truth|: allows one or two units in the last place of the output.
FLOOR = {torch.float64: 1e-12, torch.float32: 5e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def dtype_name(dtype: torch.dtype) -> str:
    return {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[
        str(dtype).split(".")[1]
    ]


def relative_error(value: Tensor, truth: Tensor) -> float:
    """Return max |value - truth| / max |truth|; infinite if one is not finite and the other differs."""
    if value.shape != truth.shape:
        return float("inf")
    if truth.numel() == 0:
        return 0.0
    if not truth.is_floating_point():
        return float((value != truth).sum().item())
    value64, truth64 = value.detach().double(), truth.detach().double()
    finite = torch.isfinite(truth64)
    same_special = (value64 == truth64) | (value64.isnan() & truth64.isnan())
    if not bool((finite | same_special).all()) or not bool(torch.isfinite(value64[finite]).all()):
        return float("inf")
    if not bool(finite.any()):
        return 0.0
    scale = truth64[finite].abs().max().item()
    difference = (value64[finite] - truth64[finite]).abs().max().item()
    return difference / max(scale, torch.finfo(torch.float32).tiny)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are bitwise equal, including NaN patterns and the sign of zero."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.numel() == 0:
        return True
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    # A copy: a tensor of one element counts as contiguous with any stride.
    flat = tensor.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)
