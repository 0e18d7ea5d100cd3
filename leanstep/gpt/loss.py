"""Multi-token cross-entropy of softcapped logits, on the tile loop of `leanstep.logprob`.

Specific to the model are the cap a * sigmoid((u + b) / c) in place of the engine's tanh, the targets ahead
and their weights. Loss and gradients are formed together, a chunk of rows at a time: the [T, V] logits never
exist as a whole and no product is computed twice.
"""

# T rows · E model · V vocabulary · K tokens predicted ahead

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from leanstep.logprob.engine.forward_gradients import Chunk, arrange_chunks, form_by_chunks
from leanstep.logprob.engine.lm_head import Head, RowSource, narrow_dtype, product, widened
from leanstep.logprob.engine.passes import kernels_for
from leanstep.logprob.engine.softmax import RowGradients, RowStatistics
from leanstep.logprob.engine.tile_loop import Call
from leanstep.logprob.engine.tiles import GPU_ELEMENT_BYTES, default_budget, even_slices
from leanstep.logprob.parallel import VocabShard

# Logits of one chunk of rows on a CPU; elsewhere the engine's budget.
CPU_CHUNK_BYTES = 8 << 20


def ahead_targets(targets: Tensor, mtp: tuple[float, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Targets [T, K] of the next K tokens and their weights [T, K]; weight 0 where there is no such token."""
    rows, ahead = targets.shape[0], len(mtp)
    padded = torch.cat([targets, targets.new_full((ahead - 1,), -1)])
    windows = padded.unfold(0, ahead, 1) if rows else targets.new_zeros(0, ahead)
    # Filled by the device, number by number: a copy from the host would wait.
    weights = torch.empty(rows, ahead, dtype=dtype, device=targets.device)
    for column, weight in zip(weights.unbind(1), mtp, strict=True):
        column.fill_(weight)
    return windows.clamp(min=0), weights.masked_fill_(windows < 0, 0.0)


@dataclass
class Float8:
    """A head's operands rounded to e4m3: 4 bits of exponent, 3 of mantissa, one scale a tensor.

    u = scale_h scale_w (h / scale_h rounded) . (w / scale_w rounded): a GPU multiplies the 8-bit numbers, a
    CPU widens them again, which is exact. Gradients are those of the operands as they were.
    """

    weight_VE: Tensor
    weight_scale: Tensor
    hidden_scale: Tensor

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor) -> Float8:
        weight_scale = _scale(weight)
        # Rows in order: 8-bit products take the second operand column by column only.
        return cls(_rounded(weight, weight_scale).contiguous(), weight_scale, _scale(hidden))

    def product(self, h: Tensor, columns: slice, out: Tensor) -> Tensor:
        """u of some rows and columns into `out`, fp32 or wider."""
        rounded, weight = _rounded(h, self.hidden_scale), self.weight_VE[columns]
        if h.is_cuda:
            u = torch._scaled_mm(
                rounded,
                weight.t(),
                scale_a=self.hidden_scale,
                scale_b=self.weight_scale,
                out_dtype=torch.float32,
            )
            return out.copy_(u)
        torch.mm(rounded.to(out.dtype), weight.t().to(out.dtype), out=out)
        return out.mul_((self.hidden_scale * self.weight_scale).to(out.dtype))


def _scale(x: Tensor) -> Tensor:
    """What makes the largest number of `x` the largest of e4m3; on the device, fp32."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    return (x.detach().abs().amax().float() / largest).clamp_(min=torch.finfo(torch.float32).tiny)


def _rounded(x: Tensor, scale: Tensor) -> Tensor:
    largest = torch.finfo(torch.float8_e4m3fn).max
    return (x / scale).clamp_(-largest, largest).to(torch.float8_e4m3fn)


def check_float8(hidden: Tensor, head: Tensor) -> None:
    """Refuse what has no 8-bit products."""
    if any(side % 16 for side in head.shape):
        raise ValueError(f"float8: expected a head whose sides are multiples of 16, got {tuple(head.shape)}")
    if not hidden.is_cuda:
        return
    capability = torch.cuda.get_device_capability(hidden.device)
    if capability < (8, 9):
        raise ValueError(
            f"float8: expected a GPU of capability 8.9 or newer, got {'.'.join(map(str, capability))}"
        )


@dataclass
class _OwnHead(Head):
    """z = a sigmoid((u + b) / c); `softcap` holds a, `shift` b and `scale` 1 / c. z = u without a softcap."""

    shift: float = 0.0
    float8: Float8 | None = None

    def bounded(
        self, h: Tensor, low_h: Tensor | None, weight: Tensor, rows: slice, columns: slice, out: Tensor
    ) -> Tensor:
        """The logits themselves: their slope follows from them."""
        if self.float8 is not None:
            self.float8.product(h, columns, out)
            if self.softcap is None:
                return out
            out.add_(self.shift).mul_(self.scale)
        else:
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
    float8: bool,
    narrow: torch.dtype | None,
) -> tuple[Call, list[Chunk]]:
    """The engine's description of this head, and its chunks of rows."""
    weight_VE = (head.T if transposed else head).detach()
    vocab = weight_VE.shape[0]
    dtype = torch.float64 if torch.float64 in (hidden.dtype, head.dtype) else torch.float32
    fixed = (VocabShard(0, vocab, vocab), vocab, dtype, narrow)
    rounded = Float8.of(hidden.detach(), weight_VE) if float8 else None
    if softcap is None and rounded is None:
        lm_head = Head(weight_VE, None, None, 1.0, None, 1.0, *fixed)
    else:
        a, b, c = softcap or (None, 0.0, 1.0)
        lm_head = _OwnHead(weight_VE, None, None, 1 / c, a, 1.0, *fixed, shift=b, float8=rounded)
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
    """Forward forms the loss and its gradients; backward multiplies them by a scalar, as often as asked."""

    @staticmethod
    def forward(
        ctx, hidden: Tensor, head: Tensor, weights: Tensor, call: Call, chunks, wants_grad, transposed
    ):
        wanted = [wants_grad and need for need in ctx.needs_input_grad[:2]] + [False] * 3
        loss = torch.zeros((), dtype=torch.float64, device=hidden.device)

        def row_gradients(_call: Call, chunk: Chunk, stats: RowStatistics):
            final = stats.final()
            # Row by row, then in float64: the sum over rows is far larger than a row.
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


def head_loss(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    *,
    mtp: tuple[float, ...] = (1.0,),
    softcap: tuple[float, float, float] | None = None,
    transposed: bool = True,
    tile_rows: int | None = None,
    float8: bool = False,
) -> Tensor:
    """Multi-token cross-entropy of softcapped logits, summed over rows.

    Equivalent to (mtp = (1.0,)):
        logits = hidden @ (head if transposed else head.T)
        a, b, c = softcap
        F.cross_entropy(a * torch.sigmoid((logits + b) / c), targets, reduction="sum", ignore_index=-1)

    Args:
        hidden: [T, E].
        head: [E, V] when `transposed`, else [V, E].
        targets: [T] integers; negative ones are ignored.
        mtp: weight of the k-th token ahead; row t has no target past the last row.
        softcap: (a, b, c) or None.
        tile_rows: rows per chunk; None chooses by the device.
        float8: the logits' product from operands rounded to 8 bits (`Float8`); the gradients' products stay.

    Returns:
        0-dimensional, float32 or float64.

    Peak extra memory: the logits of one chunk, and the gradients of hidden and head (they are made in the
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
    if float8:
        check_float8(hidden, head)
    narrow = narrow_dtype(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        wide = torch.float64 if torch.float64 in (hidden.dtype, head.dtype) else torch.float32
        index, weights = ahead_targets(targets.long(), tuple(mtp), wide)
        call, chunks = _make_call(hidden, head, index, softcap, transposed, tile_rows, float8, narrow)
        weights = weights[:, 0] if weights.shape[1] == 1 else weights
        wants_grad = torch.is_grad_enabled()
        return _HeadLoss.apply(hidden, head, weights, call, chunks, wants_grad, transposed)
