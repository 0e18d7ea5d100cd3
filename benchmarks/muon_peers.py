"""Alternatives for the benchmarks: the plain step, torch.optim.Muon, a stacked compiled step, dion."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from leanstep.cpu import cpu_bfloat16_speedup, find_compiler
from leanstep.muon import reference
from leanstep.muon.polar import MIN_HALF_SPEEDUP


class PlainNorMuon:
    """NorMuon with the functions of `reference.py`, one matrix at a time."""

    def __init__(
        self,
        params: list[nn.Parameter],
        lr: float,
        weight_decay: float,
        orthogonalise: Callable[[Tensor], Tensor] = reference.polar,
    ) -> None:
        self.params, self.lr, self.weight_decay, self.orthogonalise = params, lr, weight_decay, orthogonalise
        self.state: list[tuple[Tensor, Tensor]] = []
        for param in params:
            dtype = torch.promote_types(param.dtype, torch.float32)
            axis = reference.variance_axis(param.shape[0], param.shape[1])
            second = torch.zeros_like(param, dtype=dtype).sum(axis, keepdim=True)
            self.state.append((torch.zeros_like(param, dtype=dtype), second))

    @torch.no_grad()
    def step(self) -> None:
        for index, param in enumerate(self.params):
            buffer, second = self.state[index]
            assert param.grad is not None
            update, buffer = reference.nesterov(param.grad.to(buffer.dtype), buffer, 0.95)
            update, second = reference.reduce_variance(self.orthogonalise(update), second, 0.95)
            rate = self.lr * reference.shape_factor(param.shape[0], param.shape[1])
            weight = param.detach().to(buffer.dtype)
            param.copy_(reference.cautious_decay(weight, update, rate, self.weight_decay * self.lr))
            self.state[index] = (buffer, second)


def polar_addmm(update: Tensor) -> Tensor:
    """Compute Polar Express with the fused products that torch.optim.Muon uses."""
    x = reference.normalize(update)
    tall = x.size(0) > x.size(1)
    if tall:
        x = x.mT
    for a, b, c in reference.POLAR_EXPRESS:
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def no_native_half(params: Mapping[str, Any]) -> str | None:
    """Return why half precision would be emulated on this machine, or None."""
    if torch.cuda.is_available() or cpu_bfloat16_speedup() > MIN_HALF_SPEEDUP:
        return None
    return f"this CPU multiplies bfloat16 at {cpu_bfloat16_speedup():.2g} of its float32 speed"


def too_slow_in_half(params: Mapping[str, Any]) -> str | None:
    """Return why torch.optim.Muon as shipped takes too long at this size, or None."""
    # Emulated bfloat16 takes about half a minute per 768 x 3072 matrix.
    big = params["num_wide"] * params["dim"] > 2 * 768
    return no_torch_muon(params) or (no_native_half(params) if big else None)


def needs_compiler(params: Mapping[str, Any]) -> str | None:
    """Return why torch.compile cannot or should not run at this size, or None."""
    if find_compiler() is None:
        return "no C++ compiler for torch.compile"
    return "compiling is not worth it at this size" if params["dim"] < 256 else None


def no_torch_muon(params: Mapping[str, Any]) -> str | None:
    """Return why torch.optim.Muon cannot run here, or None."""
    return None if hasattr(torch.optim, "Muon") else "this torch has no torch.optim.Muon; it came with 2.9"


def torch_muon(compute_dtype: torch.dtype | None):
    """Build torch.optim.Muon; `compute_dtype` replaces the bfloat16 of its cast."""

    def make(parameters: list[nn.Parameter], constants: dict[str, Any]) -> Callable[[], Any]:
        optimizer = torch.optim.Muon(parameters, lr=constants["lr"])
        if compute_dtype is None:
            return optimizer.step

        cast = Tensor.to

        def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if kwargs.get("dtype") is torch.bfloat16:
                kwargs["dtype"] = compute_dtype
            return cast(self, *args, **kwargs)

        def step() -> None:
            # Up to torch 2.13 the cast is .bfloat16(), later .to(dtype=torch.bfloat16, copy=True).
            old_cast = mock.patch.object(
                Tensor, "bfloat16", lambda self: cast(self, compute_dtype, copy=True)
            )
            with old_cast, mock.patch.object(Tensor, "to", to):
                optimizer.step()

        return step

    return make


def stacked_compiled(parameters: list[nn.Parameter], constants: dict[str, Any]) -> Callable[[], Any]:
    """Step as nanochat does: equal shapes stacked, momentum to write in one compiled function, bfloat16."""
    shapes: dict[torch.Size, list[nn.Parameter]] = {}
    for parameter in parameters:
        shapes.setdefault(parameter.shape, []).append(parameter)
    groups = []
    for (rows, cols), members in shapes.items():
        buffer = torch.zeros(len(members), rows, cols, device=members[0].device)
        second = buffer.sum(reference.variance_axis(rows, cols), keepdim=True)
        groups.append((members, buffer, second))
    fused = torch.compile(_fused_step, dynamic=False)

    @torch.no_grad()
    def step() -> None:
        for members, buffer, second in groups:
            grads = torch.stack([p.grad for p in members if p.grad is not None])
            weights = torch.stack([p.detach() for p in members])
            rate = constants["lr"] * reference.shape_factor(*members[0].shape)
            fused(weights, grads, buffer, second, torch.tensor(rate), torch.tensor(constants["lr"]))
            torch._foreach_copy_([p.detach() for p in members], list(weights.unbind(0)))

    return step


def _fused_step(
    weights: Tensor, grads: Tensor, buffer: Tensor, second: Tensor, rate: Tensor, lr: Tensor
) -> None:
    buffer.lerp_(grads, 0.05)
    x = grads.lerp(buffer, 0.95).bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * reference.SAFETY + reference.ABSOLUTE_EPS)
    for a, b, c in reference.POLAR_EXPRESS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    update, moved = reference.reduce_variance(x.float(), second, 0.95)
    second.copy_(moved)
    mask = (update * weights) >= 0
    weights.sub_(rate * update + rate * (1.2 * lr) * weights * mask)


def dion_normuon(parameters: list[nn.Parameter], constants: dict[str, Any]) -> Callable[[], Any]:
    """Step with microsoft/dion's NorMuon at its defaults."""
    import dion  # type: ignore[import-not-found]

    return dion.NorMuon([{"params": parameters}], lr=constants["lr"]).step
