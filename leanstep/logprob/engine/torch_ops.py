"""What linear_logprobs, token_logprobs and linear_policy_loss share as torch.library ops.

torch.compile(fullgraph=True) cannot trace a tile loop (threads, C++, launches). Inside a compiled region each
function therefore calls an op, defined beside it, which the graph holds as one node. Forward and backward are
ops of their own: the forward returns its row statistics as well, and the backward starts from them. What an
op's arguments cannot express (process groups, a KL head, allowed ids, main_grad) is not traced and breaks the
graph.

An op takes and returns tensors and plain numbers, so its signature is flat and long. Among the numbers 0
means "not given", among the results an empty tensor means None.
"""

# T' selected rows · r low rank

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from leanstep.logprob.engine.softmax import RowStatistics
from leanstep.logprob.inputs import LMHead, LoRA, unpack_head

Tensors = Sequence[Tensor | None]
NUM_STATISTICS = 5  # that a forward op returns: max, sum, moment, target, total


def packed_statistics(stats: RowStatistics) -> list[Tensor | None]:
    """The statistics that the forward op hands to the backward op."""
    vectors = (stats.max, stats.sum, stats.moment, stats.target, stats.total)
    # Clones: they share a storage, and an op's results may not.
    return [None if vector is None else vector.clone() for vector in vectors]


def unpacked_statistics(vectors: Sequence[Tensor]) -> RowStatistics:
    return RowStatistics(*[vector if vector.numel() else None for vector in vectors])  # type: ignore[arg-type]


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


def under_autocast(dtype: torch.dtype | None, tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Autocast as it was around the traced call."""
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(tensor.device.type, dtype=dtype)


def flat_head(weight: Any, temperature: float | Tensor, hidden: Tensor) -> Any:
    """A head as an op takes it: (weight, bias, down, up), temperatures per row or None, [temperature, LoRA's
    scaling], the dtype of autocast or None."""
    tensor, bias, lora = unpack_head(weight)
    adapter, scaling = (None, None), 1.0
    if lora is not None:
        adapter, scaling = (lora.down, lora.up), float(lora.scaling)
    per_row = temperature if isinstance(temperature, Tensor) else None
    number = 1.0 if per_row is not None else float(temperature)  # type: ignore[arg-type]
    kind = hidden.device.type
    # A traced graph does not keep the autocast around it.
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return (tensor, bias, *adapter), per_row, [number, scaling], autocast


def head_of(weight: Tensor, bias: Tensor | None, down: Any, up: Any, scaling: float) -> LMHead:
    """The head that an op's flat arguments describe."""
    return LMHead(weight, bias, None if down is None else LoRA(down, up, scaling))
