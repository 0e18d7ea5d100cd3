"""Log-probs and entropy straight from hidden states: the [T, V] logits never exist.

Rows are selected before the projection, and logits live one tile at a time. Those that find room in the
memory of the weight's gradient wait there for the backward, which recomputes the others.
"""

# T rows · T' selected rows · D model · V local vocabulary · K targets per row

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from leanstep.logprob.checks import check_entropy, check_head_call, check_vocabulary, checked_allowed
from leanstep.logprob.engine.frozen import frozen_forward
from leanstep.logprob.engine.invariant import arrange_blocks
from leanstep.logprob.engine.kl_topk import divergences
from leanstep.logprob.engine.lm_head import Head, RowSource, main_grad_mark
from leanstep.logprob.engine.passes import kernels_for
from leanstep.logprob.engine.softmax import FinalStatistics, RowGradients, first_order_only
from leanstep.logprob.engine.tile_loop import Call, backward_tiles, forward_tiles
from leanstep.logprob.engine.tiles import CPU_MAX_ROWS, LogitsInGradient, SavedLogits, arrange, on_gpu
from leanstep.logprob.engine.torch_ops import REMEMBERED, traced_linear
from leanstep.logprob.engine.vocab_subset import SPARSE_FRACTION, AllowedIds, SparseCall, sparse_logprobs
from leanstep.logprob.inputs import (
    Allowed,
    Entropy,
    LogProbs,
    ReferenceHead,
    Transform,
    Tuning,
    VocabShards,
)
from leanstep.logprob.parallel import combine_statistics, reduce_hidden_grad

# Row chunks as tall as the gradient's memory allows, so that few rows are recomputed; but chunks too small
# for efficient GEMMs, or tiles far beyond a cache, would cost more than recomputing.
FEWEST_SAVED_ROWS = 256
MOST_SAVED_ROWS = 4096

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
    """Log-prob of given targets under the LM head, and its entropy, one tile of logits at a time.

    Equivalent to:
        logits = torch.nn.functional.linear(hidden[rows], weight, bias)
        log_p = torch.log_softmax(logits.float() / temperature, -1)
        logp = log_p.gather(1, targets[:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)

    Row i of a language model scores token i + 1: `targets` are what the rows predict, not the tokens that the
    rows were made of. `plan_rows(...).targets(tokens)` and `next_token_targets(tokens)` align them.

    Args:
        hidden: [T, D].
        weight: [V, D], a tensor or DTensor (Shard(0) or Replicate); an nn.Linear, its bias included; a PEFT
            LoRA layer; or `LMHead(weight, bias, lora)`.
        targets: [T'] or [T', K] ids aligned with `rows`, or with all T rows.
        rows: [T'] int64, rows to score, gathered before the projection; the others get zero gradient.
        entropy: "none"; "metric": a value without gradient; "grad".
        temperature: > 0, a float or one per row.
        transform: `Transform(scale, softcap, label_smoothing)`.
        outputs: any of "lse", "z_loss" (lse squared), "argmax", ("top_k", k), "kl", "reverse_kl".
        reference: `ReferenceHead(weight, hidden, bias)`, the constant head of the exact KL.
        allowed: `Allowed(ids, offsets, has_set)`: log-prob and entropy of the softmax over these ids and the
            target only, as in `linear_masked_logprobs`; `Allowed(..., whole_entropy=True)`: the entropy stays
            that of the whole vocabulary.
        shards: `VocabShards(group, start, total, ...)`, where each rank holds some columns.
        tuning: `Tuning(budget, tile, save_logits, main_grad, round_logits, invariant)`.

    Returns:
        LogProbs with one entry per selected row, fp32 (fp64 for fp64 input).

    Peak extra memory: a tile per core (1 to 2 MiB on a CPU, 6 without a C++ compiler, up to 544 on a GPU) and
        one more, the selected rows of hidden and [T', D] sums that do not fit its gradient, 5 vectors, saved
        logits; gradients that are returned.
    GEMMs (2 T' D V FLOPs each): 3 with gradients, one more for rows whose logits are not saved; with a frozen
        head 2, or 3 if entropy is "grad"; 1 without gradients.
    Collectives: 2 forward, 1 backward with a group; else none.
    Use something else when: V < 1,000 and all rows count; the plain version is as fast.
    """
    check_entropy(entropy)
    wants, top_k = _checked_outputs(outputs)
    tuning = Tuning() if tuning is None else tuning
    if torch.compiler.is_compiling() and tuning.main_grad is None and not tuning.invariant:
        if reference is None and allowed is None and shards is None:
            asked = (entropy, wants, top_k)
            return traced_linear(hidden, weight, targets, rows, temperature, transform, asked, tuning)
    smoothing = 0.0 if transform is None else transform.label_smoothing
    checked = check_head_call(
        hidden, weight, rows=rows, temperature=temperature, transform=transform, shards=shards
    )
    head, tensors, source, group = checked.head, checked.tensors, checked.source, checked.group
    hidden, rows, targets = tensors[0], checked.rows, checked.targets(targets, (1, 2))
    if smoothing:
        check_vocabulary(head, "for label_smoothing")
    ids = checked_allowed(allowed, targets.shape[0], head.vocabulary, hidden.device)
    if ids is not None and (wants or smoothing or targets.dim() == 2):
        raise ValueError("allowed: expected no outputs, label_smoothing or several targets per row beside it")
    tensor, bias, low_hidden = tensors[1:4]
    if tuning.invariant:
        _check_invariant(wants, allowed, low_hidden, shards)
    with torch.autocast(hidden.device.type, enabled=False):
        if ids is not None and low_hidden is None and group is None and _is_sparse(ids, head, entropy):
            pairs = ids.sorted_pairs(targets, head.columns)
            sparse = SparseCall(head, rows, pairs, entropy, budget=tuning.budget, main_grad=tuning.main_grad)
            return LogProbs(*sparse_logprobs(hidden, tensor, bias, sparse)[:2])
        num_rows, columns = source.num_rows, head.columns
        needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
        save_where, save_bytes = tuning.save_logits  # type: ignore[misc]
        in_gradient = needs_grad and save_where == "grad" and tensor.requires_grad
        in_gradient = in_gradient and tuning.main_grad is None
        reference_head = _reference_head(wants, head, hidden, reference, rows)
        trained = any(t is not None and t.requires_grad for t in (tensor, bias))
        many_passes = bool(top_k or "argmax" in wants) or ids is not None or reference_head is not None
        frozen = torch.is_grad_enabled() and hidden.requires_grad and not trained
        frozen = frozen and low_hidden is None and ids is None and reference_head is None
        frozen = frozen and not smoothing and targets.dim() == 1 and REMEMBERED.get() is None
        if on_gpu(hidden.device):
            # With an entropy gradient the Jacobians take 3 GEMMs as well, and more passes.
            frozen = frozen and entropy != "grad" and not wants and group is None
        bias_gradient = needs_grad and bias is not None and bias.requires_grad
        simple = not smoothing and targets.dim() == 1
        element_bytes = _bytes_per_logit(
            head, simple=simple, bias_gradient=bias_gradient, rounded=tuning.round_logits
        )
        sizes = {
            "budget": tuning.budget,
            "tile": tuning.tile,
            "max_rows": _tallest_tile(head, in_gradient),
        }
        blocks = None
        if tuning.invariant:
            frozen, ranks = False, 1 if group is None else group.size()
            blocks, arrangement = arrange_blocks(head, hidden, num_rows, ranks=ranks, **sizes)
            places = blocks.places(hidden.device)
            source = RowSource(source.hidden, places if rows is None else rows[places])
            targets = targets[places]
            if isinstance(head.temperature, Tensor):
                head.temperature = head.temperature[places]
        else:
            arrangement = arrange(
                num_rows,
                columns,
                hidden.shape[1],
                hidden.device,
                kernels_for(hidden, head.dtype, num_rows * columns),
                cores=0 if many_passes or frozen else None if num_rows <= columns else 1,
                element_bytes=element_bytes,
                trained=needs_grad and tensor.requires_grad,
                **sizes,
            )
        tiles, cores, kernels = arrangement
        call = Call(
            head=head,
            source=source,
            low=checked.low,
            targets=targets,
            tiles=tiles,
            cores=cores,
            kernels=kernels,
            entropy=entropy,
            lse=bool({"lse", "z_loss"} & wants),
            allowed=ids,
            smoothing=smoothing,
            top_k=max(top_k, int("argmax" in wants)),
            reference=reference_head,
            kl="kl" in wants,
            reverse_kl="reverse_kl" in wants,
            group=group,
            reduce_grad=checked.reduce_grad,
            main_grad=tuning.main_grad,
            in_gradient=in_gradient,
            save_bytes=save_bytes if needs_grad else 0,  # type: ignore[arg-type]
            round_logits=tuning.round_logits,
            blocks=blocks,
        )
        function = _FrozenLinearLogProbs if frozen else _LinearLogProbs
        with call.one_thread():
            found: Any = function.apply(*tensors, call)
        if blocks is not None:
            found = [None if values is None else blocks.picked(values) for values in found]
        logp, entropy_values, lse, kl, reverse_kl, values, best = found
    return LogProbs(
        logp=logp,
        entropy=entropy_values,
        lse=lse if "lse" in wants else None,
        z_loss=lse.square() if "z_loss" in wants else None,
        argmax=best[:, 0] if "argmax" in wants else None,
        top_k=(values, best) if "top_k" in wants else None,
        kl=kl,
        reverse_kl=reverse_kl,
    )


class _LinearLogProbs(torch.autograd.Function):
    """Forward: statistics tile by tile. Backward: the same tiles again, turned into gradients."""

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, low_hidden, low_weight, call: Call):  # type: ignore[override, no-untyped-def]
        ctx.set_materialize_grads(False)
        saved, memory, best = _saved_logits(call), REMEMBERED.get(), None
        stats = None if memory is None else memory.statistics()
        if stats is None:
            stats, best = forward_tiles(call, saved)
            if memory is not None:
                memory.keep(stats)
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
        # In metric mode the restricted softmax alone has a gradient.
        if allowed_final is not None and call.entropy != "grad":
            full, allowed_final = (*allowed_final.saved()[:2], None), None
        restricted = (None, None) if allowed_final is None else allowed_final.saved()[:2]
        given = (hidden, weight, bias, low_hidden, low_weight)
        ctx.save_for_backward(*given, *full, *restricted, *saved_kl, *saved.tensors)
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
        # Read once: activation checkpointing allows no second look.
        _, weight, _, _, _, maximum, log_sum, entropy, allowed_max, allowed_log_sum, *others = (
            ctx.saved_tensors
        )
        saved_kl, early = others[:4], ctx.early
        saved = SavedLogits(weight, call.logit_dtype, early)
        saved.restore(ctx.places, others[4:])
        if ctx.needs_input_grad[1]:
            # The gradient overwrites its logits and goes to the caller: another backward recomputes.
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
        return *grads, None


class _FrozenLinearLogProbs(torch.autograd.Function):
    """Neither weight nor bias needs a gradient: the rows' Jacobians are formed in the forward loop."""

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, low_hidden, low_weight, call: Call):  # type: ignore[override, no-untyped-def]
        ctx.set_materialize_grads(False)
        stats, best, jacobians = frozen_forward(call, call.entropy == "grad", call.lse)
        best = None if best is None else best.over_ranks(call.group)
        final = stats.final()
        ctx.save_for_backward(call.source.rows, *jacobians)
        ctx.call, ctx.hidden_shape = call, hidden.shape
        values, ids = (None, None) if best is None else (best.values, best.ids)
        metric = final.entropy if call.entropy == "metric" else None
        ctx.mark_non_differentiable(*(t for t in (values, ids, metric) if t is not None))
        lse = final.log_sum_exp() if call.lse else None
        return final.log_prob(stats.target), final.entropy, lse, None, None, values, ids

    @staticmethod
    @first_order_only
    def backward(ctx: Any, g_logp, g_entropy, g_lse, *_unused):  # type: ignore[no-untyped-def]
        rows, *jacobians = ctx.saved_tensors
        call: Call = ctx.call
        dtype, num_rows = call.head.dtype, call.num_rows
        flowing = [
            (g.to(dtype).unsqueeze(-1), jacobian)
            for g, jacobian in zip((g_logp, g_entropy, g_lse), jacobians, strict=True)
            if g is not None and jacobian is not None
        ]
        out = jacobians[0].new_zeros(ctx.hidden_shape)
        # Ranks add their shares before anything is rounded; alone, a chunk of rows at a time is enough.
        parts = call.row_slices if call.group is None else [slice(0, num_rows)]
        for part in parts:
            grad = jacobians[0].new_zeros(jacobians[0][part].shape, dtype=dtype)
            for g, jacobian in flowing:
                grad.addcmul_(jacobian[part].to(dtype), g[part])
            grad = reduce_hidden_grad(grad, call.group, call.reduce_grad).to(out.dtype)
            if rows is None:
                out[part] = grad
            else:
                out.index_add_(0, rows[part], grad)
        return out, None, None, None, None, None


def _is_sparse(allowed: AllowedIds, head: Head, entropy: str) -> bool:
    """Whether the allowed rows of the weight are all that is needed, and few."""
    short = allowed.everywhere and allowed.mean_size < SPARSE_FRACTION * head.columns
    return short and (entropy == "none" or not allowed.whole_entropy)


def _bytes_per_logit(head: Head, *, simple: bool, bias_gradient: bool, rounded: bool) -> int:
    """Of a GPU's tile: a logit, and its 16-bit gradient where that is not written over it.

    simple: only the kernels look at a tile.
    """
    if rounded and simple:
        return head.operand_dtype.itemsize
    apart = head.operand_dtype.itemsize < head.dtype.itemsize and (bias_gradient or not simple)
    return head.dtype.itemsize + (head.operand_dtype.itemsize if apart else 0)


def _tallest_tile(head: Head, in_gradient: bool) -> int:
    """Tiles as tall as the gradient's memory has room for, where that is a sensible height."""
    fitting = LogitsInGradient.rows_that_fit(head.weight, head.dtype) if in_gradient else 0
    return min(fitting, MOST_SAVED_ROWS) if fitting >= FEWEST_SAVED_ROWS else CPU_MAX_ROWS


def _saved_logits(call: Call) -> SavedLogits:
    """Where the call's logits may wait: dW, where its tiles have room for them, then saved tensors."""
    weight, dtype, early = call.head.weight, call.logit_dtype, None
    if call.in_gradient and call.tiles.order == "vocab" and call.num_rows and call.head.columns:
        if min(call.num_rows, call.tiles.rows) <= LogitsInGradient.rows_that_fit(weight, dtype):
            early = LogitsInGradient(weight, dtype)
    return SavedLogits(weight, dtype, early, call.save_bytes)


def _check_invariant(wants: set[str], allowed: Any, low_hidden: Any, shards: VocabShards | None) -> None:
    """Refuse what makes no promise about bits."""
    if torch.compiler.is_compiling():
        raise ValueError("tuning.invariant: expected a call outside of torch.compile")
    if wants - {"lse", "z_loss"}:
        raise ValueError(f"outputs: expected lse or z_loss with tuning.invariant, got {sorted(wants)}")
    if allowed is not None:
        raise ValueError("allowed: expected None with tuning.invariant")
    if low_hidden is not None:
        raise ValueError("weight: expected a head without LoRA with tuning.invariant; merge it first")
    if shards is not None and shards.group is not None and shards.start is not None:
        raise ValueError("shards.start: expected None (equal shards) with tuning.invariant")


def _checked_outputs(outputs: Sequence[str | tuple[str, int]]) -> tuple[set[str], int]:
    """The names asked for, and k of ("top_k", k)."""
    names, top_k = set(), 0
    for output in [outputs] if isinstance(outputs, str) else outputs:
        name, k = (output, 0) if isinstance(output, str) else output
        if name not in OUTPUTS or (name == "top_k") != (k > 0):
            expected = "lse, z_loss, argmax, kl, reverse_kl or ('top_k', k > 0)"
            raise ValueError(f"outputs: expected {expected}, got {output!r}")
        names.add(name)
        top_k = max(top_k, k)
    return names, top_k


def _reference_head(
    wants: set[str], head: Head, hidden: Tensor, reference: ReferenceHead | None, rows: Tensor | None
) -> tuple[Head, RowSource] | None:
    if not {"kl", "reverse_kl"} & wants:
        return None
    if reference is None or (reference.weight is None and reference.hidden is None):
        raise ValueError("reference: expected a ReferenceHead with weight or hidden for a KL, got neither")
    # The head itself, without its adapter, is the usual reference of a LoRA run.
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
    return replace(head, weight=weight.detach(), bias=bias, low_weight=None), RowSource(
        ref_hidden.detach(), rows
    )
