"""Gradients formed in the forward, one chunk of rows at a time: 3 GEMMs per row, and no logit computed twice.

A loss that is a sum over rows, with weights known beforehand, needs its logits once. Per chunk of rows: the
logits, the rows' losses, then the logits turn into their own gradients, which are added to those of hidden
and weight. Backward multiplies the finished gradients by a scalar.

The policy loss, distillation and the GPT's head share the parts in this file: the tiles of a chunk, the
memory of its logits, the sums of gradients and the autograd function. Each loss says what happens to the rows
of one chunk.
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
    """Rows whose logits exist together; with `recompute` they do not fit, and are computed twice."""

    rows: slice
    recompute: bool = False


# Row gradients of a chunk from its statistics, and the final statistics unless these are `RowFactors`.
RowWork = Callable[
    [Call, Any, RowStatistics], tuple[FinalStatistics | None, RowGradients] | tuple[None, RowFactors]
]


class FormedLoss(Protocol):
    """A loss that forms its own gradients.

    name: of the public function, for messages. source: the selected rows of hidden.
    """

    name: str
    source: RowSource

    def form(self, wanted: Sequence[bool]) -> tuple[Sequence[Tensor | None], HeadGradients | None]:
        """Outputs, the loss first, and the gradients of `wanted` inputs; None: no gradient is wanted.

        Sums of hidden gradients are made for `gradient_source(source)`.
        """
        ...


def agreed_columns(head: Head, group: Any) -> int:
    """Columns that the height of a chunk is computed from: ranks need equally many chunks.

    The local columns without a group; the largest equal share of the vocabulary with one, whatever the width
    of the local shard.
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
    """Tiles as tall as a chunk, and a part of the vocabulary for each core.

    Args:
        several: whether there is more than one chunk.
        one_core: whether the passes run on one core in any case.
    """
    # Several chunks sum dW in place. 16-bit weights need fp32 sums for that, which only "rows" order has.
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
    """The memory of dW for the logits of a single chunk of `num_rows`; None where they do not fit."""
    fits = 0 < num_rows <= LogitsInGradient.rows_that_fit(head.weight, dtype)
    return LogitsInGradient(head.weight, dtype) if fits and head.columns else None


def gradient_source(source: RowSource) -> RowSource:
    """The rows that hidden gradients are summed for: on a GPU the selected ones alone.

    The backward then puts them in their places, so that the zeros of other rows need not be multiplied.
    """
    if source.rows is None or not on_gpu(source.hidden.device):
        return unrounded_source(source)
    shape = (source.num_rows, source.hidden.shape[1])
    return unrounded_source(RowSource(source.hidden.new_empty(()).expand(shape), None))


def unrounded_source(source: RowSource) -> RowSource:
    """The same rows for gradients that must not be rounded yet: fp16 ones stay in fp32 until the backward.

    Their loss scale arrives there; without it many of them are below fp16's smallest number.
    """
    if source.hidden.dtype != torch.float16:
        return source
    stand_in = source.hidden.new_empty((), dtype=torch.float32).expand(source.hidden.shape)
    return RowSource(stand_in, source.rows)


def gradient_scale(head: Head, divisor: float) -> float:
    """A power of two for the logit gradients of fp16 products, which are formed without a loss scale.

    Args:
        divisor: what the loss is divided by, about: its row gradients are that much smaller than one.
    """
    if head.operand_dtype != torch.float16:
        return 1.0
    return 2.0 ** math.floor(math.log2(max(divisor, 1.0)))


def most_saved_rows(chunks: Sequence[Chunk]) -> int:
    """Rows of the tallest chunk whose logits are saved."""
    return max((c.rows.stop - c.rows.start for c in chunks if not c.recompute), default=0)


def form_by_chunks(
    call: Call,
    chunks: Sequence[Chunk],
    wanted: Sequence[bool],
    row_work: RowWork,
    early: LogitsInGradient | None = None,
) -> HeadGradients | None:
    """Run both directions of the tile loop on one chunk after another.

    Args:
        wanted: which of hidden, weight, bias, low_hidden, low_weight need a gradient.
        row_work: called with the chunk's part of `call`, the chunk and its statistics over all shards.
        early: the weight's gradient, whose memory holds the logits; None: a buffer for one chunk.

    Returns:
        The gradients, those of hidden for `gradient_source(call.source)`; None if none is wanted.
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
            # Gathered once for both directions; on a CPU a chunk is read in place.
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
    """The outputs of `loss.form`; the first one has gradients for `tensors`, once.

    Args:
        tensors: hidden, weight, bias, low_hidden, low_weight.
    """
    return _LossWithGradients.apply(*tensors, loss, torch.is_grad_enabled())


class _LossWithGradients(torch.autograd.Function):
    """Forward forms the loss and its gradients; backward multiplies them by a scalar."""

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
            raise RuntimeError(f"{ctx.name}: its gradients were handed out by an earlier backward")
        # The caller owns them now; a second backward would hand out memory that somebody accumulates into.
        ctx.gradients = None
        # A device's scalar is not read on the host: multiply whatever it is.
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
    """Whether a number in host memory is 1; False for a number on a device, which would be a host sync."""
    if scalar.device.type != "cpu" or scalar.numel() != 1 or not has_memory(scalar):
        return False
    kinds = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}
    kind = kinds.get(scalar.dtype)
    return kind is not None and kind.from_address(scalar.data_ptr()).value == 1.0
