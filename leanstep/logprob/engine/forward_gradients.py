"""Gradients computed in the forward pass, one chunk of rows at a time: 3 GEMMs per row, each logit once.

A loss that is a sum over rows, with weights known beforehand, needs its logits only once. Per chunk of rows,
the forward pass computes the logits and the rows' losses, overwrites the logits with their gradients and adds
these to the gradients of hidden and weight. The backward pass multiplies the finished gradients by a scalar.

The policy loss, distillation and the GPT's head share the code in this file: the tiles of a chunk, the memory
of its logits, the sums of gradients and the autograd function. Each loss defines the work on the rows of one
chunk.
"""

# T rows · T' selected rows · D model · V local vocabulary · c rows of a chunk

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from leanstep.cpu import has_memory
from leanstep.logprob.checks import check_vocabulary
from leanstep.logprob.engine.lm_head import Head, HeadGradients, HeadSums, RowSource
from leanstep.logprob.engine.softmax import (
    FinalStatistics,
    RowFactors,
    RowGradients,
    RowStatistics,
    first_order_only,
)
from leanstep.logprob.engine.tile_loop import Call, backward_tiles, forward_tiles
from leanstep.logprob.engine.tiles import (
    GPU_ELEMENT_BYTES,
    Arrangement,
    ChunkBuffer,
    LogitsInGradient,
    SavedLogits,
    TileMemory,
    arrange,
    on_gpu,
)
from leanstep.logprob.parallel import combine_statistics


@dataclass
class Chunk:
    """Rows whose logits exist together; with `recompute` the logits do not fit and are computed twice."""

    rows: slice
    recompute: bool = False


# Computes a chunk's row gradients from its statistics; also returns the final statistics, except with
# `RowFactors`.
RowWork = Callable[
    [Call, Any, RowStatistics], tuple[FinalStatistics | None, RowGradients] | tuple[None, RowFactors]
]


class FormedLoss(Protocol):
    """A loss that computes its own gradients.

    name: the public function, for messages. source: the selected rows of hidden.
    """

    name: str
    source: RowSource

    def form(self, wanted: Sequence[bool]) -> tuple[Sequence[Tensor | None], HeadGradients | None]:
        """Return the outputs, the loss first, and the gradients of the `wanted` inputs; None if none is.

        Hidden gradients are summed for `gradient_source(source)`.
        """
        ...


def agreed_columns(head: Head, group: Any) -> int:
    """Return the number of columns from which the chunk height is computed; ranks need the same chunks.

    Without a group, the local columns; with one, the vocabulary divided by the number of ranks, rounded up,
    independent of the width of the local shard.
    """
    if group is None:
        return head.columns
    return -(-check_vocabulary(head, "with unequal shards") // group.size())


def arrange_chunks(
    source: RowSource,
    head: Head,
    kernels: Any,
    chunk_rows: int,
    *,
    several: bool,
    one_core: bool = False,
    element_bytes: int = GPU_ELEMENT_BYTES,
) -> Arrangement:
    """Choose tiles as tall as a chunk, and a part of the vocabulary for each core.

    Args:
        several: whether there is more than one chunk.
        one_core: whether the passes always run on one core.
    """
    # Several chunks sum dW in place. 16-bit weights need fp32 sums for that, which only the "rows" order has.
    one_core = one_core or (several and head.weight.dtype != head.dtype)
    tiles, cores, kernels = arrange(
        source.num_rows,
        head.columns,
        source.hidden.shape[1],
        source.hidden.device,
        kernels,
        max_rows=max(chunk_rows, 1),
        chunk_rows=chunk_rows,
        cores=1 if one_core else None,
        element_bytes=element_bytes,
    )
    order = "rows" if several and cores == 1 else "vocab"
    return Arrangement(replace(tiles, order=order), cores, kernels)


def logits_in_gradient(head: Head, dtype: torch.dtype, num_rows: int) -> LogitsInGradient | None:
    """Return the memory of dW for the logits of a single chunk of `num_rows`; None if they do not fit."""
    fits = 0 < num_rows <= LogitsInGradient.rows_that_fit(head.weight, dtype)
    return LogitsInGradient(head.weight, dtype) if fits and head.columns else None


def gradient_source(source: RowSource) -> RowSource:
    """Return the rows for which hidden gradients are summed: on a GPU, only the selected rows.

    The backward pass then scatters them, so that it does not multiply the zeros of other rows.
    """
    if source.rows is None or not on_gpu(source.hidden.device):
        return unrounded_source(source)
    shape = (source.num_rows, source.hidden.shape[1])
    return unrounded_source(RowSource(source.hidden.new_empty(()).expand(shape), None))


def unrounded_source(source: RowSource) -> RowSource:
    """Return the same rows in the dtype of gradients: fp16 gradients stay in fp32 until the backward pass.

    The backward pass applies the loss scale; without it, many gradients underflow in fp16.
    """
    if source.hidden.dtype != torch.float16:
        return source
    placeholder = source.hidden.new_empty((), dtype=torch.float32).expand(source.hidden.shape)
    return RowSource(placeholder, source.rows)


def gradient_scale(head: Head, divisor: float) -> float:
    """Return a power of two that scales the logit gradients of fp16 products, which have no loss scale yet.

    Args:
        divisor: approximately what the loss is divided by: its row gradients are about 1 / divisor.
    """
    if head.operand_dtype != torch.float16:
        return 1.0
    return 2.0 ** math.floor(math.log2(max(divisor, 1.0)))


def most_saved_rows(chunks: Sequence[Chunk]) -> int:
    """Return the rows of the tallest chunk whose logits are saved."""
    return max((c.rows.stop - c.rows.start for c in chunks if not c.recompute), default=0)


def form_by_chunks(
    call: Call,
    chunks: Sequence[Chunk],
    wanted: Sequence[bool],
    row_work: RowWork,
    early: LogitsInGradient | None = None,
) -> HeadGradients | None:
    """Run the forward and backward tile loops on each chunk in turn.

    Args:
        wanted: which of hidden, weight, bias, low_hidden, low_weight need a gradient.
        row_work: called with the chunk's part of `call`, the chunk and its statistics over all shards.
        early: the weight's gradient, whose memory holds the logits; None: a buffer for one chunk.

    Returns:
        The gradients, with those of hidden for `gradient_source(call.source)`; None if none is wanted.
    """
    weight, gpu = call.head.weight, on_gpu(call.source.hidden.device)
    sums: HeadSums | None = None
    memory: TileMemory | None = early
    if any(wanted):
        low = None if call.low is None else unrounded_source(call.low)
        sums = replace(call, source=gradient_source(call.source), low=low).head_sums(wanted, early)
        if early is None:
            memory = ChunkBuffer(weight, call.logit_dtype, most_saved_rows(chunks), call.head.columns)
    saved = None
    for chunk in chunks:
        some = call.rows(chunk.rows)
        if gpu:
            # Gathered once for both loops; on a CPU, a chunk is read in place.
            every_row = slice(0, some.num_rows)
            some = replace(some, source=RowSource(some.chunks(every_row)[0], None))
        saved = SavedLogits(weight, call.logit_dtype, None if chunk.recompute else memory)
        stats = combine_statistics(forward_tiles(some, saved)[0], call.group)
        final, gradients = row_work(some, chunk, stats)
        if sums is not None:
            backward_tiles(some, final, None, gradients, sums, saved, first_row=chunk.rows.start)
    # The logits are freed before the result is allocated.
    memory = saved = None
    return None if sums is None else sums.result()


def loss_with_gradients(tensors: Sequence[Tensor | None], loss: FormedLoss) -> Any:
    """Return the outputs of `loss.form`; the first one is differentiable in `tensors`, once.

    Args:
        tensors: hidden, weight, bias, low_hidden, low_weight.
    """
    return _LossWithGradients.apply(*tensors, loss, torch.is_grad_enabled())


class _LossWithGradients(torch.autograd.Function):
    """Forward: compute the loss and its gradients. Backward: multiply them by a scalar."""

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, low_hidden, low_weight, loss: FormedLoss, grad_mode: bool):  # type: ignore[override, no-untyped-def]
        tensors = (hidden, weight, bias, low_hidden, low_weight)
        wanted = [grad_mode and t is not None and t.requires_grad for t in tensors]
        outputs, ctx.gradients = loss.form(wanted)
        ctx.name, ctx.hidden_shape = loss.name, hidden.shape
        ctx.dtypes = [None if t is None else t.dtype for t in tensors]
        ctx.rows = loss.source.rows if on_gpu(hidden.device) else None
        ctx.mark_non_differentiable(*(t for t in outputs[1:] if t is not None))
        return tuple(outputs)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, g: Tensor, *_unused):  # type: ignore[no-untyped-def]
        gradients: HeadGradients | None = ctx.gradients
        if gradients is None:
            raise RuntimeError(f"{ctx.name}: an earlier backward pass has already returned its gradients")
        # The caller owns them now: a second backward pass would return memory that is accumulated into.
        ctx.gradients = None
        # A scalar on a device is not read on the host; always multiply by it.
        for grad in () if _is_one_on_host(g) else gradients:
            if grad is not None:
                grad.mul_(g)
        pairs = zip(gradients, ctx.dtypes, strict=True)
        gradients = HeadGradients(*[None if grad is None else grad.to(dtype) for grad, dtype in pairs])
        if ctx.rows is not None and gradients.hidden is not None:
            hidden = gradients.hidden.new_zeros(ctx.hidden_shape)
            gradients = gradients._replace(hidden=hidden.index_add_(0, ctx.rows, gradients.hidden))
        return *gradients, None, None


def _is_one_on_host(scalar: Tensor) -> bool:
    """Whether a number in host memory is 1; False for a number on a device: reading it is a host sync."""
    if scalar.device.type != "cpu" or scalar.numel() != 1 or not has_memory(scalar):
        return False
    kinds = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}
    kind = kinds.get(scalar.dtype)
    return kind is not None and kind.from_address(scalar.data_ptr()).value == 1.0
