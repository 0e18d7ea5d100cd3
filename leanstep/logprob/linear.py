"""Log-probs and entropy from hidden states without the [T, V] logits.

Rows are selected before the projection, and only one tile of logits exists at a time. Tiles that fit the
memory of the weight's gradient are saved there for the backward pass, which recomputes the others.
`_check_problem` checks the arguments, `_choose_tiles` chooses the tiles, and the loops of engine/tile_loop.py
do the work.
"""

# T rows · T' selected rows · D model · V local vocabulary · K targets per row

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leanstep.logprob.checks import (
    CheckedCall,
    accumulation_dtype,
    check_entropy,
    check_head_call,
    check_vocabulary,
    checked_allowed,
    full_tensor,
)
from leanstep.logprob.engine.frozen import FrozenLinearLogProbs
from leanstep.logprob.engine.invariant import RowBlocks, arrange_blocks
from leanstep.logprob.engine.kl_topk import TopK, divergences
from leanstep.logprob.engine.lm_head import Head, RowSource, main_grad_mark
from leanstep.logprob.engine.passes import kernels_for
from leanstep.logprob.engine.softmax import FinalStatistics, RowGradients, RowStatistics, first_order_only
from leanstep.logprob.engine.tile_loop import Call, backward_tiles, forward_tiles
from leanstep.logprob.engine.tiles import (
    CPU_MAX_ROWS,
    Arrangement,
    LogitsInGradient,
    SavedLogits,
    Tiles,
    arrange,
    on_gpu,
)
from leanstep.logprob.engine.torch_ops import (
    NUM_STATISTICS,
    allowed_of,
    fake_gradients,
    flat_allowed,
    flat_head,
    gathered,
    gradients_of,
    head_of,
    leaves_of,
    or_empty,
    outside_graph,
    packed_statistics,
    recording,
    rows_of_mask,
    spread,
    statistics_shapes,
    temperature_of,
    under_autocast,
    unpacked_statistics,
)
from leanstep.logprob.engine.vocab_subset import (
    SPARSE_FRACTION,
    AllowedIds,
    RestOfVocabulary,
    SparseCall,
    sparse_logprobs,
)
from leanstep.logprob.inputs import (
    Allowed,
    Entropy,
    LogProbs,
    ReferenceHead,
    Transform,
    Tuning,
    VocabShards,
)
from leanstep.logprob.parallel import combine_statistics

# Row chunks are as tall as the gradient's memory allows, so that few rows are recomputed. Chunks too small
# for efficient GEMMs, or tiles much larger than a cache, would cost more than recomputing.
FEWEST_SAVED_ROWS = 256
MOST_SAVED_ROWS = 4096

# The result of a forward loop: statistics of the rows, and their largest logits if requested.
Known = tuple[RowStatistics, TopK | None]

OUTPUTS = ("lse", "z_loss", "argmax", "top_k", "kl", "reverse_kl")


def linear_logprobs(
    hidden: Tensor,
    weight: Any,
    targets: Tensor,
    *,
    rows: Tensor | None = None,
    entropy: Entropy = "none",
    temperature: float | Tensor = 1.0,
    transform: Transform | None = None,
    outputs: Sequence[str | tuple[str, int]] = (),
    reference: ReferenceHead | None = None,
    allowed: Allowed | tuple[Tensor, ...] | None = None,
    shards: VocabShards | None = None,
    tuning: Tuning | None = None,
) -> LogProbs:
    """Compute the targets' log-probs under the LM head, and its entropy, one tile of logits at a time.

    Equivalent to:
        logits = torch.nn.functional.linear(hidden[rows], weight, bias)
        log_p = torch.log_softmax(logits.float() / temperature, -1)
        logp = log_p.gather(1, targets[:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)

    Row i of a language model scores token i + 1: `targets` are the predicted tokens, not the input tokens.
    `plan_rows(...).targets(tokens)` and `next_token_targets(tokens)` align them.

    Args:
        hidden: [T, D].
        weight: [V, D], a tensor or DTensor (Shard(0) or Replicate); an nn.Linear (its bias is used); a PEFT
            LoRA layer; or `LMHead(weight, bias, lora)`.
        targets: [T'] or [T', K] ids aligned with `rows`, or with all T rows.
        rows: [T'] int64, rows to score, gathered before the projection; other rows get zero gradient.
        entropy: "none"; "metric": a value without gradient; "grad".
        temperature: > 0, a float or one per row.
        transform: `Transform(scale, softcap, label_smoothing)`.
        outputs: any of "lse", "z_loss" (lse squared), "argmax", ("top_k", k), "kl", "reverse_kl".
        reference: `ReferenceHead(weight, hidden, bias)`, the constant head of the exact KL.
        allowed: `Allowed(ids, offsets, has_set)`: the log-prob is that of the softmax over these ids and the
            target only, as in `linear_masked_logprobs`. The entropy covers the whole vocabulary unless
            `whole_entropy=False`.
        shards: `VocabShards(group, start, total, ...)` if each rank holds part of the columns.
        tuning: `Tuning(budget, tile, save_logits, main_grad, round_logits, invariant)`.

    Returns:
        LogProbs with one entry per selected row, fp32 (fp64 for fp64 input).

    Peak extra memory: one tile per core (1 to 2 MiB on a CPU, 6 without a C++ compiler, up to 544 on a GPU)
        plus one; the selected rows of hidden and [T', D] sums that do not fit its gradient; 5 vectors; saved
        logits; the returned gradients.
    GEMMs (2 T' D V FLOPs each): 3 with gradients, plus 1 for rows whose logits are not saved; with a frozen
        head 2, or 3 if entropy is "grad"; 1 without gradients.
    Collectives: 2 forward, 1 backward with a group; otherwise none.
    Use something else when: V < 1,000 and all rows are scored; the plain version is as fast.
    """
    request = _requested(entropy, outputs)
    tuning = Tuning() if tuning is None else tuning
    if torch.compiler.is_compiling() and not tuning.invariant:
        options: dict[str, Any] = {"rows": rows, "temperature": temperature, "transform": transform}
        options |= {"reference": reference, "allowed": allowed, "tuning": tuning}
        if shards is None and tuning.main_grad is None:
            return _traced(hidden, weight, targets, request, **options)
        options |= {"entropy": entropy, "outputs": outputs, "shards": shards}
        return _outside_graph(hidden, weight, targets, **options)
    checked = check_head_call(
        hidden,
        weight,
        rows=rows,
        temperature=temperature,
        transform=transform,
        shards=shards,
        main_grad=tuning.main_grad,
    )
    problem = _check_problem(checked, targets, request, transform, reference, allowed, shards, tuning)
    return _scored(problem)


_outside_graph = outside_graph(linear_logprobs)


def counted_logprobs(
    hidden: Tensor,
    weight: Any,
    targets: Tensor,
    counts: Tensor,
    *,
    entropy: Entropy = "none",
    temperature: float = 1.0,
    outputs: Sequence[str] = (),
    transform: Transform | None = None,
    tuning: Tuning | None = None,
) -> LogProbs:
    """Run `linear_logprobs` on the rows where `counts` [T] is True; results are [T], 0 elsewhere.

    For compiled regions only: the number of rows is not a size in the graph, and the other rows are not
    projected.
    """
    options: dict[str, Any] = {"rows": counts, "temperature": temperature, "transform": transform}
    options |= {"reference": None, "allowed": None, "tuning": Tuning() if tuning is None else tuning}
    return _traced(hidden, weight, targets, _requested(entropy, outputs), **options)


def linear_log_odds(
    hidden: Tensor,
    weight: Any,
    targets: Tensor,
    *,
    rows: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    transform: Transform | None = None,
    shards: VocabShards | None = None,
    tuning: Tuning | None = None,
) -> LogProbs:
    """Compute log odds of K targets per row against all other columns, and the entropy of all columns.

    Equivalent to:
        others = logits.scatter(1, targets, -torch.inf)
        log_odds = logits.gather(1, targets) - torch.logsumexp(others, -1, keepdim=True)

    `log_softmax` of the log odds and a zero gives the log-probs of the targets and of the rest. The log-prob
    of the rest stays accurate even if the targets hold nearly all of the mass, unlike log(1 - sum(p)).

    Args:
        targets: [T', K] distinct ids per row, K smaller than the vocabulary.
        rows, temperature, transform, shards, tuning: as in `linear_logprobs`.

    Returns:
        LogProbs with log odds [T', K] instead of log-probs; the entropy has no gradient.
    """
    tuning = Tuning() if tuning is None else tuning
    checked = check_head_call(
        hidden,
        weight,
        rows=rows,
        temperature=temperature,
        transform=transform,
        shards=shards,
        main_grad=tuning.main_grad,
    )
    rest = RestOfVocabulary()
    request = _Request("metric", set(), 0)
    return _scored(_Problem(checked, checked.targets(targets, (2,)), request, 0.0, rest, None, tuning))


class _Request(NamedTuple):
    """The outputs that a call requests: the entropy mode, the names of outputs, k of top_k."""

    entropy: Entropy
    names: set[str]
    top_k: int


def _requested(entropy: Entropy, outputs: Sequence[str | tuple[str, int]]) -> _Request:
    check_entropy(entropy)
    names, top_k = set(), 0
    for output in [outputs] if isinstance(outputs, str) else outputs:
        name, k = (output, 0) if isinstance(output, str) else output
        if name not in OUTPUTS or (name == "top_k") != (k > 0):
            expected = "lse, z_loss, argmax, kl, reverse_kl or ('top_k', k > 0)"
            raise ValueError(f"outputs: expected {expected}, got {output!r}")
        names.add(name)
        top_k = max(top_k, k)
    return _Request(entropy, names, top_k)


@dataclass
class _Problem:
    """A call with checked arguments: what to compute, but not yet how."""

    checked: CheckedCall
    targets: Tensor
    request: _Request
    smoothing: float
    allowed: AllowedIds | RestOfVocabulary | None
    reference: tuple[Head, RowSource] | None
    tuning: Tuning
    # The result of an earlier forward loop on the same tensors.
    known: Known | None = None

    def __post_init__(self) -> None:
        self.needs_grad = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in self.checked.tensors
        )

    @property
    def saves_in_gradient(self) -> bool:
        """Whether the memory of the weight's gradient may hold logits."""
        saves = self.tuning.save_logits[0] == "grad"  # type: ignore[index]
        trained = self.needs_grad and self.checked.tensors[1].requires_grad
        return saves and trained and self.tuning.main_grad is None

    @property
    def is_simple(self) -> bool:
        """Whether each row has one target and its log-prob is not smoothed."""
        return not self.smoothing and self.targets.dim() == 1

    @property
    def is_sparse(self) -> bool:
        """Whether the allowed rows of the weight suffice for all requested outputs and cost less."""
        ids = self.allowed
        if not isinstance(ids, AllowedIds) or not ids.everywhere:
            return False
        if ids.whole_entropy and self.request.entropy != "none":
            return False
        if self.checked.low is not None or self.checked.group is not None:
            return False
        return ids.mean_size < SPARSE_FRACTION * self.checked.head.columns

    @property
    def forms_jacobians(self) -> bool:
        """Whether the head is frozen and the forward loop computes the rows' Jacobians."""
        hidden, weight, bias = self.checked.tensors[:3]
        if not self.needs_grad or not hidden.requires_grad:
            return False
        if self.tuning.invariant or self.known is not None:
            return False
        if weight.requires_grad or (bias is not None and bias.requires_grad) or self.checked.low is not None:
            return False
        if self.allowed is not None or self.reference is not None or not self.is_simple:
            return False
        if not on_gpu(hidden.device):
            return True
        # With an entropy gradient, the Jacobians also take 3 GEMMs, and more passes.
        return self.request.entropy != "grad" and not self.request.names and self.checked.group is None


def _check_problem(
    checked: CheckedCall,
    targets: Tensor,
    request: _Request,
    transform: Transform | None,
    reference: ReferenceHead | None,
    allowed: Any,
    shards: VocabShards | None,
    tuning: Tuning,
) -> _Problem:
    """Check the arguments that only `linear_logprobs` takes."""
    head, smoothing = checked.head, 0.0 if transform is None else transform.label_smoothing
    if smoothing:
        check_vocabulary(head, "for label_smoothing")
    targets = checked.targets(targets, (1, 2))
    ids = checked_allowed(allowed, targets.shape[0], head.vocabulary, checked.source.hidden.device)
    if ids is not None and (request.names or smoothing or targets.dim() == 2):
        raise ValueError("allowed: expected no outputs, label_smoothing or several targets per row with it")
    if tuning.invariant:
        _check_invariant(request.names, allowed, checked.low, shards)
    reference_head = _reference_head(request.names, checked, reference)
    return _Problem(checked, targets, request, smoothing, ids, reference_head, tuning)


def _scored(problem: _Problem) -> LogProbs:
    """Choose the implementation and run it."""
    with torch.autocast(problem.checked.source.hidden.device.type, enabled=False):
        if problem.is_sparse:
            return _run_sparse(problem)
        call = _choose_blocks(problem) if problem.tuning.invariant else _choose_tiles(problem)
        logp, entropy, lse, kl, reverse_kl, values, best = _run(problem, call)
    names = problem.request.names
    return LogProbs(
        logp=logp,
        entropy=entropy,
        lse=lse if "lse" in names else None,
        z_loss=lse.square() if "z_loss" in names else None,
        argmax=best[:, 0] if "argmax" in names else None,
        top_k=(values, best) if "top_k" in names else None,
        kl=kl,
        reverse_kl=reverse_kl,
    )


def _run_sparse(problem: _Problem) -> LogProbs:
    checked, allowed, tuning = problem.checked, problem.allowed, problem.tuning
    assert isinstance(allowed, AllowedIds)
    call = SparseCall(
        checked.head,
        checked.rows,
        allowed.sorted_pairs(problem.targets, checked.head.columns),
        problem.request.entropy,
        budget=tuning.budget,
        main_grad=tuning.main_grad,
    )
    hidden, weight, bias = checked.tensors[:3]
    logp, entropy, _ = sparse_logprobs(hidden, weight, bias, call)
    return LogProbs(logp, entropy)


def _run(problem: _Problem, call: Call) -> Any:
    """Return logp, entropy, lse, kl, reverse_kl, top-k values and ids; each is None unless requested."""
    tensors = problem.checked.tensors
    with call.one_thread():
        if problem.forms_jacobians:
            return FrozenLinearLogProbs.apply(*tensors, call)
        results: Any = _LinearLogProbs.apply(*tensors, call, problem.known)
    if call.blocks is None:
        return results
    return [None if values is None else call.blocks.picked(values) for values in results]


def _choose_tiles(problem: _Problem) -> Call:
    """Choose tiles, cores and passes for the shapes and the requested outputs."""
    checked, tuning, request = problem.checked, problem.tuning, problem.request
    head, (hidden, weight, bias) = checked.head, checked.tensors[:3]
    num_rows, columns = checked.source.num_rows, head.columns
    many_passes = bool(request.top_k or "argmax" in request.names) or problem.forms_jacobians
    many_passes = many_passes or problem.allowed is not None or problem.reference is not None
    bias_gradient = problem.needs_grad and bias is not None and bias.requires_grad
    arrangement = arrange(
        num_rows,
        columns,
        hidden.shape[1],
        hidden.device,
        kernels_for(hidden, head.dtype, num_rows * columns),
        budget=tuning.budget,
        tile=tuning.tile,
        max_rows=_tallest_tile(head, problem.saves_in_gradient),
        cores=0 if many_passes else None if num_rows <= columns else 1,
        element_bytes=_bytes_per_logit(
            head, simple=problem.is_simple, bias_gradient=bias_gradient, rounded=tuning.round_logits
        ),
        trained=problem.needs_grad and weight.requires_grad,
    )
    return _call(problem, arrangement)


def _choose_blocks(problem: _Problem) -> Call:
    """Choose row blocks and tiles for `tuning.invariant`: a row's bits do not depend on the other rows."""
    checked, tuning = problem.checked, problem.tuning
    head, source, group = checked.head, checked.source, checked.group
    blocks, arrangement = arrange_blocks(
        head,
        source.hidden,
        source.num_rows,
        ranks=1 if group is None else group.size(),
        budget=tuning.budget,
        tile=tuning.tile,
        max_rows=_tallest_tile(head, problem.saves_in_gradient),
    )
    places = blocks.places(source.hidden.device)
    if isinstance(head.temperature, Tensor):
        head.temperature = head.temperature[places]
    blocked = RowSource(source.hidden, places if source.rows is None else source.rows[places])
    problem = replace(problem, checked=replace(checked, source=blocked), targets=problem.targets[places])
    return _call(problem, arrangement, blocks)


def _call(problem: _Problem, arrangement: Arrangement, blocks: RowBlocks | None = None) -> Call:
    checked, tuning, (entropy, names, top_k) = problem.checked, problem.tuning, problem.request
    return Call(
        head=checked.head,
        source=checked.source,
        low=checked.low,
        targets=problem.targets,
        tiles=arrangement.tiles,
        cores=arrangement.cores,
        kernels=arrangement.kernels,
        entropy=entropy,
        lse=bool({"lse", "z_loss"} & names),
        allowed=problem.allowed,
        smoothing=problem.smoothing,
        top_k=max(top_k, int("argmax" in names)),
        reference=problem.reference,
        kl="kl" in names,
        reverse_kl="reverse_kl" in names,
        group=checked.group,
        reduce_grad=checked.reduce_grad,
        main_grad=tuning.main_grad,
        in_gradient=problem.saves_in_gradient,
        save_bytes=tuning.save_logits[1] if problem.needs_grad else 0,  # type: ignore[arg-type, index]
        round_logits=tuning.round_logits,
        blocks=blocks,
    )


class _LinearLogProbs(torch.autograd.Function):
    """Forward: compute statistics tile by tile. Backward: convert the same tiles to gradients."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden, weight, bias, low_hidden, low_weight, call: Call, known: Known | None
    ):  # type: ignore[no-untyped-def]
        ctx.set_materialize_grads(False)
        saved = _saved_logits(call)
        stats, best = forward_tiles(call, saved) if known is None else known
        if call.group is not None and call.blocks is None:
            stats = combine_statistics(stats, call.group)
            best = None if best is None else best.over_ranks(call.group)
        final, allowed_final = stats.final(), stats.allowed_final()
        logp = (allowed_final or final).log_prob(stats.target)
        if call.smoothing and stats.total is not None and call.head.vocabulary is not None:
            mean = (stats.total / call.head.vocabulary - final.max) - final.log_sum
            logp = (1.0 - call.smoothing) * logp + call.smoothing * (
                mean if logp.dim() == 1 else mean.unsqueeze(-1)
            )
        kl = reverse_kl = None
        saved_kl: tuple[Tensor | None, ...] = (None,) * 4
        if call.reference is not None:
            saved_kl = divergences(stats)
            kl, reverse_kl = saved_kl[:2]
        full = final.saved()
        if call.entropy != "grad":
            full = (*full[:2], None)
        # In metric mode only the restricted softmax has a gradient.
        if allowed_final is not None and call.entropy != "grad":
            full, allowed_final = (*allowed_final.saved()[:2], None), None
        restricted = (None, None) if allowed_final is None else allowed_final.saved()[:2]
        inputs = (hidden, weight, bias, low_hidden, low_weight)
        ctx.save_for_backward(*inputs, *full, *restricted, *saved_kl, *saved.tensors)
        ctx.call, ctx.places, ctx.early = call, saved.places, saved.memory
        lse = final.log_sum_exp() if call.lse else None
        values, ids = (None, None) if best is None else (best.values, best.ids)
        metric = final.entropy if call.entropy == "metric" else None
        ctx.mark_non_differentiable(*(t for t in (values, ids, metric) if t is not None))
        return logp, final.entropy, lse, kl, reverse_kl, values, ids

    @staticmethod
    @first_order_only
    def backward(ctx: Any, g_logp, g_entropy, g_lse, g_kl, g_reverse, _values, _ids):  # type: ignore[no-untyped-def]
        call: Call = ctx.call
        # Read once: activation checkpointing does not allow a second read.
        _, weight, _, _, _, maximum, log_sum, entropy, allowed_max, allowed_log_sum, *others = (
            ctx.saved_tensors
        )
        saved_kl, early = others[:4], ctx.early
        saved = SavedLogits(weight, call.logit_dtype, early)
        saved.restore(ctx.places, others[4:])
        if ctx.needs_input_grad[1]:
            # The gradient overwrites the saved logits and is returned, so another backward pass recomputes.
            ctx.early = None
        final = FinalStatistics.restored(maximum, log_sum, entropy)
        allowed_final = final if call.allowed is not None else None
        if allowed_max is not None:
            allowed_final = FinalStatistics.restored(allowed_max, allowed_log_sum, None)
        incoming = (g_logp, g_entropy, g_lse, g_kl, g_reverse)
        gradients = RowGradients(*[None if g is None else g.to(call.head.dtype) for g in incoming])
        with torch.autocast(call.targets.device.type, enabled=False), call.one_thread():
            sums = call.head_sums(ctx.needs_input_grad[:5], early)
            if call.head.is_on_gpu:
                call = replace(call, source=sums.hold_rows(call.source))
            backward_tiles(call, final, allowed_final, gradients, sums, saved, divergences=saved_kl)
            grads = sums.result()
        if call.main_grad is not None:
            grads = grads._replace(weight=main_grad_mark(weight))
        return *grads, None, None


def _bytes_per_logit(head: Head, *, simple: bool, bias_gradient: bool, rounded: bool) -> int:
    """Return the bytes per logit of a GPU tile, plus its 16-bit gradient if that has its own memory.

    simple: only the kernels read a tile.
    """
    if rounded and simple:
        return head.operand_dtype.itemsize
    separate = head.operand_dtype.itemsize < head.dtype.itemsize and (bias_gradient or not simple)
    return head.dtype.itemsize + (head.operand_dtype.itemsize if separate else 0)


def _tallest_tile(head: Head, in_gradient: bool) -> int:
    """Return the largest tile height that fits the gradient's memory, if that height is efficient."""
    fitting = LogitsInGradient.rows_that_fit(head.weight, head.dtype) if in_gradient else 0
    return min(fitting, MOST_SAVED_ROWS) if fitting >= FEWEST_SAVED_ROWS else CPU_MAX_ROWS


def _saved_logits(call: Call) -> SavedLogits:
    """Return the storage for saved logits: dW if its memory fits the tiles, then saved tensors."""
    weight, dtype, early = call.head.weight, call.logit_dtype, None
    if call.in_gradient and call.tiles.order == "vocab" and call.num_rows and call.head.columns:
        if min(call.num_rows, call.tiles.rows) <= LogitsInGradient.rows_that_fit(weight, dtype):
            early = LogitsInGradient(weight, dtype)
    return SavedLogits(weight, dtype, early, call.save_bytes)


def _check_invariant(
    names: set[str], allowed: Any, low: RowSource | None, shards: VocabShards | None
) -> None:
    """Raise an error for options that are not bitwise invariant."""
    if torch.compiler.is_compiling():
        raise ValueError("tuning.invariant: expected a call outside of torch.compile")
    if names - {"lse", "z_loss"}:
        raise ValueError(f"outputs: expected lse or z_loss with tuning.invariant, got {sorted(names)}")
    if allowed is not None:
        raise ValueError("allowed: expected None with tuning.invariant")
    if low is not None:
        raise ValueError("weight: expected a head without LoRA with tuning.invariant; merge it first")
    if shards is not None and shards.group is not None and shards.start is not None:
        raise ValueError("shards.start: expected None (equal shards) with tuning.invariant")


def _reference_head(
    names: set[str], checked: CheckedCall, reference: ReferenceHead | None
) -> tuple[Head, RowSource] | None:
    """Return the constant head of a KL and its hidden rows."""
    if not {"kl", "reverse_kl"} & names:
        return None
    head, hidden = checked.head, checked.tensors[0]
    if reference is None or (reference.weight is None and reference.hidden is None):
        raise ValueError("reference: expected a ReferenceHead with weight or hidden for a KL, got neither")
    # In a LoRA run, the usual reference is the head without its adapter.
    weight, bias = head.weight, head.bias if reference.bias is None else reference.bias
    if reference.weight is not None:
        weight, bias = reference.weight, reference.bias
    ref_hidden = hidden if reference.hidden is None else reference.hidden
    if weight.shape[0] != head.weight.shape[0] or weight.shape[1:] != ref_hidden.shape[1:]:
        expected = f"[{head.weight.shape[0]}, {ref_hidden.shape[1]}]"
        raise ValueError(f"reference.weight: expected {expected}, got {tuple(weight.shape)}")
    if ref_hidden.shape[0] != hidden.shape[0]:
        raise ValueError(f"reference.hidden: expected {hidden.shape[0]} rows, got {ref_hidden.shape[0]}")
    bias = None if bias is None else bias.detach()
    constant = replace(head, weight=weight.detach(), bias=bias, low_weight=None)
    return constant, RowSource(ref_hidden.detach(), checked.rows)


# linear_logprobs as a torch.library op. numbers: LoRA's scaling, scale, softcap, smoothing. counts:
# lse, top_k, budget, rows and columns of a tile, round_logits, kl, reverse_kl, whole_entropy (-1: None). rows
# may be a mask [T]: `torch_ops.rows_of_mask`.


def _op_problem(
    tensors: Sequence[Any], numbers: Sequence[float], counts: Sequence[int], entropy: Any,
    autocast: torch.dtype | None,
) -> _Problem:  # fmt: skip
    """Return the problem that the op's arguments describe."""
    hidden, weight, bias, down, up, targets, rows, temperatures, *others = tensors
    lse, top_k, budget, tile_rows, tile_columns, rounds, kl, reverse_kl, whole = counts
    wanted = {"lse": lse, "top_k": top_k, "kl": kl, "reverse_kl": reverse_kl}
    transform = Transform(numbers[1], numbers[2] or None, numbers[3])
    tile = (tile_rows or None, tile_columns or None) if tile_rows or tile_columns else None
    tuning = Tuning(budget or None, tile, "none", round_logits=bool(rounds))
    with under_autocast(autocast, hidden):
        checked = check_head_call(
            hidden,
            head_of(weight, bias, down, up, numbers[0]),
            rows=rows,
            temperature=temperature_of(temperatures),
            transform=transform,
            shards=None,
        )
    request = _Request(entropy, {name for name, count in wanted.items() if count}, top_k)
    reference = ReferenceHead(*others[:3]) if kl or reverse_kl else None
    allowed = allowed_of(others[3:], whole)
    return _check_problem(checked, targets, request, transform, reference, allowed, None, tuning)


def _statistics(problem: _Problem) -> Known | None:
    """Run only the forward loop; return None if the backward op has to recompute the statistics."""
    if problem.allowed is not None:
        return None
    with torch.autocast(problem.checked.source.hidden.device.type, enabled=False):
        call = _choose_tiles(problem)
        with call.one_thread():
            return forward_tiles(call, _saved_logits(call))


@torch.library.custom_op("leanstep::linear_logprobs", mutates_args=())
def _linear_op(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor | None, up: Tensor | None,
    targets: Tensor, rows: Tensor | None, temperatures: Tensor | None, reference_weight: Tensor | None,
    reference_hidden: Tensor | None, reference_bias: Tensor | None, allowed_ids: Tensor | None,
    allowed_offsets: Tensor | None, has_set: Tensor | None, numbers: list[float], counts: list[int],
    entropy: str, autocast: torch.dtype | None,
) -> list[Tensor]:  # fmt: skip
    """Return logp, entropy, lse, kl, reverse_kl, top-k values and ids, and the statistics, [T'] each."""
    where, mask = rows_of_mask(rows)
    tensors = (hidden, weight, bias, down, up, targets, where, temperatures, reference_weight)
    tensors += (reference_hidden, reference_bias, allowed_ids, allowed_offsets, has_set)
    with torch.no_grad():
        problem = _op_problem(tensors, numbers, counts, entropy, autocast)
        known = _statistics(problem)
        statistics = packed_statistics(None if known is None else known[0])
        out = _scored(replace(problem, known=known))
    results = [out.logp, out.entropy, out.lse, out.kl, out.reverse_kl, *(out.top_k or (None, None))]
    return or_empty([spread(values, mask) for values in (*results, *statistics)], out.logp)


@_linear_op.register_fake
def _(
    hidden, weight, bias, down, up, targets, rows, temperatures, reference_weight, reference_hidden,
    reference_bias, allowed_ids, allowed_offsets, has_set, numbers, counts, entropy, autocast,
):  # fmt: skip
    dtype = accumulation_dtype(hidden.dtype, weight.dtype)
    num_rows = hidden.shape[0] if rows is None else rows.shape[0]
    lse, k, kl, reverse_kl = counts[0], counts[1], counts[6], counts[7]
    row, several = (num_rows,), (num_rows, *targets.shape[1:])
    moment = entropy != "none"
    shapes = [several, *(row if wanted else 0 for wanted in (moment, lse, kl, reverse_kl))]
    shapes += [(num_rows, k) if k else 0]
    if allowed_ids is None:
        names = {"moment": moment, "total": numbers[3], "cross": kl, "reverse_cross": reverse_kl}
        names |= dict.fromkeys(("ref_max", "ref_sum"), kl or reverse_kl)
        shapes += statistics_shapes(row, several, *(name for name, wanted in names.items() if wanted))
    else:
        shapes += [0] * NUM_STATISTICS
    results = [hidden.new_empty(shape, dtype=dtype) for shape in shapes]
    ids = hidden.new_empty((num_rows, k), dtype=torch.int64) if k else hidden.new_empty(0, dtype=dtype)
    return [*results[:6], ids, *results[6:]]


@torch.library.custom_op("leanstep::linear_logprobs_backward", mutates_args=())
def _linear_backward_op(
    upstream: list[Tensor], statistics: list[Tensor], needed: list[bool],
    hidden: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor | None, up: Tensor | None,
    targets: Tensor, rows: Tensor | None, temperatures: Tensor | None, reference_weight: Tensor | None,
    reference_hidden: Tensor | None, reference_bias: Tensor | None, allowed_ids: Tensor | None,
    allowed_offsets: Tensor | None, has_set: Tensor | None, numbers: list[float], counts: list[int],
    entropy: str, autocast: torch.dtype | None,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of hidden, weight, bias, down and up."""
    leaves = leaves_of((hidden, weight, bias, down, up), needed)
    where, mask = rows_of_mask(rows)
    tensors = [*leaves, targets, where, temperatures, reference_weight, reference_hidden, reference_bias]
    tensors += [allowed_ids, allowed_offsets, has_set]
    stats = unpacked_statistics(gathered(statistics, mask))
    with recording():
        # Top-k has no gradient.
        problem = _op_problem(tensors, numbers, [counts[0], 0, *counts[2:]], entropy, autocast)
        out = _scored(replace(problem, known=None if stats is None else (stats, None)))
        outputs = [out.logp, out.entropy if entropy == "grad" else None, out.lse, out.kl, out.reverse_kl]
        return gradients_of(outputs, gathered(upstream, mask), leaves)


@_linear_backward_op.register_fake
def _(upstream, statistics, needed, hidden, weight, bias, down, up, *_constants):
    return fake_gradients((hidden, weight, bias, down, up), needed, upstream[0])


_NUM_TENSORS = 14  # the op's leading arguments that are tensors


def _save_linear(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.constants = inputs[_NUM_TENSORS:]
    ctx.save_for_backward(*inputs[:_NUM_TENSORS], *output[-NUM_STATISTICS:])
    ctx.mark_non_differentiable(*output[5:], *([output[1]] if inputs[-2] != "grad" else []))


def _linear_backward(ctx: Any, upstream: Sequence[Tensor]) -> Any:
    saved, needed = ctx.saved_tensors, list(ctx.needs_input_grad[:5])
    inputs, statistics = saved[:_NUM_TENSORS], list(saved[_NUM_TENSORS:])
    grads = _linear_backward_op(list(upstream[:5]), statistics, needed, *inputs, *ctx.constants)
    grads = [grad if need else None for grad, need in zip(grads, needed, strict=True)]
    return *grads, *(None,) * (_NUM_TENSORS - 5 + len(ctx.constants))


_linear_op.register_autograd(_linear_backward, setup_context=_save_linear)


def _traced(
    hidden: Tensor,
    weight: Any,
    targets: Tensor,
    request: _Request,
    *,
    rows: Tensor | None,
    temperature: float | Tensor,
    transform: Transform | None,
    reference: ReferenceHead | None,
    allowed: Allowed | tuple[Tensor, ...] | None,
    tuning: Tuning,
) -> LogProbs:
    """Run `linear_logprobs` inside a compiled region."""
    transform, (entropy, names, top_k) = transform or Transform(), request
    head, temperatures, scaling, autocast = flat_head(weight, temperature, hidden)
    numbers = [scaling, transform.scale, transform.softcap or 0.0, transform.label_smoothing]
    tile = (tuning.tile.rows, tuning.tile.columns) if isinstance(tuning.tile, Tiles) else tuning.tile
    sides = [0, 0] if tile is None else [tile[0] or 0, tile[1] or 0]
    needs_lse, k = int(bool({"lse", "z_loss"} & names)), max(top_k, int("argmax" in names))
    counts = [needs_lse, k, tuning.budget or 0, *sides, int(tuning.round_logits)]
    counts += [int("kl" in names), int("reverse_kl" in names)]
    reference = reference or ReferenceHead()
    of_reference = (full_tensor(reference.weight), reference.hidden, full_tensor(reference.bias))
    of_allowed, whole = flat_allowed(allowed)
    tensors = (hidden, *head, targets, rows, temperatures, *of_reference, *of_allowed)
    out = _linear_op(*tensors, numbers, [*counts, whole], entropy, autocast)
    return LogProbs(
        logp=out[0],
        entropy=out[1] if entropy != "none" else None,
        lse=out[2] if "lse" in names else None,
        z_loss=out[2].square() if "z_loss" in names else None,
        argmax=out[6][:, 0] if "argmax" in names else None,
        top_k=(out[5], out[6]) if "top_k" in names else None,
        kl=out[3] if "kl" in names else None,
        reverse_kl=out[4] if "reverse_kl" in names else None,
    )
