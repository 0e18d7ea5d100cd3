"""modded-nanogpt: leanstep's functions with upstream's names and argument order.

    -from triton_kernels import XXT, XTX, ba_plus_cAA, transpose_add, transpose_copy
    +from leanstep.integrations.modded_nanogpt import XXT, XTX, ba_plus_cAA, transpose_add, transpose_copy

`polar_express` replaces the compiled function of that name in train_gpt.py, `unbind_bank` the lines that read
weights from a bank. All of them trace under `torch.compile(fullgraph=True)`. On a CPU, where upstream's
kernels do not run, the same calls use torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leanstep.muon import polar, transpose_add, transpose_copy, unbind_bank
from leanstep.muon.polar import has_kernel
from leanstep.muon.transpose import triton_kernels

__all__ = [
    "XTX",
    "XXT",
    "ba_plus_cAA",
    "polar_express",
    "transpose_add",
    "transpose_copy",
    "unbind_bank",
]


def XXT(A: Tensor, out: Tensor) -> Tensor:
    """out = A @ A.mT for A [M, K] or [B, M, K]; returns out."""
    return triton_kernels().xxt(A, out) if has_kernel(A) else out.copy_(A @ A.mT)


def XTX(A: Tensor, out: Tensor) -> Tensor:
    """out = A.mT @ A for A [M, K] or [B, M, K]; returns out."""
    return triton_kernels().xtx(A, out) if has_kernel(A) else out.copy_(A.mT @ A)


def ba_plus_cAA(A: Tensor, alpha: float, beta: float, out: Tensor) -> Tensor:
    """out = alpha * A @ A + beta * A for a symmetric A [M, M] or [B, M, M]; returns out."""
    if has_kernel(A):
        return triton_kernels().ba_caa(A, out, alpha=alpha, beta=beta)
    add = torch.addmm if A.ndim == 2 else torch.baddbmm
    return out.copy_(add(A, A, A, beta=beta, alpha=alpha))


@torch.no_grad()
def polar_express(
    grad_chunk: Tensor, momentum_buffer: Tensor, momentum_t: Tensor, split_baddbmm: bool = False
) -> Tensor:
    """Apply Nesterov momentum, then compute the polar factor of the update, for wide and tall matrices.

    Equivalent to:
        momentum_buffer.lerp_(grad_chunk, 1 - momentum_t)
        grad_chunk.lerp_(momentum_buffer, momentum_t)
        factor = leanstep.muon.reference.polar(grad_chunk, POLAR_EXPRESS, "absolute").bfloat16()

    Args:
        grad_chunk: [R, C] or [B, R, C] float32; holds the update afterwards, as upstream's does.
        momentum_buffer: like `grad_chunk`, advanced in place.
        momentum_t: 0-d tensor on the CPU, so that a new value does not trigger recompilation.
        split_baddbmm: accepted and ignored: which products are split is leanstep's choice.

    Returns:
        bfloat16, shaped like `grad_chunk`. With a float for the momentum: `momentum_polar`.
    """
    momentum = momentum_t.to(grad_chunk.dtype)
    momentum_buffer.lerp_(grad_chunk, 1 - momentum)
    update = grad_chunk.lerp_(momentum_buffer, momentum)
    factor = polar(update, eps_mode="absolute", compute_dtype=torch.bfloat16)
    return factor.bfloat16()
