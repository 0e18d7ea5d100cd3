"""Head, softcap and multi-token cross-entropy in one pass over rows of logits.

A tile of rows goes through head, softcap, loss and its own gradient while it is in cache, so the [T, V]
logits never exist as a whole, and neither does any of the dozen temporaries that autograd would keep of
them.
"""

# T rows · C rows of a tile · E model · V vocabulary · K tokens predicted ahead

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Logits of one tile: large enough for the matrix product, small enough to stay in cache. Measured flat from
# 256 KiB to 1 MiB on two cores.
TILE_BYTES = 512 * 1024


def ahead_targets(targets: Tensor, mtp: tuple[float, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Targets [T, K] of the next K tokens and their weights [T, K]; weight 0 where there is no such token."""
    rows, ahead = targets.shape[0], len(mtp)
    padded = torch.cat([targets, targets.new_full((ahead - 1,), -1)])
    windows = padded.unfold(0, ahead, 1) if rows else targets.new_zeros(0, ahead)
    weights = torch.tensor(mtp, dtype=dtype, device=targets.device).expand(rows, ahead)
    return windows.clamp(min=0), torch.where(windows >= 0, weights, 0.0)


def _tile_loss(
    logits: Tensor, index: Tensor, weights: Tensor, softcap: tuple[float, float, float] | None, grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Summed loss of a tile and its gradient; `logits` [C, V] come as (logit + b) / c and are overwritten."""
    row_weight = weights.sum(-1, keepdim=True)
    if softcap is None:
        scaled, height = logits, 1.0
        shift = logits.amax(-1, keepdim=True)
        exps = (logits - shift).exp_()
    else:
        height = softcap[0]
        scaled = logits.sigmoid_()
        # The cap bounds the exponent to 0..a, so no row maximum is needed (below 80 keeps fp32 finite).
        shift = None if height < 80 else height
        exps = (scaled * height if shift is None else scaled * height - shift).exp_()
    total = exps.sum(-1, keepdim=True)
    lse = total.log() if shift is None else total.log() + shift
    picked = scaled.gather(1, index) * height
    # Row by row, then in float64: the two sums are far larger than their difference.
    loss = (row_weight * lse).sub_((weights * picked).sum(-1, keepdim=True)).sum(dtype=torch.float64)
    if not grad:
        return loss, None
    exps.mul_(row_weight / total)
    exps.scatter_add_(1, index, -weights)
    if softcap is not None:
        # d softcap / d logit = (a / c) * s * (1 - s); the caller multiplies a / c into the two products.
        exps.mul_(scaled.addcmul_(scaled, scaled, value=-1))
    return loss, exps


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden: Tensor, head: Tensor, index: Tensor, weights: Tensor, softcap, tile_rows, transposed
    ):
        want_hidden, want_head = ctx.needs_input_grad[:2]
        grad = want_hidden or want_head
        weight_EV = head if transposed else head.T
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        weight_EV = weight_EV.to(wide)
        factor, slope, bias = 1.0, 1.0, None
        if softcap is not None:
            a, b, c = softcap
            factor, slope = 1 / c, a / c
            bias = torch.full((1,), b / c, dtype=wide, device=hidden.device).expand(weight_EV.shape[1])
        loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_head = torch.zeros(
            weight_EV.shape if transposed else weight_EV.T.shape, dtype=wide, device=hidden.device
        )
        for start in range(0, hidden.shape[0], tile_rows):
            rows = slice(start, start + tile_rows)
            x = hidden[rows].to(wide)
            logits = torch.mm(x, weight_EV) if bias is None else torch.addmm(bias, x, weight_EV, alpha=factor)
            part, dlogits = _tile_loss(logits, index[rows], weights[rows], softcap, grad)
            loss += part
            if dlogits is None:
                continue
            if grad_hidden is not None:
                grad_hidden[rows] = torch.mm(dlogits, weight_EV.T).mul_(slope)
            if want_head:
                if transposed:
                    grad_head.addmm_(x.T, dlogits, alpha=slope)
                else:
                    grad_head.addmm_(dlogits.T, x, alpha=slope)
        ctx.save_for_backward(grad_hidden, grad_head.to(head.dtype) if want_head else None)
        return loss.to(wide)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor):  # type: ignore[override]
        grad_hidden, grad_head = ctx.saved_tensors
        return (
            None if grad_hidden is None else grad_hidden * upstream.to(grad_hidden.dtype),
            None if grad_head is None else grad_head * upstream.to(grad_head.dtype),
            *(None,) * 5,
        )


def head_loss(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    *,
    mtp: tuple[float, ...] = (1.0,),
    softcap: tuple[float, float, float] | None = None,
    transposed: bool = True,
    tile_rows: int | None = None,
) -> Tensor:
    """Multi-token cross-entropy of softcapped logits, summed over rows.

    Equivalent to (mtp = (1.0,)):
        logits = hidden @ (head if transposed else head.T)
        a, b, c = softcap
        F.cross_entropy(a * torch.sigmoid((logits + b) / c), targets, reduction="sum", ignore_index=-1)

    Args:
        hidden: [T, E].
        head: [E, V] when `transposed`, else [V, E].
        targets: [T] integers; negative ones are ignored.
        mtp: weight of the k-th token ahead; row t has no target past the last row.
        softcap: (a, b, c) or None.
        tile_rows: rows per tile; None chooses by the cache.

    Returns:
        0-dimensional, float32 or float64.

    Peak extra memory: three tiles, and the gradients of hidden and head (they are made in the forward pass).
    """
    if hidden.dim() != 2 or head.dim() != 2:
        raise ValueError(
            f"hidden, head: expected two matrices, got {tuple(hidden.shape)} and {tuple(head.shape)}"
        )
    if head.shape[0 if transposed else 1] != hidden.shape[1]:
        raise ValueError(
            f"head: expected {hidden.shape[1]} model features with transposed={transposed}, "
            f"got {tuple(head.shape)}"
        )
    if targets.shape != hidden.shape[:1] or targets.is_floating_point():
        raise ValueError(
            f"targets: expected ({hidden.shape[0]},) integers to match hidden, "
            f"got {targets.dtype} {tuple(targets.shape)}"
        )
    if tile_rows is None:
        vocab = head.shape[1 if transposed else 0]
        tile_rows = max(16, TILE_BYTES // (4 * vocab))
    if tile_rows < 1:
        raise ValueError(f"tile_rows: expected at least 1, got {tile_rows}")
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    index, weights = ahead_targets(targets.long(), tuple(mtp), wide)
    return _HeadLoss.apply(hidden, head, index, weights, softcap, tile_rows, transposed)
