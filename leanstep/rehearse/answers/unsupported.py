"""Refuse what a rehearsal cannot run: recurrent layers, CTC, lazy modules, tensor types, pipelines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.modules.lazy import LazyModuleMixin

from leanstep.rehearse.answers.stand_ins import after_import
from leanstep.rehearse.refusals import CTC, LAZY, PIPELINE, RECURRENT, TENSOR_TYPE, Refused

_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu", "gru_cell", "_pack_padded_sequence")
_TENSOR_TYPES = {
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


def install() -> None:
    """Refuse each feature where the program first uses it on the device."""
    functions: Any = torch._VF
    for name in _RECURRENT:
        setattr(functions, name, _on_host_only(getattr(functions, name), RECURRENT))
    torch.ctc_loss = _on_host_only(torch.ctc_loss, CTC)  # pyright: ignore[reportAttributeAccessIssue]
    LazyModuleMixin.__init__ = _refuse(LAZY)  # pyright: ignore[reportAttributeAccessIssue]
    _refuse_tensor_types()
    after_import("torch.distributed.pipelining.stage", _refuse_stages)


def _refuse(sentence: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise Refused(sentence)

    return refuse


def _on_host_only(plain: Callable[..., Any], sentence: str) -> Callable[..., Any]:
    def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.device.type == "cuda":
            raise Refused(sentence)
        return plain(x, *args, **kwargs)

    return call


class _TensorType(type):
    """A type such as `torch.cuda.FloatTensor`: only isinstance works, because libraries use it."""

    dtype: torch.dtype
    __call__ = _refuse(TENSOR_TYPE)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Tensor) and instance.is_cuda and instance.dtype == cls.dtype


def _refuse_tensor_types() -> None:
    for name, dtype in _TENSOR_TYPES.items():
        setattr(torch.cuda, name, _TensorType(name, (), {"__module__": "torch.cuda", "dtype": dtype}))
    convert, set_default = Tensor.type, torch.set_default_tensor_type

    def check(kind: Any) -> None:
        if isinstance(kind, _TensorType) or (isinstance(kind, str) and kind.startswith("torch.cuda.")):
            raise Refused(TENSOR_TYPE)

    def type_of(self: Tensor, dtype: Any = None, non_blocking: bool = False, **options: Any) -> Any:
        check(dtype)
        return convert(self, dtype, non_blocking, **options)

    def set_default_tensor_type(kind: Any) -> None:
        check(kind)
        set_default(kind)

    Tensor.type = type_of  # pyright: ignore[reportAttributeAccessIssue]
    torch.set_default_tensor_type = set_default_tensor_type


def _refuse_stages(module: Any) -> None:
    module._PipelineStageBase.__init__ = _refuse(PIPELINE)
