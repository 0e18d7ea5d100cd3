"""Products on one core each, through the BLAS that NumPy brings, where that is the faster one.

On AMD's processors OpenBLAS (in NumPy's wheels) takes 3 to 8 % less time for an fp32 product on one core than
MKL (in torch's). It has threads of its own, which would fight torch's over the cores; so it is used only
inside `one_thread_each`, where both work with one thread per call. Everywhere else a product is torch's.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np  # noqa: F401 (its BLAS must be loaded before anybody looks for it)
import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor

from leanstep.native import has_memory, is_wanted

# CblasRowMajor, CblasNoTrans and CblasTrans of cblas.h.
ROW_MAJOR, AS_IS, TRANSPOSED = 101, 111, 112

_open_blocks = 0
_limits: list[Any] = []
_lock = threading.Lock()


@functools.cache
def _numpy_blas() -> ThreadpoolController | None:
    """The thread control of NumPy's BLAS, or None when it is of a kind that nobody can limit."""
    found = ThreadpoolController().select(user_api="blas")
    return found if found.lib_controllers else None


@contextlib.contextmanager
def one_thread_each() -> Iterator[None]:
    """NumPy's BLAS works with one thread per call until the end of the block; torch must do so already.

    Blocks of several threads may overlap: the first sets the limit, the last lifts it.
    """
    global _open_blocks
    blas = _numpy_blas()
    if blas is None:
        yield
        return
    with _lock:
        if not _open_blocks:
            _limits.append(blas.limit(limits=1))
        _open_blocks += 1
    try:
        yield
    finally:
        with _lock:
            _open_blocks -= 1
            if not _open_blocks:
                _limits.pop().restore_original_limits()


def is_open(x: Tensor) -> bool:
    """Whether a product of this matrix may go to NumPy's BLAS here and now."""
    return _open_blocks > 0 and x.ndim == 2 and x.device.type == "cpu" and has_memory(x)


def multiply(a: Tensor, b: Tensor, out: Tensor, *, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """out = alpha a @ b + beta out, for matrices. Returns out."""
    if out.dtype == torch.float32 and is_open(out) and out.stride(1) == 1:
        gemm, left, right = _sgemm(), _layout(a), _layout(b)
        if gemm is not None and left is not None and right is not None:
            # fmt: off
            gemm(ROW_MAJOR, left[0], right[0], *out.shape, a.shape[1], alpha,
                 a.data_ptr(), left[1], b.data_ptr(), right[1], beta, out.data_ptr(), out.stride(0))
            # fmt: on
            return out
    return torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)


def _layout(x: Tensor) -> tuple[int, int] | None:
    """How cblas reads the matrix: as it is or transposed, and the elements from one line to the next."""
    if x.dtype != torch.float32 or not has_memory(x) or 0 in x.shape:
        return None
    rows, columns = x.stride()
    if columns == 1 and rows >= x.shape[1]:
        return AS_IS, rows
    if rows == 1 and columns >= x.shape[0]:
        return TRANSPOSED, columns
    return None


@functools.cache
def _sgemm() -> Callable[..., Any] | None:
    """OpenBLAS' cblas_sgemm, where it is the faster one; wheels add a prefix and a suffix to its name."""
    blas = _numpy_blas()
    if blas is None or not _is_amd() or not is_wanted():
        return None
    for controller in blas.lib_controllers:
        if controller.internal_api != "openblas":
            continue
        for prefix, suffix in itertools.product(("", "scipy_"), ("", "64_", "_64")):
            function = getattr(controller.dynlib, f"{prefix}cblas_sgemm{suffix}", None)
            if function is not None:
                size = c_int64 if suffix else c_int32
                matrix = [c_void_p, size]
                function.argtypes = [*[c_int] * 3, *[size] * 3, c_float, *matrix * 2, c_float, *matrix]
                function.restype = None
                return function
    return None


@functools.cache
def _is_amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
