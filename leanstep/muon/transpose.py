"""dst = src^T and dst += src^T for matrices larger than the cache (a tied head and its embedding).

torch's `dst.add_(src.T)` reads or writes one of the two sides with a stride of a whole row. Implementations:

    triton     on a GPU: tiles, coalesced on both sides
    compiled   torch.compile on the CPU: 16 x 16 tiles transposed in registers (needs a C++ compiler)
    blocked    plain torch: transpose a cache-sized block into scratch, then add it row by row
    stock      dst.copy_(src.T), dst.add_(src.T)

Inside torch.compile a CPU uses `stock`, which Inductor compiles; a GPU uses one torch.library op.
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

IMPLEMENTATIONS = ("auto", "triton", "compiled", "blocked", "stock")
# Compiling takes seconds, once: worth it for a table of this size that is transposed every step.
MIN_COMPILED_ELEMENTS = 1 << 22
# Columns per block: 768 x 1024 floats of scratch are 3 MB and stay in the cache until the add.
BLOCK_COLUMNS = 1024
# Functions that torch.compile could not build in this process.
_refused: set[Callable[[Tensor, Tensor], None]] = set()


def choose_transpose(src: Tensor) -> str:
    """Return the implementation that `auto` selects for this tensor."""
    if src.device.type == "cuda" and triton_kernels() is not None:
        return "triton"
    if src.device.type != "cpu":
        return "stock"
    if src.numel() >= MIN_COMPILED_ELEMENTS and _has_compiler():
        return "compiled"
    return "blocked"


@functools.cache
def _has_compiler() -> bool:
    return find_compiler() is not None


def _check(src: Tensor, dst: Tensor, impl: str) -> str:
    if src.ndim != 2:
        raise ValueError(f"src: expected two dimensions, got shape {tuple(src.shape)}")
    if dst.shape != (src.size(1), src.size(0)):
        raise ValueError(f"dst: expected shape {(src.size(1), src.size(0))}, got {tuple(dst.shape)}")
    if src.device != dst.device:
        raise ValueError(f"dst: expected device {src.device}, got {dst.device}")
    if not torch.compiler.is_compiling() and (share_memory(src, dst) or has_shared_elements(dst)):
        raise ValueError("dst: expected memory that overlaps neither src nor itself, got overlapping memory")
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl: expected one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    if torch.compiler.is_compiling():
        return "stock" if src.device.type == "cpu" and impl != "triton" else "traced"
    return choose_transpose(src) if impl == "auto" else impl


@torch.library.custom_op("leanstep::transpose", mutates_args=("dst",))
def _transpose_op(src: Tensor, dst: Tensor, add: bool) -> None:
    # On a CPU this runs only if the caller requests Triton's interpreter.
    impl = "triton" if src.device.type == "cpu" else "auto"
    transpose_add(src, dst, impl=impl) if add else transpose_copy(src, dst, impl=impl)


@torch.no_grad()
def transpose_copy(src: Tensor, dst: Tensor | None = None, *, impl: str = "auto") -> Tensor:
    """Write src.T of src [R, C] to dst [C, R], or to a new contiguous tensor if dst is None. Return dst.

    Equivalent to:
        dst.copy_(src.T)
    """
    out = src.new_empty(src.shape[::-1]) if dst is None else dst
    impl = _check(src, out, impl)
    if impl == "traced":
        _transpose_op(src, out, False)
    elif impl == "triton":
        triton_kernels().transpose_copy(src, out)
    elif impl != "compiled" or not _ran_compiled(_copy, out, src):
        # torch's copy_ already works in blocks of 60 x 60: a blocked version in Python is no faster.
        out.copy_(src.T)
    return out


@torch.no_grad()
def transpose_add(src: Tensor, dst: Tensor, *, impl: str = "auto") -> Tensor:
    """Add src.T of src [R, C] to dst [C, R], in place. Return dst.

    Equivalent to:
        dst.add_(src.T)
    """
    impl = _check(src, dst, impl)
    if impl == "traced":
        _transpose_op(src, dst, True)
    elif impl == "triton":
        triton_kernels().transpose_add(src, dst)
    elif impl == "stock":
        dst.add_(src.T)
    elif impl != "compiled" or not _ran_compiled(_add, dst, src):
        _add_blocked(dst, src)
    return dst


def _add_blocked(dst: Tensor, src: Tensor) -> None:
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
    """Run `function` compiled; return False, with nothing written, if torch.compile cannot build it here."""
    if function in _refused:
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
def _compiled(function: Callable[[Tensor, Tensor], None]) -> Callable[[Tensor, Tensor], None]:
    return torch.compile(function)


@functools.cache
def triton_kernels() -> Any:
    """Return the module of Triton kernels, or None if Triton cannot launch them."""
    if not can_launch():
        return None
    from leanstep.muon import kernel

    return kernel
