"""What the head functions share as torch.library ops.

torch.compile(fullgraph=True) cannot trace a tile loop (threads, C++, launches). Inside a compiled region each
function therefore calls an op, defined beside it, which the graph holds as one node. Forward and backward are
ops of their own: the forward returns its row statistics as well, and the backward starts from them. What an
op's arguments cannot express (process groups, main_grad) runs outside of the graph (`outside_graph`).

The number of rows stays symbolic: a shape function uses `shape[0]`, because `len` makes it a constant, and
with it one graph per number of rows.

An op takes and returns tensors and plain numbers, so its signature is flat and long. Among the numbers 0
means "not given", among the results an empty tensor means None.
"""

# T' selected rows · r low rank

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from leanstep.cpu import has_memory
from leanstep.logprob.checks import full_tensor
from leanstep.logprob.engine.softmax import RowStatistics
from leanstep.logprob.inputs import Allowed, LMHead, LoRA, unpack_head

Tensors = Sequence[Tensor | None]
NAMES = [field.name for field in fields(RowStatistics)]
NUM_STATISTICS = len(NAMES)  # that a forward op returns


def packed_statistics(stats: RowStatistics | None) -> list[Tensor | None]:
    """The statistics that the forward op hands to the backward op; None: it keeps none."""
    vectors = [getattr(stats, name, None) for name in NAMES]
    # Clones: they share a storage, and an op's results may not.
    return [None if vector is None else vector.clone() for vector in vectors]


def unpacked_statistics(vectors: Sequence[Tensor]) -> RowStatistics | None:
    """None where the forward op kept none, or there are no rows."""
    found = [vector if vector.numel() else None for vector in vectors]
    return None if found[0] is None else RowStatistics(*found)  # type: ignore[arg-type]


def statistics_shapes(row: tuple[Any, ...], target: tuple[Any, ...], *names: str) -> list[Any]:
    """Shapes of the packed statistics: max, sum, target and those in `names`; 0 where one is not kept."""
    kept = ("max", "sum", "target", *names)
    return [0 if name not in kept else target if name == "target" else row for name in NAMES]


def outside_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as a call that a compiled region leaves the graph for; an error with fullgraph=True."""
    reason = f"{function.__name__}: a process group or main_grad; leave fullgraph=True out"
    return torch.compiler.disable(function, reason=reason)


def found_rows(rows: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """An op's `rows` as row numbers; and the mask [T] again where that is how they came.

    A mask stands for as many rows as it has True entries. That number is no size of a graph: the op's results
    have an entry for all T rows, 0 where the mask is False.
    """
    if rows is None or rows.dtype != torch.bool:
        return rows, None
    return rows.nonzero().flatten(), rows


def spread(values: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Values [R, ...] of the mask's rows at their places, [T, ...]; 0 elsewhere. Unchanged without a mask."""
    if values is None or mask is None:
        return values
    full = values.new_zeros((mask.shape[0], *values.shape[1:]))
    full[mask] = values
    return full


def gathered(values: Sequence[Tensor], mask: Tensor | None) -> list[Tensor]:
    """The entries of `spread` values that the mask names; empty tensors stay."""
    return [values_ if mask is None or not values_.numel() else values_[mask] for values_ in values]


@contextlib.contextmanager
def recording(wanted: bool = True) -> Iterator[None]:
    """Switch autograd on inside an op, which runs below it."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "ADInplaceOrView"):
        exclude = exclude.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.set_grad_enabled(wanted):
        yield


def or_empty(tensors: Tensors, like: Tensor) -> list[Tensor]:
    return [like.new_empty(0) if t is None else t for t in tensors]


def leaves_of(tensors: Tensors, needed: Sequence[bool]) -> list[Any]:
    """The same tensors, those that need a gradient as leaves of a graph of their own."""
    pairs = zip(tensors, needed, strict=True)
    return [None if t is None else t.detach().requires_grad_(need) for t, need in pairs]


def gradients_of(outputs: Tensors, upstream: Sequence[Tensor], leaves: Tensors) -> list[Tensor]:
    """The leaves' gradients, empty where none is needed."""
    pairs = [(out, g) for out, g in zip(outputs, upstream, strict=True) if out is not None and g.numel()]
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    if pairs:
        grads = torch.autograd.grad([out for out, _ in pairs], wanted, [g.to(out.dtype) for out, g in pairs])
    else:
        grads = tuple(torch.zeros_like(leaf) for leaf in wanted)
    remaining = iter(grads)
    per_leaf = [next(remaining) if leaf is not None and leaf.requires_grad else None for leaf in leaves]
    return or_empty(per_leaf, upstream[0])


def fake_gradients(tensors: Tensors, needed: Sequence[bool], like: Tensor) -> list[Tensor]:
    """Tensors of the gradients' shapes, for tracing."""
    pairs = zip(tensors, needed, strict=True)
    some = [torch.empty_like(t, memory_format=torch.contiguous_format) if n else None for t, n in pairs]  # type: ignore[arg-type]
    return or_empty(some, like)


def save_formed(ctx: Any, inputs: Any, output: Any) -> None:
    """For an op that forms its gradients: `needed` is its last input; it returns the loss, three more results
    and the gradients of its first five inputs."""
    ctx.save_for_backward(*output[4:])
    ctx.needed = inputs[-1]
    ctx.others = [[None] * len(x) if _is_tensors(x) else None for x in inputs[5:]]
    ctx.mark_non_differentiable(*output[1:])


def multiply_formed(ctx: Any, upstream: Sequence[Tensor]) -> Any:
    """The backward of such an op."""
    pairs = zip(ctx.saved_tensors, ctx.needed, strict=True)
    grads = [_scaled(grad, upstream[0]) if need else None for grad, need in pairs]
    return *grads, *ctx.others


def _scaled(grad: Tensor, factor: Tensor) -> Tensor:
    """grad * factor in the dtype of `grad`; a GradScaler's 65,536 is infinite in fp16."""
    if grad.dtype == torch.float16:
        return (grad.float() * factor.float()).half()
    return grad * factor.to(grad.dtype)


def _is_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and isinstance(value[0], Tensor)


def on_device(number: float | Tensor, like: Tensor) -> Tensor:
    """A number as the 0-dimensional tensor that an op takes; a tensor as it is.

    A product, because that is what a graph has for any number; `torch.full` makes it a constant of the graph.
    """
    if isinstance(number, Tensor):
        return number
    return torch.ones((), dtype=torch.float64, device=like.device) * number


def traced_temperature(temperature: float | Tensor, like: Tensor) -> Tensor | None:
    """A temperature as an op takes it: a tensor, so that one graph serves all numbers; None for 1.0."""
    if not isinstance(temperature, Tensor) and temperature == 1.0:
        return None
    return on_device(temperature, like)


def temperature_of(temperatures: Tensor | None) -> float | Tensor:
    """The temperature that an op's argument describes: a number where it can be read without waiting."""
    if temperatures is None:
        return 1.0
    is_number = temperatures.dim() == 0 and temperatures.device.type == "cpu" and has_memory(temperatures)
    return float(temperatures) if is_number else temperatures


def under_autocast(dtype: torch.dtype | None, tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Autocast as it was around the traced call."""
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(tensor.device.type, dtype=dtype)


def flat_head(weight: Any, temperature: float | Tensor, hidden: Tensor) -> Any:
    """A head as an op takes it: (weight, bias, down, up), temperatures or None for 1.0, LoRA's scaling, the
    dtype of autocast or None."""
    tensor, bias, lora = unpack_head(weight)
    # A sharded weight is gathered in the graph: an op takes plain tensors.
    tensor, bias = full_tensor(tensor), full_tensor(bias)
    adapter, scaling = (None, None), 1.0
    if lora is not None:
        adapter, scaling = (lora.down, lora.up), float(lora.scaling)
    kind = hidden.device.type
    # A traced graph does not keep the autocast around it.
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    temperatures = traced_temperature(temperature, hidden)
    return (tensor, bias, *adapter), temperatures, scaling, autocast


def head_of(weight: Tensor, bias: Tensor | None, down: Any, up: Any, scaling: float) -> LMHead:
    """The head that an op's flat arguments describe."""
    return LMHead(weight, bias, None if down is None else LoRA(down, up, scaling))


def flat_allowed(allowed: Any) -> tuple[list[Any], int]:
    """Allowed ids as an op takes them: [ids, offsets, has_set], and `whole_entropy`, -1 for None."""
    if allowed is None:
        return [None] * 3, -1
    ids, offsets, has_set, whole = Allowed(*allowed)
    return [ids, offsets, has_set], -1 if whole is None else int(whole)


def allowed_of(tensors: Sequence[Any], whole: int) -> Allowed | None:
    """The record that an op's flat arguments describe."""
    if tensors[0] is None:
        return None
    return Allowed(tensors[0], tensors[1], tensors[2], None if whole < 0 else bool(whole))
