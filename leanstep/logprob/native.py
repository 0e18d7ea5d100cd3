"""The passes over a tile of logits on a CPU: native.cpp, which `leanstep.cpu` builds once per machine.

Same functions as kernel.py, for fp32 tiles whose rows are contiguous. A call is the work of one core;
`leanstep.cpu` gives every core its own tiles.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from pathlib import Path

from torch import Tensor

from leanstep.cpu import load_library

SOURCE = Path(__file__).with_name("native.cpp")


def _declare(library: ctypes.CDLL) -> None:
    tail = [c_void_p, c_int64, *[c_void_p] * 4]
    library.update_statistics.argtypes = [c_void_p, *[c_int64] * 3, *tail]
    library.scale_exponentials.argtypes = [c_void_p, c_void_p, *[c_int64] * 4, *tail]
    library.update_statistics.restype = library.scale_exponentials.restype = None


def is_built() -> bool:
    """Whether the library can be called; builds it when this machine has not done so yet."""
    return not isinstance(load_library(SOURCE, _declare), str)


def _library() -> ctypes.CDLL:
    library = load_library(SOURCE, _declare)
    assert not isinstance(library, str), library
    return library


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def update_statistics(
    z: Tensor,
    maximum: Tensor,
    total: Tensor,
    moment: Tensor | None,
    tokens: Tensor | None = None,
    first: int = 0,
    target: Tensor | None = None,
) -> None:
    """Add the columns of `z` [R, W] fp32 to the running m, s and t (None: not kept), in place.

    With `tokens` [R], `target` gets the logits of those that the tile, which begins at id `first`, holds.
    """
    vectors = (target if tokens is not None else None, maximum, total, moment)
    _library().update_statistics(
        z.data_ptr(), *z.shape, z.stride(0), _address(tokens), first, *map(_address, vectors)
    )


def scale_exponentials(
    z: Tensor,
    out: Tensor,
    maximum: Tensor,
    constant: Tensor,
    slope: Tensor | None,
    tokens: Tensor | None = None,
    first: int = 0,
    target: Tensor | None = None,
) -> Tensor:
    """out <- e^(z-m) (constant + slope (z-m)) per row; 0 where e^(z-m) is 0. `out` may be `z`.

    With `target` [R] that is added at the tokens that the tile, which begins at id `first`, holds.
    """
    strides, vectors = (z.stride(0), out.stride(0)), (target, maximum, constant, slope)
    _library().scale_exponentials(
        z.data_ptr(), out.data_ptr(), *z.shape, *strides, _address(tokens), first, *map(_address, vectors)
    )
    return out
