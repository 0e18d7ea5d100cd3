"""Ops: what is known about one before it runs (`OpInfo`), and about one run of it (`OpRun`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from leanstep.diagnose.recording.lineage import Product
from leanstep.flops import MATMULS, FusedProducts
from leanstep.tape.lines import Site
from leanstep.tape.syncs import is_candidate

# Ops that launch nothing: they create views, allocate without writing, or query shapes.
NO_KERNEL = frozenset(
    "_unsafe_view _reshape_alias detach detach_ alias lift lift_fresh set_ resize_ is_same_size "
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided _local_scalar_dense".split()
)
# The address of a tensor's storage: same as `untyped_storage()._cdata`, in half the time.
storage_of: Callable[[Tensor], int] = getattr(
    torch._C, "_storage_address", lambda tensor: tensor.untyped_storage()._cdata
)
HALF = (torch.bfloat16, torch.float16)
# The types of most tensors.
_TENSORS = frozenset({Tensor, torch.nn.Parameter})


class OpInfo:
    """Static facts about an op, computed once per overload.

    `handler` updates op-specific counters, see `op_handlers.py`; most ops have none.
    `makes_buffer`: the output is a new buffer, and not that of a cast or a matmul.
    """

    __slots__ = (
        "counted", "handler", "makes_buffer", "matmul", "maybe_read", "name", "products", "renames",
        "returns_new", "schema_name", "tensor_positions", "view", "writes",
    )  # fmt: skip

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.schema_name: str = schema.name
        namespace, _, self.name = schema.name.partition("::")
        is_aten = namespace == "aten"
        self.view = bool(getattr(func, "is_view", False))
        self.counted = not (self.view or self.name in NO_KERNEL or namespace in ("profiler", "prim"))
        self.matmul = MATMULS.get(self.name) if is_aten else None
        self.products = FusedProducts.of(schema) if is_aten else None
        self.renames = is_aten and self.name in ("detach", "alias", "lift_fresh")
        self.maybe_read = is_candidate(schema.name)
        self.tensor_positions = tuple(
            i for i, argument in enumerate(schema.arguments) if "Tensor" in str(argument.type)
        )
        # Arguments that the op writes in place, by position; `out=` tensors are keyword-only, no parameters.
        self.writes = tuple(
            i
            for i, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write and not argument.kwarg_only
        )
        self.returns_new = all(r.alias_info is None for r in schema.returns)
        self.makes_buffer = self.counted and self.returns_new and not self.matmul and self.name != "_to_copy"
        self.handler: Callable[[Any, OpRun], None] | None = None


class OpRun:
    """One run of an op: what the recorder knows about it, filled in step by step.

    One is created per op of the step, so it has slots, and only the needed attributes are set.
    """

    __slots__ = (
        "args", "built_in", "chain", "created_node", "data_inputs", "direct", "first_read", "flags", "flops",
        "grad", "in_engine", "info", "kwargs", "max_bytes", "node", "number", "opaque", "outs", "phase",
        "product", "read_bytes", "site", "tainted", "tensors", "trained", "written_bytes",
    )  # fmt: skip

    # Where it runs, set by `Recorder._locate`. `direct`: dispatched by a line, not by the backward of one.
    site: Site
    flags: int
    phase: str
    direct: bool
    # The autograd node that runs, None outside the engine; the sequence number that the next node will get.
    node: Any
    number: int
    in_engine: bool
    # A built-in node: the op works on gradients, and no line dispatched it.
    built_in: bool
    # Whether gradients are enabled, and whether the op created a node; not set in built-in nodes.
    grad: bool
    created_node: bool
    # Code ids of the functions that called an op of a forward without gradients.
    chain: tuple[int, ...]
    # Length of the log of parameter reads before the op.
    first_read: int
    # Sizes: of all inputs, of all outputs, of the largest of both.
    read_bytes: int
    written_bytes: int
    max_bytes: int
    # What the inputs depend on: any parameter, one that an optimizer holds, a matmul with a weight.
    tainted: bool
    trained: bool
    product: Product | None
    # Inputs that depend on no parameter, with their storages.
    data_inputs: list[tuple[int, Tensor]]
    outs: Sequence[Tensor]

    def __init__(self, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        self.info, self.args, self.kwargs = info, args, kwargs
        self.tensors = tensors_among(args, info.tensor_positions)
        # An input has no storage, such as a sparse tensor: the op is counted but not inspected.
        self.opaque = False
        self.flops = 0


def tensors_among(args: tuple[Any, ...], positions: tuple[int, ...]) -> list[Tensor]:
    """Return the tensors among an op's arguments and in its lists of tensors."""
    tensors: list[Tensor] = []
    count = len(args)
    for position in positions:
        if position >= count:
            break
        arg = args[position]
        kind = type(arg)
        # A lookup costs less than `isinstance` with torch's classes.
        if kind in _TENSORS:
            tensors.append(arg)
        elif kind is list or kind is tuple:
            tensors.extend(item for item in arg if isinstance(item, Tensor))
        elif arg is not None and isinstance(arg, Tensor):
            tensors.append(arg)
    return tensors


def output_tensors(out: Any) -> Sequence[Tensor]:
    if type(out) in _TENSORS or isinstance(out, Tensor):
        return (out,)
    if isinstance(out, (tuple, list)):
        return [item for item in out if isinstance(item, Tensor)]
    return ()


def different_order(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one shape store their dimensions in different orders."""
    if a.shape != b.shape or a.ndim < 2:
        return False
    dims = [d for d, size in enumerate(a.shape) if size > 1]
    strides_a, strides_b = a.stride(), b.stride()
    # A dimension of stride 0 is broadcast and has no position in the order.
    dims = [d for d in dims if strides_a[d] and strides_b[d]]
    return sorted(dims, key=lambda d: -strides_a[d]) != sorted(dims, key=lambda d: -strides_b[d])


def out_of_order(tensor: Tensor) -> bool:
    """Return whether dimensions are not stored outermost first: a transposed view, not merely a slice."""
    strides = [s for s, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1 and s]
    return any(outer < inner for outer, inner in itertools.pairwise(strides))


def widens(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether `target` represents every value of `source` exactly: casting back loses nothing."""
    if source == target:
        return False
    if source == torch.bool:
        return True
    if source.is_floating_point != target.is_floating_point or source.is_complex or target.is_complex:
        return False
    return target.itemsize > source.itemsize and torch.promote_types(source, target) == target
