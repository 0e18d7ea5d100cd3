"""Log-probs and entropy from logits that exist already: the caller's logits, a few vectors, one chunk.

One autograd Function for both outputs. The forward pass reads row chunks and keeps statistics only; the
backward pass reads the caller's logits again and fills one gradient buffer chunk by chunk.
"""

# N rows of logits · R selected rows · V local vocabulary

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leanstep.cpu import num_threads, run_on_cores
from leanstep.logprob.checks import (
    accumulation_dtype,
    check_entropy,
    check_float,
    check_rows,
    check_targets,
    check_temperature,
    checked_allowed,
    local_columns,
)
from leanstep.logprob.engine.passes import (
    Finish,
    NativePasses,
    Passes,
    finishes_logits,
    kernels_for,
    suited,
)
from leanstep.logprob.engine.softmax import (
    FinalStatistics,
    RowFactors,
    RowGradients,
    RowStatistics,
    first_order_only,
    logit_gradient,
)
from leanstep.logprob.engine.tiles import Scratch, checked_tile, default_budget, even_slices
from leanstep.logprob.engine.torch_ops import REMEMBERED, traced_token
from leanstep.logprob.engine.vocab_subset import AllowedIds
from leanstep.logprob.inputs import Allowed, Entropy, LogProbs, Tuning, VocabShards
from leanstep.logprob.parallel import VocabShard, combine_statistics


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    rows: Tensor | None = None,
    entropy: Entropy = "none",
    temperature: float | Tensor = 1.0,
    outputs: Sequence[str] = (),
    allowed: Allowed | tuple[Tensor, ...] | None = None,
    shards: VocabShards | None = None,
    tuning: Tuning | None = None,
    reuse_buffer: bool = False,
) -> LogProbs:
    """Log-prob of one target per row, and the entropy of the row, in bounded memory.

    Equivalent to:
        log_p = torch.log_softmax(logits.float() / temperature, -1)
        logp = log_p.gather(1, targets[:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)

    Row i of a language model scores token i + 1: `targets` are what the rows predict, not the tokens that the
    rows were made of.

    Args:
        logits: [N, V], any float dtype and strides; not modified unless `reuse_buffer`.
        targets: [N] or, with `rows`, [R] global ids. When N = R they are taken as [R].
        rows: [R] int64, the rows wanted; gathered chunk by chunk.
        entropy: "none"; "metric": a value without gradient; "grad".
        temperature: > 0, a float or one per row.
        outputs: "lse" (log-sum-exp) or "z_loss" (its square), differentiable.
        allowed: `Allowed(ids, offsets, has_set)`: log-prob and entropy of the softmax over these ids and the
            target only; `Allowed(..., whole_entropy=True)`: the entropy stays that of the whole vocabulary.
        shards: `VocabShards(group, start, total)`, where each rank holds some columns.
        tuning: `Tuning(budget=)` bytes for a chunk of rows, or `Tuning(tile=(rows, None))`.
        reuse_buffer: backward writes the gradient into the storage of `logits`. Only for contiguous fp32 or
            fp64 logits that are not a leaf, and one backward.

    Returns:
        LogProbs: fp32, or fp64 for fp64 logits. -inf logits are fine; a row of them has logp -inf, entropy 0.

    Peak extra memory: the gradient and one chunk; saved for backward: `logits` and up to 5 vectors.
    Collectives: 2 forward, 0 backward with a group; else none.
    Use something else when: a second derivative is needed (`reference.reference_logprobs`).
    """
    check_float("logits", logits, 2)
    check_entropy(entropy)
    check_rows(rows, logits.device)
    wants = {outputs} if isinstance(outputs, str) else set(outputs)
    if wants - {"lse", "z_loss"}:
        raise ValueError(f"outputs: expected lse or z_loss from logits, got {outputs!r}")
    if tuning is not None and tuning.invariant:
        raise ValueError("tuning: expected invariant=False here: the logits were made elsewhere")
    if torch.compiler.is_compiling() and allowed is None and shards is None and not reuse_buffer:
        return traced_token(logits, targets, rows, entropy, temperature, wants, tuning or Tuning())
    num_rows, width = logits.shape
    dtype = accumulation_dtype(logits.dtype)
    if shards is not None and shards.sequence_parallel:
        raise ValueError("shards: sequence_parallel has no meaning for logits that exist, got True")
    shard, vocabulary = local_columns(width, shards)
    targets = check_targets(targets, rows, num_rows, vocabulary)
    ids = checked_allowed(allowed, targets.shape[0], vocabulary, logits.device)
    if ids is not None and wants:
        raise ValueError("outputs: lse has no single meaning with allowed ids, expected ()")
    if reuse_buffer:
        _check_reusable(logits, rows, dtype)
    kernels = kernels_for(logits, dtype, targets.shape[0] * shard.real)
    # A row that is selected twice must not get both gradients at once.
    cores = num_threads() if kernels is NativePasses and rows is None else 1
    kernels = suited(kernels, cores)
    in_kernel = finishes_logits(kernels) and ids is None and logits.stride(-1) == 1
    chunks = _Chunks(
        targets=targets,
        rows=rows,
        entropy=entropy,
        temperature=check_temperature(temperature, rows, num_rows, dtype),
        allowed=ids,
        # Where nothing is copied, one launch may see all rows.
        chunk_rows=_chunk_rows(tuning, logits, dtype, cores, at_once=in_kernel and rows is None),
        shard=shard,
        group=None if shards is None else shards.group,
        dtype=dtype,
        reuse_buffer=reuse_buffer,
        kernels=kernels,
        cores=cores,
        in_kernel=in_kernel,
    )
    logp, entropy_values, lse = _TokenLogProbs.apply(logits, chunks)  # type: ignore[misc]
    z_loss = lse.square() if "z_loss" in wants else None
    return LogProbs(logp, entropy_values, lse if "lse" in wants else None, z_loss)


@dataclass
class _Chunks:
    """How the logits are read: which rows, how many at a time, at which temperature, by whom."""

    targets: Tensor
    rows: Tensor | None
    entropy: Entropy
    temperature: float | Tensor
    allowed: AllowedIds | None
    chunk_rows: int
    shard: VocabShard
    group: Any
    dtype: torch.dtype
    reuse_buffer: bool
    kernels: Passes | None
    cores: int
    # The kernel reads the caller's logits, 16 bits or 32, and divides by the temperature itself.
    in_kernel: bool = False

    @property
    def two_softmaxes(self) -> bool:
        """Whether log-prob and entropy run over different ids."""
        return self.allowed is not None and self.allowed.whole_entropy and self.entropy != "none"

    def over_chunks(self, logits: Tensor, work: Callable[[slice, Scratch], None]) -> None:
        """Do the work on every chunk of rows, on all cores where one call of a kernel is one core's."""
        selected = self.targets.shape[0]
        shape = (min(self.chunk_rows, selected), self.shard.real)
        scratch = [Scratch(logits, self.dtype, *shape) for _ in range(self.cores)]
        chunks = list(even_slices(selected, self.chunk_rows))
        if self.cores == 1:
            for part in chunks:
                work(part, scratch[0])
        else:
            jobs = [lambda core, part=part: work(part, scratch[core]) for part in chunks]
            run_on_cores(jobs, self.cores)

    def source(self, logits: Tensor, part: slice, make_buffer: Callable[[], Tensor]) -> Tensor:
        """Rows `part` of the tempered logits; a buffer is filled only when they must be made."""
        real = logits[:, : self.shard.real]
        if self.rows is None:
            chunk = real[part]
        else:
            chunk = real.index_select(0, self.rows[part])
        if self.in_kernel:
            return chunk
        unscaled = isinstance(self.temperature, float) and self.temperature == 1.0
        if unscaled and chunk.dtype == self.dtype and (self.kernels is None or chunk.stride(-1) == 1):
            return chunk
        buffer = make_buffer().copy_(chunk)
        t = self.temperature
        if unscaled:
            return buffer
        return buffer.div_(t[part].unsqueeze(-1) if isinstance(t, Tensor) else t)

    def finishing(self, part: slice) -> dict[str, Any]:
        """What is left to the kernel: the temperature."""
        t = self.temperature
        if not self.in_kernel or (isinstance(t, float) and t == 1.0):
            return {}
        size = (part.stop - part.start,)
        scale = (
            1.0 / t[part] if isinstance(t, Tensor) else self.targets.new_full(size, 1.0 / t, dtype=self.dtype)
        )
        return {"finish": Finish(None, 1.0, False, scale)}


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, call: _Chunks) -> tuple[Tensor, Tensor | None, Tensor]:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        selected = call.targets.shape[0]
        stats = RowStatistics.empty(
            selected,
            dtype=call.dtype,
            device=logits.device,
            moment=call.entropy != "none",
            allowed=call.two_softmaxes,
        )
        needed = 0 if call.kernels is not None else 1 + (call.entropy != "none")

        def add_chunk(part: slice, scratch: Scratch) -> None:
            shape = (part.stop - part.start, call.shard.real)
            source = call.source(logits, part, lambda: scratch.tile(0, *shape))
            targets = call.targets[part]
            rows = stats.rows(part.start, part.stop)
            if call.allowed is not None and call.shard.real:
                subset = call.allowed.restrict(source, part, targets, call.shard.start)
                if call.two_softmaxes:
                    rows.allowed_part().update_(subset, [subset], kernels=call.kernels)
                else:
                    source = subset
            if call.shard.real:
                where = (targets, call.shard.start)
                work = scratch.tiles(needed, *shape)
                rows.update_(source, work, *where, kernels=call.kernels, **call.finishing(part))

        memory = REMEMBERED.get()
        known = None if memory is None else memory.statistics()
        if known is not None:
            stats = known
        else:
            call.over_chunks(logits, add_chunk)
            if memory is not None:
                memory.keep(stats)
        stats = combine_statistics(stats, call.group)
        final, allowed_final = stats.final(), stats.allowed_final()
        ctx.call = call
        full = final.saved()
        if allowed_final is not None:
            saved = (*allowed_final.saved()[:2], *(full if call.entropy == "grad" else (None, None, None)))
        else:
            saved = (full[0], full[1], full[2] if call.entropy == "grad" else None, None, None)
        ctx.save_for_backward(logits, *saved)
        logp = (allowed_final or final).log_prob(stats.target)
        lse = final.log_sum_exp()
        if call.allowed is not None:
            ctx.mark_non_differentiable(lse)
        if call.entropy == "metric":
            ctx.mark_non_differentiable(final.entropy)
        return logp, final.entropy, lse

    @staticmethod
    @first_order_only
    def backward(ctx: Any, g_logp: Tensor | None, g_entropy: Tensor | None, g_lse: Tensor | None) -> Any:
        call: _Chunks = ctx.call
        if call is None:
            raise RuntimeError(
                "token_logprobs(reuse_buffer=True): the logits were overwritten by an earlier backward"
            )
        logits, *vectors = ctx.saved_tensors
        if call.two_softmaxes:
            allowed_final = FinalStatistics.restored(vectors[0], vectors[1], None)
            final = allowed_final if vectors[2] is None else FinalStatistics.restored(*vectors[2:])
        else:
            final = allowed_final = FinalStatistics.restored(*vectors[:3])
        two_softmaxes = call.two_softmaxes and g_entropy is not None
        main = allowed_final if g_entropy is None else final
        gradients = RowGradients(None if two_softmaxes else g_logp, g_entropy, g_lse)
        every_row, slope = slice(0, call.targets.shape[0]), 1.0 / call.temperature
        factors, second = RowFactors.of(main, gradients.rows(every_row, slope)), None
        if two_softmaxes and g_logp is not None:
            second = RowFactors.of(allowed_final, RowGradients(g_logp).rows(every_row, slope))
        grad, in_place = _gradient_buffer(logits, call)
        needs_work = g_entropy is not None and call.kernels is None

        def write_chunk(part: slice, scratch: Scratch) -> None:
            shape, targets = (part.stop - part.start, call.shard.real), call.targets[part]
            narrow = grad.dtype if call.in_kernel else None
            out = grad[part][:, : call.shard.real] if in_place else scratch.tile(0, *shape, narrow)
            source = call.source(logits, part, lambda: out)
            subset = None
            needs_subset = g_logp is not None or not two_softmaxes
            if call.allowed is not None and needs_subset and call.shard.real:
                subset = call.allowed.restrict(source, part, targets, call.shard.start)
                if not two_softmaxes:
                    source = subset
            if call.shard.real:
                tiles = [out, scratch.tile(1, *shape)] if needs_work else [out]
                where = (targets, call.shard.start)
                more = call.finishing(part)
                logit_gradient(source, tiles, factors.rows(part), *where, kernels=call.kernels, **more)
                if second is not None and subset is not None:
                    out.add_(
                        logit_gradient(subset, [subset], second.rows(part), *where, kernels=call.kernels)
                    )
            if not in_place:
                target = grad[:, : call.shard.real]
                if call.rows is None:
                    target[part] = out
                else:
                    target.index_add_(0, call.rows[part], out.to(grad.dtype))

        call.over_chunks(logits, write_chunk)
        if call.reuse_buffer:
            ctx.call = None
        return grad, None


def _gradient_buffer(logits: Tensor, call: _Chunks) -> tuple[Tensor, bool]:
    """The gradient to fill, and whether chunks can be formed in it directly."""
    if call.reuse_buffer:
        # Shares the version counter: whoever else saved these logits is told that they changed.
        logits = logits.detach()
        logits[:, call.shard.real :] = 0.0
        return logits, True
    if call.rows is not None:
        return torch.zeros_like(logits, memory_format=torch.contiguous_format), False
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    grad[:, call.shard.real :] = 0.0
    return grad, logits.dtype == call.dtype or call.in_kernel


def _chunk_rows(
    tuning: Tuning | None, logits: Tensor, dtype: torch.dtype, cores: int, *, at_once: bool
) -> int:
    num_rows, width = logits.shape
    if tuning is not None and tuning.tile is not None:
        tile = checked_tile(tuning.tile, num_rows, width)
        if tile.columns < width:
            raise ValueError(f"tile: expected all {width} columns (or None) for logits, got {tile.columns}")
        return tile.rows
    if at_once:
        return max(num_rows, 1)
    budget = default_budget(logits.device) if tuning is None or tuning.budget is None else tuning.budget
    return max(budget // cores // (2 * dtype.itemsize * max(width, 1)), 1)


def _check_reusable(logits: Tensor, rows: Tensor | None, dtype: torch.dtype) -> None:
    problem = None
    base = logits._base
    if logits.is_leaf or (base is not None and base.is_leaf):
        problem = "a leaf or a view of one"
    elif not logits.is_contiguous():
        problem = f"strides {logits.stride()} of a tensor that is not contiguous"
    elif logits.dtype != dtype:
        problem = f"dtype {logits.dtype} where {dtype} is accumulated"
    elif rows is not None:
        problem = "rows"
    if problem:
        raise ValueError(
            "reuse_buffer: expected contiguous fp32 or fp64 logits that are not a leaf, all rows; "
            f"got {problem}"
        )
