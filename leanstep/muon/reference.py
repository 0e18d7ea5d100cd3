"""The fp64 reference: one parameter at a time, one line per formula, any float dtype.

    nesterov -> polar -> reduce_variance -> cautious_decay          (matrices)
    adam                                                            (everything else)

Each function returns new tensors and does not modify its arguments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Triples = Sequence[tuple[float, float, float]]

# Polar Express (Amsel et al., arXiv 2505.16932), designed for five steps, safety 0.02, cushion 2.
POLAR_EXPRESS: Triples = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
# Keller Jordan's quintic Newton-Schulz step, repeated, as in torch.optim.Muon.
NEWTON_SCHULZ: Triples = ((3.4445, -4.775, 2.0315),) * 5

# ||X|| must be below 1 although the norm is rounded, so divide by slightly more.
SAFETY = 1.02
ABSOLUTE_EPS = 1e-6


def polar_factor(matrix: Tensor) -> Tensor:
    """Return U V^T of the singular value decomposition, the limit of the iterations. Batched, [..., R, C]."""
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u @ vh


def normalize(update: Tensor, eps_mode: str = "relative") -> Tensor:
    """Return update / (1.02 * its Frobenius norm), per matrix over the last two dimensions.

    `absolute` adds 1e-6 to the divisor, as upstream does: updates below that size shrink.
    `relative` divides by max|update| first, so the result does not depend on the scale; zero stays zero.
    """
    if update.numel() == 0:
        return update
    if eps_mode == "absolute":
        norm = torch.linalg.vector_norm(update, dim=(-2, -1), keepdim=True)
        return update / (norm * SAFETY + ABSOLUTE_EPS)
    largest = update.abs().amax(dim=(-2, -1), keepdim=True)
    scaled = update / torch.where(largest == 0, torch.ones_like(largest), largest)
    norm = torch.linalg.vector_norm(scaled, dim=(-2, -1), keepdim=True)
    return scaled / (norm * SAFETY).clamp_min(torch.finfo(update.dtype).tiny)


def polar(update: Tensor, coefficients: Triples = POLAR_EXPRESS, eps_mode: str = "relative") -> Tensor:
    """Run the odd polynomial iteration X <- aX + (bA + cA^2) X, A = X X^T, in the dtype of `update`."""
    x = normalize(update, eps_mode)
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


def nesterov(grad: Tensor, buffer: Tensor, momentum: float) -> tuple[Tensor, Tensor]:
    """Momentum as an exponential average with look-ahead, no bias correction; return (update, new buffer)."""
    buffer = buffer + (1 - momentum) * (grad - buffer)
    return grad + momentum * (buffer - grad), buffer


def variance_axis(rows: int, cols: int, per: str = "long") -> int:
    """Return the axis to average over: the shorter one (`long`), or always the last (`row`)."""
    return -1 if per == "row" or rows >= cols else -2


def reduce_variance(update: Tensor, second: Tensor, beta2: float, per: str = "long") -> tuple[Tensor, Tensor]:
    """Divide each line by its running rms at constant Frobenius norm (NorMuon); returns (update, second)."""
    axis = variance_axis(update.size(-2), update.size(-1), per)
    mean_square = update.square().mean(axis, keepdim=True)
    second = second + (1 - beta2) * (mean_square - second)
    if per == "row":
        scale = 1 / (second.sqrt() + 1e-8)
    else:
        scale = second.clamp_min(1e-10).rsqrt()
    norm = torch.linalg.vector_norm(update, dim=(-2, -1), keepdim=True)
    scaled_norm = torch.linalg.vector_norm(update * scale, dim=(-2, -1), keepdim=True)
    return update * scale * (norm / scaled_norm.clamp_min(1e-10)), second


def cautious_decay(weight: Tensor, update: Tensor, lr: float, decay: float) -> Tensor:
    """Step against `update`; decay only the entries whose decay does not oppose the step.

    `decay` is weight_decay * (base lr), `lr` the rate with all multipliers: the decay scales with lr^2.
    """
    mask = (update * weight) >= 0
    return weight - ((weight * mask) * decay) * lr - update * lr


def adam(
    weight: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Adam with cautious decay scaled by lr^2; `step` counts from 1. Returns (weight, first, second)."""
    beta1, beta2 = betas
    first = beta1 * first + (1 - beta1) * grad
    second = beta2 * second + (1 - beta2) * grad.square()
    rate = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    update = rate * first / (second.sqrt() + eps)
    mask = (update * weight) > 0
    return weight - (update + (weight * mask) * (lr * lr * weight_decay)), first, second


def shape_factor(rows: int, cols: int, rule: str = "shape") -> float:
    """Return the learning-rate factor of a rows x cols matrix (rows = output features)."""
    if rule == "shape":
        return math.sqrt(max(1.0, rows / cols))
    if rule == "spectral":
        return math.sqrt(rows / cols)
    if rule == "rms":
        return 0.2 * math.sqrt(max(rows, cols))
    return 1.0


def normuon(
    weight: Tensor,
    grad: Tensor,
    buffer: Tensor,
    second: Tensor,
    *,
    lr: float,
    momentum: float = 0.95,
    beta2: float = 0.95,
    weight_decay: float = 0.0,
    lr_mul: float = 1.0,
    rule: str = "shape",
    eps_mode: str = "relative",
) -> tuple[Tensor, Tensor, Tensor]:
    """Make one whole step of one matrix or a bank of matrices; return (weight, buffer, second)."""
    update, buffer = nesterov(grad, buffer, momentum)
    update, second = reduce_variance(polar(update, eps_mode=eps_mode), second, beta2)
    rate = lr * lr_mul * shape_factor(weight.size(-2), weight.size(-1), rule)
    return cautious_decay(weight, update, rate, weight_decay * lr), buffer, second
