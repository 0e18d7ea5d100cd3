"""bfloat16 in Triton's interpreter with the semantics of a GPU: arithmetic on values, and rounding.

The interpreter stores bfloat16 as 16-bit integers. It multiplies those integers in `tl.dot`, adds them in
arithmetic, and truncates a float32 that becomes bfloat16. Here operands are first widened to float32, sums of
products are float32, and results are rounded to nearest even.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np


def widen(bits: np.ndarray) -> np.ndarray:
    """Convert bfloat16 bits (uint16) to float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """Convert float32 to bfloat16 bits, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


@contextlib.contextmanager
def exact_bfloat16() -> Iterator[None]:
    """Replace the interpreter's bfloat16 products, arithmetic and casts inside this context."""
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    dot, binary, unary, cast = builder.create_dot, builder.binary_op, builder.unary_op, builder.cast_impl

    def is_bfloat16(operand: Any) -> bool:
        return operand.dtype.scalar == tl.bfloat16

    def product(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if is_bfloat16(a) and is_bfloat16(b):
            a, b = (handle(widen(operand.data), tl.float32) for operand in (a, b))
        return dot(self, a, b, d, *options)

    def on_values(function: Callable[[np.ndarray], np.ndarray], *operands: Any) -> Any:
        result = function(*(widen(operand.data) for operand in operands))
        if result.dtype == np.bool_:
            return handle(result, tl.int1)
        return handle(narrow(result), tl.bfloat16)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        return (
            on_values(op, lhs, rhs) if is_bfloat16(lhs) and is_bfloat16(rhs) else binary(self, lhs, rhs, op)
        )

    def unary_op(self: Any, operand: Any, op: Any) -> Any:
        return on_values(op, operand) if is_bfloat16(operand) else unary(self, operand, op)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if is_bfloat16(source) and target.scalar != tl.bfloat16:
            return cast(self, handle(widen(source.data), tl.float32), target)
        if target.scalar == tl.bfloat16 and not is_bfloat16(source):
            return handle(narrow(source.data.astype(np.float32)), tl.bfloat16)
        return cast(self, source, target)

    def convert(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        return (
            cast_impl(self, source, target)
            if target.scalar == tl.bfloat16
            else to_other(self, source, target, rounding)
        )

    to_other = builder.create_fp_to_fp

    def constant(self: Any, value: float) -> Any:
        return handle(narrow(np.array([value], dtype=np.float32)), tl.bfloat16)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(builder, "get_bf16", constant, create=True))
        replacements = {"create_dot": product, "binary_op": binary_op, "unary_op": unary_op}
        for name, function in (replacements | {"cast_impl": cast_impl, "create_fp_to_fp": convert}).items():
            stack.enter_context(mock.patch.object(builder, name, function))
        yield
