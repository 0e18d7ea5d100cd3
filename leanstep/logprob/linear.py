"""Log-probs and entropy straight from hidden states: the [T, V] logits never exist.

Rows are selected before the projection, logits live one tile at a time; those that find room in the memory of
the weight's gradient wait there for the backward, which recomputes the others.
"""

# T rows · T' selected rows · D model · V local vocabulary · K targets per row

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from leanstep.logprob.dispatch import kernels_for, suited
from leanstep.logprob.extras import divergences
from leanstep.logprob.frozen import frozen_sweep
from leanstep.logprob.gradient import RowGradients, first_order_only
from leanstep.logprob.head import Head, RowSource
from leanstep.logprob.head_sums import HeadSums
from leanstep.logprob.heads import LoRA, build_head
from leanstep.logprob.keep import Keep, checked_keep
from leanstep.logprob.kept_logits import KeptLogits, LentGradient, checked_allowance
from leanstep.logprob.outputs import (
    Entropy,
    LogProbs,
    check_entropy,
    check_rows,
    check_temperature,
    check_tokens,
)
from leanstep.logprob.parallel import (
    combine_statistics,
    gather_hidden_rows,
    reduce_hidden_grad,
    resolve_group,
    shard_rows,
)
from leanstep.logprob.sparse import SPARSE_FRACTION, sparse_logprobs
from leanstep.logprob.statistics import FinalStatistics
from leanstep.logprob.sweep import Problem, backward_sweep, forward_sweep
from leanstep.logprob.tiles import CPU_MAX_ROWS, Tiles, checked_tile, choose_cores, choose_tiles

# Row chunks as tall as the gradient's memory allows, so that no more rows than need be are recomputed; but
# chunks so low that products slow down, or tiles far beyond a cache, would cost more than recomputing.
FEWEST_LENT_ROWS = 256
MOST_LENT_ROWS = 4096

EXTRAS = ("lse", "z_loss", "argmax", "top_k", "kl", "reverse_kl")


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor | nn.Module,
    tokens: Tensor,
    *,
    bias: Tensor | None = None,
    rows: Tensor | None = None,
    entropy: Entropy = "none",
    temperature: float | Tensor = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    keep: Keep | None = None,
    extras: Sequence[str | tuple[str, int]] = (),
    ref_weight: Tensor | None = None,
    ref_hidden: Tensor | None = None,
    ref_bias: Tensor | None = None,
    lora: LoRA | None = None,
    main_grad: Tensor | None = None,
    budget: int | None = None,
    tile: tuple[int, int] | Tiles | None = None,
    logits_in_grad: bool = True,
    logit_bytes: int = 0,
    group: Any = None,
    vocab_start: int | None = None,
    vocab_total: int | None = None,
    sequence_parallel: bool = False,
    reduce_grad: str = "all_reduce",
) -> LogProbs:
    """Log-prob of given tokens under the LM head, and its entropy, one tile of logits at a time.

    Equivalent to:
        logits = scale * torch.nn.functional.linear(hidden[rows], weight, bias)
        log_p = torch.log_softmax(logits.float() / temperature, -1)
        logp = log_p.gather(1, tokens[:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)

    Args:
        hidden: [T, D].
        weight: [V, D]; a plain tensor, a DTensor (Shard(0) or Replicate), an nn.Linear or a LoRA layer.
        tokens: [T'] or [T', K] ids aligned with `rows`, or with all T rows.
        bias: [V].
        rows: [T'] int64, rows to score, gathered before the projection; the others get zero gradient.
        entropy: "none"; "metric": a value without gradient; "grad".
        temperature: > 0, a float or one per row.
        scale, softcap: z = softcap tanh(scale u / softcap) / temperature.
        label_smoothing: logp becomes (1 - eps) logp + eps mean_v log p_v.
        keep: (ids, offsets[, has_set]) per selected row: log-probs over these ids and the target only.
        extras: any of "lse", "z_loss" (lse squared), "argmax", ("top_k", k), "kl", "reverse_kl"; the KL is
            exact, to the head `ref_weight`, `ref_bias` (default: `weight` and its bias, without LoRA) on
            `ref_hidden` (default: `hidden`), all constant.
        lora: a low-rank addition to `weight`.
        main_grad: [V, D]; the weight's gradient is added to it and not returned.
        budget: bytes for tiles; `tile` = (rows, columns) sets them outright.
        logits_in_grad: logits wait for the backward in the memory of the weight's gradient, which is then
            allocated in the forward: all of them while T' <= D, no byte more at the peak. A second backward
            recomputes them. False: several forwards come before their backwards, and memory is short.
        logit_bytes: more tiles of logits, up to this many bytes, stay until the backward, which recomputes
            only the others; T' V x 4 keeps them all (x 8 in fp64). The numbers are the same bit for bit.
        group, vocab_start, vocab_total: vocabulary shards, as in `token_logprobs`.
        sequence_parallel: hidden is [T / ranks, D]; `rows` are global and on the host.
        reduce_grad: "all_reduce" the hidden gradient over `group`, or "none" if the caller's layer does.

    Returns:
        LogProbs with one entry per selected row, fp32 (fp64 for fp64 input).

    Peak extra memory: a tile (1 to 2 MiB, or 6 without a C++ compiler) per CPU core and one more, the
        selected rows of hidden and [T', D] sums that do not fit its gradient, 5 vectors, `logit_bytes`;
        gradients that are returned.
    GEMMs (2 T' D V FLOPs each): 3 with gradients, one more of the rows whose logits are not kept; with a
        frozen head 2, or 3 if entropy is "grad"; 1 without.
    Collectives: 2 forward, 1 backward with a group; else none.
    Use something else when: V < 1,000 and all rows count; the plain version is as fast.
    """
    check_entropy(entropy)
    checked_allowance(logit_bytes)
    process_group = resolve_group(group)
    shard_options: Any = {"group": group, "vocab_start": vocab_start, "vocab_total": vocab_total}
    if sequence_parallel and process_group is not None:
        rows_given, total_rows = rows, hidden.shape[0] * process_group.size()
        host_rows = torch.arange(total_rows) if rows is None else rows
        shards = shard_rows(host_rows, total_rows, process_group, hidden.device)
        hidden = gather_hidden_rows(hidden, shards, process_group)
        rows, reduce_grad = None, "none"
    else:
        check_rows(rows, hidden.device)
        rows_given, total_rows = rows, hidden.shape[0]
    head, tensors = build_head(hidden, weight, bias, lora, scale=scale, softcap=softcap, **shard_options)
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing: expected 0 <= value < 1, got {label_smoothing}")
    if label_smoothing and head.vocabulary is None:
        raise ValueError("vocab_total: expected the whole vocabulary's size for label_smoothing, got None")
    wants, top_k = _checked_extras(extras)
    tokens = check_tokens(tokens, rows_given, total_rows, head.vocabulary, (1, 2))
    head.temperature = check_temperature(temperature, rows_given, total_rows, head.dtype)
    keep_ids = checked_keep(keep, tokens.shape[0], head.vocabulary, hidden.device)
    if keep_ids is not None and (wants or label_smoothing or tokens.dim() == 2):
        raise ValueError("keep: expected no extras, label_smoothing or several targets per row beside it")
    weight, bias, low_hidden = tensors[1:4]
    with torch.autocast(hidden.device.type, enabled=False):
        everywhere = keep is not None and len(keep) == 2 and low_hidden is None and process_group is None
        if keep_ids is not None and everywhere and entropy == "none":
            if keep_ids.mean_size < SPARSE_FRACTION * head.columns:
                return LogProbs(sparse_logprobs(hidden, weight, bias, rows, head, tokens, keep_ids, budget))
        source = RowSource(hidden.detach(), rows)
        tiles = (
            choose_tiles(source.num_rows, head.columns, hidden.shape[1], budget=budget, device=hidden.device)
            if tile is None
            else checked_tile(tile, source.num_rows, head.columns)
        )
        problem = Problem(
            head=head,
            source=source,
            low=None if low_hidden is None else RowSource(low_hidden.detach(), rows),
            tokens=tokens,
            tiles=tiles,
            moment=entropy != "none",
            keep=keep_ids,
            smoothing=label_smoothing,
            top_k=max(top_k, int("argmax" in wants)),
            reference=_reference_head(wants, head, hidden, ref_weight, ref_hidden, ref_bias, rows),
            kl="kl" in wants,
            reverse_kl="reverse_kl" in wants,
            group=process_group,
            reduce_grad=reduce_grad,
            kernels=kernels_for(hidden, head.dtype, source.num_rows * head.columns),
        )
        call = _Call(problem, entropy, bool({"lse", "z_loss"} & wants), main_grad)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            call.logit_bytes = logit_bytes
            call.logits_in_grad = logits_in_grad and weight.requires_grad and main_grad is None
        function = _LinearLogProbs
        if _is_frozen(problem, hidden, weight, bias):
            function = _FrozenLinearLogProbs
        else:
            if tile is None:
                _choose_sweep(problem, budget, call.logits_in_grad)
            problem.kernels = suited(problem.kernels, problem.cores)
        logp, entropy_values, lse, kl, reverse_kl, values, ids = function.apply(*tensors, call)  # type: ignore[misc]
    return LogProbs(
        logp=logp,
        entropy=entropy_values,
        lse=lse if "lse" in wants else None,
        z_loss=lse.square() if "z_loss" in wants else None,
        argmax=ids[:, 0] if "argmax" in wants else None,
        top_k=(values, ids) if "top_k" in wants else None,
        kl=kl,
        reverse_kl=reverse_kl,
    )


@dataclass
class _Call:
    """What the autograd Functions carry besides tensors."""

    problem: Problem
    entropy: Entropy
    lse: bool
    main_grad: Tensor | None
    logit_bytes: int = 0
    logits_in_grad: bool = False

    def kept_logits(self) -> KeptLogits:
        p = self.problem
        weight, dtype = p.head.weight, p.head.dtype
        lent = None
        if self.logits_in_grad and p.tiles.order == "vocab" and p.num_rows and p.head.columns:
            if min(p.num_rows, p.tiles.rows) <= LentGradient.rows_that_fit(weight, dtype):
                lent = LentGradient(weight, dtype)
        return KeptLogits(weight, dtype, lent, self.logit_bytes)


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, low_hidden, low_weight, call: _Call):  # type: ignore[override, no-untyped-def]
        ctx.set_materialize_grads(False)
        p = call.problem
        kept_logits = call.kept_logits()
        stats, best = forward_sweep(p, kept_logits)
        stats = combine_statistics(stats, p.group)
        best = None if best is None else best.over_ranks(p.group)
        final, kept_final = stats.final(), stats.keep_final()
        logp = (kept_final or final).log_prob(stats.target)
        if p.smoothing and stats.total is not None and p.head.vocabulary is not None:
            mean = (stats.total / p.head.vocabulary - final.max) - final.log_sum
            logp = (1.0 - p.smoothing) * logp + p.smoothing * (
                mean if logp.dim() == 1 else mean.unsqueeze(-1)
            )
        kl = reverse_kl = None
        saved_kl: tuple[Tensor | None, ...] = (None,) * 4
        if p.reference is not None:
            saved_kl = divergences(stats)
            kl, reverse_kl = saved_kl[:2]
        full = final.saved()
        if call.entropy != "grad":
            full = (*full[:2], None)
        # In metric mode the restricted softmax alone has a gradient.
        if kept_final is not None and call.entropy != "grad":
            full, kept_final = (*kept_final.saved()[:2], None), None
        kept = (None, None) if kept_final is None else kept_final.saved()[:2]
        given = (hidden, weight, bias, low_hidden, low_weight)
        ctx.save_for_backward(*given, *full, *kept, *saved_kl, *kept_logits.tensors)
        ctx.call, ctx.places, ctx.lent = call, kept_logits.places, kept_logits.room
        lse = final.log_sum_exp() if call.lse else None
        values, ids = (None, None) if best is None else (best.values, best.ids)
        quiet = [
            t for t in (values, ids, final.entropy if call.entropy == "metric" else None) if t is not None
        ]
        ctx.mark_non_differentiable(*quiet)
        return logp, final.entropy, lse, kl, reverse_kl, values, ids

    @staticmethod
    @first_order_only
    def backward(ctx: Any, g_logp, g_entropy, g_lse, g_kl, g_reverse, _values, _ids):  # type: ignore[no-untyped-def]
        call: _Call = ctx.call
        # Read once: activation checkpointing allows no second look.
        _, weight, _, _, _, maximum, log_sum, entropy, kept_max, kept_log_sum, *others = ctx.saved_tensors
        saved_kl, lent = others[:4], ctx.lent
        kept_logits = KeptLogits(weight, call.problem.head.dtype, lent)
        kept_logits.restore(ctx.places, others[4:])
        if ctx.needs_input_grad[1]:
            # The gradient overwrites its logits and goes to the caller: another backward recomputes.
            ctx.lent = None
        p = call.problem
        final = FinalStatistics.restored(maximum, log_sum, entropy)
        kept = final if p.keep is not None else None
        if kept_max is not None:
            kept = FinalStatistics.restored(kept_max, kept_log_sum, None)
        gradients = RowGradients(
            *(_cast(g, p.head.dtype) for g in (g_logp, g_entropy, g_lse, g_kl, g_reverse))
        )
        with torch.autocast(p.tokens.device.type, enabled=False):
            sums = HeadSums(p, ctx.needs_input_grad[:5], call.main_grad, lent=lent)
            backward_sweep(p, final, kept, gradients, sums, kept_logits, divergences=saved_kl)
            grads = sums.result()
        return *grads, None


class _FrozenLinearLogProbs(torch.autograd.Function):
    """Neither weight nor bias needs a gradient: the rows' Jacobians are formed in the forward sweep."""

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, low_hidden, low_weight, call: _Call):  # type: ignore[override, no-untyped-def]
        ctx.set_materialize_grads(False)
        p = call.problem
        stats, best, jacobians = frozen_sweep(p, call.entropy == "grad", call.lse)
        best = None if best is None else best.over_ranks(p.group)
        final = stats.final()
        ctx.save_for_backward(p.source.rows, *jacobians)
        ctx.call, ctx.hidden_shape = call, hidden.shape
        values, ids = (None, None) if best is None else (best.values, best.ids)
        quiet = [
            t for t in (values, ids, final.entropy if call.entropy == "metric" else None) if t is not None
        ]
        ctx.mark_non_differentiable(*quiet)
        lse = final.log_sum_exp() if call.lse else None
        return final.log_prob(stats.target), final.entropy, lse, None, None, values, ids

    @staticmethod
    @first_order_only
    def backward(ctx: Any, g_logp, g_entropy, g_lse, *_unused):  # type: ignore[no-untyped-def]
        rows, *jacobians = ctx.saved_tensors
        p = ctx.call.problem
        flowing = [
            (g.to(p.head.dtype).unsqueeze(-1), jacobian)
            for g, jacobian in zip((g_logp, g_entropy, g_lse), jacobians, strict=True)
            if g is not None and jacobian is not None
        ]
        out = jacobians[0].new_zeros(ctx.hidden_shape)
        # Ranks add their shares before anything is rounded; alone, a chunk of rows at a time is enough.
        parts = p.tiles.row_slices(p.num_rows) if p.group is None else [slice(0, p.num_rows)]
        for part in parts:
            grad = jacobians[0].new_zeros(jacobians[0][part].shape, dtype=p.head.dtype)
            for g, jacobian in flowing:
                grad.addcmul_(jacobian[part].to(p.head.dtype), g[part])
            grad = reduce_hidden_grad(grad, p.group, p.reduce_grad).to(out.dtype)
            if rows is None:
                out[part] = grad
            else:
                out.index_add_(0, rows[part], grad)
        return out, None, None, None, None, None


def _is_frozen(p: Problem, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether only hidden needs a gradient, of outputs whose Jacobian the forward sweep can form."""
    trained = any(t is not None and t.requires_grad for t in (weight, bias))
    plain = (
        p.low is None and p.keep is None and p.reference is None and not p.smoothing and p.tokens.dim() == 1
    )
    return torch.is_grad_enabled() and hidden.requires_grad and not trained and plain


def _choose_sweep(p: Problem, budget: int | None, lends: bool) -> None:
    """Tiles that suit the passes and the gradient's memory, and a part of the vocabulary for each core."""
    if p.top_k or p.keep is not None or p.reference is not None:
        return
    hidden, max_rows, cores = p.source.hidden, CPU_MAX_ROWS, 1
    if lends and (fitting := LentGradient.rows_that_fit(p.head.weight, p.head.dtype)) >= FEWEST_LENT_ROWS:
        max_rows = min(fitting, MOST_LENT_ROWS)
    if p.tiles.order == "vocab":
        cores = choose_cores(p.num_rows, p.head.columns, hidden.shape[1], hidden.device)
    p.arrange(cores, p.num_rows, max_rows, budget)


def _checked_extras(extras: Sequence[str | tuple[str, int]]) -> tuple[set[str], int]:
    names, top_k = set(), 0
    for extra in [extras] if isinstance(extras, str) else extras:
        name, k = (extra, 0) if isinstance(extra, str) else extra
        if name not in EXTRAS or (name == "top_k") != (k > 0):
            expected = "lse, z_loss, argmax, kl, reverse_kl or ('top_k', k > 0)"
            raise ValueError(f"extras: expected {expected}, got {extra!r}")
        names.add(name)
        top_k = max(top_k, k)
    return names, top_k


def _reference_head(
    wants: set[str],
    head: Head,
    hidden: Tensor,
    weight: Tensor | None,
    ref_hidden: Tensor | None,
    bias: Tensor | None,
    rows: Tensor | None,
) -> tuple[Head, RowSource] | None:
    if not {"kl", "reverse_kl"} & wants:
        return None
    if weight is None and ref_hidden is None:
        raise ValueError("ref_weight: expected a weight or ref_hidden for a KL, got neither")
    if weight is None:
        # The head itself, without its adapter: the usual reference of a LoRA run.
        weight, bias = head.weight, head.bias if bias is None else bias
    else:
        weight = weight.detach()
    ref_hidden = hidden if ref_hidden is None else ref_hidden
    if weight.shape[0] != head.weight.shape[0] or weight.shape[1:] != ref_hidden.shape[1:]:
        expected = f"[{head.weight.shape[0]}, {ref_hidden.shape[1]}]"
        raise ValueError(f"ref_weight: expected {expected}, got {tuple(weight.shape)}")
    if ref_hidden.shape[0] != hidden.shape[0]:
        raise ValueError(f"ref_hidden: expected {hidden.shape[0]} rows, got {ref_hidden.shape[0]}")
    head = replace(head, weight=weight, bias=_detached(bias), low_weight=None)
    return head, RowSource(ref_hidden.detach(), rows)


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
