"""modded-nanogpt: leanstep's functions with upstream's names and argument order.

    -from triton_kernels import XXT, XTX, ba_plus_cAA, transpose_add, transpose_copy
    +from leanstep.integrations.modded_nanogpt import XXT, XTX, ba_plus_cAA, transpose_add, transpose_copy

`polar_express` replaces the compiled function of that name in train_gpt.py, `unbind_bank` the lines that read
weights from a bank. All of them trace under `torch.compile(fullgraph=True)`. On a CPU, where upstream's
kernels do not run, the same calls use torch. docs/modded_nanogpt.md has the figures.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leanstep.gpt import unbind_bank
from leanstep.muon import polar, transpose_add, transpose_copy
from leanstep.muon.polar import gram_matrix, quadratic

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
    return gram_matrix(A, out)


def XTX(A: Tensor, out: Tensor) -> Tensor:
    """out = A.mT @ A for A [M, K] or [B, M, K]; returns out."""
    return gram_matrix(A, out, tall=True)


def ba_plus_cAA(A: Tensor, alpha: float, beta: float, out: Tensor) -> Tensor:
    """out = alpha * A @ A + beta * A for a symmetric A [M, M] or [B, M, M]; returns out."""
    return quadratic(A, out, 0.0, beta, alpha, identity=False)


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
        bfloat16, shaped like `grad_chunk`. For a float instead of `momentum_t` and momentum, norm and cast in
        one pass, see `leanstep.muon.momentum_polar`.
    """
    momentum = momentum_t.to(grad_chunk.dtype)
    momentum_buffer.lerp_(grad_chunk, 1 - momentum)
    update = grad_chunk.lerp_(momentum_buffer, momentum)
    factor = polar(update, eps_mode="absolute", method="standard", compute_dtype=torch.bfloat16)
    return factor.bfloat16()
