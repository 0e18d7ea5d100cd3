"""The elementwise passes over a tile of logits: Triton on a GPU, C++ on a CPU, otherwise plain torch.

`update_statistics` reads a tile once and adds its columns to the running softmax statistics;
`scale_exponentials` reads it once and writes its gradient. kernel.py implements both in Triton, native.cpp
for one CPU core, softmax.py with a few torch operations and a second tile of scratch memory. A divergence
between two heads has two more passes, `divergence_sums` and `divergence_gradient`, which read a tile of each
head; their torch versions are in leanstep/objectives. `mixed_product` returns how this torch multiplies
16-bit operands.
"""

# R rows · W columns of a tile

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from leanstep.cpu import has_memory, load_library, num_threads
from leanstep.logprob.engine.pass_interface import Compared, LabelGradient
from leanstep.triton_driver import can_launch

# For fewer logits, the first build (one second, once per machine) costs more than C++ saves.
NATIVE_LOGITS = 1 << 18
# C++ on one core is as fast as the torch passes on two or three cores.
MOST_IDLE_THREADS = 2
SOURCE = Path(__file__).with_name("native.cpp")


@functools.cache
def mixed_product(
    operands: torch.dtype, result: torch.dtype, device: torch.device
) -> Literal["addmm", "mm", "widen"]:
    """Return how this torch multiplies 16-bit operands into fp32 sums on a device.

    addmm with out_dtype reads and writes the sums itself. torch 2.8 supports it only for sums in the
    operands' dtype, but supports mm. Older versions, and ROCm versions that support neither, widen the
    operands: exact, but slower.
    """
    a = torch.ones((8, 8), dtype=operands, device=device)
    sums = torch.zeros((8, 8), dtype=result, device=device)
    try:
        torch.addmm(sums, a, a, out_dtype=result, out=sums)
        return "addmm"
    except (RuntimeError, TypeError):
        pass
    try:
        torch.mm(a, a, out_dtype=result)
        return "mm"
    except (RuntimeError, TypeError):
        return "widen"


def aligned(tile: Tensor) -> Tensor:
    """Return the tile contiguous and aligned to 64 bytes, like memory that torch allocates."""
    if tile.is_contiguous() and has_memory(tile) and tile.data_ptr() % 64 == 0:
        return tile
    return tile.clone(memory_format=torch.contiguous_format)


def kernels_for(tensor: Tensor, dtype: torch.dtype, num_logits: int) -> Any:
    """Return the passes for `num_logits` logits computed from `tensor`, summed in `dtype`; None: plain torch.

    A plan (fake tensors) uses kernels if the real call would use them; a rehearsal records Triton's launches
    and runs the same code.
    """
    if dtype != torch.float32:
        return None
    if launches_triton(tensor):
        return _triton()
    if isinstance(tensor, FakeTensor) and not torch.compiler.is_compiling():
        available = tensor.is_cuda or NativePasses.is_built()
        return PlannedPasses if num_logits >= NATIVE_LOGITS and available else None
    if tensor.is_cuda:
        return _triton()
    if tensor.device.type != "cpu" or num_logits < NATIVE_LOGITS or not has_memory(tensor):
        return None
    return NativePasses if NativePasses.is_built() else None


def launches_triton(tensor: Tensor) -> bool:
    """Whether Triton can launch on a tensor: on a GPU tensor; on a fake one if launches are recorded."""
    if not tensor.is_cuda or _triton() is None:
        return False
    return not isinstance(tensor, FakeTensor) or _triton().LAUNCHES_ARE_RECORDED


def finishes_logits(kernels: Any) -> bool:
    """Whether these passes accept a `Finish`, read 16-bit logits and write 16-bit gradients (Triton only)."""
    return getattr(kernels, "FINISHES_LOGITS", False)


def suited(kernels: Any, cores: int) -> Any:
    """Return the passes, or None instead of C++ on one core if torch can use many threads."""
    alone = kernels is NativePasses and cores == 1 and num_threads() > MOST_IDLE_THREADS
    return None if alone else kernels


@functools.cache
def _triton() -> Any:
    """Return Triton's kernels for tiles, or None."""
    if not can_launch():
        return None
    from leanstep.logprob.engine import kernel

    return kernel


@functools.cache
def row_kernels() -> Any:
    """Return Triton's kernels for whole rows, or None."""
    if not can_launch():
        return None
    from leanstep.logprob.engine.gpu import kernel

    return kernel


def gathered(hidden: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    """Write hidden[rows] to `out` [R, D] in the dtype of `out`; on a GPU, in one pass over whole rows."""
    kernels = row_kernels() if launches_triton(hidden) and hidden.stride(-1) == 1 else None
    if kernels is not None:
        return kernels.gather_rows(hidden, rows, out)
    if hidden.dtype == out.dtype:
        return torch.index_select(hidden, 0, rows, out=out)
    return out.copy_(hidden.index_select(0, rows))


class PlannedPasses:
    """The passes of a plan on fake tensors: they compute nothing and never allocate."""

    @staticmethod
    def update_statistics(z: Tensor, *_unused: Any) -> None:
        pass

    @staticmethod
    def scale_exponentials(z: Tensor, out: Tensor, *_unused: Any) -> Tensor:
        return out

    @staticmethod
    def divergence_sums(*_unused: Any) -> None:
        pass

    @staticmethod
    def divergence_gradient(z: Tensor, y: Tensor, out: Tensor, *_unused: Any) -> Tensor:
        return out


class NativePasses:
    """The passes in C++ (native.cpp), for fp32 tiles with contiguous rows; each call runs on one core."""

    @staticmethod
    def is_built() -> bool:
        """Whether the library can be called; builds it on first use."""
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
        """Add the columns of `z` [R, W] fp32 to the running m, s and t (None: not computed), in place.

        With `targets` [R], write the logits of the targets within the tile, which begins at id `first`, to
        `target`.
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
        """Compute out = e^(z-m) (constant + slope (z-m)) per row; 0 where e^(z-m) is 0. `out` may be `z`.

        `target` [R], if set, is added at the targets within the tile, which begins at id `first`.
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

    @staticmethod
    def divergence_sums(z: Tensor, y: Tensor, compared: Compared, sums: Tensor) -> None:
        """Add the columns of a student's tile `z` and a teacher's `y`, [R, W] each, to `sums` [3, R].

        The rows of `sums` are D, the sum of S = p dD/dp, and the student's entropy.
        """
        pointers, kind = _pointers(compared)
        _library().divergence_sums(
            *map(_address, (z, y)), *z.shape, z.stride(0), y.stride(0), pointers, *kind, *map(_address, sums)
        )

    @staticmethod
    def divergence_gradient(
        z: Tensor,
        y: Tensor,
        out: Tensor,
        compared: Compared,
        slope: Tensor,
        factor: Tensor,
        cap: float = 0.0,
        labels: LabelGradient | None = None,
        first: int = 0,
    ) -> Tensor:
        """Compute out = factor (S - p slope), with the row's sum of S in `slope`; `out` may be `z` or `y`.

        A row whose factors are 0 gets zeros. `cap`: softcap / temperature. With `labels`, the gradient of
        their cross-entropy is added; the tile begins at id `first`.
        """
        pointers, kind = _pointers(compared)
        strides = (z.stride(0), y.stride(0), out.stride(0))
        label = (None, None, None, 1.0) if labels is None else labels
        _library().divergence_gradient(
            *map(_address, (z, y, out)), *z.shape, *strides, pointers, *kind, *map(_address, (slope, factor)),
            cap, _address(label[0]), first, _address(label[1]), _address(label[2]), label[3],
        )  # fmt: skip
        return out


def _pointers(compared: Compared) -> tuple[Any, tuple[int, float, float, float]]:
    return (c_void_p * 4)(*(t.data_ptr() for t in compared.statistics)), compared[1:]


def _declare(library: ctypes.CDLL) -> None:
    tail = [c_void_p, c_int64, *[c_void_p] * 4]
    library.update_statistics.argtypes = [c_void_p, *[c_int64] * 3, *tail]
    library.scale_exponentials.argtypes = [c_void_p, c_void_p, *[c_int64] * 4, *tail]
    kind = [c_void_p, c_int64, *[c_float] * 3]
    library.divergence_sums.argtypes = [*[c_void_p] * 2, *[c_int64] * 4, *kind, *[c_void_p] * 3]
    library.divergence_gradient.argtypes = [
        *[c_void_p] * 3, *[c_int64] * 5, *kind, *[c_void_p] * 2,
        c_float, c_void_p, c_int64, *[c_void_p] * 2, c_float,
    ]  # fmt: skip
    for name in ("update_statistics", "scale_exponentials", "divergence_sums", "divergence_gradient"):
        getattr(library, name).restype = None


def _library() -> ctypes.CDLL:
    library = load_library(SOURCE, _declare)
    assert not isinstance(library, str), library
    return library


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
