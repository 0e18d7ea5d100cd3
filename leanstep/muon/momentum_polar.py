"""Momentum and polar factor in one call, for hand-written optimizers.

On a GPU the momentum, its norm and the cast to 16 bits are one pass (fused/kernel.py); on a CPU they process
blocks of rows that fit in the cache. Inside torch.compile the call is one torch.library op.
"""

# B matrices · R rows · C columns

from __future__ import annotations

import torch
from torch import Tensor

from leanstep.muon.param_groups import Group
from leanstep.muon.polar import EPS_MODES, Workspace, iterate, plan_polar, polar, triples_of
from leanstep.muon.reference import POLAR_EXPRESS, Triples
from leanstep.muon.state import Stack, fuses
from leanstep.muon.update import fill_update, fused_passes


@torch.no_grad()
def momentum_polar(
    grad: Tensor,
    momentum_buffer: Tensor,
    momentum: float = 0.95,
    *,
    nesterov: bool = True,
    coefficients: Triples = POLAR_EXPRESS,
    eps_mode: str = "relative",
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    """Advance the momentum buffer by the gradient, in place, and return the polar factor of the update.

    Equivalent to:
        update, new = leanstep.muon.reference.nesterov(grad, momentum_buffer, 0.95)
        factor = leanstep.muon.reference.polar(update, coefficients, eps_mode)
        momentum_buffer.copy_(new)

    Args:
        grad: [R, C] or [B, R, C], any float dtype and strides; not modified.
        momentum_buffer: like `grad`, float32 (float64 for float64 gradients).
        momentum: weight of the buffer; the gradient has weight 1 - momentum.
        nesterov: if False, the update is the new buffer.
        coefficients, eps_mode: as in `polar`.
        compute_dtype: dtype of the products; None chooses as `polar` does.

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
    if eps_mode not in EPS_MODES:
        raise ValueError(f"eps_mode: expected one of {', '.join(EPS_MODES)}, got {eps_mode!r}")
    if torch.compiler.is_compiling():
        numbers = [x for triple in coefficients for x in triple]
        return _momentum_polar_op(grad, momentum_buffer, momentum, nesterov, numbers, eps_mode, compute_dtype)
    if grad.numel() == 0:
        return momentum_buffer.clone()
    if fuses(momentum_buffer):
        group = {"momentum": momentum, "nesterov": nesterov, "eps_mode": eps_mode}
        return _fused(grad, momentum_buffer, group, coefficients, compute_dtype)
    update = torch.empty_like(momentum_buffer, memory_format=torch.contiguous_format)
    fill_update(grad, momentum_buffer, momentum, update, nesterov=nesterov)
    return polar(update, coefficients=coefficients, eps_mode=eps_mode, compute_dtype=compute_dtype or "auto")


def _fused(
    grad: Tensor, buffer: Tensor, group: Group, coefficients: Triples, compute_dtype: torch.dtype | None
) -> Tensor:
    """Compute momentum, norm and cast in two launches, then run the products."""
    rows, cols = grad.shape[-2:]
    plan = plan_polar(
        rows, cols, device=grad.device, dtype=buffer.dtype, compute_dtype=compute_dtype or "auto"
    )
    # The kernels need contiguous rows.
    ordered = [t if t.stride(-1) == 1 or cols == 1 else t.contiguous() for t in (grad, buffer)]
    views = [t.unsqueeze(0) if t.ndim == 2 else t for t in ordered]
    stack = Stack(views[1], views[0], views[1], None, None, plan, 0.0, 0.0)
    workspace = Workspace()
    x = fused_passes().normalized_updates([stack], plan, group, workspace, None)
    factor = iterate(x, plan, coefficients, workspace)
    if ordered[1] is not buffer:
        buffer.copy_(ordered[1])
    return factor.to(buffer.dtype).view(buffer.shape)


@torch.library.custom_op("leanstep::momentum_polar", mutates_args=("momentum_buffer",))
def _momentum_polar_op(
    grad: Tensor, momentum_buffer: Tensor, momentum: float, nesterov: bool, coefficients: list[float],
    eps_mode: str, compute_dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    return momentum_polar(
        grad,
        momentum_buffer,
        momentum,
        nesterov=nesterov,
        coefficients=triples_of(coefficients),
        eps_mode=eps_mode,
        compute_dtype=compute_dtype,
    )


@_momentum_polar_op.register_fake
def _(grad, momentum_buffer, momentum, nesterov, coefficients, eps_mode, compute_dtype):
    return momentum_buffer.new_empty(momentum_buffer.shape)
