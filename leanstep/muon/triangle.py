"""x @ x^T at half the price on one core: NumPy hands it to the BLAS routine that computes one triangle.

torch multiplies both triangles and has no operator for one. NumPy recognises a matrix times its own
transpose, calls SYRK and mirrors the result. Its BLAS brings threads of its own, which would fight torch's
over the cores; so SYRK is used only inside `one_triangle_allowed`, where both work with one thread per job.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

import numpy as np
import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor

from leanstep.cores import is_watched

_allowed = 0
_lock = threading.Lock()


@functools.cache
def _numpy_blas() -> ThreadpoolController | None:
    """The thread control of NumPy's BLAS, or None when it is of a kind that nobody can limit."""
    found = ThreadpoolController().select(user_api="blas")
    return found if found.lib_controllers else None


@contextlib.contextmanager
def one_triangle_allowed() -> Iterator[None]:
    """NumPy's BLAS works with one thread per call until the end of the block, and `square_into` uses it.

    Not while somebody watches: a profiler or a planner sees torch's operations only.
    """
    global _allowed
    blas = None if is_watched() else _numpy_blas()
    if blas is None:
        yield
        return
    with blas.limit(limits=1):
        with _lock:
            _allowed += 1
        try:
            yield
        finally:
            with _lock:
                _allowed -= 1


def can_square(x: Tensor) -> bool:
    """Whether `square_into` may be used for x here and now."""
    return (
        _allowed > 0
        and type(x) is Tensor
        and x.device.type == "cpu"
        and x.ndim == 2
        and x.dtype in (torch.float32, torch.float64)
    )


def square_into(x: Tensor, out: Tensor, *, tall: bool = False) -> Tensor:
    """out = x @ x.mT, or x.mT @ x when `tall`. Returns out."""
    rows = x.numpy().T if tall else x.numpy()
    np.matmul(rows, rows.T, out=out.numpy())
    return out
