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
def same_address_kernel(out_ptr, BLOCK: tl.constexpr, EQUAL: tl.constexpr):
    """All lanes of a store have one address."""
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at * 0, at * 0 if EQUAL else at)


@triton.jit
def two_stores_kernel(out_ptr, BLOCK: tl.constexpr, EQUAL: tl.constexpr):
    """Two lanes write one address in two stores."""
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, at * 0)
    tl.store(out_ptr + BLOCK - 1 - at, at * 0 if EQUAL else at + 1)


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


@triton.jit
def rows_kernel(x_ptr, stride, WIDE: tl.constexpr):
    """x[row, 0] <- row; 32-bit offsets leave a large tensor."""
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    tl.store(x_ptr + row * stride, 1)


@triton.jit
def neighbour_kernel(x_ptr, y_ptr, distance):
    """Load `distance` elements past x, where y may be."""
    tl.store(y_ptr, tl.load(x_ptr + distance))


@triton.jit
def float_argument_kernel(out_ptr, value):
    """Floats are float32 tensors on a GPU: they have a type to convert from."""
    tl.store(out_ptr, value.to(tl.float64))


@triton.jit
def ticket_kernel(ticket_ptr, out_ptr):
    """Each program stores its position in the execution order."""
    tl.store(out_ptr + tl.program_id(0), tl.atomic_add(ticket_ptr, 1))
