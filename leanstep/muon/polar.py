"""Polar Express: the nearest semi-orthogonal matrix in five polynomial steps.

    standard   A = X X^T;  X <- (aI + bA + cA^2) X
    gram       the same polynomials in n x n: Q <- P Q, G <- P G P, and finally O = Q X

A tall X uses A = X^T X and multiplies from the right, so nothing is transposed. On a GPU the symmetric
products in half precision are Triton kernels (`kernel.py`). On a CPU in float32 a symmetric product is
computed in row panels up to the diagonal and mirrored, and matrices with a ratio of the sides above 4/3 use
the gram form.
"""

# B matrices · R rows · C columns · n = min(R, C)

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from leanstep.cpu import cpu_bfloat16_speedup
from leanstep.muon.reference import ABSOLUTE_EPS, POLAR_EXPRESS, SAFETY, Triples
from leanstep.muon.transpose import triton_kernels

EPS_MODES = ("relative", "absolute")
HALF = (torch.bfloat16, torch.float16)
PANELS = 4  # of a symmetric product on a CPU: 5/8 of the operations of a full one
MIN_PANEL_SIDE = 256
MIN_GRAM_SIDE = 256
GRAM_RATIO = 4 / 3  # from this ratio of the sides, the n x n form needs fewer operations
# On a CPU half precision is faster only if the product is large enough to hide the conversions.
MIN_HALF_SIDE = 256
MIN_HALF_SPEEDUP = 1.3
# Largest number of elements in one batched product. On a CPU larger stacks leave the cache.
MAX_STACK_ELEMENTS = {"cpu": 1 << 19}
MAX_STACK_ELEMENTS_ON_GPU = 1 << 26


@torch.compiler.assume_constant_result
def cpu_prefers_half() -> bool:
    """Return whether this CPU multiplies bfloat16 faster than float32; measured once, milliseconds."""
    return cpu_bfloat16_speedup() > MIN_HALF_SPEEDUP


def product_dtype(
    x: Tensor, requested: torch.dtype | str = "auto", cpu_half: bool | None = None
) -> torch.dtype:
    """Return the dtype of the products of x [..., R, C]; `cpu_half` replaces the measurement."""
    if isinstance(requested, torch.dtype):
        return requested
    if x.dtype == torch.float64:
        return torch.float64
    if x.device.type != "cpu":
        return torch.bfloat16
    if min(x.shape[-2:]) < MIN_HALF_SIDE:
        return torch.float32
    return torch.bfloat16 if (cpu_prefers_half() if cpu_half is None else cpu_half) else torch.float32


def stack_limit(rows: int, cols: int, device: torch.device) -> int:
    """Return the number of matrices in one batched product."""
    return max(1, MAX_STACK_ELEMENTS.get(device.type, MAX_STACK_ELEMENTS_ON_GPU) // max(1, rows * cols))


def has_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in HALF and triton_kernels() is not None


def symmetric(
    a: Tensor, b: Tensor, add: Tensor | None = None, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """Return a @ b, or beta * add + alpha * a @ b, of [B, n, *] and [B, *, n], which must be symmetric."""
    side = a.size(-2)
    # Half precision on a CPU (oneDNN) is fastest with one full product.
    if a.device.type != "cpu" or torch.compiler.is_compiling() or a.dtype in HALF or side < MIN_PANEL_SIDE:
        return torch.bmm(a, b) if add is None else torch.baddbmm(add, a, b, beta=beta, alpha=alpha)
    out = a.new_empty(a.size(0), side, side)
    # Multiples of 16 keep the panels aligned to vector registers.
    edges = [round(side * i / PANELS / 16) * 16 for i in range(PANELS)] + [side]
    for begin, end in itertools.pairwise(edges):
        left, right = a[:, begin:end], b[:, :, :end]
        if add is None:
            out[:, begin:end, :end] = torch.bmm(left, right)
        else:
            same = add[:, begin:end, :end]
            out[:, begin:end, :end] = torch.baddbmm(same, left, right, beta=beta, alpha=alpha)
        out[:, :begin, begin:end] = out[:, begin:end, :begin].mT
    return out


def gram_matrix(x: Tensor, tall: bool) -> Tensor:
    """Return x @ x.mT, or x.mT @ x if `tall`, of x [B, R, C]."""
    if has_kernel(x):
        side = x.size(-1 if tall else -2)
        out = x.new_empty(x.size(0), side, side)
        return triton_kernels().xtx(x, out) if tall else triton_kernels().xxt(x, out)
    return symmetric(x.mT, x) if tall else symmetric(x, x.mT)


def quadratic(gram: Tensor, b: float, c: float) -> Tensor:
    """Return b * gram + c * gram @ gram of a symmetric gram [B, n, n]."""
    if has_kernel(gram):
        return triton_kernels().ba_caa(gram, torch.empty_like(gram), alpha=c, beta=b)
    return symmetric(gram, gram, gram, beta=b, alpha=c)


def normalize(update: Tensor, dtype: torch.dtype, eps_mode: str = "relative") -> Tensor:
    """Return update / (1.02 * its norm) per matrix [B, R, C], in `dtype`; see `reference.normalize`."""
    update = update.to(torch.promote_types(update.dtype, torch.float32))
    if eps_mode == "absolute":
        return (update / (_norm(update) * SAFETY + ABSOLUTE_EPS)).to(dtype)
    tiny = torch.finfo(update.dtype).tiny
    # Two vectorised passes: torch's infinity norm runs element by element, twenty times slower.
    largest = torch.maximum(update.amax((-2, -1), keepdim=True), -update.amin((-2, -1), keepdim=True))
    # A division, not a product with the reciprocal: 1 / largest overflows for subnormal updates.
    scaled = update / largest.clamp_min(tiny)
    inverse = 1 / (_norm(scaled) * SAFETY).clamp_min(tiny)
    return scaled.mul_(inverse) if dtype == update.dtype else (scaled * inverse).to(dtype)


def _norm(x: Tensor) -> Tensor:
    # Rows first: one float32 sum over millions of squares has an error of 1e-4, two short sums one of 1e-7.
    rows = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.linalg.vector_norm(rows, dim=-2, keepdim=True)


def iterate(x: Tensor, coefficients: Triples = POLAR_EXPRESS) -> Tensor:
    """Return the approximate polar factors of normalised matrices x [B, R, C], in the dtype of x."""
    rows, cols = x.shape[-2:]
    tall, side = rows > cols, min(rows, cols)
    half = x.dtype in HALF
    gram = gram_matrix(x, tall)
    # Squaring in half precision loses singular values below 0.1; small matrices can afford the extra digits.
    if half or side < MIN_GRAM_SIDE or max(rows, cols) < GRAM_RATIO * side:
        for i, (a, b, c) in enumerate(coefficients):
            if i:
                gram = gram_matrix(x, tall)
            poly = quadratic(gram, b, c)
            if half:  # aI + poly would round poly away
                x = torch.baddbmm(x, x, poly, beta=a) if tall else torch.baddbmm(x, poly, x, beta=a)
            else:
                poly.diagonal(dim1=-2, dim2=-1).add_(a)
                x = torch.bmm(x, poly) if tall else torch.bmm(poly, x)
        return x
    total = None
    for i, (a, b, c) in enumerate(coefficients):
        poly = quadratic(gram, b, c)
        poly.diagonal(dim1=-2, dim2=-1).add_(a)
        if i + 1 < len(coefficients):
            gram = symmetric(symmetric(poly, gram), poly)
        # The factors commute up to rounding, which low-rank matrices amplify: full products from the third.
        multiply = symmetric if i == 1 else torch.bmm
        total = poly if total is None else multiply(*((total, poly) if tall else (poly, total)))
    assert total is not None
    return torch.bmm(x, total) if tall else torch.bmm(total, x)


@torch.no_grad()
def polar(
    update: Tensor,
    *,
    coefficients: Triples = POLAR_EXPRESS,
    eps_mode: str = "relative",
    compute_dtype: torch.dtype | str = "auto",
) -> Tensor:
    """Return the approximate polar factor U V^T of every matrix in `update`.

    Equivalent to:
        factor = leanstep.muon.reference.polar(update, coefficients, eps_mode)

    Args:
        update: [..., R, C], any float dtype and strides; not modified.
        coefficients: (a, b, c) per step.
        eps_mode: relative (any scale gives the same result; zero gives zero) or absolute (adds 1e-6
            to the norm, as the speedrun does).
        compute_dtype: of the products. auto: bfloat16 on a GPU, and on a CPU that multiplies it faster.

    Returns:
        [..., R, C] in the dtype of `update`; singular values for a Gaussian matrix are in 0.86 .. 1.14.
        No gradient flows through it. Traces in `torch.compile(fullgraph=True)`.

    Peak extra memory: three copies of a batch of matrices plus four of its smaller square.
    Collectives: none.
    """
    if not update.is_floating_point() or update.layout != torch.strided:
        raise ValueError(f"update: expected a dense real floating tensor, got {update.dtype} {update.layout}")
    if update.ndim < 2:
        raise ValueError(f"update: expected at least two dimensions, got shape {tuple(update.shape)}")
    check_polar_options(eps_mode, compute_dtype)
    if update.numel() == 0:
        return update.clone()
    rows, cols = update.shape[-2:]
    dtype = product_dtype(update, compute_dtype)
    parts = update.reshape(-1, rows, cols).split(stack_limit(rows, cols, update.device))
    factors = [iterate(normalize(part, dtype, eps_mode), coefficients).to(update.dtype) for part in parts]
    return (factors[0] if len(factors) == 1 else torch.cat(factors)).view(update.shape)


def check_polar_options(eps_mode: str, compute_dtype: torch.dtype | str) -> None:
    if eps_mode not in EPS_MODES:
        raise ValueError(f"eps_mode: expected one of {', '.join(EPS_MODES)}, got {eps_mode!r}")
    if compute_dtype != "auto" and not (
        isinstance(compute_dtype, torch.dtype) and compute_dtype.is_floating_point
    ):
        raise ValueError(f"compute_dtype: expected 'auto' or a floating-point dtype, got {compute_dtype!r}")
