"""What is known about an ATen op before it runs: whether it has a kernel, what it writes and multiplies."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from leanstep.diagnose.recording.fused_products import FusedProducts
from leanstep.script.syncs import is_candidate

# Ops that launch nothing: they rename, allocate without writing, or ask a question about shapes.
NO_KERNEL = frozenset(
    "_unsafe_view _reshape_alias detach detach_ alias lift lift_fresh set_ resize_ is_same_size "
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided _local_scalar_dense".split()
)
# name -> positions of the two factors
MATMULS = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "addmm": (1, 2),
    "addmm_": (1, 2),
    "baddbmm": (1, 2),
    "baddbmm_": (1, 2),
    "addbmm": (1, 2),
    "linear": (0, 1),
    "mv": (0, 1),
    "addmv": (1, 2),
    "_addmm_activation": (1, 2),
    "_scaled_mm": (0, 1),
}
# Backward ops that write a whole buffer for a small gradient: the gradient is their first argument ...
WHOLE_BUFFER = frozenset(("select_backward", "slice_backward", "unfold_backward", "diagonal_backward"))
# ... or it goes into zeros made a moment ago: position of the gradient among the arguments.
INTO_ZEROS = {
    "index_put": 2,
    "index_put_": 2,
    "_index_put_impl_": 2,
    "scatter_add": 3,
    "scatter_add_": 3,
    "index_add": 3,
    "index_add_": 3,
}
ZEROS = frozenset(("zeros", "new_zeros", "zeros_like"))
ADDS = frozenset(("add", "add_", "sub", "sub_", "copy_"))
FOREACH_ADDS = frozenset(("_foreach_add_", "_foreach_add", "_foreach_sub_", "_foreach_sub", "_foreach_copy_"))
# The address of a tensor's storage, which `untyped_storage()._cdata` is as well, for half the time.
storage_of: Callable[[Tensor], int] = getattr(
    torch._C, "_storage_address", lambda tensor: tensor.untyped_storage()._cdata
)
HALF = (torch.bfloat16, torch.float16)


class OpInfo:
    """The static half of a record; made once per op overload."""

    __slots__ = (
        "adds", "cast", "clone", "counted", "foreach_adds", "fresh", "into_zeros", "matmul", "maybe_read",
        "name", "plain", "products", "renames", "schema_name", "view", "whole_buffer", "writes", "zeros",
    )  # fmt: skip

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.schema_name: str = schema.name
        namespace, _, self.name = schema.name.partition("::")
        self.view = bool(getattr(func, "is_view", False))
        self.counted = not (self.view or self.name in NO_KERNEL or namespace in ("profiler", "prim"))
        self.matmul = MATMULS.get(self.name) if namespace == "aten" else None
        self.products = FusedProducts.of(schema) if namespace == "aten" else None
        self.cast = self.name == "_to_copy"
        self.clone = self.name == "clone"
        self.adds = self.name in ADDS
        self.foreach_adds = self.name in FOREACH_ADDS
        self.whole_buffer = self.name in WHOLE_BUFFER
        self.into_zeros = INTO_ZEROS.get(self.name)
        self.zeros = self.name in ZEROS
        self.renames = namespace == "aten" and self.name in ("detach", "alias", "lift_fresh")
        self.maybe_read = is_candidate(schema.name)
        # Arguments that the op writes in place, by position; `out=` tensors are keyword-only, no parameters.
        self.writes = tuple(
            i
            for i, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write and not argument.kwarg_only
        )
        self.fresh = self.counted and all(r.alias_info is None for r in schema.returns)
        self.plain = not (
            self.matmul or self.cast or self.clone or self.adds or self.foreach_adds or self.whole_buffer
            or self.into_zeros is not None or self.zeros or self.products
        )  # fmt: skip


def matmul_shape(info: OpInfo, args: tuple[Any, ...]) -> tuple[int, int, int, int, bool]:
    """(batch, rows, inner, columns, second factor is column-major) of a matmul."""
    assert info.matmul is not None
    a, b = args[info.matmul[0]], args[info.matmul[1]]
    inner = a.shape[-1]
    if info.name == "linear":
        return 1, a.numel() // max(inner, 1), inner, b.shape[0], True
    columns = 1 if b.ndim == 1 else b.shape[-1]
    batch = a.shape[0] if a.ndim == 3 else 1
    column_major = b.ndim > 1 and b.stride(-1) != 1 and b.stride(-2) == 1
    return batch, a.shape[-2], inner, columns, column_major


def different_order(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape walk through memory in a different order of their dimensions."""
    if a.shape != b.shape or a.ndim < 2:
        return False
    dims = [d for d, size in enumerate(a.shape) if size > 1]
    strides_a, strides_b = a.stride(), b.stride()
    # A dimension of stride 0 is broadcast: it has no place in the order.
    dims = [d for d in dims if strides_a[d] and strides_b[d]]
    return sorted(dims, key=lambda d: -strides_a[d]) != sorted(dims, key=lambda d: -strides_b[d])


def out_of_order(tensor: Tensor) -> bool:
    """Whether the dimensions are not stored outermost first: a transposed view, not merely a slice."""
    strides = [s for s, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1 and s]
    return any(outer < inner for outer, inner in itertools.pairwise(strides))


def widens(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether every value of `source` has an exact twin in `target`, so that coming back loses nothing."""
    if source == target:
        return False
    if source == torch.bool:
        return True
    if source.is_floating_point != target.is_floating_point or source.is_complex or target.is_complex:
        return False
    return target.itemsize > source.itemsize and torch.promote_types(source, target) == target
