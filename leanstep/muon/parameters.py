"""What one parameter of a group needs besides its matrices: rates, options, a fresh state, an Adam step.

Single-process and sharded optimizers call these on whole parameters and on slices of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leanstep.muon.groups import group_cut
from leanstep.muon.matrices import second_shape
from leanstep.muon.steps import MatrixOptions, rate_factor
from leanstep.muon.update import adam_


def check_grad(name: str, param: Tensor) -> None:
    grad = param.grad
    assert grad is not None
    if grad.layout != torch.strided or not grad.is_floating_point():
        raise ValueError(f"{name}: expected a dense real gradient, got {grad.dtype} {grad.layout}")
    if grad.shape != param.shape or grad.device != param.device:
        raise ValueError(
            f"{name}: expected a gradient of shape {tuple(param.shape)} on {param.device}, "
            f"got {tuple(grad.shape)} on {grad.device}"
        )


def matrix_rates(group: dict[str, Any], rows: int, cols: int, multiplier: float) -> tuple[float, float]:
    """(rate with all multipliers, decay factor) of a matrix."""
    lr = float(group["lr"])
    rate = lr * multiplier * rate_factor(group["lr_rule"], rows, cols, group["layout"])
    decay = float(group["weight_decay"]) * group["wd_mul"] * lr
    if group["decay"] == "decoupled":
        decay = decay / rate if rate else 0.0
    return rate, decay


def matrix_options(group: dict[str, Any]) -> MatrixOptions:
    return MatrixOptions(
        momentum=group["momentum"],
        nesterov=group["nesterov"],
        beta2=group["beta2"],
        variance=group["variance"],
        cautious=group["decay"] == "cautious",
        residual=group["residual"],
        eps_mode=group["eps_mode"],
        coefficients=group["coefficients"],
    )


def _keeps_residual(group: dict[str, Any], param: Tensor) -> bool:
    return param.dtype == torch.bfloat16 and group["residual"] != "none"


def new_matrix_state(group: dict[str, Any], param: Tensor) -> dict[str, Any]:
    """Zero momentum and variance, and zero low bits for a bfloat16 weight."""
    dtype = torch.promote_types(param.dtype, torch.float32)
    state: dict[str, Any] = {"momentum_buffer": torch.zeros_like(param, dtype=dtype)}
    if group["variance"] != "off":
        shape = second_shape(param.shape, group_cut(group), group["variance"])
        state["second_momentum"] = torch.zeros(shape, dtype=dtype, device=param.device)
    if _keeps_residual(group, param):
        state["residual"] = torch.zeros_like(param, dtype=torch.int16)
    return state


def new_adam_state(group: dict[str, Any], param: Tensor) -> dict[str, Any]:
    dtype = torch.promote_types(param.dtype, torch.float32)
    state: dict[str, Any] = {
        "step": torch.tensor(0.0),
        "exp_avg": torch.zeros_like(param, dtype=dtype),
        "exp_avg_sq": torch.zeros_like(param, dtype=dtype),
    }
    if _keeps_residual(group, param):
        state["residual"] = torch.zeros_like(param, dtype=torch.int16)
    return state


def adam_item(group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
    """One Adam step of `weight` (or a slice of one) with the matching slices of gradient and state."""
    base = float(group["lr"])
    lr = base * float(group["lr_mul"])
    strength = float(group["weight_decay"]) * group["wd_mul"]
    cautious = group["decay"] == "cautious"
    adam_(
        weight,
        grad,
        state["exp_avg"],
        state["exp_avg_sq"],
        step=int(state["step"]),
        lr=lr,
        betas=tuple(group["betas"]),
        eps=group["eps"],
        decay=(lr * lr if cautious else base) * strength,
        cautious=cautious,
        residual=state.get("residual"),
        mode=group["residual"],
    )


def grads_are_finite(grads: list[Tensor]) -> bool:
    """Whether no gradient holds NaN or infinity: one pass and one host read per device in the usual case."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        if grad.numel():
            by_device.setdefault(grad.device, []).append(grad)
    for group in by_device.values():
        # A finite norm is proof; an infinite one may be an overflow of finite values, so look again.
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(group)])
        if not torch.isfinite(norms).all() and not all(bool(torch.isfinite(grad).all()) for grad in group):
            return False
    return True
