"""Log-probs and entropy from existing logits, in the memory of a few vectors and one chunk.

One autograd Function computes both outputs. The forward pass reads row chunks and saves only statistics; the
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
from leanstep.logprob.engine.pass_interface import Finish, Passes
from leanstep.logprob.engine.passes import NativePasses, finishes_logits, kernels_for, suited
from leanstep.logprob.engine.softmax import (
    FinalStatistics,
    RowFactors,
    RowGradients,
    RowStatistics,
    first_order_only,
    logit_gradient,
)
from leanstep.logprob.engine.tiles import Scratch, checked_tile, default_budget, even_slices
from leanstep.logprob.engine.torch_ops import (
    NUM_STATISTICS,
    allowed_of,
    flat_allowed,
    gradients_of,
    or_empty,
    outside_graph,
    packed_statistics,
    recording,
    statistics_shapes,
    temperature_of,
    traced_temperature,
    unpacked_statistics,
)
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
    """Return the log-prob of one target per row and the entropy of the row, in bounded memory.

    Equivalent to:
        log_p = torch.log_softmax(logits.float() / temperature, -1)
        logp = log_p.gather(1, targets[:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)

    Row i of a language model scores token i + 1: `targets` are the predicted tokens, not the input tokens.

    Args:
        logits: [N, V], any float dtype and strides; not modified unless `reuse_buffer`.
        targets: [N] or, with `rows`, [R] global ids. If N = R, they are read as [R].
        rows: [R] int64, the rows to score; gathered chunk by chunk.
        entropy: "none"; "metric": a value without gradient; "grad".
        temperature: > 0, a float or one per row.
        outputs: "lse" (log-sum-exp) or "z_loss" (its square), differentiable.
        allowed: `Allowed(ids, offsets, has_set)`: the log-prob is that of the softmax over these ids and the
            target only. The entropy covers the whole vocabulary unless `whole_entropy=False`.
        shards: `VocabShards(group, start, total)` if each rank holds part of the columns.
        tuning: `Tuning(budget=)` bytes for a chunk of rows, or `Tuning(tile=(rows, None))`.
        reuse_buffer: the backward pass writes the gradient into the storage of `logits`. Only for contiguous
            fp32 or fp64 logits that are not a leaf, and for a single backward pass.

    Returns:
        LogProbs: fp32, or fp64 for fp64 logits. Logits may be -inf; a row of -inf has logp -inf, entropy 0.

    Peak extra memory: the gradient and one chunk; saved for backward: `logits` and up to 5 vectors.
    Collectives: 2 forward, 0 backward with a group; otherwise none.
    Use something else when: a second derivative is needed (`reference.reference_logprobs`).
    """
    check_entropy(entropy)
    names = {outputs} if isinstance(outputs, str) else set(outputs)
    if names - {"lse", "z_loss"}:
        raise ValueError(f"outputs: expected lse or z_loss from logits, got {outputs!r}")
    if allowed is not None and names:
        raise ValueError("outputs: expected () with allowed ids, because lse is ambiguous there")
    if shards is not None and shards.sequence_parallel:
        raise ValueError("shards: expected sequence_parallel=False for existing logits, got True")
    tuning = Tuning() if tuning is None else tuning
    if tuning.invariant:
        raise ValueError("tuning: expected invariant=False here: the logits were computed elsewhere")
    check_float("logits", logits, 2)
    check_rows(rows, logits.device, logits.shape[0])
    if torch.compiler.is_compiling():
        options: dict[str, Any] = {"rows": rows, "entropy": entropy, "temperature": temperature}
        options |= {"allowed": allowed, "tuning": tuning}
        if shards is None and not reuse_buffer:
            return _traced(logits, targets, names, **options)
        options |= {"outputs": outputs, "shards": shards, "reuse_buffer": reuse_buffer}
        return _outside_graph(logits, targets, **options)
    chunks = _chosen_chunks(
        logits, targets, rows, entropy, temperature, allowed, shards, tuning, reuse_buffer=reuse_buffer
    )
    return _scored(logits, chunks, names)


_outside_graph = outside_graph(token_logprobs)


def _chosen_chunks(
    logits: Tensor,
    targets: Tensor,
    rows: Tensor | None,
    entropy: Entropy,
    temperature: float | Tensor,
    allowed: Any,
    shards: VocabShards | None,
    tuning: Tuning,
    *,
    reuse_buffer: bool = False,
) -> _Chunks:
    """Check the per-row arguments, then choose the chunk size and the implementation of the passes."""
    num_rows, width = logits.shape
    dtype = accumulation_dtype(logits.dtype)
    shard, vocabulary = local_columns(width, shards)
    targets = check_targets(targets, rows, num_rows, vocabulary)
    ids = checked_allowed(allowed, targets.shape[0], vocabulary, logits.device)
    if reuse_buffer:
        _check_reusable(logits, rows, dtype)
    kernels = kernels_for(logits, dtype, targets.shape[0] * shard.real)
    # With `rows`, one core only: a row that is selected twice must not receive two gradients concurrently.
    cores = num_threads() if kernels is NativePasses and rows is None else 1
    kernels = suited(kernels, cores)
    in_kernel = finishes_logits(kernels) and ids is None and logits.stride(-1) == 1
    return _Chunks(
        targets=targets,
        rows=rows,
        entropy=entropy,
        temperature=check_temperature(temperature, rows, num_rows, dtype),
        allowed=ids,
        # If nothing is copied, one launch can process all rows.
        chunk_rows=_chunk_rows(tuning, logits, dtype, cores, at_once=in_kernel and rows is None),
        shard=shard,
        group=None if shards is None else shards.group,
        dtype=dtype,
        reuse_buffer=reuse_buffer,
        kernels=kernels,
        cores=cores,
        in_kernel=in_kernel,
    )


def _scored(logits: Tensor, chunks: _Chunks, names: set[str], known: RowStatistics | None = None) -> LogProbs:
    """Score the chunks; `known` holds the statistics of an earlier forward pass on the same logits."""
    logp, entropy, lse = _TokenLogProbs.apply(logits, chunks, known)  # type: ignore[misc]
    z_loss = lse.square() if "z_loss" in names else None
    return LogProbs(logp, entropy, lse if "lse" in names else None, z_loss)


@dataclass
class _Chunks:
    """How the logits are read: rows, chunk size, temperature, kernels and cores."""

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
        """Whether log-prob and entropy cover different ids."""
        return self.allowed is not None and self.allowed.whole_entropy and self.entropy != "none"

    def over_chunks(self, logits: Tensor, work: Callable[[slice, Scratch], None]) -> None:
        """Call `work` on every chunk of rows, on several cores if each kernel call uses a single core."""
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
        """Return rows `part` of logits / temperature; a buffer is filled only if a copy is needed."""
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
        """Return the keyword argument that makes the kernel apply the temperature, if it does."""
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
    def forward(  # type: ignore[override]
        ctx: Any, logits: Tensor, call: _Chunks, known: RowStatistics | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        ctx.set_materialize_grads(False)
        stats = _statistics(logits, call) if known is None else known
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
                "token_logprobs(reuse_buffer=True): an earlier backward pass has overwritten the logits"
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
        return grad, None, None


def _statistics(logits: Tensor, call: _Chunks) -> RowStatistics:
    """Compute the statistics of the selected rows over this shard's columns, chunk by chunk."""
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

    call.over_chunks(logits, add_chunk)
    return stats


def _gradient_buffer(logits: Tensor, call: _Chunks) -> tuple[Tensor, bool]:
    """Return the gradient buffer to fill, and whether chunks can be computed in it directly."""
    if call.reuse_buffer:
        # detach() shares the version counter: autograd reports the change to other ops that saved the logits.
        logits = logits.detach()
        logits[:, call.shard.real :] = 0.0
        return logits, True
    if call.rows is not None:
        return torch.zeros_like(logits, memory_format=torch.contiguous_format), False
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    grad[:, call.shard.real :] = 0.0
    return grad, logits.dtype == call.dtype or call.in_kernel


def _chunk_rows(tuning: Tuning, logits: Tensor, dtype: torch.dtype, cores: int, *, at_once: bool) -> int:
    num_rows, width = logits.shape
    if tuning.tile is not None:
        tile = checked_tile(tuning.tile, num_rows, width)
        if tile.columns < width:
            raise ValueError(f"tile: expected all {width} columns (or None) for logits, got {tile.columns}")
        return tile.rows
    if at_once:
        return max(num_rows, 1)
    budget = default_budget(logits.device) if tuning.budget is None else tuning.budget
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


# token_logprobs as a torch.library op. counts: lse, budget, rows of a chunk, whole_entropy (-1: None).


def _op_chunks(logits: Tensor, tensors: Sequence[Any], counts: Sequence[int], entropy: Any) -> _Chunks:
    """Return the chunks that the op's arguments describe."""
    targets, rows, temperatures, *sets = tensors
    _, budget, tile_rows, whole = counts
    tuning = Tuning(budget or None, (tile_rows, None) if tile_rows else None)
    allowed = allowed_of(sets, whole)
    return _chosen_chunks(logits, targets, rows, entropy, temperature_of(temperatures), allowed, None, tuning)


@torch.library.custom_op("leanstep::token_logprobs", mutates_args=())
def _token_op(
    logits: Tensor, targets: Tensor, rows: Tensor | None, temperatures: Tensor | None,
    allowed_ids: Tensor | None, allowed_offsets: Tensor | None, has_set: Tensor | None,
    counts: list[int], entropy: str,
) -> list[Tensor]:  # fmt: skip
    """Return logp, entropy, lse and the statistics, [R] each."""
    tensors = (targets, rows, temperatures, allowed_ids, allowed_offsets, has_set)
    with torch.no_grad():
        chunks = _op_chunks(logits, tensors, counts, entropy)
        # With allowed ids the backward op recomputes the statistics.
        known = _statistics(logits, chunks) if allowed_ids is None else None
        statistics = packed_statistics(known)
        out = _scored(logits, chunks, {"lse"} if counts[0] else set(), known)
    return or_empty([out.logp, out.entropy, out.lse, *statistics], out.logp)


@_token_op.register_fake
def _(logits, targets, rows, temperatures, ids, offsets, has_set, counts, entropy):
    row, moment = (logits.shape[0] if rows is None else rows.shape[0],), entropy != "none"
    statistics = (
        [0] * NUM_STATISTICS if ids is not None else statistics_shapes(row, row, "moment" if moment else "")
    )
    shapes = [row, row if moment else 0, row if counts[0] else 0, *statistics]
    return [logits.new_empty(shape, dtype=accumulation_dtype(logits.dtype)) for shape in shapes]


@torch.library.custom_op("leanstep::token_logprobs_backward", mutates_args=())
def _token_backward_op(
    upstream: list[Tensor], statistics: list[Tensor], logits: Tensor, targets: Tensor, rows: Tensor | None,
    temperatures: Tensor | None, allowed_ids: Tensor | None, allowed_offsets: Tensor | None,
    has_set: Tensor | None, counts: list[int], entropy: str,
) -> Tensor:  # fmt: skip
    """Return the gradient of the logits."""
    leaf = logits.detach().requires_grad_()
    tensors = (targets, rows, temperatures, allowed_ids, allowed_offsets, has_set)
    with recording():
        chunks = _op_chunks(leaf, tensors, counts, entropy)
        out = _scored(leaf, chunks, {"lse"} if counts[0] else set(), unpacked_statistics(statistics))
        outputs = [out.logp, out.entropy if entropy == "grad" else None, out.lse]
        return gradients_of(outputs, upstream, [leaf])[0]


@_token_backward_op.register_fake
def _(upstream, statistics, logits, *_constants):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


_NUM_TENSORS = 7  # the op's leading arguments that are tensors


def _save_token(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.constants = inputs[_NUM_TENSORS:]
    ctx.save_for_backward(*inputs[:_NUM_TENSORS], *output[-NUM_STATISTICS:])
    ctx.mark_non_differentiable(*output[3:], *([output[1]] if inputs[-1] != "grad" else []))


def _token_backward(ctx: Any, upstream: Sequence[Tensor]) -> Any:
    saved = ctx.saved_tensors
    inputs, statistics = saved[:_NUM_TENSORS], list(saved[_NUM_TENSORS:])
    grad = _token_backward_op(list(upstream[:3]), statistics, *inputs, *ctx.constants)
    return grad, *(None,) * (_NUM_TENSORS - 1 + len(ctx.constants))


_token_op.register_autograd(_token_backward, setup_context=_save_token)


def _traced(
    logits: Tensor,
    targets: Tensor,
    names: set[str],
    *,
    rows: Tensor | None,
    entropy: str,
    temperature: float | Tensor,
    allowed: Allowed | tuple[Tensor, ...] | None,
    tuning: Tuning,
) -> LogProbs:
    """Run `token_logprobs` inside a compiled region."""
    temperatures = traced_temperature(temperature, logits)
    tile_rows = tuning.tile[0] if isinstance(tuning.tile, tuple) else None
    sets, whole = flat_allowed(allowed)
    counts = [int(bool(names)), tuning.budget or 0, tile_rows or 0, whole]
    out = _token_op(logits, targets, rows, temperatures, *sets, counts, entropy)
    lse, z_loss = out[2] if "lse" in names else None, out[2].square() if "z_loss" in names else None
    return LogProbs(out[0], out[1] if entropy != "none" else None, lse, z_loss)
