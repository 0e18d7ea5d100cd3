"""dst = src^T and dst += src^T for matrices larger than the cache (a tied head and its embedding).

torch's `dst.add_(src.T)` reads or writes one of the two sides with a stride of a whole row. Instead:

    on a GPU   a Triton kernel: tiles, coalesced on both sides
    on a CPU   torch.compile for large tables: 16 x 16 tiles transposed in registers (needs a C++ compiler);
               otherwise cache-sized blocks, transposed into scratch and added row by row

Inside torch.compile a GPU uses one torch.library op, and a CPU the plain expression, which Inductor compiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from leanstep.cpu import find_compiler
from leanstep.output_buffers import has_shared_elements, share_memory
from leanstep.triton_driver import can_launch

# Compiling takes seconds, once: worth it for a table of this size that is transposed every step.
MIN_COMPILED_ELEMENTS = 1 << 22
# Columns per block: 768 x 1024 floats of scratch are 3 MB and stay in the cache until the add.
BLOCK_COLUMNS = 1024
# Functions that torch.compile could not build in this process.
_refused: set[Callable[[Tensor, Tensor], None]] = set()


@torch.no_grad()
def transpose_copy(src: Tensor, dst: Tensor | None = None) -> Tensor:
    """Write src.T of src [R, C] to dst [C, R], or to a new contiguous tensor if dst is None. Return dst.

    Equivalent to:
        dst.copy_(src.T)
    """
    _check_source(src)
    out = src.new_empty(src.shape[::-1]) if dst is None else dst
    _check_target(src, out)
    if src.device.type == "cuda" and triton_kernels() is not None:
        triton_kernels().transpose_copy(src, out)
    elif not _ran_compiled(_copy, out, src):
        # torch's copy_ already works in blocks of 60 x 60: a blocked version in Python is no faster.
        _copy(out, src)
    return out


@torch.no_grad()
def transpose_add(src: Tensor, dst: Tensor) -> Tensor:
    """Add src.T of src [R, C] to dst [C, R], in place. Return dst.

    Equivalent to:
        dst.add_(src.T)
    """
    _check_source(src)
    _check_target(src, dst)
    if src.device.type == "cuda" and triton_kernels() is not None:
        triton_kernels().transpose_add(src, dst)
    elif src.device.type != "cpu" or torch.compiler.is_compiling():
        _add(dst, src)
    elif not _ran_compiled(_add, dst, src):
        add_blocked(dst, src)
    return dst


def _check_source(src: Tensor) -> None:
    if src.ndim != 2:
        raise ValueError(f"src: expected two dimensions, got shape {tuple(src.shape)}")


def _check_target(src: Tensor, dst: Tensor) -> None:
    if dst.shape != (src.size(1), src.size(0)):
        raise ValueError(f"dst: expected shape {(src.size(1), src.size(0))}, got {tuple(dst.shape)}")
    if src.device != dst.device:
        raise ValueError(f"dst: expected device {src.device}, got {dst.device}")
    if not torch.compiler.is_compiling() and (share_memory(src, dst) or has_shared_elements(dst)):
        raise ValueError("dst: expected memory that overlaps neither src nor itself, got overlapping memory")


def add_blocked(dst: Tensor, src: Tensor) -> None:
    """dst += src.T, in blocks of columns."""
    length, width = src.shape
    scratch = torch.empty(width * min(BLOCK_COLUMNS, length), dtype=src.dtype, device=src.device)
    for begin in range(0, length, BLOCK_COLUMNS):
        rows = src[begin : begin + BLOCK_COLUMNS]
        block = scratch[: rows.numel()].view(width, rows.size(0))
        block.copy_(rows.T)
        dst[:, begin : begin + rows.size(0)].add_(block)


def _copy(dst: Tensor, src: Tensor) -> None:
    dst.copy_(src.T)


def _add(dst: Tensor, src: Tensor) -> None:
    dst.add_(src.T)


def _ran_compiled(function: Callable[[Tensor, Tensor], None], dst: Tensor, src: Tensor) -> bool:
    """Run `function` compiled, on a CPU; return False, with nothing written, if it does not pay or fails."""
    large = src.device.type == "cpu" and src.numel() >= MIN_COMPILED_ELEMENTS
    if torch.compiler.is_compiling() or not large or function in _refused or not _has_compiler():
        return False
    try:
        _compiled(function)(dst, src)
    except RuntimeError as error:
        if not type(error).__module__.startswith("torch._dynamo"):
            raise
        # torch generates C++ for the processor it is configured for, but the compiler targets the real one.
        _refused.add(function)
    return function not in _refused


@functools.cache
def _has_compiler() -> bool:
    return find_compiler() is not None


@functools.cache
def _compiled(function: Callable[[Tensor, Tensor], None]) -> Callable[[Tensor, Tensor], None]:
    return torch.compile(function)


@torch.compiler.assume_constant_result
def _has_triton() -> bool:
    return can_launch()


def triton_kernels() -> Any:
    """Return the module of Triton kernels, or None if Triton cannot launch them."""
    if not _has_triton():
        return None
    from leanstep.muon import kernel

    return kernel
