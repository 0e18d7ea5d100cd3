"""Kernels with one bug each, and similar correct ones."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def half_arithmetic_kernel(x_ptr, y_ptr, sum_ptr, product_ptr, less_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(sum_ptr + at, x + y)
    tl.store(less_ptr + at, (x < y).to(tl.int8))
    tl.store(product_ptr + at, tl.dot(x, y, input_precision="ieee"))


@triton.jit
def double_kernel(x_ptr, size, BLOCK: tl.constexpr, MASK: tl.constexpr):
    """x <- 2 x; without MASK the last program accesses memory outside the tensor."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < (size if MASK else size + 1)
    tl.store(x_ptr + at, 2 * tl.load(x_ptr + at, mask=inside, other=0.0), mask=inside)


@triton.jit
def reverse_kernel(x_ptr, BLOCK: tl.constexpr, BARRIER: tl.constexpr):
    """x <- x in reverse order: what a lane overwrites, another one loads."""
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    if BARRIER:
        tl.debug_barrier()
    tl.store(x_ptr + BLOCK - 1 - at, x)


@triton.jit
def pass_on_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr, BARRIER: tl.constexpr):
    """A lane loads what its neighbour stored."""
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, at)
    if BARRIER:
        tl.debug_barrier()
    tl.store(out_ptr + at, tl.load(x_ptr + (at + 1) % BLOCK))


@triton.jit
def scalar_then_block_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr, BARRIER: tl.constexpr):
    """Every lane loads the first element, then one of them overwrites it."""
    first = tl.load(x_ptr)
    if BARRIER:
        tl.debug_barrier()
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, at + first)


@triton.jit
def all_programs_kernel(x_ptr, out_ptr, KIND: tl.constexpr):
    """Programs 0 to 3: all store one address, all add to it, or load what the next one stores."""
    pid = tl.program_id(0)
    if KIND == "store":
        tl.store(out_ptr, pid)
    elif KIND == "atomic":
        tl.atomic_add(out_ptr, pid)
    elif KIND == "atomic and load":
        tl.store(x_ptr + pid, tl.load(out_ptr))
        tl.atomic_add(out_ptr, pid)
    else:
        tl.store(x_ptr + pid, tl.load(x_ptr + (pid + 1) % 4))
