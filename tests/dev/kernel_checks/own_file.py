"""A user's file for `python -m dev.kernels FILE.py`: kernels, a function that calls one, launch()."""

import torch
import triton
import triton.language as tl


@triton.jit
def add_one_kernel(x_ptr, size, BLOCK: tl.constexpr, MASK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < (size if MASK else size + 1)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=inside) + 1, mask=inside)


@triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128}, num_warps=8)], key=["size"])
@triton.jit
def scale_kernel(x_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 2 * tl.load(x_ptr + at, mask=at < size), mask=at < size)


@triton.jit
def forgotten_kernel(x_ptr):
    tl.store(x_ptr, 0.0)


def launch():
    x = torch.ones(100, device="cuda")
    add_one_kernel[(2,)](x, len(x), BLOCK=64, MASK=True)
    scale_kernel[lambda meta: (triton.cdiv(len(x), meta["BLOCK"]),)](x, len(x))
    # Another type, and a pointer that is no multiple of 16 bytes.
    y = torch.ones(101, device="cuda", dtype=torch.bfloat16)
    add_one_kernel[(2,)](y[1:], 100, BLOCK=64, MASK=True)
    return {"x": x, "y": y}


def plain():
    y = torch.full((101,), 2.0, dtype=torch.bfloat16)
    y[0] = 1
    return {"x": torch.full((100,), 4.0), "y": y}


def plain_that_differs():
    return {"x": torch.full((100,), 3.0), "y": plain()["y"]}


def plain_of_something_else():
    return torch.zeros(3)


def launch_with_a_step_too_far():
    add_one_kernel[(2,)](torch.ones(100).to("cuda"), 100, BLOCK=64, MASK=False)


def launch_nothing():
    torch.cuda.synchronize()


def launch_and_fail():
    raise ValueError("no such size")
