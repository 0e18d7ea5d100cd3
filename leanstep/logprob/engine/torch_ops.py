"""Code that the torch.library ops of the head functions share.

torch.compile(fullgraph=True) cannot trace a tile loop (threads, C++, launches). Inside a compiled region,
each function calls an op, defined next to it, which is one node of the graph. Forward and backward are
separate ops: the forward op also returns its row statistics, and the backward op starts from them. Calls that
an op's arguments cannot express (process groups, main_grad) run outside of the graph (`outside_graph`).

The number of rows stays symbolic: shape functions use `shape[0]`, because `len` makes it a constant and
causes one graph per number of rows.

An op takes and returns tensors and plain numbers, so its signature is flat and long. A number of 0 means "not
set"; an empty result tensor means None.
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
NUM_STATISTICS = len(NAMES)  # returned by a forward op


def packed_statistics(stats: RowStatistics | None) -> list[Tensor | None]:
    """Return the statistics that the forward op passes to the backward op; None: it passes none."""
    vectors = [getattr(stats, name, None) for name in NAMES]
    # The vectors share a storage, which an op's results must not, so they are cloned.
    return [None if vector is None else vector.clone() for vector in vectors]


def unpacked_statistics(vectors: Sequence[Tensor]) -> RowStatistics | None:
    """Return the statistics, or None if the forward op returned none or there are no rows."""
    present = [vector if vector.numel() else None for vector in vectors]
    return None if present[0] is None else RowStatistics(*present)  # type: ignore[arg-type]


def statistics_shapes(row: tuple[Any, ...], target: tuple[Any, ...], *names: str) -> list[Any]:
    """Return the shapes of the packed statistics: max, sum, target and `names`; 0 for the others."""
    present = ("max", "sum", "target", *names)
    return [0 if name not in present else target if name == "target" else row for name in NAMES]


def outside_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` as a call that breaks the graph; it is an error with fullgraph=True."""
    reason = f"{function.__name__}: a process group or main_grad; remove fullgraph=True"
    return torch.compiler.disable(function, reason=reason)


def rows_of_mask(rows: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Convert an op's `rows` to row indices; also return the mask [T] if `rows` is one.

    A mask selects as many rows as it has True entries. That number is not a size in the graph: the op's
    results have an entry for each of the T rows, 0 where the mask is False.
    """
    if rows is None or rows.dtype != torch.bool:
        return rows, None
    return rows.nonzero().flatten(), rows


def spread(values: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Scatter values [R, ...] to the mask's rows, [T, ...], 0 elsewhere; without a mask, return them."""
    if values is None or mask is None:
        return values
    full = values.new_zeros((mask.shape[0], *values.shape[1:]))
    full[mask] = values
    return full


def gathered(values: Sequence[Tensor], mask: Tensor | None) -> list[Tensor]:
    """Invert `spread`: select the mask's entries; empty tensors stay empty."""
    return [values_ if mask is None or not values_.numel() else values_[mask] for values_ in values]


@contextlib.contextmanager
def recording(wanted: bool = True) -> Iterator[None]:
    """Enable autograd inside an op, which the dispatcher runs below the autograd key."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "ADInplaceOrView"):
        exclude = exclude.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.set_grad_enabled(wanted):
        yield


def or_empty(tensors: Tensors, like: Tensor) -> list[Tensor]:
    return [like.new_empty(0) if t is None else t for t in tensors]


def leaves_of(tensors: Tensors, needed: Sequence[bool]) -> list[Any]:
    """Return the tensors detached; those that need a gradient are leaves of a new graph."""
    pairs = zip(tensors, needed, strict=True)
    return [None if t is None else t.detach().requires_grad_(need) for t, need in pairs]


def gradients_of(outputs: Tensors, upstream: Sequence[Tensor], leaves: Tensors) -> list[Tensor]:
    """Return the leaves' gradients, an empty tensor where none is needed."""
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
    """Return tensors with the gradients' shapes, for tracing."""
    pairs = zip(tensors, needed, strict=True)
    some = [torch.empty_like(t, memory_format=torch.contiguous_format) if n else None for t, n in pairs]  # type: ignore[arg-type]
    return or_empty(some, like)


def save_formed(ctx: Any, inputs: Any, output: Any) -> None:
    """Save the gradients of an op that computes them in its forward pass.

    `needed` is the op's last input. The op returns the loss, three more results and the gradients of its
    first five inputs.
    """
    ctx.save_for_backward(*output[4:])
    ctx.needed = inputs[-1]
    ctx.others = [[None] * len(x) if _is_tensors(x) else None for x in inputs[5:]]
    ctx.mark_non_differentiable(*output[1:])


def multiply_formed(ctx: Any, upstream: Sequence[Tensor]) -> Any:
    """Run the backward pass of such an op: multiply the saved gradients."""
    pairs = zip(ctx.saved_tensors, ctx.needed, strict=True)
    grads = [_scaled(grad, upstream[0]) if need else None for grad, need in pairs]
    return *grads, *ctx.others


def _scaled(grad: Tensor, factor: Tensor) -> Tensor:
    """Return grad * factor in the dtype of `grad`; a GradScaler's 65,536 overflows fp16."""
    if grad.dtype == torch.float16:
        return (grad.float() * factor.float()).half()
    return grad * factor.to(grad.dtype)


def _is_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and isinstance(value[0], Tensor)


def on_device(number: float | Tensor, like: Tensor) -> Tensor:
    """Convert a number to a 0-dimensional tensor; return a tensor unchanged.

    The product keeps the number symbolic in a graph; `torch.full` would make it a constant.
    """
    if isinstance(number, Tensor):
        return number
    return torch.ones((), dtype=torch.float64, device=like.device) * number


def traced_temperature(temperature: float | Tensor, like: Tensor) -> Tensor | None:
    """Convert a temperature to a tensor, so that one graph serves all values; None for 1.0."""
    if not isinstance(temperature, Tensor) and temperature == 1.0:
        return None
    return on_device(temperature, like)


def temperature_of(temperatures: Tensor | None) -> float | Tensor:
    """Return the temperature of an op's argument, as a number if it can be read without a host sync."""
    if temperatures is None:
        return 1.0
    is_number = temperatures.dim() == 0 and temperatures.device.type == "cpu" and has_memory(temperatures)
    return float(temperatures) if is_number else temperatures


def under_autocast(dtype: torch.dtype | None, tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Restore the autocast state of the traced call."""
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(tensor.device.type, dtype=dtype)


def flat_head(weight: Any, temperature: float | Tensor, hidden: Tensor) -> Any:
    """Flatten a head to an op's arguments.

    Returns (weight, bias, down, up), temperatures or None for 1.0, LoRA's scaling, and the dtype of autocast
    or None.
    """
    tensor, bias, lora = unpack_head(weight)
    # Ops take plain tensors, so a sharded weight is gathered in the graph.
    tensor, bias = full_tensor(tensor), full_tensor(bias)
    adapter, scaling = (None, None), 1.0
    if lora is not None:
        adapter, scaling = (lora.down, lora.up), float(lora.scaling)
    kind = hidden.device.type
    # A traced graph does not preserve the surrounding autocast state.
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    temperatures = traced_temperature(temperature, hidden)
    return (tensor, bias, *adapter), temperatures, scaling, autocast


def head_of(weight: Tensor, bias: Tensor | None, down: Any, up: Any, scaling: float) -> LMHead:
    """Return the head that an op's flat arguments describe."""
    return LMHead(weight, bias, None if down is None else LoRA(down, up, scaling))


def flat_allowed(allowed: Any) -> tuple[list[Any], int]:
    """Flatten `Allowed` to an op's arguments: [ids, offsets, has_set], and `whole_entropy` (-1: None)."""
    if allowed is None:
        return [None] * 3, -1
    ids, offsets, has_set, whole = Allowed(*allowed)
    return [ids, offsets, has_set], -1 if whole is None else int(whole)


def allowed_of(tensors: Sequence[Any], whole: int) -> Allowed | None:
    """Return the `Allowed` record that an op's flat arguments describe."""
    if tensors[0] is None:
        return None
    return Allowed(tensors[0], tensors[1], tensors[2], None if whole < 0 else bool(whole))
