"""What autograd does in place on a device, but not under a dispatch mode.

The engine adds two gradients of one tensor into the one that has no other reference, and the backward of a
gather or an index_select writes into the zeros it has just allocated. Under a mode, torch uses the
out-of-place variants instead: one extra buffer wherever a large tensor is read twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ops: Any = torch.ops.aten
# References to a tensor inside a dispatch mode when only the engine's buffer holds it (torch 2.13).
_UNSHARED = 4
# Call -> (in-place call, node whose backward issues it; None: the engine itself).
REPLACED: dict[Any, tuple[Any, str | None]] = {
    _ops.add.Tensor: (_ops.add_.Tensor, None),
    _ops.index_add.default: (_ops.index_add_.default, "IndexSelectBackward0"),
    _ops.scatter_add.default: (_ops.scatter_add_.default, "GatherBackward0"),
}


def as_on_a_device(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the call that a device would run instead of one of `REPLACED`, and its arguments."""
    node = torch._C._current_autograd_node()
    # With gradients enabled inside a node, a reentrant checkpoint recomputes the program's own forward.
    if node is None or torch.is_grad_enabled():
        return func, args
    in_place, made_by = REPLACED[func]
    if made_by is not None:
        return (in_place if node.name() == made_by else func), args
    if kwargs or len(args) != 2 or not all(isinstance(a, Tensor) for a in args):
        return func, args
    first, second = args
    if first.shape != second.shape or first.dtype != second.dtype:
        return func, args
    if _unshared(first):
        return in_place, args
    return (in_place, (second, first)) if _unshared(second) else (func, args)


def _unshared(tensor: Any) -> bool:
    """Return whether only the engine holds this gradient, so that it may write to it."""
    count = getattr(tensor, "_use_count", None)  # private API: without it, every tensor counts as shared
    return count is not None and count() <= _UNSHARED and tensor.is_contiguous() and not tensor._is_view()
