"""A Triton kernel for relu² between the two products of an MLP, forward and backward in one pass each.

    squares <- relu(x)²                                   one read, one write
    squares <- relu(x)², grad <- grad relu(x)             two reads, two writes

The slope of relu(x)² is 2 relu(x); the 2 goes into the small matrices (`layers.py`). The plain path there is
its oracle.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def squared_relu_kernel(
    x_ptr, squares_ptr, grad_ptr, size, HAS_GRAD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    # As torch's relu: NaN stays NaN.
    r = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(squares_ptr + offsets, (r * r).to(squares_ptr.dtype.element_ty), mask=inside)
    if HAS_GRAD:
        grad = tl.load(grad_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_ptr + offsets, (grad * r).to(grad_ptr.dtype.element_ty), mask=inside)


def squared_relu(x: Tensor, grad: Tensor | None = None) -> Tensor:
    """relu(x)²; `grad`, if given, is multiplied by relu(x) in place. All contiguous, of one shape."""
    squares, size = torch.empty_like(x), x.numel()
    if size:
        with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
            squared_relu_kernel[(triton.cdiv(size, BLOCK),)](
                x, squares, x if grad is None else grad, size,
                HAS_GRAD=grad is not None, BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip
    return squares


def _entry(suffix: str, has_grad: bool) -> dict[str, Any]:
    constants = {"HAS_GRAD": has_grad, "BLOCK": BLOCK}
    pointers = dict.fromkeys(("x_ptr", "squares_ptr", "grad_ptr"), "*bf16")
    return {
        "name": f"squared_relu{suffix}",
        "fn": squared_relu_kernel,
        "signature": {**pointers, "size": "i64", **dict.fromkeys(constants, "constexpr")},
        "constexprs": constants,
        "num_warps": 4,
        "num_stages": 3,
    }


AOT_KERNELS: list[dict] = [_entry("", False), _entry("_backward", True)]
