"""Matrix products whose result is symmetric: compute the lower panels, mirror the rest.

A result of n x n is cut into row panels. Panel i needs only its first i + 1 column blocks, so b panels
cost (b + 1) / 2b of the full product; the strictly upper part is a transposed copy of what is there.
One product per panel (not per block) keeps the calls few and large: that is what a CPU BLAS likes.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from typing import Any

import torch
from torch import Tensor

# Below this side a full product is as fast as the panels (measured with two threads, see docs/muon.md).
MIN_SYMMETRIC_SIDE = 256
_HALF = (torch.bfloat16, torch.float16)


@functools.cache
def _kernels() -> Any:
    """The Triton kernels, or None where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    from leanstep.muon import kernel

    return kernel


def _has_kernel(x: Tensor) -> bool:
    # Half precision on a GPU, rows in order; the rest goes to the vendor's library.
    return x.is_cuda and x.dtype in _HALF and x.stride(-1) == 1 and _kernels() is not None


def choose_panels(side: int, device: torch.device) -> int:
    """How many row panels a symmetric side x side product is cut into; 1 = compute all of it."""
    if device.type != "cpu" or side < MIN_SYMMETRIC_SIDE:
        return 1
    # More panels skip more work but make smaller calls; 4 and 6 tie at 768, where 4 wait less for each other.
    return 4 if side < 1024 else 6


def _bounds(side: int, panels: int) -> list[tuple[int, int]]:
    # Multiples of 16 keep the panels aligned to vector registers.
    edges = [0, *(min(side, round(side * i / panels / 16) * 16) for i in range(1, panels)), side]
    return [(low, high) for low, high in itertools.pairwise(edges) if high > low]


def _mirror(out: Tensor, bounds: list[tuple[int, int]]) -> None:
    for lo, hi in bounds[1:]:
        out[:lo, lo:hi].copy_(out[lo:hi, :lo].mT)


def gram_matrix(x: Tensor, out: Tensor, *, tall: bool = False, panels: int = 1) -> Tensor:
    """out = x @ x.mT, or x.mT @ x when `tall`; x is [R, C] or [B, R, C]. Returns out."""
    if _has_kernel(x):
        return (_kernels().xtx if tall else _kernels().xxt)(x, out)
    if panels == 1 or x.ndim == 3:
        return torch.matmul(x.mT, x, out=out) if tall else torch.matmul(x, x.mT, out=out)
    bounds = _bounds(out.size(0), panels)
    for lo, hi in bounds:
        if tall:
            torch.mm(x[:, lo:hi].mT, x[:, :hi], out=out[lo:hi, :hi])
        else:
            torch.mm(x[lo:hi], x[:hi].mT, out=out[lo:hi, :hi])
    _mirror(out, bounds)
    return out


def commuting_product(a: Tensor, b: Tensor, out: Tensor, *, panels: int = 1) -> Tensor:
    """out = a @ b for symmetric a and b that commute, so that the product is symmetric too."""
    if panels == 1 or a.ndim == 3:
        return torch.matmul(a, b, out=out)
    bounds = _bounds(out.size(0), panels)
    for lo, hi in bounds:
        torch.mm(a[lo:hi], b[:, :hi], out=out[lo:hi, :hi])
    _mirror(out, bounds)
    return out


def quadratic(
    gram: Tensor, out: Tensor, a: float, b: float, c: float, *, panels: int = 1, identity: bool = True
) -> Tensor:
    """out = b * gram + c * gram @ gram, plus a times the identity unless `identity` is off."""
    if _has_kernel(gram):
        _kernels().ba_caa(gram, out, alpha=c, beta=b)
    elif gram.ndim == 3:
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=out)
    elif panels == 1:
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=out)
    else:
        bounds = _bounds(out.size(0), panels)
        for lo, hi in bounds:
            torch.addmm(gram[lo:hi, :hi], gram[lo:hi], gram[:, :hi], beta=b, alpha=c, out=out[lo:hi, :hi])
        _mirror(out, bounds)
    if identity:
        out.diagonal(dim1=-2, dim2=-1).add_(a)
    return out
