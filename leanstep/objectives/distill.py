"""Distillation on hidden states: a divergence to a teacher over the whole vocabulary, without [T, V] tensors.

The logits of both heads are computed once per chunk of rows, in a buffer of fixed size (distill_tiles.py).
The divergence is summed with weights that are known beforehand, so the forward pass computes the gradients
and the backward pass multiplies them by a scalar: no logits are computed twice. GEMMs per row: 3 for the
student's head and 1 per teacher.
"""

# T rows · T' selected rows · R rows of a chunk · D model · V local vocabulary · W columns of a tile

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leanstep.cpu import one_thread_each
from leanstep.logprob import Transform, Tuning, VocabShards, linear_logprobs
from leanstep.logprob.checks import (
    CheckedCall,
    accumulation_dtype,
    check_head_call,
    check_options,
    select_per_row,
)
from leanstep.logprob.engine.forward_gradients import (
    agreed_columns,
    arrange_chunks,
    gradient_scale,
    gradient_source,
    logits_in_gradient,
    loss_with_gradients,
    unrounded_source,
)
from leanstep.logprob.engine.gpu.gpu_tiles import GPU_ALIGNMENT, gpu_chunk_rows
from leanstep.logprob.engine.lm_head import Head, HeadGradients, HeadSums, RowSource
from leanstep.logprob.engine.passes import finishes_logits, kernels_for
from leanstep.logprob.engine.tiles import (
    Arrangement,
    ChunkBuffer,
    LogitsInGradient,
    TileMemory,
    Tiles,
    even_slices,
    on_gpu,
)
from leanstep.logprob.engine.torch_ops import (
    fake_gradients,
    flat_head,
    gradients_of,
    head_of,
    leaves_of,
    multiply_formed,
    on_device,
    or_empty,
    outside_graph,
    recording,
    save_formed,
    under_autocast,
)
from leanstep.logprob.linear import linear_log_odds
from leanstep.objectives.distill_tiles import ChunkPasses, Problem
from leanstep.objectives.divergences import Divergence, checked_divergence
from leanstep.objectives.divergences import divergence as plain_divergence
from leanstep.objectives.teachers import (
    GivenTiles,
    HeadTiles,
    Teacher,
    TeacherTopK,
    checked_top_k,
    flat_teacher,
    open_teacher,
    tail_log_mass,
    teacher_of,
)

# Bytes for the logits of one chunk, all heads together. Chunks of fewer rows spend more on rewriting dW than
# they save.
CPU_CHUNK_BYTES, GPU_CHUNK_BYTES = 64 << 20, 2 << 30
FEWEST_ROWS = 64
# Columns of a tile if torch runs the passes: the tile and five more like it fit a cache.
PLAIN_COLUMNS = 1024


class DistillLoss(NamedTuple):
    """`loss` is differentiable; the rest is detached, one entry per selected row.

    divergence: [T'], the weighted sum over teachers. hard: [T'], cross-entropy of the labels, or None.
    entropy: [T'], the student's entropy at the call's temperature, or None.
    """

    loss: Tensor
    divergence: Tensor
    hard: Tensor | None = None
    entropy: Tensor | None = None


@dataclass(frozen=True)
class HardLabels:
    """Labels whose cross-entropy is added: (1 - weight) D + weight CE, with CE at temperature 1.

    Args:
        targets: [T'] or [T] target ids of the rows.
        weight: between 0 and 1.
    """

    targets: Tensor
    weight: float = 0.5


def linear_distill_loss(
    hidden: Tensor,
    weight: Any,
    teacher: Teacher | Sequence[tuple[Teacher, float]],
    *,
    divergence: Divergence | str | tuple[str, float] = "forward_kl",
    temperature: float = 1.0,
    rows: Tensor | None = None,
    row_weights: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    hard: HardLabels | None = None,
    transform: Transform | None = None,
    shards: VocabShards | None = None,
    tuning: Tuning | None = None,
) -> DistillLoss:
    """Compute the divergence of a student's head to its teacher over selected rows, with exact gradients.

    Equivalent to, for "forward_kl":
        log_p = torch.log_softmax(hidden[rows] @ weight.T / temperature, -1)
        log_q = torch.log_softmax(teacher.hidden[rows] @ teacher.weight.T / temperature, -1)
        loss = (log_q.exp() * (log_q - log_p)).sum(-1).mean()

    Args:
        hidden: [T, D].
        weight: [V, D], or any head that `linear_logprobs` accepts.
        teacher: `TeacherHead(hidden, weight)`, `TeacherLogProbs(log_probs)`, `TeacherTopK(ids, log_probs)`;
            or several of the first two with weights, [(teacher, weight), ...]: their divergences are added.
        divergence: "forward_kl", "reverse_kl", ("jsd", beta), ("skew_kl", alpha), ("skew_reverse_kl", alpha),
            "cross_entropy" (forward KL without the teacher's entropy), or a `Divergence`.
        temperature: > 0, of both softmaxes; the loss is not multiplied by its square.
        rows: [T'] int64, rows to score, gathered before both projections; other rows get zero gradient.
        row_weights: [T'] or [T], factors of the rows; 0 excludes a row.
        normalizer: divisor of the sum, a number or a 0-dimensional tensor; None: the sum of `row_weights`, at
            least 1. Use it for TRL's "batchmean" and `num_items_in_batch`; use `row_weights` for a mean over
            sequences.
        hard: `HardLabels(targets, weight)`.
        transform: of the student's head. shards: both heads are sharded alike; no sequence parallelism.
        tuning: `Tuning(budget=)` bytes for the logits of one chunk; `round_logits` for heads without bias and
            softcap.

    Returns:
        DistillLoss; only `loss` is differentiable, and only once. A row whose divergence is infinite (mass
        where the other side has none) makes the loss infinite and gets no gradient.

    Peak extra memory: 64 MiB of logits on a CPU, 2 GiB on a GPU, but at least 64 rows (with a single chunk of
        at most D rows, only the teachers' logits; the student's are stored in dW); a few tiles; the returned
        gradients (with 16-bit weights and several chunks, also fp32 sums of dW).
    GEMMs (2 T' D V FLOPs each): 3 for the student's head and 1 per teacher; TeacherTopK: those of
        `linear_logprobs`.
    Collectives: 3 per row chunk and 1 at the end with a group; TeacherTopK: 2 forward, 1 backward; otherwise
        none.
    Use something else when: the divergence of each row needs its own gradient.
    """
    kind = checked_divergence(divergence)
    tuning = check_options(transform, shards, tuning)
    if hard is not None and not 0 <= hard.weight <= 1:
        raise ValueError(f"hard.weight: expected 0 <= value <= 1, got {hard.weight}")
    if torch.compiler.is_compiling():
        traced: dict[str, Any] = {"temperature": temperature, "rows": rows, "row_weights": row_weights}
        traced |= {"normalizer": normalizer, "hard": hard, "transform": transform, "tuning": tuning}
        if shards is None:
            return _traced(hidden, weight, teacher, kind, **traced)
        return _outside_graph(hidden, weight, teacher, divergence=kind, shards=shards, **traced)
    checked = check_head_call(
        hidden, weight, rows=rows, temperature=temperature, transform=transform, shards=shards
    )
    if isinstance(checked.head.temperature, Tensor):
        raise ValueError("temperature: expected one number for all rows, got a tensor")
    weights = _row_weights(row_weights, normalizer, checked.source, checked.head.dtype)
    if isinstance(teacher, TeacherTopK):
        if hard is not None:
            raise ValueError("hard: expected None with TeacherTopK; add linear_cross_entropy to its loss")
        options = {"transform": transform, "shards": shards, "tuning": tuning}
        return _top_k_loss(checked, hidden, weight, teacher, kind, weights, options)
    teachers = _open_teachers(teacher, kind, checked, shards)
    divisor = float(normalizer) if isinstance(normalizer, (int, float)) else checked.source.num_rows
    problem = _problem(checked, teachers, kind, weights, hard, tuning, divisor)
    one_thread = one_thread_each() if problem.cores > 1 else contextlib.nullcontext()
    with torch.autocast(hidden.device.type, enabled=False), one_thread:
        return DistillLoss(*loss_with_gradients(checked.tensors, _DistillLoss(problem)))


_outside_graph = outside_graph(linear_distill_loss)


def _open_teachers(
    teacher: Teacher | Sequence[tuple[Teacher, float]],
    kind: Divergence,
    checked: CheckedCall,
    shards: VocabShards | None,
) -> list[tuple[HeadTiles | GivenTiles, float]]:
    """Return the teachers' tiles and their weights."""
    weighted = [(teacher, 1.0)] if not isinstance(teacher, Sequence) else list(teacher)
    teachers = [
        (open_teacher(one, checked.head, checked.source, shards), float(factor)) for one, factor in weighted
    ]
    for tiles, _ in teachers:
        if isinstance(tiles, GivenTiles) and tiles.is_probability and not kind.cross_entropy:
            raise ValueError('divergence: expected "cross_entropy" with SoftLabels')
    return teachers


def _problem(
    checked: CheckedCall,
    teachers: list[tuple[HeadTiles | GivenTiles, float]],
    kind: Divergence,
    weights: Tensor,
    hard: HardLabels | None,
    tuning: Tuning,
    divisor: float,
) -> Problem:
    """Build the `Problem` of a call and choose its chunks and tiles."""
    head, source, group = checked.head, checked.source, checked.group
    in_gradient = torch.is_grad_enabled() and checked.tensors[1].requires_grad
    logit_dtype = _logit_dtype(head, teachers, source, tuning)
    chunks = _chunks(head, source.num_rows, len(teachers), logit_dtype, in_gradient, tuning.budget, group)
    tiles, cores, kernels = _arranged(head, source, chunks, len(teachers))
    return Problem(
        head=head,
        source=source,
        low=checked.low,
        teachers=teachers,
        kind=kind,
        weights=weights,
        targets=None if hard is None else checked.targets(hard.targets),
        hard_weight=0.0 if hard is None else hard.weight,
        chunks=chunks,
        tiles=tiles,
        cores=cores,
        kernels=kernels,
        group=group,
        reduce_grad=checked.reduce_grad,
        logit_dtype=logit_dtype,
        gradient_scale=gradient_scale(head, divisor),
    )


@dataclass
class _DistillLoss:
    """The loss of a `Problem` and its gradients."""

    problem: Problem
    name: str = "linear_distill_loss"

    def __post_init__(self) -> None:
        self.source = self.problem.source

    def form(self, wanted: Sequence[bool]) -> tuple[tuple[Tensor | None, ...], HeadGradients | None]:
        """Return the loss, divergence, cross-entropy of the labels and entropy per row, and the gradients."""
        problem, hidden = self.problem, self.source.hidden
        early = _early_gradient(problem) if wanted[1] else None
        sums = _head_sums(problem, wanted, early) if any(wanted) else []
        memories: list[TileMemory] = [] if early is None else [early]
        while len(memories) <= len(problem.teachers):
            memories.append(ChunkBuffer(hidden, problem.logit_dtype, problem.tallest, problem.head.columns))
        rows = torch.zeros((3, self.source.num_rows), dtype=problem.head.dtype, device=hidden.device)
        scratches = problem.scratches()
        for part in problem.chunks:
            rows[:, part] = ChunkPasses(problem, part, memories, scratches).run(sums)
        for fork in sums[1:]:
            sums[0].join(fork)
        gradients = sums[0].result() if sums else None
        soft, hard, entropy = rows
        mixed = soft if problem.targets is None else torch.lerp(soft, hard, problem.hard_weight)
        loss = torch.where(problem.weights == 0, 0.0, mixed * problem.weights).sum()
        return (loss, soft, None if problem.targets is None else hard, entropy), gradients


def _head_sums(problem: Problem, wanted: Sequence[bool], early: LogitsInGradient | None) -> list[HeadSums]:
    """Return gradient accumulators, one per part of the vocabulary."""
    sums = HeadSums(
        problem.head,
        gradient_source(problem.source),
        None if problem.low is None else unrounded_source(problem.low),
        problem.tiles,
        wanted,
        reduce=(problem.group, problem.reduce_grad),
        early=early,
        factor=1.0 / problem.gradient_scale,
    )
    return [sums, *(sums.fork() for _ in problem.column_parts[1:])]


def _top_k_loss(
    checked: CheckedCall,
    hidden: Tensor,
    weight: Any,
    teacher: TeacherTopK,
    kind: Divergence,
    weights: Tensor,
    options: dict[str, Any],
) -> DistillLoss:
    """Compute the loss for k outcomes and the tail: k log-probs per row, then plain torch on [T', k + 1]."""
    ids, log_q = checked_top_k(teacher, checked.source)
    options = {"rows": checked.rows, "temperature": checked.head.temperature, **options}
    if teacher.tail and ids.shape[1] != checked.head.vocabulary:
        out = linear_log_odds(hidden, weight, ids, **options)
        odds_of_tail = out.logp.new_zeros((len(out.logp), 1))
        log_p = _OddsToLogProbs.apply(torch.cat([out.logp, odds_of_tail], -1))
        log_q = torch.cat([log_q, tail_log_mass(log_q).unsqueeze(-1)], -1)
    else:
        out = linear_logprobs(hidden, weight, ids, entropy="metric", **options)
        log_p = out.logp
    log_q = log_q.to(log_p.dtype)
    values = plain_divergence(log_p, log_q, kind)
    loss = torch.where(weights == 0, 0.0, values * weights).sum()
    return DistillLoss(loss, values.detach(), None, out.entropy)


class _OddsToLogProbs(torch.autograd.Function):
    """`torch.log_softmax(odds, -1)` with an accurate gradient if one outcome has nearly all the mass.

    The gradient of the likeliest outcome is g - p (g + rest), a difference of nearly equal numbers if p is
    close to 1. It is computed as g (1 - p) - p rest, with 1 - p summed over the other outcomes.
    """

    @staticmethod
    def forward(ctx: Any, odds: Tensor) -> Tensor:
        log_p = torch.log_softmax(odds, -1)
        ctx.save_for_backward(log_p)
        return log_p

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (log_p,) = ctx.saved_tensors
        p, likeliest = log_p.exp(), log_p.argmax(-1, keepdim=True)
        p_other, grad_other = (t.scatter(-1, likeliest, 0.0).sum(-1, keepdim=True) for t in (p, grad))
        p_likeliest, grad_likeliest = p.gather(-1, likeliest), grad.gather(-1, likeliest)
        slope = grad - p * (grad_likeliest + grad_other)
        return slope.scatter(-1, likeliest, grad_likeliest * p_other - p_likeliest * grad_other)


def _row_weights(
    weights: Tensor | None, normalizer: float | Tensor | None, source: RowSource, dtype: torch.dtype
) -> Tensor:
    if weights is None:
        weights = torch.ones(source.num_rows, dtype=dtype, device=source.hidden.device)
    else:
        if weights.dim() != 1:
            raise ValueError(f"row_weights: expected one dimension, got {tuple(weights.shape)}")
        weights = select_per_row("row_weights", weights.detach(), source.rows, len(source.hidden)).to(dtype)
    if normalizer is None:
        return weights / weights.sum().clamp(min=1.0)
    if isinstance(normalizer, Tensor):
        if normalizer.dim() > 0 or normalizer.requires_grad:
            got = f"shape {tuple(normalizer.shape)}, requires_grad={normalizer.requires_grad}"
            raise ValueError(f"normalizer: expected a number or a 0-dimensional constant, got {got}")
        return weights / normalizer.to(weights.device, dtype)
    if not normalizer > 0:
        raise ValueError(f"normalizer: expected a number > 0, got {normalizer}")
    return weights / normalizer


def _chunks(
    head: Head,
    num_rows: int,
    teachers: int,
    dtype: torch.dtype,
    in_gradient: bool,
    budget: int | None,
    group: Any,
) -> list[slice]:
    """Return row chunks whose logits fit the budget; they are the same on all ranks, for any shard widths.

    A single chunk stores only the teachers' logits if the student's fit in the weight's gradient.
    """
    columns = agreed_columns(head, group)
    fewest, row_bytes = FEWEST_ROWS if budget is None else 1, (1 + teachers) * dtype.itemsize
    if on_gpu(head.weight.device):
        shape = (columns, head.weight.shape[1])
        most = gpu_chunk_rows(shape, head.weight, row_bytes, budget or GPU_CHUNK_BYTES)
        return even_slices(num_rows, max(most, fewest), GPU_ALIGNMENT)
    budget = budget or CPU_CHUNK_BYTES
    if in_gradient and num_rows <= LogitsInGradient.rows_that_fit(head.weight, dtype):
        if num_rows * columns * teachers * dtype.itemsize <= budget:
            return even_slices(num_rows, max(num_rows, 1))
    return even_slices(num_rows, max(budget // max(row_bytes * columns, 1), fewest))


def _logit_dtype(
    head: Head, opened: list[tuple[Any, float]], source: RowSource, tuning: Tuning | None
) -> torch.dtype:
    """Return the dtype of logits: 16 bits if requested and if only the kernels of one teacher read them."""
    teacher = opened[0][0]
    kernels = kernels_for(source.hidden, head.dtype, source.num_rows * head.columns)
    plain = len(opened) == 1 and isinstance(teacher, HeadTiles) and finishes_logits(kernels)
    plain = plain and all(h.bias is None and h.softcap is None for h in (head, teacher.head))
    rounds = tuning is not None and tuning.round_logits and plain
    return head.operand_dtype if rounds and teacher.head.operand_dtype == head.operand_dtype else head.dtype


def _arranged(head: Head, source: RowSource, chunks: list[slice], teachers: int) -> Arrangement:
    """Choose tiles as tall as a chunk and, with kernels, a part of the vocabulary for each core."""
    hidden, tallest = source.hidden, max((c.stop - c.start for c in chunks), default=1)
    kernels = kernels_for(hidden, head.dtype, source.num_rows * head.columns) if teachers == 1 else None
    tiles, cores, kernels = arrange_chunks(
        source, head, kernels, tallest, several=len(chunks) > 1, one_core=kernels is None
    )
    width = tiles.columns
    if kernels is None and not on_gpu(hidden.device):
        width = min(width, PLAIN_COLUMNS)
    return Arrangement(Tiles(tallest, width, tiles.order), cores, kernels)


def _early_gradient(problem: Problem) -> LogitsInGradient | None:
    """Return the memory of dW for the student's logits if there is a single chunk and it fits."""
    if len(problem.chunks) != 1:
        return None
    early = logits_in_gradient(problem.head, problem.logit_dtype, problem.tallest)
    if early is None:
        return None
    every_column = [columns for part in problem.column_parts for columns in part]
    fits = [early.reserve(slice(0, problem.tallest), columns) for columns in every_column]
    return early if all(fits) else None


# linear_distill_loss as a torch.library op: the forward op computes the gradients, the backward op scales
# them. teachers: all tensors of all teachers. names: "alone" or "several", and the kind of each teacher
# (`teachers.flat_teacher`). numbers: temperature, LoRA's scaling, scale, softcap, the divergence's weights,
# the labels' weight, and four per teacher. counts: cross_entropy, budget, round_logits.


@torch.library.custom_op("leanstep::linear_distill_loss", mutates_args=())
def _distill_op(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor | None, up: Tensor | None,
    teachers: list[Tensor], rows: Tensor | None, row_weights: Tensor | None, normalizer: Tensor | None,
    targets: Tensor | None, names: str, numbers: list[float], counts: list[int],
    autocast: torch.dtype | None, needed: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Return loss, divergence, cross-entropy of labels, entropy, and gradients of the first five inputs."""
    several, *kinds = names.split()
    tensors, rest = iter(teachers), iter(numbers[8:])
    weighted = [(teacher_of(kind, tensors, rest), next(rest)) for kind in kinds]
    leaves: list[Any] = leaves_of((hidden, weight, bias, down, up), needed)
    with recording(any(needed)), under_autocast(autocast, hidden):
        out = linear_distill_loss(
            leaves[0],
            head_of(leaves[1], leaves[2], leaves[3], leaves[4], numbers[1]),
            weighted if several == "several" else weighted[0][0],
            divergence=Divergence(numbers[4], numbers[5], numbers[6], bool(counts[0])),
            temperature=numbers[0],
            rows=rows,
            row_weights=row_weights,
            normalizer=normalizer,
            hard=None if targets is None else HardLabels(targets, numbers[7]),
            transform=Transform(numbers[2], numbers[3] or None),
            tuning=Tuning(counts[1] or None, round_logits=bool(counts[2])),
        )
        gradients = or_empty([None] * 5, hidden)
        if any(needed):
            gradients = gradients_of([out.loss], [torch.ones_like(out.loss)], leaves)
    results = [out.loss.detach(), out.divergence, out.hard, out.entropy]
    # These are rows of one tensor, but an op's results must not share storage, so they are cloned.
    return [*or_empty([None if t is None else t.clone() for t in results], hidden), *gradients]


@_distill_op.register_fake
def _(
    hidden, weight, bias, down, up, teachers, rows, row_weights, normalizer, targets, names, numbers, counts,
    autocast, needed,
):  # fmt: skip
    num_rows = hidden.shape[0] if rows is None else rows.shape[0]
    dtype = accumulation_dtype(hidden.dtype, weight.dtype)
    shapes = [(), num_rows, 0 if targets is None else num_rows, num_rows]
    results = [hidden.new_empty(shape, dtype=dtype) for shape in shapes]
    results[2] = hidden.new_empty(0) if targets is None else results[2]
    return [*results, *fake_gradients((hidden, weight, bias, down, up), needed, hidden)]


_distill_op.register_autograd(multiply_formed, setup_context=save_formed)


def _traced(
    hidden: Tensor,
    weight: Any,
    teacher: Any,
    kind: Divergence,
    *,
    temperature: Any,
    rows: Tensor | None,
    row_weights: Tensor | None,
    normalizer: Any,
    hard: HardLabels | None,
    transform: Transform | None,
    tuning: Tuning,
) -> DistillLoss:
    """Run `linear_distill_loss` inside a compiled region."""
    if isinstance(temperature, Tensor):
        raise ValueError("temperature: expected one number for all rows, got a tensor")
    if not isinstance(normalizer, Tensor) and normalizer is not None and not normalizer > 0:
        raise ValueError(f"normalizer: expected a number > 0, got {normalizer}")
    transform = transform or Transform()
    head, _, scaling, autocast = flat_head(weight, 1.0, hidden)
    numbers = [float(temperature), scaling, transform.scale, transform.softcap or 0.0]
    numbers += [kind.teacher, kind.student, kind.mix, 0.0 if hard is None else float(hard.weight)]
    several = isinstance(teacher, (list, tuple))
    names, teachers = ["several" if several else "alone"], []
    for one, factor in teacher if several else [(teacher, 1.0)]:
        name, tensors, more = flat_teacher(one)
        names.append(name)
        teachers += tensors
        numbers += [*more, float(factor)]
    needed = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, *head)]
    divisor = None if normalizer is None else on_device(normalizer, hidden)
    tensors = (hidden, *head, teachers, rows, row_weights, divisor, None if hard is None else hard.targets)
    counts = [int(kind.cross_entropy), tuning.budget or 0, int(tuning.round_logits)]
    out = _distill_op(*tensors, " ".join(names), numbers, counts, autocast, needed)
    return DistillLoss(out[0], out[1], None if hard is None else out[2], out[3])
