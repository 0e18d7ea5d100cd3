"""Lazy modules (`nn.LazyLinear` and others): their parameters get shapes at the first call.

torch turns an uninitialised parameter into a normal one in place. The same object cannot become a fake
tensor, so the module that is being initialised gets a new parameter instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import Parameter, UninitializedBuffer, UninitializedParameter, is_lazy

from leanstep.rehearse.refusals import Refused


def install() -> None:
    for kind in (UninitializedParameter, UninitializedBuffer):
        kind.__new__ = staticmethod(_uninitialised)  # pyright: ignore[reportAttributeAccessIssue]
        kind.materialize = _materialize  # pyright: ignore[reportAttributeAccessIssue]
    lazy_module: Any = LazyModuleMixin
    infer = lazy_module._infer_parameters

    def infer_parameters(self: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        tensors: Any = (*module._parameters.values(), *module._buffers.values())
        for tensor in tensors:
            if is_lazy(tensor):
                tensor.holder = module  # pyright: ignore[reportAttributeAccessIssue]
        return infer(self, module, *args, **kwargs)

    lazy_module._infer_parameters = infer_parameters
    add_group = torch.optim.Optimizer.add_param_group

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        params = param_group["params"]
        if not isinstance(params, torch.Tensor):
            param_group["params"] = params = list(params)
            if any(is_lazy(p[1] if isinstance(p, tuple) else p) for p in params):
                raise Refused(
                    "optimizer: expected initialised parameters, got those of a lazy module; "
                    "call the model once before building the optimizer"
                )
        add_group(self, param_group)

    torch.optim.Optimizer.add_param_group = add_param_group


def _uninitialised(cls: Any, requires_grad: bool | None = None, device: Any = None, dtype: Any = None) -> Any:
    if requires_grad is None:
        requires_grad = issubclass(cls, Parameter)
    tensor: Any = torch.Tensor._make_subclass(cls, torch.empty(0, device="cpu", dtype=dtype), requires_grad)
    tensor.options = (
        torch.device(device) if device is not None else torch.get_default_device(),
        tensor.dtype,
    )
    return tensor


def move(tensor: Any, fn: Any) -> None:
    """Store the device and dtype that an uninitialised tensor will have (`Module.to` and similar)."""
    device, dtype = tensor.options
    moved = fn(torch.empty(0, device=device, dtype=dtype))
    tensor.options = (moved.device, moved.dtype)


def _materialize(self: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
    holder = self.holder
    materialized: Any = torch.empty(shape, device=device or self.options[0], dtype=dtype or self.options[1])
    if isinstance(self, Parameter):
        materialized = Parameter(materialized, self.requires_grad)
    for tensors in (holder._parameters, holder._buffers):
        for name, tensor in tensors.items():
            if tensor is self:
                tensors[name] = materialized
