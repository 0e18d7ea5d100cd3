"""Checks of output tensors that a caller supplies, before the first write and without a host read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def check_output_buffer(
    name: str,
    buffer: object,
    *,
    shape: Sequence[int],
    device: torch.device,
    inputs: Iterable[Tensor | None] = (),
) -> None:
    """Raise for a buffer that a write would resize, or that shares memory with another tensor of the call.

    torch resizes an `out=` tensor of the wrong shape and then writes beyond the end of a view.
    """
    if not isinstance(buffer, Tensor) or buffer.layout != torch.strided:
        got = f"a {buffer.layout} tensor" if isinstance(buffer, Tensor) else type(buffer).__name__
        raise ValueError(f"{name}: expected a dense tensor, got {got}")
    if not buffer.is_floating_point():
        raise ValueError(f"{name}: expected a floating-point tensor, got {buffer.dtype}")
    if tuple(buffer.shape) != tuple(shape):
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(buffer.shape)}")
    if buffer.device != device:
        raise ValueError(f"{name}: expected device {device}, got {buffer.device}")
    if has_shared_elements(buffer):
        raise ValueError(f"{name}: expected separate memory per element, got strides {buffer.stride()}")
    if any(tensor is not None and share_memory(buffer, tensor) for tensor in inputs):
        raise ValueError(f"{name}: expected memory that no input uses, got a tensor that overlaps one")


def has_shared_elements(tensor: Tensor) -> bool:
    """Return whether two indices of a tensor may share memory (expanded or overlapping views)."""
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    reach = 0
    for stride, size in sorted(dim for dim in dims if dim[1] > 1):
        if stride <= reach:
            return tensor.numel() > 0
        reach += stride * (size - 1)
    return False


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether the spans of two tensors, first to last element, overlap in one storage."""
    if a.layout != torch.strided or b.layout != torch.strided or not a.numel() or not b.numel():
        return False
    if a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return False
    first_a, last_a = _byte_span(a)
    first_b, last_b = _byte_span(b)
    return first_a < last_b and first_b < last_a


def _byte_span(tensor: Tensor) -> tuple[int | torch.SymInt, int | torch.SymInt]:
    """Return the storage offsets of a tensor's first byte and of the byte after its last."""
    first = tensor.storage_offset() * tensor.element_size()
    reach = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return first, first + (reach + 1) * tensor.element_size()
