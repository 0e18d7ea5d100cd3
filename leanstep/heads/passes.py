"""The two passes over a tile of logits, `stats` and `grads`: torch, C++ (passes.cpp), Triton (kernels.py).

    stats    per row, with x = k (z - max z): max z, sum e^x, sum e^x x, z[id], first argmax; one read
    grads    slope (g onehot - p (a + b (log p + entropy))), log p = k (z - m) - log_s; one read and one write

The torch functions define the passes; they serve fp64, fake tensors and machines without a compiler. All
three have the same arguments: `ids` are global and `first_id` is the id of the tile's first column; an id
outside the tile is a target of another tile. p = 0 contributes 0, also where the logit is -inf. There are no
atomics: two runs give the same bits.
"""

# R rows · W columns of a tile

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from leanstep.cpu import has_memory, load_library
from leanstep.heads.head import is_fake
from leanstep.triton_driver import can_launch

# For fewer logits, the first build (one second, once per machine) costs more than C++ saves.
NATIVE_LOGITS = 1 << 18
# e^x is 0 below this x, in fp64 too.
LOWEST_EXPONENT = -800.0


def on_gpu(device: torch.device) -> bool:
    """Whether tensors of this device take Triton's kernels and products of 16-bit operands."""
    return device.type == "cuda"


def passes_for(tensor: Tensor, dtype: torch.dtype, num_logits: int) -> Any:
    """Return the passes for logits computed from `tensor` and summed in `dtype`, an object with both."""
    if dtype == torch.float32:
        fake = is_fake(tensor)
        if on_gpu(tensor.device) and can_launch() and (not fake or triton_passes().launches_are_recorded()):
            return triton_passes()
        enough = num_logits >= NATIVE_LOGITS and tensor.device.type == "cpu"
        if enough and not fake and has_memory(tensor):
            return native_passes() or TORCH
    return TORCH


def torch_stats(
    z: Tensor, ids: Tensor, first_id: int, k: Tensor,
    max_: Tensor, sum_: Tensor, sum_x: Tensor, target: Tensor, argmax: Tensor,
) -> None:  # fmt: skip
    z = z.to(k.dtype)
    max_.copy_(z.amax(1))
    argmax.copy_(z.argmax(1))
    x = z - max_.masked_fill(max_ == -torch.inf, 0)[:, None]
    x.mul_(k[:, None]).clamp_(min=LOWEST_EXPONENT)
    e = x.exp()
    sum_.copy_(e.sum(1))
    sum_x.copy_(e.mul_(x).sum(1))
    here, column = _in_tile(ids, first_id, z.shape[1])
    target.copy_(z.gather(1, column)[:, 0].masked_fill(~here, -torch.inf))


def torch_grads(
    z: Tensor, out: Tensor, ids: Tensor, first_id: int, k: Tensor, m: Tensor, log_s: Tensor,
    entropy: Tensor, a: Tensor, b: Tensor, g: Tensor, inv_cap: float,
) -> None:  # fmt: skip
    z = z.to(k.dtype)
    log_p = (z - m[:, None]).mul_(k[:, None]).sub_(log_s[:, None]).clamp_(min=LOWEST_EXPONENT)
    p = log_p.exp()
    du = log_p.add_(entropy[:, None]).mul_(b[:, None]).add_(a[:, None]).mul_(p).neg_()
    here, column = _in_tile(ids, first_id, z.shape[1])
    du.scatter_add_(1, column, g.where(here, 0)[:, None])
    if inv_cap:
        t = z * inv_cap
        du.mul_((1 - t).mul_(1 + t))
    out.copy_(du)


def _in_tile(ids: Tensor, first_id: int, width: int) -> tuple[Tensor, Tensor]:
    """Return which ids are in a tile [R], and their column in it [R, 1], 0 if it is in none."""
    column = ids - first_id
    here = (column >= 0) & (column < width)
    return here, column.where(here, 0)[:, None]


class Native:
    """The same passes in C++, on one core, for fp32 tiles whose rows are contiguous."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def stats(self, z: Tensor, ids: Tensor, first_id: int, *vectors: Tensor) -> None:
        assert z.stride(1) == 1 or z.shape[1] == 1
        arguments = (ids.data_ptr(), first_id, *_pointers(vectors))
        self.library.stats(z.data_ptr(), *z.shape, z.stride(0), *arguments)

    def grads(self, z: Tensor, out: Tensor, ids: Tensor, first_id: int, *vectors_and_inv_cap: Any) -> None:
        assert z.stride(1) == out.stride(1) == 1 or z.shape[1] == 1
        assert out.dtype == z.dtype
        *vectors, inv_cap = vectors_and_inv_cap
        sizes = (*z.shape, z.stride(0), out.stride(0))
        arguments = (ids.data_ptr(), first_id, *_pointers(vectors), inv_cap)
        self.library.grads(z.data_ptr(), out.data_ptr(), *sizes, *arguments)


def _pointers(vectors: Sequence[Tensor]) -> list[int]:
    assert all(v.is_contiguous() and v.dtype == torch.float32 for v in vectors)
    return [v.data_ptr() for v in vectors]


def _declare(library: ctypes.CDLL) -> None:
    p, i = ctypes.c_void_p, ctypes.c_int64
    library.stats.argtypes = [p, i, i, i, p, i, *[p] * 6]
    library.grads.argtypes = [p, p, i, i, i, i, p, i, *[p] * 7, ctypes.c_float]
    library.stats.restype = library.grads.restype = None


def native_passes() -> Native | None:
    """Return the C++ passes, built on first use; None without a compiler."""
    library = load_library(Path(__file__).with_name("passes.cpp"), _declare)
    return None if isinstance(library, str) else Native(library)


@functools.cache
def triton_passes() -> Any:
    """Return the passes in Triton; importing it takes half a second."""
    from leanstep.heads import kernels

    return kernels


TORCH = SimpleNamespace(stats=torch_stats, grads=torch_grads)
