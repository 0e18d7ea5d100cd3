"""One NorMuon step of equal matrices: momentum -> polar factor -> variance -> decay and write; one Adam step.

`step_matrices` is the whole algorithm in plain torch. On a GPU it runs under `torch.compile(fullgraph=True)`
(`update.py`); on a CPU it is called as it is, and the passes around the products process blocks of rows that
stay in the cache. `reference.py` has the same formulas, one line each.
"""

# B matrices · R rows · C columns; lists have one tensor [b, R, C] per parameter or bank, and their b add up
# to B

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from leanstep.muon.polar import check_polar_options, iterate, normalize, polar
from leanstep.muon.reference import POLAR_EXPRESS, Triples
from leanstep.muon.residual import from_master, to_master

# Elements per block: four float32 temporaries of this size fit in the L2 cache.
BLOCK_ELEMENTS = 96 * 1024

Scalar = float | Tensor


def step_matrices(
    weights: Sequence[Tensor], grads: Sequence[Tensor], momenta: Sequence[Tensor],
    seconds: Sequence[Tensor | None], residuals: Sequence[Tensor | None],
    multipliers: Sequence[Tensor | None], go: Tensor | None, *, rate: Scalar, decay: Scalar,
    momentum: Scalar, nesterov: bool, beta2: Scalar, variance: str, cautious: bool, mode: str,
    dtype: torch.dtype, eps_mode: str, coefficients: Triples,
) -> None:  # fmt: skip
    """Step matrices of one shape in place.

    Equivalent to, for each matrix:
        weight, momentum, second = reference.normuon(weight, grad, momentum, second, lr=..., ...)

    Args:
        weights, grads, momenta: [b, R, C]; momenta in float32.
        seconds: variance, [b, R, 1] or [b, 1, C], float32; None: no variance reduction.
        residuals: int16 [b, R, C] that completes a bfloat16 weight to float32, read by `mode`; or None.
        multipliers: [b, 1, 1] factors of `rate`, or None.
        go: a number on the device; if it is 0, nothing changes. None: 1.
        rate, decay: see `write`. variance: long (lines of the longer side) or row.
        dtype: of the products.
    """
    update = momentum_updates(grads, momenta, go, momentum=momentum, nesterov=nesterov, dtype=dtype)
    factor = iterate(normalize(update, dtype, eps_mode), coefficients)
    sizes = [weight.size(0) for weight in weights]
    scales: Sequence[Tensor | None] = [None] * len(weights)
    if seconds[0] is not None:
        scales = variance_scale(factor, seconds, go, beta2=beta2, per=variance).split(sizes)  # type: ignore[arg-type]
    for weight, part, scale, residual, multiplier in zip(
        weights, factor.split(sizes), scales, residuals, multipliers, strict=True
    ):
        matrix_rate = rate if multiplier is None else rate * multiplier
        write(weight, part, scale, residual, go, rate=matrix_rate, decay=decay, cautious=cautious, mode=mode)


def momentum_updates(
    grads: Sequence[Tensor], momenta: Sequence[Tensor], go: Tensor | None, *, momentum: Scalar,
    nesterov: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Advance the momenta by the gradients; return the updates [B, R, C].

    On a GPU updates of bfloat16 products are bfloat16, which halves what the next passes read.

    Equivalent to:
        update, buffer[:] = reference.nesterov(grad, buffer, momentum)
    """
    half = dtype == torch.bfloat16 and momenta[0].device.type != "cpu"
    updates = []
    for grad, buffer in zip(grads, momenta, strict=True):
        parts = []
        for g, old in row_blocks(grad, buffer):
            g = g.to(old.dtype)
            new = torch.lerp(old, g, 1 - momentum)
            parts.append(torch.lerp(g, new, momentum) if nesterov else new)
            put(old, new, go)
        update = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        updates.append(update.to(dtype) if half else update)
    return updates[0] if len(updates) == 1 else torch.cat(updates)


def variance_scale(
    factor: Tensor, seconds: Sequence[Tensor], go: Tensor | None, *, beta2: Scalar, per: str
) -> Tensor:
    """Advance the variances and return the scale of each line: factor * scale is the NorMuon update.

    Equivalent to:
        update, second[:] = reference.reduce_variance(factor, second, beta2, per); update = factor * scale
    """
    second = seconds[0] if len(seconds) == 1 else torch.cat(list(seconds))
    axis = -1 if second.shape[-2:] == (factor.size(-2), 1) else -2
    length = factor.size(axis)
    square = torch.zeros_like(second)
    for part, lines in row_blocks(factor, square):
        lines.add_(part.to(second.dtype).square().sum(axis, keepdim=True))
    mean = square / length
    new = torch.lerp(second, mean, 1 - beta2)
    for old, part in zip(seconds, new.split([s.size(0) for s in seconds]), strict=True):
        put(old, part, go)
    scale = 1 / (new.sqrt() + 1e-8) if per == "row" else new.clamp_min(1e-10).rsqrt()
    # Both norms from the line sums, without reading the factor again.
    norm = mean.sum((-2, -1), keepdim=True).mul(length).sqrt()
    scaled = (mean * scale.square()).sum((-2, -1), keepdim=True).mul(length).sqrt()
    return scale * (norm / scaled.clamp_min(1e-10))


def write(
    weight: Tensor, factor: Tensor, scale: Tensor | None, residual: Tensor | None, go: Tensor | None, *,
    rate: Scalar, decay: Scalar, cautious: bool, mode: str,
) -> None:  # fmt: skip
    """weight <- weight - decay - rate * update in place, with update = factor * scale.

    Equivalent to (cautious):
        weight[:] = reference.cautious_decay(weight, update, rate, decay)

    Args:
        rate: learning rate with all multipliers, a number or [b, 1, 1].
        decay: cautious: weight decay * learning rate without multipliers, which `rate` multiplies in;
            decoupled: the share of the weight that goes.
    """
    for live, part, lines, low in row_blocks(weight, factor, scale, residual):
        update = part.to(torch.promote_types(part.dtype, torch.float32))
        if lines is not None:
            update = update * lines
        master = (
            live.to(torch.promote_types(live.dtype, torch.float32))
            if low is None
            else to_master(live, low, mode)
        )
        if not isinstance(decay, Tensor) and decay == 0:
            new = master - update * rate
        elif cautious:
            # The order of the products fixes the last bit.
            shrink = (update * master).ge(0).to(master.dtype).mul_(master).mul_(decay).mul_(rate)
            new = (master - shrink).sub_(update * rate)
        else:
            new = (master - master * decay).sub_(update * rate)
        put_weight(live, low, new, go, mode)


def scaled_factors(
    updates: Sequence[Tensor], seconds: Sequence[Tensor | None], go: Tensor | None, *, beta2: Scalar,
    variance: str, dtype: torch.dtype, eps_mode: str, coefficients: Triples,
) -> list[Tensor]:  # fmt: skip
    """Return factor * scale of updates [b, R, C]: the middle of `step_matrices`, for FSDP2."""
    results = []
    for update, second in zip(updates, seconds, strict=True):
        factor = iterate(normalize(update, dtype, eps_mode), coefficients)
        if second is not None:
            factor = factor * variance_scale(factor, [second], go, beta2=beta2, per=variance)
        results.append(factor)
    return results


def write_all(
    weights: Sequence[Tensor], updates: Sequence[Tensor], residuals: Sequence[Tensor | None],
    go: Tensor | None, *, rate: Scalar, decay: Scalar, cautious: bool, mode: str,
) -> None:  # fmt: skip
    """Write scaled factors, the end of `step_matrices`."""
    for weight, update, residual in zip(weights, updates, residuals, strict=True):
        write(weight, update, None, residual, go, rate=rate, decay=decay, cautious=cautious, mode=mode)


def step_adam(
    weights: Sequence[Tensor], grads: Sequence[Tensor], firsts: Sequence[Tensor], seconds: Sequence[Tensor],
    residuals: Sequence[Tensor | None], steps: Sequence[Tensor], go: Tensor | None, *, lr: Scalar,
    betas: tuple[float, float], eps: float, decay: Scalar, cautious: bool, mode: str,
) -> None:  # fmt: skip
    """Make one Adam step of tensors of any shape, in place; `decay` multiplies the weight directly.

    Equivalent to:
        weight[:], first[:], second[:] = reference.adam(weight, grad, first, second, step, ...)

    Args:
        steps: number of this step, per parameter, counted from 1.
    """
    beta1, beta2 = betas
    for weight, grad, first, second, residual, step in zip(
        weights, grads, firsts, seconds, residuals, steps, strict=True
    ):
        count = (
            float(step) if step.device.type == "cpu" and not torch.compiler.is_compiling() else step.double()
        )
        rate = lr * (1 - beta2**count) ** 0.5 / (1 - beta1**count)
        tensors = [weight, grad, first, second] + ([] if residual is None else [residual])
        for live, g, m, v, *rest in blocks(tensors):
            g, low = g.to(m.dtype), rest[0] if rest else None
            new_m = torch.lerp(m, g, 1 - beta1)
            new_v = torch.addcmul(v * beta2, g, g, value=1 - beta2)
            update = (new_m * rate).to(m.dtype) / (new_v.sqrt() + eps)
            master = live.to(m.dtype) if low is None else to_master(live, low, mode)
            if isinstance(decay, Tensor) or decay != 0:
                shrink = (update * master).gt(0).to(m.dtype).mul_(master) if cautious else master
                update = update + shrink * decay
            put_weight(live, low, master - update, go, mode)
            put(m, new_m, go)
            put(v, new_v, go)


def put(target: Tensor, value: Tensor, go: Tensor | None) -> None:
    """target[:] = value, unless go is 0."""
    target.copy_(value if go is None else torch.where(go != 0, value, target))


def put_weight(live: Tensor, low: Tensor | None, master: Tensor, go: Tensor | None, mode: str) -> None:
    """Write a float32 weight to the parameter and its low bits, unless go is 0."""
    if low is None:
        put(live, master.to(live.dtype), go)
    else:
        high, rest = from_master(master, mode)
        put(live, high, go)
        put(low, rest, go)


def row_blocks(*tensors: Tensor | None) -> Iterable[Sequence[Any]]:
    """Return blocks of rows of [B, R or 1, C or 1] that fit in the cache; on a GPU the tensors themselves."""
    x = tensors[0]
    assert x is not None
    size = max(1, BLOCK_ELEMENTS // max(1, x.size(0) * x.size(2)))
    if size >= x.size(1) or x.device.type != "cpu" or torch.compiler.is_compiling():
        return [tensors]
    blocks = []
    for begin in range(0, x.size(1), size):
        rows = slice(begin, begin + size)
        blocks.append([t if t is None or t.size(1) == 1 else t[:, rows] for t in tensors])
    return blocks


def blocks(tensors: Sequence[Tensor]) -> Iterable[Sequence[Tensor]]:
    """Return pieces of equal tensors that fit in the cache; the tensors on a GPU, or if they are strided."""
    small = tensors[0].numel() <= BLOCK_ELEMENTS or not all(t.is_contiguous() for t in tensors)
    if small or tensors[0].device.type != "cpu" or torch.compiler.is_compiling():
        return [tensors]
    return zip(*(t.view(-1).split(BLOCK_ELEMENTS) for t in tensors), strict=True)


@torch.no_grad()
def momentum_polar(
    grad: Tensor,
    momentum_buffer: Tensor,
    momentum: float = 0.95,
    *,
    nesterov: bool = True,
    coefficients: Triples = POLAR_EXPRESS,
    eps_mode: str = "relative",
    compute_dtype: torch.dtype | str = "auto",
) -> Tensor:
    """Advance the momentum buffer by the gradient, in place, and return the polar factor of the update.

    For hand-written optimizers. Traces in `torch.compile(fullgraph=True)`, which fuses the passes on a GPU.

    Equivalent to:
        update, new = leanstep.muon.reference.nesterov(grad, momentum_buffer, 0.95)
        factor = leanstep.muon.reference.polar(update, coefficients, eps_mode)
        momentum_buffer.copy_(new)

    Args:
        grad: [R, C] or [B, R, C], any float dtype and strides; not modified.
        momentum_buffer: like `grad`, float32 (float64 for float64 gradients).
        momentum: weight of the buffer; the gradient has weight 1 - momentum.
        nesterov: if False, the update is the new buffer.
        coefficients, eps_mode, compute_dtype: as in `polar`.

    Returns:
        The factor, shaped like `grad`, in the dtype of the buffer; no gradient flows through it.

    Peak extra memory: that of `polar` and one copy of the update.
    Collectives: none.
    """
    if grad.ndim not in (2, 3) or not grad.is_floating_point():
        got = f"{grad.dtype} {tuple(grad.shape)}"
        raise ValueError(f"grad: expected a floating-point tensor [R, C] or [B, R, C], got {got}")
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    if momentum_buffer.shape != grad.shape or momentum_buffer.dtype != wide:
        got = f"{momentum_buffer.dtype} {tuple(momentum_buffer.shape)}"
        raise ValueError(f"momentum_buffer: expected {wide} {tuple(grad.shape)}, got {got}")
    check_polar_options(eps_mode, compute_dtype)
    if grad.numel() == 0:
        return momentum_buffer.clone()
    views = [t if t.ndim == 3 else t.unsqueeze(0) for t in (grad, momentum_buffer)]
    update = momentum_updates(views[:1], views[1:], None, momentum=momentum, nesterov=nesterov, dtype=wide)
    factor = polar(update, coefficients=coefficients, eps_mode=eps_mode, compute_dtype=compute_dtype)
    return factor.view(grad.shape)
