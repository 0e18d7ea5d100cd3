"""`torch.cuda.FloatTensor` and similar types, which predate `dtype` and `device`.

A CPU build has these names but refuses to use them. A CUDA build creates tensors on the real device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_DTYPES = {
    "BFloat16Tensor": torch.bfloat16,
    "BoolTensor": torch.bool,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "ShortTensor": torch.int16,
}


class _TensorType(type):
    """A type that constructs tensors and recognises them with isinstance; it has no instances of its own."""

    dtype: torch.dtype
    is_cuda = True

    def __call__(cls, *args: Any, device: Any = None) -> Tensor:
        if len(args) == 1 and isinstance(args[0], Tensor):
            return args[0].to("cuda", cls.dtype)
        if len(args) == 1 and not isinstance(args[0], int | torch.Size):
            return torch.tensor(args[0], dtype=cls.dtype, device="cuda")
        return torch.empty(*(args or (0,)), dtype=cls.dtype, device="cuda")

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Tensor) and instance.is_cuda and instance.dtype == cls.dtype


def install() -> None:
    """Install tensor types for the simulated device; `Tensor.type` and the default type accept them."""
    types = {name: _TensorType(name, (), {"dtype": dtype}) for name, dtype in _DTYPES.items()}
    by_name: dict[Any, Any] = {f"torch.cuda.{name}": kind for name, kind in types.items()}
    names = {kind.dtype: name for name, kind in by_name.items()}
    convert, set_default = Tensor.type, torch.set_default_tensor_type
    for name, kind in types.items():
        kind.__module__ = "torch.cuda"
        setattr(torch.cuda, name, kind)

    def type_of(self: Tensor, dtype: Any = None, non_blocking: bool = False, **options: Any) -> Any:
        kind = by_name.get(dtype, dtype)
        if isinstance(kind, _TensorType):
            return self.to("cuda", kind.dtype, non_blocking=non_blocking)
        if dtype is None and self.is_cuda:
            return names.get(self.dtype, str(self.dtype))
        return convert(self, dtype, non_blocking, **options)

    def set_default_tensor_type(kind: Any) -> None:
        kind = by_name.get(kind, kind)
        if isinstance(kind, _TensorType):
            torch.set_default_dtype(kind.dtype)
            torch.set_default_device("cuda")
        else:
            torch.set_default_device("cpu")
            set_default(kind)

    Tensor.type = type_of  # pyright: ignore[reportAttributeAccessIssue]
    torch.set_default_tensor_type = set_default_tensor_type
