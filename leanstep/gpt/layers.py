"""Residual stream, norms and MLP with hand-written backwards: fewer passes over [T, E], fewer saved tensors.

Autograd on the plain code saves most intermediates and reads every tensor several times; a norm alone takes
a dozen passes. Each function here saves only the tensors its backward needs and works in place on tensors
that it owns.
"""

# T tokens · E model · F hidden

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

EPS = torch.finfo(torch.float32).eps


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which statistics are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def inverse_rms(x: Tensor) -> Tensor:
    """Return 1 / sqrt(mean(x^2) + eps) over the last dimension, which becomes 1."""
    square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide_dtype(x.dtype)).square_()
    return square.div_(x.shape[-1]).add_(EPS).rsqrt_()


def add_norm_backward(out: Tensor, grad: Tensor, normed: Tensor, inverse: Tensor) -> Tensor:
    """out += gradient of an RMS norm: inverse * (grad - normed * mean(grad * normed)). In place on `out`."""
    mean = (grad * normed).sum(-1, keepdim=True, dtype=inverse.dtype).div_(-normed.shape[-1]).mul_(inverse)
    out.addcmul_(grad, inverse.to(out.dtype))
    return out.addcmul_(normed, mean.to(out.dtype))


Number = float | Tensor


def number(x: Number) -> Number:
    """Return a 0-dimensional CPU tensor as a float (a faster operand); on a GPU unchanged: no sync."""
    if isinstance(x, int | float):
        return x
    return x.item() if x.device.type == "cpu" else x


def add_scaled(out: Tensor, x: Tensor, factor: float | Tensor) -> Tensor:
    """out += factor * x, in place."""
    return out.addcmul_(x, factor) if isinstance(factor, Tensor) else out.add_(x, alpha=factor)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum of products, 0-dimensional. Not torch.dot: BLAS adds in order, ten times less exact."""
    return (a * b).sum()


class Norm(torch.autograd.Function):
    """RMS norm over the last dimension."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        inverse = inverse_rms(x)
        normed = x * inverse.to(x.dtype)
        ctx.save_for_backward(normed, inverse)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[override]
        normed, inverse = ctx.saved_tensors
        return add_norm_backward(torch.zeros_like(normed), grad, normed, inverse)


class Mix(torch.autograd.Function):
    """sum_i factors_i * tensors_i + injected terms.

    Arguments: edge (of `Injections`, or None), injected [(number, tensor)], then n factors (0-dimensional
    tensors or floats), then n tensors.
    """

    @staticmethod
    def forward(ctx, edge: Tensor | None, injected: list[tuple[Number, Tensor]], *arguments) -> Tensor:
        half = len(arguments) // 2
        tensors = arguments[half:]
        ctx.numbers = [number(f) for f in arguments[:half]]
        ctx.factor_dtypes = [f.dtype if isinstance(f, Tensor) else None for f in arguments[:half]]
        ctx.save_for_backward(*tensors)
        out = tensors[0] * ctx.numbers[0]
        for factor, x in zip(ctx.numbers[1:], tensors[1:], strict=True):
            add_scaled(out, x, factor)
        for factor, x in injected:
            add_scaled(out, x, factor)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        tensors = ctx.saved_tensors
        edge = grad if ctx.needs_input_grad[0] else None
        needs = ctx.needs_input_grad[2:]
        grad_factors = [
            dot(grad, x).to(dtype) if need else None
            for dtype, x, need in zip(ctx.factor_dtypes, tensors, needs, strict=False)
        ]
        grad_tensors = [
            grad * factor if need else None
            for factor, need in zip(ctx.numbers, needs[len(tensors) :], strict=True)
        ]
        return edge, None, *grad_factors, *grad_tensors


class NormLinear(torch.autograd.Function):
    """norm(x) @ weight.T."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        inverse = inverse_rms(x)
        normed = x * inverse.to(x.dtype)
        ctx.save_for_backward(normed, inverse, weight)
        return torch.mm(normed, weight.T)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        normed, inverse, weight = ctx.saved_tensors
        grad_normed = torch.mm(grad, weight)
        grad_x = add_norm_backward(torch.zeros_like(normed), grad_normed, normed, inverse)
        return grad_x, torch.mm(grad.T, normed)


def _mlp_forward(x: Tensor, first: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return norm(x), its 1 / rms, the rectified hidden layer and its squares."""
    inverse = inverse_rms(x)
    normed = x * inverse.to(x.dtype)
    hidden = torch.mm(normed, first.T).relu_()
    return normed, inverse, hidden, hidden.square()


def _mlp_backward(grad, scale: Number, normed, inverse, hidden, first, second, grad_x):
    """Return gradients of the matrices and of the scale before the MLP; add the input's to `grad_x`."""
    # relu(p)^2 has slope 2 relu(p), which is zero where p is negative: no mask needed. The constant and the
    # scale are folded into the small matrices.
    squared = hidden.square()
    grad_second = torch.mm(squared.T, grad)
    grad_hidden = torch.mm(grad, second.T, out=squared).mul_(hidden)
    # <grad, squared @ second> without recomputing that product.
    grad_scale = dot(grad_second, second)
    grad_first = torch.mm(grad_hidden.T, normed).mul_(2 * scale)
    grad_normed = torch.mm(grad_hidden, first * (2 * scale))
    add_norm_backward(grad_x, grad_normed, normed, inverse)
    return grad_first, grad_second.mul_(scale), grad_scale


class MLP(torch.autograd.Function):
    """relu(norm(x) @ first.T)^2 @ second; the squares are recomputed in the backward."""

    @staticmethod
    def forward(ctx, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        normed, inverse, hidden, squared = _mlp_forward(x, first)
        ctx.save_for_backward(normed, inverse, hidden, first, second)
        return torch.mm(squared, second)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        normed, inverse, hidden, first, second = ctx.saved_tensors
        grad_x = torch.zeros_like(normed)
        grad_first, grad_second, _ = _mlp_backward(
            grad.contiguous(), 1.0, normed, inverse, hidden, first, second, grad_x
        )
        return grad_x, grad_first, grad_second


class ResidualMLP(torch.autograd.Function):
    """resid * x + post * mlp(norm(x)): the second product accumulates onto the residual."""

    @staticmethod
    def forward(ctx, x: Tensor, resid: Tensor, post: Number, first: Tensor, second: Tensor) -> Tensor:
        normed, inverse, hidden, squared = _mlp_forward(x, first)
        ctx.resid, ctx.post = number(resid), number(post)
        ctx.dtypes = resid.dtype, None if isinstance(post, int | float) else post.dtype
        ctx.save_for_backward(x, normed, inverse, hidden, first, second)
        out = x * ctx.resid
        if isinstance(ctx.post, Tensor):
            return out.addcmul_(torch.mm(squared, second), ctx.post)
        return out.addmm_(squared, second, alpha=ctx.post)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        x, normed, inverse, hidden, first, second = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = grad * ctx.resid
        grad_first, grad_second, grad_post = _mlp_backward(
            grad, ctx.post, normed, inverse, hidden, first, second, grad_x
        )
        resid_dtype, post_dtype = ctx.dtypes
        grad_post = None if post_dtype is None else grad_post.to(post_dtype)
        return grad_x, dot(grad, x).to(resid_dtype), grad_post, grad_first, grad_second


class SmearNorm(torch.autograd.Function):
    """norm(x_t + gate_t * x_{t-1}), gate_t = smear * sigmoid(weight . x_t[:width]), 0 where `closed`."""

    @staticmethod
    def forward(ctx, x: Tensor, smear: Tensor, weight: Tensor, closed: Tensor | None) -> Tensor:
        width = weight.shape[1]
        opening = torch.mm(x[1:, :width], weight.T).sigmoid_()
        if closed is not None:
            opening.masked_fill_(closed[1:, None], 0)
        mixed = x.clone()
        mixed[1:].addcmul_(x[:-1], opening * smear)
        inverse = inverse_rms(mixed)
        normed = mixed.mul_(inverse.to(x.dtype))
        ctx.save_for_backward(x, smear, weight, opening, normed, inverse)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        x, smear, weight, opening, normed, inverse = ctx.saved_tensors
        width = weight.shape[1]
        grad_mixed = add_norm_backward(torch.zeros_like(x), grad, normed, inverse)
        grad_gate = (grad_mixed[1:] * x[:-1]).sum(-1, keepdim=True)
        grad_x = grad_mixed.clone()
        grad_x[:-1].addcmul_(grad_mixed[1:], opening * smear)
        # A closed gate has opening 0, hence no gradient through the sigmoid either.
        grad_logit = grad_gate * smear * opening * (1 - opening)
        grad_x[1:, :width].addmm_(grad_logit, weight)
        grad_smear = (grad_gate * opening).sum().to(smear.dtype)
        return grad_x, grad_smear, torch.mm(grad_logit.T, x[1:, :width]), None


class Injections(torch.autograd.Function):
    """Autograd edges for x0_lambda_i * x0 + bigram_lambda_i * xb for every layer.

    Its outputs are [T, E] views of a single zero: they carry the graph, not values. A function that takes
    one adds the real terms itself and returns its gradient here, where the layers' gradients are summed. No
    injection is ever stored, and x0 and xb get their gradients in one accumulating pass per layer.
    """

    @staticmethod
    def forward(
        ctx, x0: Tensor, x0_factors: Tensor | None, xb: Tensor | None, xb_factors: Tensor | None, layers
    ):
        ctx.save_for_backward(x0, x0_factors, xb, xb_factors)
        ctx.layers = layers
        ctx.set_materialize_grads(False)
        zero = x0.new_zeros(())
        return tuple(zero.clone().expand_as(x0) for _ in layers)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):  # type: ignore[override]
        x0, x0_factors, xb, xb_factors = ctx.saved_tensors
        results: list[Tensor | None] = []
        for x, factors, skipped in ((x0, x0_factors, None), (xb, xb_factors, 0)):
            if x is None or factors is None:
                results += [None, None]
                continue
            grad_x, numbers = torch.zeros_like(x), factors.tolist() if x.device.type == "cpu" else factors
            grad_factors = torch.zeros_like(factors)
            for layer, grad in zip(ctx.layers, grads, strict=True):
                if grad is not None and layer != skipped:
                    add_scaled(grad_x, grad, numbers[layer])
                    grad_factors[layer] = dot(grad, x)
            results += [grad_x, grad_factors]
        return *results, None


def injections(
    x0: Tensor,
    x0_factors: Tensor | None,
    xb: Tensor | None,
    xb_factors: Tensor | None,
    layers: list[int],
    count: int,
) -> tuple[list[Tensor | None], list[list[tuple[Number, Tensor]]]]:
    """Return, for `count` layers, an edge and the terms (number, tensor) to add in each of `layers`."""
    edges: list[Tensor | None] = [None] * count
    terms: list[list[tuple[Number, Tensor]]] = [[] for _ in range(count)]
    for layer, edge in zip(layers, Injections.apply(x0, x0_factors, xb, xb_factors, layers), strict=True):
        edges[layer] = edge
        if x0_factors is not None:
            terms[layer].append((number(x0_factors.detach()[layer]), x0.detach()))
        # Layer 0 already includes its bigram.
        if xb_factors is not None and xb is not None and layer > 0:
            terms[layer].append((number(xb_factors.detach()[layer]), xb.detach()))
    return edges, terms
