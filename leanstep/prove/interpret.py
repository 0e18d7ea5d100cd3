"""Run Triton kernels without a GPU: Triton's interpreter, with what it lacks for other libraries' kernels.

The interpreter has no implementation of `libdevice` functions (they return None), passes float arguments
as Python numbers, which have no `.to()`, and computes with the bits of bf16 numbers as if they were integers.
This is mended here, before a script imports its kernels.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import torch

# libdevice's names -> functions of fp64 tensors; the result has the type of the first argument.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(torch, name)
    for name in (
        "rsqrt exp exp2 expm1 log log2 log10 log1p sqrt sin cos tan asin acos atan atan2 sinh cosh tanh "
        "asinh acosh atanh erf erfc erfinv lgamma floor ceil trunc pow fmod hypot copysign"
    ).split()
}
_FUNCTIONS |= {
    "abs": torch.abs,
    "fabs": torch.abs,
    "rint": torch.round,
    "nearbyint": torch.round,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "fma": lambda x, y, z: x * y + z,
    "div_rn": torch.divide,
    "rcp_rn": torch.reciprocal,
    "rsqrt_rn": torch.rsqrt,
    "sqrt_rn": torch.sqrt,
    "fast_expf": torch.exp,
    "fast_logf": torch.log,
    "fast_dividef": torch.divide,
    "fast_powf": torch.pow,
    "fast_tanhf": torch.tanh,
    "exp10": lambda x: torch.pow(10.0, x),
}


def interpret_kernels() -> None:
    """Let Triton kernels run on the CPU if there is no GPU; for the process of a script.

    A value of TRITON_INTERPRET that the user set stays.
    """
    if "TRITON_INTERPRET" in os.environ and os.environ["TRITON_INTERPRET"] != "1":
        return
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return
    if os.environ.get("TRITON_INTERPRET") != "1":
        os.environ["TRITON_INTERPRET"] = "1"
        # torch's compiler may have imported it: its functions decide at import whether they are interpreted.
        for name in [name for name in sys.modules if re.match(r"triton(?!\._C)(\.|$)", name)]:
            del sys.modules[name]
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    language: Any = importlib.import_module("triton.language")
    for place in ("triton.language.extra.libdevice", "triton.language.extra.cuda.libdevice"):
        module = importlib.import_module(place)
        for name, function in _FUNCTIONS.items():
            setattr(module, name, _elementwise(function, language, interpreter))
    original = interpreter._implicit_cvt

    def converted(value: Any) -> Any:
        if type(value) is not float:
            return original(value)
        numpy = importlib.import_module("numpy")
        handle = interpreter.TensorHandle(numpy.array([value], dtype=numpy.float32), language.float32)
        return language.tensor(handle, language.float32)

    interpreter._implicit_cvt = converted
    _compute_bf16_in_fp32(interpreter, language)
    sys.meta_path.insert(0, _LigerTypes(language.float64))


class _LigerTypes(importlib.abc.MetaPathFinder):
    """Adds fp64 to the types that Liger's kernels know: the reference run needs it."""

    def __init__(self, fp64: Any) -> None:
        self._fp64 = fp64

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != "liger_kernel.ops.utils":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def then_add(module: Any) -> None:
                execute(module)
                getattr(module, "torch_to_triton_dtype", {})[torch.float64] = self._fp64

            loader.exec_module = then_add
        return spec


def _elementwise(function: Callable[..., Any], language: Any, interpreter: Any) -> Callable[..., Any]:
    def call(*args: Any, _semantic: Any = None, **unused: Any) -> Any:
        first = next(arg for arg in args if isinstance(arg, language.tensor))
        values = [
            torch.as_tensor(arg.handle.data).double()
            if isinstance(arg, language.tensor)
            else torch.tensor(float(getattr(arg, "value", arg)), dtype=torch.float64)
            for arg in args
        ]
        result = function(*values).numpy().astype(first.handle.data.dtype)
        kind = first.type
        return language.tensor(interpreter.TensorHandle(result, first.handle.dtype), kind)

    return call


def _compute_bf16_in_fp32(interpreter: Any, language: Any) -> None:
    """Widen bf16 operands before arithmetic and round the result, as a GPU does."""
    builder, bf16, fp32 = interpreter.InterpreterBuilder, language.bfloat16, language.float32
    cast = builder.cast_impl

    def widened(self: Any, handle: Any) -> Any:
        return cast(self, handle, fp32) if handle.dtype.scalar == bf16 else handle

    def cast_impl(self: Any, source: Any, kind: Any) -> Any:
        source = widened(self, source) if kind.scalar != bf16 else source
        if kind.scalar == bf16 and source.dtype.scalar not in (bf16, fp32):
            source = cast(self, source, fp32)
        return cast(self, source, kind) if source.dtype.scalar != kind.scalar else source

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any) -> Any:
            handles, op = args[:-1], args[-1]
            if handles[0].dtype.scalar != bf16:
                return original(self, *args)
            result = original(self, *(widened(self, handle) for handle in handles), op)
            is_float = result.data.dtype.kind == "f"
            return cast(self, result, bf16) if is_float else interpreter.TensorHandle(result.data, bf16)

        return call

    builder.cast_impl = cast_impl
    for name in ("unary_op", "binary_op", "ternary_op"):
        setattr(builder, name, around(getattr(builder, name)))
