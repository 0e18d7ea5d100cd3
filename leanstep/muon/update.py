"""The passes around the polar factor: momentum in front of it, variance, decay and the write behind it.

On a CPU every pass works on blocks of rows that stay in the cache from the first operation to the last,
so a step reads and writes each big tensor once where operation-by-operation code does so ten times.

    fill_update     grad, buffer            -> buffer, update      (Nesterov, written into the polar input)
    variance_scale  polar factor, second    -> second, line scale  (NorMuon; the factor is only read)
    write_weight    weight, factor, scale   -> weight              (cautious decay, low bits)
    adam_           weight, grad, moments   -> weight, moments
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from leanstep.muon.reference import variance_axis
from leanstep.muon.residual import from_master, to_master

# Elements per block: four float32 temporaries of this size fit into the second-level cache of two cores.
BLOCK_ELEMENTS = 96 * 1024

Scalar = float | Tensor


def row_blocks(shape: torch.Size, device: torch.device) -> Iterator[slice]:
    """Slices of the second-to-last dimension, each about one cache-full (all rows at once off the CPU)."""
    rows = shape[-2]
    if device.type != "cpu":
        yield slice(0, rows)
        return
    per_row = max(1, math.prod(shape) // max(1, rows))
    size = max(1, BLOCK_ELEMENTS // per_row)
    for begin in range(0, rows, size):
        yield slice(begin, min(rows, begin + size))


def fill_update(
    grad: Tensor, buffer: Tensor, momentum: Scalar, out: Tensor, *, nesterov: bool = True
) -> Tensor:
    """Advance `buffer` (float32) by `grad` and write the update, cast to the dtype of `out`, into `out`.

    Equivalent to:
        update, buffer[:] = reference.nesterov(grad, buffer, momentum)
    """
    for rows in row_blocks(grad.shape, grad.device):
        g, m = grad[..., rows, :].to(buffer.dtype), buffer[..., rows, :]
        m.lerp_(g, 1 - momentum)
        target = out[..., rows, :]
        if not nesterov:
            target.copy_(m)
        elif out.dtype == buffer.dtype:
            torch.lerp(g, m, momentum, out=target)
        else:
            target.copy_(torch.lerp(g, m, momentum))
    return out


def variance_scale(factor: Tensor, second: Tensor, beta2: Scalar, per: str = "long") -> Tensor:
    """Advance `second` and return the scale of each line, so that factor * scale is the NorMuon update.

    Equivalent to:
        update, second[:] = reference.reduce_variance(factor, second, beta2, per); update = factor * scale
    """
    rows, cols = factor.shape[-2:]
    axis = variance_axis(rows, cols, per)
    length = factor.shape[axis]
    square = torch.zeros(second.shape, dtype=second.dtype, device=second.device)
    for block in row_blocks(factor.shape, factor.device):
        part = factor[..., block, :].to(second.dtype).square()
        if axis == -1:
            square[..., block, :] = part.sum(-1, keepdim=True)
        else:
            square += part.sum(-2, keepdim=True)
    mean_square = square.div_(length)
    second.lerp_(mean_square, 1 - beta2)
    scale = 1 / (second.sqrt() + 1e-8) if per == "row" else second.clamp_min(1e-10).rsqrt_()
    # Both norms follow from the line sums, so the factor is not read again.
    norm = mean_square.sum((-2, -1), keepdim=True).mul_(length).sqrt_()
    scaled = (mean_square * scale.square()).sum((-2, -1), keepdim=True).mul_(length).sqrt_()
    return scale.mul_(norm / scaled.clamp_min_(1e-10))


def _decay_and_step(weight: Tensor, update: Tensor, lr: Scalar, decay: Scalar, cautious: bool) -> None:
    # weight (float32) in place, `update` is scratch. The order of the products fixes the last bit.
    if isinstance(decay, Tensor) or decay != 0:
        shrink = torch.mul(update, weight).ge_(0).mul_(weight) if cautious else weight.clone()
        weight.sub_(shrink.mul_(decay).mul_(lr))
    weight.sub_(update.mul_(lr))


def write_weight(
    weight: Tensor,
    factor: Tensor,
    *,
    lr: Scalar,
    decay: Scalar,
    scale: Tensor | None = None,
    residual: Tensor | None = None,
    mode: str = "nearest",
    cautious: bool = True,
) -> None:
    """weight <- weight - decay where it helps - lr * factor * scale, in place.

    Equivalent to:
        weight[:] = reference.cautious_decay(weight, factor * scale, lr, decay)

    Args:
        weight: [..., R, C]; with `residual` (int16, same shape) a bfloat16 weight is a full float32 one.
        factor: the polar factor, any float dtype.
        lr: with all multipliers. decay: weight_decay * base lr.
        scale: [..., R, 1] or [..., 1, C] from `variance_scale`.
    """
    for rows in row_blocks(weight.shape, weight.device):
        live, part = weight[..., rows, :], factor[..., rows, :]
        update = part.to(torch.promote_types(part.dtype, torch.float32), copy=True)
        if scale is not None:
            update.mul_(scale[..., rows, :] if scale.size(-2) > 1 else scale)
        if residual is not None:
            low = residual[..., rows, :]
            master = to_master(live, low, mode)
            _decay_and_step(master, update, lr, decay, cautious)
            high, rest = from_master(master, mode)
            live.copy_(high)
            low.copy_(rest)
        elif live.dtype == update.dtype:
            _decay_and_step(live, update, lr, decay, cautious)
        else:
            master = live.to(update.dtype)
            _decay_and_step(master, update, lr, decay, cautious)
            live.copy_(master)


def adam_(
    weight: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    cautious: bool = True,
    residual: Tensor | None = None,
    mode: str = "nearest",
) -> None:
    """One Adam step in place; `decay` multiplies the weight directly (lr * lr * weight_decay * wd_mul).

    Equivalent to:
        reference.adam(weight, grad, first, second, step, ...)
    """
    beta1, beta2 = betas
    rate = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    tensors = [weight, grad, first, second] + ([residual] if residual is not None else [])
    # The arithmetic is elementwise: any common view will do, one with rows lets it go block by block.
    tensors = [t.unsqueeze(0) if t.ndim == 1 else t.reshape(1, 1) if t.ndim == 0 else t for t in tensors]
    for rows in row_blocks(tensors[0].shape, weight.device):
        live, g, m, v = (t[..., rows, :] for t in tensors[:4])
        g = g.to(m.dtype)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        update = (m * rate).div_(v.sqrt().add_(eps))
        low = tensors[4][..., rows, :] if residual is not None else None
        master = to_master(live, low, mode) if low is not None else live.to(m.dtype)
        if decay:
            shrink = torch.mul(update, master).gt_(0).mul_(master) if cautious else master
            update.add_(shrink * decay)
        if low is not None:
            high, rest = from_master(master.sub_(update), mode)
            live.copy_(high)
            low.copy_(rest)
        elif live.dtype == m.dtype:
            live.sub_(update)
        else:
            live.copy_(master.sub_(update))
