"""The whole policy objective on hidden states, gradients formed while the logits exist: 3 GEMMs, not 4.

An objective that is a weighted sum of per-row functions f_i(logp_i, H_i), with weights known from masks,
needs no second look at the logits: per row chunk, logits once, statistics, df/dlogp and df/dH on [c] vectors,
then the logits turn into their own gradient. Backward multiplies the finished gradients by a scalar.
"""

# T rows · T' selected rows · D model · V local vocabulary · c rows of a chunk

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from leanstep.logprob.dispatch import kernels_for
from leanstep.logprob.gradient import RowGradients, first_order_only
from leanstep.logprob.head import Head, RowSource
from leanstep.logprob.head_sums import HeadGradients, HeadSums
from leanstep.logprob.heads import LoRA, build_head
from leanstep.logprob.kept_logits import ChunkBuffer, KeptLogits, LentGradient
from leanstep.logprob.objective import (
    Normalizer,
    PolicyLoss,
    PolicyObjective,
    RowLosses,
    checked_objective,
    checked_sequences,
    policy_losses,
    policy_metrics,
    row_weights,
    weighted_sum,
)
from leanstep.logprob.outputs import check_rows, check_temperature, check_tokens, select_per_row
from leanstep.logprob.parallel import combine_statistics, resolve_group
from leanstep.logprob.sweep import Problem, backward_sweep, forward_sweep
from leanstep.logprob.tiles import (
    CPU_MAX_ROWS,
    Tiles,
    choose_cores,
    choose_tiles,
    default_budget,
    even_slices,
)

# A chunk keeps its whole vocabulary of logits: more than a cache holds, far less than [T, V].
CPU_CHUNK_BYTES = 128 << 20
# Fewer rows than this at a time would spend more on rewriting dW than a recomputed GEMM costs.
FEWEST_ROWS = 64


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor | nn.Module,
    tokens: Tensor,
    *,
    old_logp: Tensor,
    advantages: Tensor,
    objective: PolicyObjective | str = "grpo",
    mask: Tensor | None = None,
    ref_logp: Tensor | None = None,
    normalizer: Normalizer | float | Tensor = "token_mean",
    sequence_lengths: Sequence[int] | None = None,
    bias: Tensor | None = None,
    rows: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    lora: LoRA | None = None,
    entropy_metric: bool = False,
    budget: int | None = None,
    group: Any = None,
    vocab_start: int | None = None,
    vocab_total: int | None = None,
    reduce_grad: str = "all_reduce",
) -> PolicyLoss:
    """The policy loss of the LM head on selected rows, with its gradients, in one pass over the logits.

    Equivalent to:
        out = linear_logprobs(hidden, weight, tokens, rows=rows, entropy="grad")
        policy_loss(out.logp, old_logp, advantages, objective=objective, entropy=out.entropy, mask=mask)

    Args:
        hidden, weight, tokens, bias, rows, temperature, scale, softcap, lora: as in `linear_logprobs`;
            group, vocab_start, vocab_total and reduce_grad, too.
        old_logp, advantages, mask, ref_logp: [T'] (or [T], then selected by `rows`).
        objective, normalizer, sequence_lengths: as in `policy_loss`. With "gspo" chunks follow sequences; one
            that does not fit a chunk is recomputed (4 GEMMs) by itself.
        entropy_metric: return the entropy although no bonus asks for it.
        budget: bytes for the logits of one chunk and the work tiles.

    Returns:
        PolicyLoss; only `loss` is differentiable, and only once.

    Peak extra memory: work tiles and c x V logits of one chunk; if all rows are one chunk of at most D rows,
        these lie in the weight's gradient. Gradients that are returned.
    Collectives: 2 per row chunk and 1 at the end with a group; else none.
    Use something else when: the normaliser depends on the log-probs (`linear_logprobs` and `policy_loss`).
    """
    objective = checked_objective(objective)
    shard_options: Any = {"group": group, "vocab_start": vocab_start, "vocab_total": vocab_total}
    head, tensors = build_head(hidden, weight, bias, lora, scale=scale, softcap=softcap, **shard_options)
    check_rows(rows, hidden.device)
    num_rows, dtype = hidden.shape[0], head.dtype
    head.temperature = check_temperature(temperature, rows, num_rows, dtype)
    tokens = check_tokens(tokens, rows, num_rows, head.vocabulary)
    selected = tokens.shape[0]

    def per_row(name: str, values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        if values.dim() != 1:
            raise ValueError(f"{name}: expected one dimension, got {tuple(values.shape)}")
        return select_per_row(name, values, rows, num_rows).detach().to(dtype)

    data = _RowData(
        old_logp=per_row("old_logp", old_logp),  # type: ignore[arg-type]
        advantages=per_row("advantages", advantages),  # type: ignore[arg-type]
        ref_logp=per_row("ref_logp", ref_logp),
        mask=per_row("mask", mask),
        weights=None,
    )
    data.weights = row_weights(data.mask, selected, normalizer, sequence_lengths, dtype, hidden.device)
    if objective.kl_coef and data.ref_logp is None:
        raise ValueError("ref_logp: expected reference log-probs because kl_coef is not 0, got None")
    process_group = resolve_group(group)
    source, low = RowSource(hidden.detach(), rows), tensors[3]
    tiles = choose_tiles(selected, head.columns, hidden.shape[1], device=hidden.device)
    chunks = _chunks(objective, sequence_lengths, selected, head, tiles, budget, process_group)
    problem = Problem(
        head=head,
        source=source,
        low=None if low is None else RowSource(low.detach(), rows),
        tokens=tokens,
        tiles=tiles,
        moment=bool(objective.entropy_coef) or entropy_metric,
        group=process_group,
        reduce_grad=reduce_grad,
        kernels=kernels_for(hidden, dtype, selected * head.columns),
    )
    _choose_sweep(problem, chunks)
    call = _Call(problem, objective, data, chunks, torch.is_grad_enabled())
    with torch.autocast(hidden.device.type, enabled=False):
        loss = _PolicyLoss.apply(*tensors, call)
    assert call.logp is not None and call.row_losses is not None
    metrics = policy_metrics(call.row_losses, call.logp, data.old_logp, call.entropy, data.mask)
    return PolicyLoss(loss, call.logp, call.entropy, metrics)  # type: ignore[arg-type]


@dataclass
class _RowData:
    old_logp: Tensor
    advantages: Tensor
    ref_logp: Tensor | None
    mask: Tensor | None
    weights: Tensor | None

    def rows(self, part: slice) -> dict[str, Tensor | None]:
        return {
            "old_logp": self.old_logp[part],
            "advantages": self.advantages[part],
            "ref_logp": None if self.ref_logp is None else self.ref_logp[part],
            "mask": None if self.mask is None else self.mask[part],
        }


@dataclass
class _Chunk:
    """Rows formed together; `lengths` are its sequences' (gspo), `recompute` when its logits do not fit."""

    rows: slice
    lengths: list[int] | None
    recompute: bool


@dataclass
class _Call:
    problem: Problem
    objective: PolicyObjective
    data: _RowData
    chunks: list[_Chunk]
    wants_grad: bool
    logp: Tensor | None = None
    entropy: Tensor | None = None
    row_losses: RowLosses | None = None


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, low_hidden, low_weight, call: _Call):  # type: ignore[override, no-untyped-def]
        p, data = call.problem, call.data
        given = (hidden, weight, bias, low_hidden, low_weight)
        wanted = tuple(call.wants_grad and t is not None and t.requires_grad for t in given)
        lent = _lent_gradient(call, wanted[1])
        sums = HeadSums(p, wanted, lent=lent) if any(wanted) else None
        logp = torch.zeros(p.num_rows, dtype=p.head.dtype, device=hidden.device)
        entropy = torch.zeros_like(logp) if p.moment else None
        losses, ratio = torch.zeros_like(logp), torch.zeros_like(logp)
        clipped = torch.zeros_like(logp, dtype=torch.bool)
        room = lent
        if room is None and sums is not None:
            room = ChunkBuffer(weight, p.head.dtype, _most_kept_rows(call.chunks), p.head.columns)
        for chunk in call.chunks:
            part = chunk.rows
            some = _rows_of(p, part)
            kept_logits = KeptLogits(weight, p.head.dtype, None if chunk.recompute else room)
            stats = combine_statistics(forward_sweep(some, kept_logits)[0], p.group)
            final = stats.final()
            logp[part] = final.log_prob(stats.target)
            if entropy is not None and final.entropy is not None:
                entropy[part] = final.entropy
            rows, g_logp, g_entropy = _row_gradients(call, chunk, logp[part], final.entropy)
            losses[part], ratio[part], clipped[part] = rows
            if sums is None:
                continue
            gradients = RowGradients(g_logp, g_entropy)
            backward_sweep(some, final, None, gradients, sums, kept_logits, first_row=part.start)
        ctx.gradients = None if sums is None else sums.result()
        call.logp, call.entropy = logp, entropy
        call.row_losses = RowLosses(losses, ratio, clipped)
        assert data.weights is not None
        return weighted_sum(losses, data.weights)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, g: Tensor):  # type: ignore[no-untyped-def]
        gradients: HeadGradients | None = ctx.gradients
        if gradients is None:
            raise RuntimeError("linear_policy_loss: its gradients were handed out by an earlier backward")
        # The caller owns them now; a second backward would hand out memory that somebody accumulates into.
        ctx.gradients = None
        # Always multiplied: to see that it is 1, the host would have to read it.
        for grad in gradients:
            if grad is not None:
                grad.mul_(g)
        return *gradients, None


def _row_gradients(
    call: _Call, chunk: _Chunk, logp: Tensor, entropy: Tensor | None
) -> tuple[RowLosses, Tensor, Tensor | None]:
    """The chunk's losses, and weight times df/dlogp and df/dH, by differentiating the objective itself."""
    assert call.data.weights is not None
    with torch.enable_grad():
        leaf = logp.detach().requires_grad_()
        entropy_leaf = None if entropy is None else entropy.detach().requires_grad_()
        data: Any = call.data.rows(chunk.rows)
        rows = policy_losses(
            call.objective, leaf, **data, entropy=entropy_leaf, sequence_lengths=chunk.lengths
        )
        total = weighted_sum(rows.losses, call.data.weights[chunk.rows])
        leaves = [leaf] if not call.objective.entropy_coef or entropy_leaf is None else [leaf, entropy_leaf]
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
    g_logp = torch.zeros_like(logp) if grads[0] is None else grads[0]
    return (
        RowLosses(rows.losses.detach(), rows.ratio, rows.clipped),
        g_logp,
        grads[1] if len(grads) > 1 else None,
    )


def _rows_of(p: Problem, part: slice) -> Problem:
    """The same problem for some of its rows; its hidden gradient stays local, the caller reduces once."""
    temperature = p.head.temperature
    head = replace(p.head, temperature=temperature[part] if isinstance(temperature, Tensor) else temperature)
    return replace(
        p,
        head=head,
        source=p.source.part(part),
        low=None if p.low is None else p.low.part(part),
        tokens=p.tokens[part],
        reduce_grad="none",
    )


def _lent_gradient(call: _Call, wanted: bool) -> LentGradient | None:
    """The memory of dW for the logits, where one chunk of rows is all there is and fits."""
    head, chunks = call.problem.head, call.chunks
    fits = LentGradient.rows_that_fit(head.weight, head.dtype)
    if not wanted or len(chunks) != 1 or not 0 < _most_kept_rows(chunks) <= fits or not head.columns:
        return None
    return LentGradient(head.weight, head.dtype)


def _most_kept_rows(chunks: list[_Chunk]) -> int:
    return max((c.rows.stop - c.rows.start for c in chunks if not c.recompute), default=0)


def _choose_sweep(p: Problem, chunks: list[_Chunk]) -> None:
    """Tiles as tall as the tallest chunk with kept logits, and a part of the vocabulary for each core."""
    hidden = p.source.hidden
    most_rows = _most_kept_rows(chunks) or min(p.num_rows, CPU_MAX_ROWS)
    cores = choose_cores(p.num_rows, p.head.columns, hidden.shape[1], hidden.device)
    # Several chunks: dW is summed where it lies, but 16-bit weights need fp32 sums, which "rows" order has.
    if len(chunks) > 1 and p.head.weight.dtype != p.head.dtype:
        cores = 1
    p.arrange(cores, most_rows, max(most_rows, 1))
    p.tiles = replace(p.tiles, order="vocab" if len(chunks) <= 1 or cores > 1 else "rows")


def _chunks(
    objective: PolicyObjective,
    sequence_lengths: Sequence[int] | None,
    num_rows: int,
    head: Head,
    tiles: Tiles,
    budget: int | None,
    group: Any,
) -> list[_Chunk]:
    """Row chunks whose logits fit the budget; with gspo whole sequences, the too long ones by themselves."""
    columns = head.columns
    if group is not None:
        # Every rank must take the same number of chunks, whatever the width of its shard.
        if head.vocabulary is None:
            raise ValueError(
                "vocab_total: expected the whole vocabulary's size with unequal shards, got None"
            )
        columns = -(-head.vocabulary // group.size())
    if budget is None:
        budget = (
            CPU_CHUNK_BYTES
            if head.weight.device.type == "cpu" or group is not None
            else default_budget("cuda")
        )
    elif budget <= 0:
        raise ValueError(f"budget: expected a positive number of bytes, got {budget}")
    # A tile's width follows the local shard; ranks must not count with it.
    work_columns = columns if group is not None else min(tiles.columns, columns)
    row_bytes = head.dtype.itemsize * (columns + 2 * work_columns)
    most = max(budget // max(row_bytes, 1), 1)
    if objective.kind != "gspo":
        if most < min(FEWEST_ROWS, num_rows):
            return [_Chunk(slice(0, num_rows), None, True)]
        return [_Chunk(part, None, False) for part in even_slices(num_rows, most)]
    chunks: list[_Chunk] = []
    start = 0
    for length in checked_sequences(sequence_lengths, num_rows):
        last = chunks[-1] if chunks else None
        rows = slice(start, start + length)
        if length > most:
            chunks.append(_Chunk(rows, [length], True))
        elif last is None or last.recompute or rows.stop - last.rows.start > most:
            chunks.append(_Chunk(rows, [length], False))
        else:
            chunks[-1] = _Chunk(slice(last.rows.start, rows.stop), [*(last.lengths or []), length], False)
        start += length
    return chunks
