"""The two elementwise passes over a tile of fp32 logits: Triton on a GPU, C++ on a CPU, else plain torch.

`update_statistics` reads a tile once and adds its columns to the running softmax statistics;
`scale_exponentials` reads it once and writes its gradient. kernel.py has both for Triton, native.cpp for one
CPU core, softmax.py as a handful of torch operations with a second tile of scratch memory.
"""

# R rows · W columns of a tile

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int64, c_void_p
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from leanstep.cpu import has_memory, load_library, num_threads

# Below this many logits the first build (a second, once per machine) costs more than C++ saves.
NATIVE_LOGITS = 1 << 18
# C++ on one core is as fast as torch's passes on two or three.
MOST_IDLE_THREADS = 2
SOURCE = Path(__file__).with_name("native.cpp")


class Passes(Protocol):
    """What kernel.py, `NativePasses` and `PlannedPasses` have in common."""

    @property
    def update_statistics(self) -> Any: ...

    @property
    def scale_exponentials(self) -> Any: ...


def kernels_for(given: Tensor, dtype: torch.dtype, num_logits: int) -> Any:
    """The passes for a call with so many logits, made of `given`, summed in `dtype`; None for torch's own.

    A plan (fake tensors) counts on kernels for as many logits as a CPU would use them.
    """
    if dtype != torch.float32:
        return None
    if isinstance(given, FakeTensor) and not torch.compiler.is_compiling():
        return PlannedPasses if num_logits >= NATIVE_LOGITS else None
    if given.is_cuda:
        return _triton()
    if given.device.type != "cpu" or num_logits < NATIVE_LOGITS or not has_memory(given):
        return None
    return NativePasses if NativePasses.is_built() else None


def suited(kernels: Any, cores: int) -> Any:
    """The same passes, but not C++ on the calling core alone where many threads could share torch's."""
    alone = kernels is NativePasses and cores == 1 and num_threads() > MOST_IDLE_THREADS
    return None if alone else kernels


@functools.cache
def _triton() -> Any:
    try:
        from leanstep.logprob.engine import kernel
    except ImportError:
        return None
    return kernel


class PlannedPasses:
    """The passes for a plan: on fake tensors they compute nothing, and they never allocate."""

    @staticmethod
    def update_statistics(z: Tensor, *_given: Any) -> None:
        pass

    @staticmethod
    def scale_exponentials(z: Tensor, out: Tensor, *_given: Any) -> Tensor:
        return out


class NativePasses:
    """The passes in C++ (native.cpp), for fp32 tiles whose rows are contiguous; one call runs on one core."""

    @staticmethod
    def is_built() -> bool:
        """Whether the library can be called; builds it on this machine's first use."""
        return not isinstance(load_library(SOURCE, _declare), str)

    @staticmethod
    def update_statistics(
        z: Tensor,
        maximum: Tensor,
        total: Tensor,
        moment: Tensor | None,
        targets: Tensor | None = None,
        first: int = 0,
        target: Tensor | None = None,
    ) -> None:
        """Add the columns of `z` [R, W] fp32 to the running m, s and t (None: not kept), in place.

        With `targets` [R], `target` gets the logits of those that the tile, which begins at id `first`,
        holds.
        """
        vectors = (target if targets is not None else None, maximum, total, moment)
        _library().update_statistics(
            z.data_ptr(), *z.shape, z.stride(0), _address(targets), first, *map(_address, vectors)
        )

    @staticmethod
    def scale_exponentials(
        z: Tensor,
        out: Tensor,
        maximum: Tensor,
        constant: Tensor,
        slope: Tensor | None,
        targets: Tensor | None = None,
        first: int = 0,
        target: Tensor | None = None,
    ) -> Tensor:
        """out <- e^(z-m) (constant + slope (z-m)) per row; 0 where e^(z-m) is 0. `out` may be `z`.

        With `target` [R] that is added at the targets that the tile, which begins at id `first`, holds.
        """
        strides, vectors = (z.stride(0), out.stride(0)), (target, maximum, constant, slope)
        _library().scale_exponentials(
            z.data_ptr(),
            out.data_ptr(),
            *z.shape,
            *strides,
            _address(targets),
            first,
            *map(_address, vectors),
        )
        return out


def _declare(library: ctypes.CDLL) -> None:
    tail = [c_void_p, c_int64, *[c_void_p] * 4]
    library.update_statistics.argtypes = [c_void_p, *[c_int64] * 3, *tail]
    library.scale_exponentials.argtypes = [c_void_p, c_void_p, *[c_int64] * 4, *tail]
    library.update_statistics.restype = library.scale_exponentials.restype = None


def _library() -> ctypes.CDLL:
    library = load_library(SOURCE, _declare)
    assert not isinstance(library, str), library
    return library


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
