"""Multi-token cross-entropy of softcapped logits, on the tile loop of `leanstep.logprob`.

This module adds the cap a * sigmoid((u + b) / c) in place of the engine's tanh, the targets ahead and their
weights. Loss and gradients are computed together, one chunk of rows at a time; no product is computed twice.
On a GPU, one kernel computes losses and gradients from a chunk's products (`kernel.py`). A chunk takes at
most an eighth of the device's memory, and its three products may use 8-bit operands.
"""

# T rows · E model · V vocabulary · K tokens predicted ahead

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from leanstep.logprob.engine.forward_gradients import Chunk, arrange_chunks, form_by_chunks
from leanstep.logprob.engine.lm_head import Head, RowSource, narrow_dtype, product, widened
from leanstep.logprob.engine.passes import kernels_for, launches_triton
from leanstep.logprob.engine.softmax import RowGradients, RowStatistics
from leanstep.logprob.engine.tile_loop import Call
from leanstep.logprob.engine.tiles import GPU_ELEMENT_BYTES, default_budget, even_slices
from leanstep.logprob.parallel import VocabShard

# Logits per chunk of rows on a CPU; elsewhere the engine's budget applies.
CPU_CHUNK_BYTES = 8 << 20


def ahead_targets(
    targets: Tensor, mtp: tuple[float | Tensor, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return targets [T, K] of the next K tokens and weights [T, K]; weight 0 if there is no such token."""
    rows, ahead = targets.shape[0], len(mtp)
    padded = torch.cat([targets, targets.new_full((ahead - 1,), -1)])
    windows = padded.unfold(0, ahead, 1) if rows else targets.new_zeros(0, ahead)
    # Filled on the device, one number at a time: a copy from the host would sync.
    weights = torch.empty(rows, ahead, dtype=dtype, device=targets.device)
    for column, weight in zip(weights.unbind(1), mtp, strict=True):
        column.fill_(weight)
    return windows.clamp(min=0), weights.masked_fill_(windows < 0, 0.0)


@dataclass
class Operands:
    """Hidden states and weight as operands on a GPU: unchanged, or in 8 bits with a scale each.

    In 8 bits h and w are e4m3, logit gradients e5m2. h and w are scaled by the maximum of their tensor, the
    gradients by their largest possible value.
    """

    hidden: Tensor
    weight_VE: Tensor
    hidden_scale: Tensor | None = None
    weight_scale: Tensor | None = None
    grad_scale: Tensor | None = None

    @classmethod
    def in_8_bits(cls, hidden: Tensor, weight: Tensor, steepest: float | Tensor) -> Operands:
        """steepest: no logit gradient is larger."""
        h_scale, w_scale = _scale(hidden), _scale(weight)
        largest = torch.finfo(torch.float8_e5m2).max
        grad_scale = torch.ones_like(h_scale).mul_(steepest).div_(largest)
        return cls(_rounded(hidden, h_scale), _rounded(weight, w_scale), h_scale, w_scale, grad_scale)

    def logits(self, rows: slice, dtype: torch.dtype) -> Tensor:
        h = self.hidden[rows]
        if self.hidden_scale is None or self.weight_scale is None:
            return torch.mm(h, self.weight_VE.T)
        # Second operands are column-major: 8-bit products accept no other layout.
        return torch._scaled_mm(
            h, self._weight_rows.T, scale_a=self.hidden_scale, scale_b=self.weight_scale, out_dtype=dtype
        )

    @functools.cached_property
    def _weight_rows(self) -> Tensor:
        """[V, E], rows in order."""
        return self.weight_VE if self.weight_VE.is_contiguous() else turned(self.weight_VE.T)

    @functools.cached_property
    def _weight_columns(self) -> Tensor:
        """[E, V], rows in order."""
        weight = self.weight_VE.T
        return weight if weight.is_contiguous() else turned(self.weight_VE)

    def new_grad(self, logits: Tensor) -> Tensor:
        """Return the buffer for a chunk's logit gradients: the logits themselves, or a new 8-bit one."""
        if self.hidden_scale is None:
            return logits
        return torch.empty(logits.shape, dtype=torch.float8_e5m2, device=logits.device)

    def hidden_grad(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        if self.weight_scale is None or self.grad_scale is None:
            return torch.mm(grad, self.weight_VE)
        return torch._scaled_mm(
            grad, self._weight_columns.T, scale_a=self.grad_scale, scale_b=self.weight_scale, out_dtype=dtype
        )

    def weight_grad(self, grad: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
        """[E, V]: the transposed head's own layout."""
        h = self.hidden[rows]
        if self.hidden_scale is None or self.grad_scale is None:
            return torch.mm(h.T, grad)
        return torch._scaled_mm(
            h.T.contiguous(),
            turned(grad).T,
            scale_a=self.hidden_scale,
            scale_b=self.grad_scale,
            out_dtype=dtype,
        )


def turned(grad: Tensor) -> Tensor:
    """Return a contiguous copy of grad.T [V, R]."""
    from leanstep.muon.transpose import transpose_copy

    # Bytes: the copy needs no arithmetic.
    out = torch.empty((grad.shape[1], grad.shape[0]), dtype=torch.uint8, device=grad.device)
    return transpose_copy(grad.view(torch.uint8), out).view(grad.dtype)


def _scale(x: Tensor) -> Tensor:
    """Return the scale that maps the maximum of `x` to that of e4m3; fp32, on the device."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    return (x.detach().abs().amax().float() / largest).clamp_(min=torch.finfo(torch.float32).tiny)


def _rounded(x: Tensor, scale: Tensor) -> Tensor:
    largest = torch.finfo(torch.float8_e4m3fn).max
    return (x / scale).clamp_(-largest, largest).to(torch.float8_e4m3fn)


def multiplies_8_bits(hidden: Tensor, head: Tensor) -> bool:
    """Return whether the device supports 8-bit products for a head of this shape."""
    if not hidden.is_cuda or hidden.dtype != torch.bfloat16:
        return False
    fits = not any(side % 16 for side in (*head.shape, hidden.shape[0]))
    return fits and torch.cuda.get_device_capability(hidden.device) >= (8, 9)


@dataclass
class _OwnHead(Head):
    """z = a sigmoid((u + b) / c); `softcap` holds a, `shift` b and `scale` 1 / c. z = u without a softcap."""

    shift: float = 0.0

    def bounded(
        self, h: Tensor, low_h: Tensor | None, weight: Tensor, rows: slice, columns: slice, out: Tensor
    ) -> Tensor:
        """The logits themselves: their slope follows from them."""
        wide = widened(out, len(weight)).fill_(self.shift * self.scale)
        product(h, weight.t(), wide, factor=self.scale, accumulate=True)
        assert self.softcap is not None
        return out.sigmoid_().mul_(self.softcap)

    @property
    def has_tanh(self) -> bool:
        return False

    def cap_slope(self, bounded: Tensor) -> Tensor:
        """a s (1 - s) with s = z / a; the factor 1 / c is the row's."""
        assert self.softcap is not None
        return torch.addcmul(bounded, bounded, bounded, value=-1 / self.softcap)


def _make_call(
    hidden: Tensor,
    head: Tensor,
    index: Tensor,
    softcap: tuple[float, float, float] | None,
    transposed: bool,
    chunk_rows: int | None,
    narrow: torch.dtype | None,
) -> tuple[Call, list[Chunk]]:
    """The engine's description of this head, and its chunks of rows."""
    weight_VE = (head.T if transposed else head).detach()
    vocab = weight_VE.shape[0]
    dtype = torch.float64 if torch.float64 in (hidden.dtype, head.dtype) else torch.float32
    fixed = (VocabShard(0, vocab, vocab), vocab, dtype, narrow)
    if softcap is None:
        lm_head = Head(weight_VE, None, None, 1.0, None, 1.0, *fixed)
    else:
        a, b, c = softcap
        lm_head = _OwnHead(weight_VE, None, None, 1 / c, a, 1.0, *fixed, shift=b)
    num_rows = hidden.shape[0]
    if chunk_rows is None:
        on_cpu = hidden.device.type == "cpu"
        budget = CPU_CHUNK_BYTES if on_cpu else default_budget(hidden.device)
        chunk_rows = max(budget // (dtype.itemsize * vocab), 64)
    chunk_rows = max(min(chunk_rows, num_rows), 1)
    source = RowSource(hidden.detach(), None)
    tiles, cores, kernels = arrange_chunks(
        source,
        lm_head,
        kernels_for(hidden, dtype, num_rows * vocab),
        chunk_rows,
        several=num_rows > chunk_rows,
        element_bytes=GPU_ELEMENT_BYTES + 2,
    )
    targets = index[:, 0] if index.shape[1] == 1 else index
    call = Call(lm_head, source, None, targets, tiles, cores, kernels)
    return call, [Chunk(rows) for rows in even_slices(num_rows, chunk_rows)]


class _HeadLoss(torch.autograd.Function):
    """Forward computes the loss and its gradients; backward, any number of times, scales them."""

    @staticmethod
    def forward(
        ctx, hidden: Tensor, head: Tensor, weights: Tensor, call: Call, chunks, wants_grad, transposed
    ):
        wanted = [wants_grad and need for need in ctx.needs_input_grad[:2]] + [False] * 3
        loss = torch.zeros((), dtype=torch.float64, device=hidden.device)

        def row_gradients(_call: Call, chunk: Chunk, stats: RowStatistics):
            final = stats.final()
            # Sum rows in float64: the total is far larger than one row.
            loss.sub_((weights[chunk.rows] * final.log_prob(stats.target)).sum(dtype=torch.float64))
            return final, RowGradients(-weights[chunk.rows])

        gradients = form_by_chunks(call, chunks, wanted, row_gradients)
        ctx.transposed, ctx.hidden_dtype = transposed, hidden.dtype
        ctx.save_for_backward(*((None, None) if gradients is None else gradients[:2]))
        return loss.to(call.head.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor):  # type: ignore[override]
        grad_hidden, grad_head = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = (grad_hidden * upstream.to(grad_hidden.dtype)).to(ctx.hidden_dtype)
        if grad_head is not None:
            grad_head = grad_head.T if ctx.transposed else grad_head
            # Multiplied into the parameter's own layout.
            out = torch.empty(grad_head.shape, dtype=grad_head.dtype, device=grad_head.device)
            grad_head = torch.mul(grad_head, upstream.to(grad_head.dtype), out=out)
        return grad_hidden, grad_head, *(None,) * 5


def rows_kernel(hidden: Tensor, head: Tensor, softcap: tuple[float, float, float] | None) -> Any:
    """Return the kernel for whole rows of logits if it supports these inputs; else None."""
    same = hidden.dtype == head.dtype and hidden.dtype in (torch.bfloat16, torch.float16)
    if softcap is None or not same or not launches_triton(hidden):
        return None
    from leanstep.gpt import kernel

    return kernel


class _RowsLoss(torch.autograd.Function):
    """The GPU version of `_HeadLoss`: one kernel over whole rows."""

    @staticmethod
    def forward(ctx, hidden, head, index, weights, kernel, softcap, transposed, steepest, tile_rows):
        weight_VE = head.detach().T if transposed else head.detach()
        wants_grad = any(ctx.needs_input_grad[:2])
        operands = Operands(hidden.detach(), weight_VE)
        if steepest is not None and wants_grad:
            operands = Operands.in_8_bits(hidden.detach(), weight_VE, steepest)
        num_rows, vocab = hidden.shape[0], weight_VE.shape[0]
        losses = torch.empty(num_rows, dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if wants_grad else None
        slices = even_slices(num_rows, min(tile_rows or rows_that_fit(hidden, vocab), max(num_rows, 1)))
        grad_head = None
        for rows in slices:
            logits = operands.logits(rows, hidden.dtype)
            grad = operands.new_grad(logits) if wants_grad else None
            kernel.softcap_rows(
                logits, grad, index[rows], weights[rows], losses[rows], softcap, operands.grad_scale
            )
            del logits
            if grad is None or grad_hidden is None:
                continue
            grad_hidden[rows] = operands.hidden_grad(grad, hidden.dtype)
            # Sums over several chunks accumulate in a wide dtype; a single product is rounded once.
            wide = hidden.dtype if len(slices) == 1 else torch.float32
            part = operands.weight_grad(grad, rows, wide)
            grad_head = part if grad_head is None else grad_head.to(torch.float32).add_(part)
        if grad_head is not None and not transposed:
            grad_head = grad_head.T
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.head_dtype = head.dtype
        return losses.sum(dtype=torch.float64).to(torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor):  # type: ignore[override]
        grad_hidden, grad_head = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * upstream.to(grad_hidden.dtype)
        if grad_head is not None:
            grad_head = torch.mul(grad_head, upstream.to(grad_head.dtype)).to(ctx.head_dtype).contiguous()
        return grad_hidden, grad_head, *(None,) * 7


def rows_that_fit(hidden: Tensor, vocab: int) -> int:
    """Return the rows of one chunk: their logits take at most an eighth of the device's memory."""
    memory = torch.cuda.get_device_properties(hidden.device).total_memory if hidden.is_cuda else 1 << 30
    return max(memory // 8 // (vocab * hidden.element_size()), 64)


def head_loss(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    *,
    mtp: tuple[float | Tensor, ...] = (1.0,),
    softcap: tuple[float, float, float] | None = None,
    transposed: bool = True,
    tile_rows: int | None = None,
    float8: bool = False,
) -> Tensor:
    """Return the multi-token cross-entropy of softcapped logits, summed over rows.

    Equivalent to (mtp = (1.0,)):
        logits = hidden @ (head if transposed else head.T)
        a, b, c = softcap
        F.cross_entropy(a * torch.sigmoid((logits + b) / c), targets, reduction="sum", ignore_index=-1)

    Args:
        hidden: [T, E].
        head: [E, V] when `transposed`, else [V, E].
        targets: [T] integers; negative ones are ignored.
        mtp: weight of the k-th token ahead, a number or a tensor [] on the device, which a CUDA graph reads
            at each replay; row t has no target past the last row.
        softcap: (a, b, c) or None.
        tile_rows: rows per chunk; None chooses by the device.
        float8: on a GPU that supports it (capability 8.9 or newer), the three products of a training step
            use 8-bit operands (`Operands`); elsewhere, and without gradients, nothing changes.

    Returns:
        0-dimensional, float32 or float64.

    Peak extra memory: the logits of one chunk, and the gradients of hidden and head (computed in the
        forward pass).
    GEMMs (2 T E V FLOPs each): 3 with gradients, 1 without.
    """
    if hidden.dim() != 2 or head.dim() != 2:
        raise ValueError(
            f"hidden, head: expected two matrices, got {tuple(hidden.shape)} and {tuple(head.shape)}"
        )
    if head.shape[0 if transposed else 1] != hidden.shape[1]:
        raise ValueError(
            f"head: expected {hidden.shape[1]} model features with transposed={transposed}, "
            f"got {tuple(head.shape)}"
        )
    if targets.shape != hidden.shape[:1] or targets.is_floating_point():
        raise ValueError(
            f"targets: expected ({hidden.shape[0]},) integers to match hidden, "
            f"got {targets.dtype} {tuple(targets.shape)}"
        )
    if tile_rows is not None and tile_rows < 1:
        raise ValueError(f"tile_rows: expected at least 1, got {tile_rows}")
    narrow = narrow_dtype(hidden)
    kernel = rows_kernel(hidden, head, softcap)
    with torch.autocast(hidden.device.type, enabled=False):
        wide = torch.float64 if torch.float64 in (hidden.dtype, head.dtype) else torch.float32
        index, weights = ahead_targets(targets.long(), tuple(mtp), wide)
        if kernel is not None:
            steepest = None
            if float8 and softcap is not None and multiplies_8_bits(hidden, head):
                # The cap's slope is a / 4c at most; softmax minus one-hot is within +-1.
                steepest = 0.25 * softcap[0] / softcap[2] * sum(abs(w) for w in mtp)
            if not torch.is_grad_enabled():
                hidden, head = hidden.detach(), head.detach()
            return _RowsLoss.apply(
                hidden, head, index.contiguous(), weights, kernel, softcap, transposed, steepest, tile_rows
            )
        call, chunks = _make_call(hidden, head, index, softcap, transposed, tile_rows, narrow)
        weights = weights[:, 0] if weights.shape[1] == 1 else weights
        wants_grad = torch.is_grad_enabled()
        return _HeadLoss.apply(hidden, head, weights, call, chunks, wants_grad, transposed)
