"""The policy loss from hidden states, with gradients computed in the forward pass: 3 GEMMs instead of 4.

The objective is a weighted sum of per-row functions f_i(logp_i, H_i) whose weights follow from the masks, so
the logits are computed only once. Per row chunk, the forward pass computes the logits, their statistics,
df/dlogp and df/dH on [c] vectors, and then overwrites the logits with their gradient. The backward pass
multiplies the finished gradients by a scalar.
"""

# T rows · T' selected rows · D model · V local vocabulary · c rows of a chunk

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leanstep.logprob.checks import CheckedCall, accumulation_dtype, check_head_call, check_options
from leanstep.logprob.engine.forward_gradients import (
    Chunk,
    agreed_columns,
    arrange_chunks,
    form_by_chunks,
    gradient_scale,
    logits_in_gradient,
    loss_with_gradients,
    most_saved_rows,
)
from leanstep.logprob.engine.gpu.gpu_tiles import GPU_ALIGNMENT, gpu_chunk_rows
from leanstep.logprob.engine.lm_head import Head, HeadGradients, RowSource
from leanstep.logprob.engine.passes import finishes_logits, kernels_for, row_kernels
from leanstep.logprob.engine.softmax import RowFactors, RowGradients, RowStatistics
from leanstep.logprob.engine.tile_loop import Call
from leanstep.logprob.engine.tiles import (
    CPU_MAX_ROWS,
    Arrangement,
    Tiles,
    choose_tiles,
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
    temperature_of,
    under_autocast,
)
from leanstep.logprob.inputs import Entropy, Transform, Tuning, VocabShards
from leanstep.logprob.objective import (
    WHOLE_BATCH,
    CovarianceChoice,
    Normalizer,
    PolicyBatch,
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

# A chunk holds the logits of the whole vocabulary: more than a cache, far less than [T, V].
CPU_CHUNK_BYTES = 128 << 20
# Objectives that have a single kernel on a GPU; the others are differentiated by autograd there, too.
KERNEL_KINDS = ("clip", "cispo")
# With smaller chunks, rewriting dW per chunk costs more than recomputing a GEMM.
FEWEST_ROWS = 64


def linear_policy_loss(
    hidden: Tensor,
    weight: Any,
    targets: Tensor,
    batch: PolicyBatch,
    *,
    objective: PolicyObjective | str = "grpo",
    normalizer: Normalizer | float | Tensor = "token_mean",
    rows: Tensor | None = None,
    entropy: Entropy = "none",
    temperature: float | Tensor = 1.0,
    transform: Transform | None = None,
    shards: VocabShards | None = None,
    tuning: Tuning | None = None,
) -> PolicyLoss:
    """Compute the policy loss of the LM head on selected rows and its gradients in one pass over the logits.

    Equivalent to:
        out = linear_logprobs(hidden, weight, targets, rows=rows, entropy="grad")
        policy_loss(out.logp, batch.old_logp, batch.advantages, entropy=out.entropy, mask=batch.mask)

    Args:
        hidden, weight, targets, rows, temperature, transform, shards: as in `linear_logprobs`; targets [T'],
            no label smoothing, no sequence parallelism.
        batch: `PolicyBatch(old_logp, advantages, mask, ref_logp, sequence_lengths)`, tensors [T'] (or [T],
            then selected by `rows`).
        objective, normalizer: as in `policy_loss`. With "gspo", chunks hold whole sequences; a sequence that
            does not fit a chunk is recomputed (4 GEMMs). "clip_cov" and "kl_cov" couple all rows, so they
            recompute all rows if these do not fit one chunk.
        entropy: "metric" returns the entropy even without an entropy bonus; with a bonus it is always
            returned.
        tuning: `Tuning(budget=)` bytes for the logits of one chunk and the work tiles.

    Returns:
        PolicyLoss; only `loss` is differentiable, and only once.

    Peak extra memory: the returned gradients, work tiles and the c x V logits of one chunk. If all rows form
        one chunk of at most D rows, its logits are stored in the weight's gradient.
    Collectives: 2 per row chunk and 1 at the end with a group; otherwise none.
    Use something else when: the normalizer depends on the log-probs, or T' <= D on a CPU, where
        `linear_logprobs` and `policy_loss` also need 3 GEMMs.
    """
    objective = checked_objective(objective)
    tuning = check_options(transform, shards, tuning, entropy=entropy)
    if torch.compiler.is_compiling():
        options: dict[str, Any] = {"objective": objective, "normalizer": normalizer, "rows": rows}
        options |= {"entropy": entropy, "temperature": temperature, "transform": transform}
        if shards is None:
            return _traced(hidden, weight, targets, batch, **options, tuning=tuning)
        return _outside_graph(hidden, weight, targets, batch, **options, shards=shards, tuning=tuning)
    checked = check_head_call(
        hidden, weight, rows=rows, temperature=temperature, transform=transform, shards=shards
    )
    targets = checked.targets(targets)
    batch = _selected_batch(batch, checked)
    weights = _checked_weights(batch, objective, normalizer, checked)
    chunks = _chunks(objective, batch.sequence_lengths, checked, tuning)
    mode: Entropy = "grad" if objective.entropy_coef else entropy
    divisor = float(normalizer) if isinstance(normalizer, (int, float)) else None
    call = _policy_call(checked, targets, chunks, tuning, mode, divisor)
    policy = _Policy(call, objective, batch, weights, chunks)
    with torch.autocast(hidden.device.type, enabled=False), call.one_thread():
        loss, logp, entropies, *row_losses = loss_with_gradients(checked.tensors, policy)
    metrics = policy_metrics(RowLosses(*row_losses), logp, batch.old_logp, entropies, batch.mask)
    return PolicyLoss(loss, logp, entropies, metrics)


_outside_graph = outside_graph(linear_policy_loss)


def _selected_batch(batch: PolicyBatch, checked: CheckedCall) -> PolicyBatch:
    """Return the batch's tensors for the selected rows, detached, in the accumulation dtype."""

    def per_row(name: str, values: Tensor | None) -> Any:
        if values is None:
            return None
        if values.dim() != 1:
            raise ValueError(f"{name}: expected one dimension, got {tuple(values.shape)}")
        return checked.per_row(name, values).detach().to(checked.head.dtype)

    return PolicyBatch(
        old_logp=per_row("old_logp", batch.old_logp),
        advantages=per_row("advantages", batch.advantages),
        mask=per_row("mask", batch.mask),
        ref_logp=per_row("ref_logp", batch.ref_logp),
        sequence_lengths=batch.sequence_lengths,
    )


def _checked_weights(
    batch: PolicyBatch,
    objective: PolicyObjective,
    normalizer: Normalizer | float | Tensor,
    checked: CheckedCall,
) -> Tensor:
    """Return the weights of the rows in the loss, [T']."""
    source, dtype = checked.source, checked.head.dtype
    lengths, device = batch.sequence_lengths, source.hidden.device
    weights = row_weights(batch.mask, source.num_rows, normalizer, lengths, dtype, device)
    if objective.kl_coef and batch.ref_logp is None:
        raise ValueError("ref_logp: expected reference log-probs because kl_coef is not 0, got None")
    return weights


def _policy_call(
    checked: CheckedCall,
    targets: Tensor,
    chunks: list[_Chunk],
    tuning: Tuning,
    entropy: Entropy,
    divisor: float | None,
) -> Call:
    """Build the engine's `Call` with tiles chosen for the chunks. `divisor`: the loss is divided by it."""
    head, source = checked.head, checked.source
    tiles, cores, kernels = _arranged(source, head, chunks, checked.tensors[2])
    return Call(
        head=head,
        source=source,
        low=checked.low,
        targets=targets,
        tiles=tiles,
        cores=cores,
        kernels=kernels,
        entropy=entropy,
        group=checked.group,
        reduce_grad=checked.reduce_grad,
        gradient_scale=gradient_scale(head, source.num_rows if divisor is None else divisor),
        round_logits=tuning.round_logits,
    )


@dataclass
class _Chunk(Chunk):
    """Rows that are computed together; `lengths` are the lengths of its sequences (gspo)."""

    lengths: list[int] | None = None


@dataclass
class _Policy:
    """The objective of a call, its data and its chunks of rows."""

    call: Call
    objective: PolicyObjective
    batch: PolicyBatch
    weights: Tensor
    chunks: list[_Chunk]
    name: str = "linear_policy_loss"

    def __post_init__(self) -> None:
        call, self.source = self.call, self.call.source
        self.logp = torch.zeros(call.num_rows, dtype=call.head.dtype, device=self.source.hidden.device)
        self.entropy = torch.zeros_like(self.logp) if call.moment else None
        self.losses, self.ratio = torch.zeros_like(self.logp), torch.zeros_like(self.logp)
        self.clipped = torch.zeros_like(self.logp, dtype=torch.bool)

    @property
    def row_outputs(self) -> tuple[Tensor | None, ...]:
        return self.logp, self.entropy, self.losses, self.ratio, self.clipped

    def form(self, wanted: Sequence[bool]) -> tuple[tuple[Tensor | None, ...], HeadGradients | None]:
        """Return the loss with the outputs per row, and the gradients."""
        call, early, self.trains = self.call, None, any(wanted)
        if wanted[1] and len(self.chunks) == 1:
            early = logits_in_gradient(call.head, call.logit_dtype, most_saved_rows(self.chunks))
        gradients = form_by_chunks(call, self.chunks, wanted, self._row_gradients, early)
        return (weighted_sum(self.losses, self.weights), *self.row_outputs), gradients

    def _row_gradients(self, call: Call, chunk: _Chunk, stats: RowStatistics) -> Any:
        """Store the chunk's outputs per row and return its row gradients."""
        part = chunk.rows
        if call.fused and self.objective.kind in KERNEL_KINDS:
            written = [None if values is None else values[part] for values in self.row_outputs]
            return None, _row_factors(call, self, part, stats, written)
        final = stats.final()
        self.logp[part] = final.log_prob(stats.target)
        if self.entropy is not None and final.entropy is not None:
            self.entropy[part] = final.entropy
        form = _row_gradients if self.trains else _row_losses
        rows, gradients = form(self, chunk, self.logp[part], final.entropy)
        self.losses[part], self.ratio[part], self.clipped[part] = rows
        return final, gradients


def _row_factors(
    call: Call, policy: _Policy, part: slice, stats: RowStatistics, written: Sequence[Tensor | None]
) -> RowFactors:
    """Do the work of `_row_gradients` in one kernel: write losses to `written`, return the tiles' factors."""
    batch = policy.batch
    values = (batch.old_logp, batch.advantages, batch.mask, batch.ref_logp)
    slope = call.head.row_slope(slice(0, call.num_rows))
    per_row = slope if isinstance(slope, Tensor) else None
    kernels = row_kernels()
    assert kernels is not None
    factors = kernels.policy_rows(
        (stats.max, stats.sum, stats.moment, stats.target),
        [None if value is None else value[part] for value in values],
        policy.weights[part],
        policy.objective,
        written,
        (call.gradient_scale if isinstance(slope, Tensor) else slope * call.gradient_scale, per_row),
    )
    return RowFactors(*factors)


def _row_losses(
    policy: _Policy, chunk: _Chunk, logp: Tensor, entropy: Tensor | None
) -> tuple[RowLosses, RowGradients]:
    """Return the chunk's losses and empty gradients."""
    batch, part = policy.batch, chunk.rows
    rows = policy_losses(
        policy.objective,
        logp,
        batch.old_logp[part],
        batch.advantages[part],
        entropy=entropy,
        ref_logp=None if batch.ref_logp is None else batch.ref_logp[part],
        mask=None if batch.mask is None else batch.mask[part],
        sequence_lengths=chunk.lengths,
    )
    return rows, RowGradients()


def _row_gradients(
    policy: _Policy, chunk: _Chunk, logp: Tensor, entropy: Tensor | None
) -> tuple[RowLosses, RowGradients]:
    """Return the chunk's losses, and weight times df/dlogp and df/dH from autograd."""
    with torch.enable_grad():
        leaf = logp.detach().requires_grad_()
        entropy_leaf = None if entropy is None else entropy.detach().requires_grad_()
        rows, _ = _row_losses(policy, chunk, leaf, entropy_leaf)
        total = weighted_sum(rows.losses, policy.weights[chunk.rows])
        leaves = [leaf] if not policy.objective.entropy_coef or entropy_leaf is None else [leaf, entropy_leaf]
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
    g_logp = torch.zeros_like(logp) if grads[0] is None else grads[0]
    gradients = RowGradients(g_logp, grads[1] if len(grads) > 1 else None)
    return RowLosses(rows.losses.detach(), rows.ratio, rows.clipped), gradients


def _arranged(source: RowSource, head: Head, chunks: list[_Chunk], bias: Tensor | None) -> Arrangement:
    """Choose tiles as tall as the tallest chunk with saved logits; split the vocabulary over the cores."""
    hidden, num_rows, columns = source.hidden, source.num_rows, head.columns
    most_rows = most_saved_rows(chunks)
    kernels = kernels_for(hidden, head.dtype, num_rows * columns)
    overwritten = finishes_logits(kernels) and (bias is None or not bias.requires_grad)
    if overwritten and columns and len(chunks) > 1 and not any(chunk.recompute for chunk in chunks):
        # On a GPU, gradients overwrite the logits of their chunk, so each chunk is one tile.
        return Arrangement(Tiles(most_rows, columns, "rows"), 1, kernels)
    if not most_rows:
        most_rows = num_rows if on_gpu(hidden.device) else min(num_rows, CPU_MAX_ROWS)
    return arrange_chunks(source, head, kernels, most_rows, several=len(chunks) > 1)


def _chunks(
    objective: PolicyObjective,
    sequence_lengths: Sequence[int] | None,
    checked: CheckedCall,
    tuning: Tuning,
) -> list[_Chunk]:
    """Return row chunks whose logits fit the budget; gspo: whole sequences, too long ones on their own."""
    num_rows = checked.source.num_rows
    most = _most_rows(checked, tuning)
    if objective.kind in WHOLE_BATCH:
        return [_Chunk(slice(0, num_rows), num_rows > most)]
    if objective.kind != "gspo":
        if most < min(FEWEST_ROWS, num_rows):
            return [_Chunk(slice(0, num_rows), True)]
        multiple = GPU_ALIGNMENT if on_gpu(checked.head.weight.device) else 1
        return [_Chunk(part) for part in even_slices(num_rows, most, multiple)]
    chunks: list[_Chunk] = []
    start = 0
    for length in checked_sequences(sequence_lengths, num_rows):
        last = chunks[-1] if chunks else None
        rows = slice(start, start + length)
        if length > most:
            chunks.append(_Chunk(rows, True, [length]))
        elif last is None or last.recompute or rows.stop - last.rows.start > most:
            chunks.append(_Chunk(rows, False, [length]))
        else:
            chunks[-1] = _Chunk(slice(last.rows.start, rows.stop), False, [*(last.lengths or []), length])
        start += length
    return chunks


def _most_rows(checked: CheckedCall, tuning: Tuning) -> int:
    """Return the number of rows whose logits fit the budget; it is the same on every rank."""
    head, source = checked.head, checked.source
    columns = agreed_columns(head, checked.group)
    if on_gpu(head.weight.device):
        logit_bytes = 2 if tuning.round_logits else head.dtype.itemsize
        return gpu_chunk_rows((columns, head.weight.shape[1]), head.weight, logit_bytes, tuning.budget)
    # The tile width depends on the local shard, so it must not enter a number that all ranks share.
    work_columns = columns
    if checked.group is None:
        width, device = source.hidden.shape[1], source.hidden.device
        work_columns = min(choose_tiles(source.num_rows, columns, width, device=device).columns, columns)
    row_bytes = head.dtype.itemsize * (columns + 2 * work_columns)
    return max((CPU_CHUNK_BYTES if tuning.budget is None else tuning.budget) // max(row_bytes, 1), 1)


# linear_policy_loss as a torch.library op: the forward op computes the gradients, the backward op scales
# them. An op takes only tensors and numbers, so every tensor is a separate parameter. names: kind, kl,
# normalizer, entropy, rounding; numbers: LoRA's scaling, scale, softcap, clip_low, clip_high, kl_coef,
# entropy_coef, dual_clip, temperatures, covariance.


@torch.library.custom_op("leanstep::linear_policy_loss", mutates_args=())
def _policy_op(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor | None, up: Tensor | None,
    targets: Tensor, rows: Tensor | None, temperatures: Tensor | None, old_logp: Tensor, advantages: Tensor,
    mask: Tensor | None, ref_logp: Tensor | None, normalizer: Tensor | None, lengths: list[int] | None,
    names: str, numbers: list[float], budget: int, autocast: torch.dtype | None, needed: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Return loss, logp, entropy, metrics, and the gradients of hidden, weight, bias, down and up."""
    kind, kl, norm, entropy, logits = names.split()
    low, high, kl_coef, entropy_coef, dual, *more = numbers[3:]
    choice = (tuple(more[:2]), CovarianceChoice(*more[2:]))
    leaves: list[Any] = leaves_of((hidden, weight, bias, down, up), needed)
    with recording(any(needed)), under_autocast(autocast, hidden):
        out = linear_policy_loss(
            leaves[0],
            head_of(leaves[1], leaves[2], leaves[3], leaves[4], numbers[0]),
            targets,
            PolicyBatch(old_logp, advantages, mask, ref_logp, lengths),
            objective=PolicyObjective(kind, low, high, dual or None, kl, kl_coef, entropy_coef, *choice),  # type: ignore[arg-type]
            normalizer=norm if normalizer is None else normalizer,  # type: ignore[arg-type]
            rows=rows,
            entropy=entropy,  # type: ignore[arg-type]
            temperature=temperature_of(temperatures),
            transform=Transform(numbers[1], numbers[2] or None),
            tuning=Tuning(budget or None, round_logits=logits == "rounded"),
        )
        gradients = or_empty([None] * 5, hidden)
        if any(needed):
            gradients = gradients_of([out.loss], [torch.ones_like(out.loss)], leaves)
    metrics = torch.stack(list(out.metrics.values()))
    return [*or_empty([out.loss.detach(), out.logp, out.entropy, metrics], hidden), *gradients]


@_policy_op.register_fake
def _(
    hidden, weight, bias, down, up, targets, rows, temperatures, old_logp, advantages, mask, ref_logp,
    normalizer, lengths, names, numbers, budget, autocast, needed,
):  # fmt: skip
    num_rows = hidden.shape[0] if rows is None else rows.shape[0]
    moment = names.split()[3] != "none" or numbers[6] != 0
    shapes = [(), num_rows, num_rows if moment else 0, 3 + moment]
    dtype = accumulation_dtype(hidden.dtype, weight.dtype)
    outputs = [hidden.new_empty(shape, dtype=dtype) for shape in shapes]
    return [*outputs, *fake_gradients((hidden, weight, bias, down, up), needed, hidden)]


_policy_op.register_autograd(multiply_formed, setup_context=save_formed)


def _traced(
    hidden: Tensor,
    weight: Any,
    targets: Tensor,
    batch: PolicyBatch,
    *,
    objective: PolicyObjective,
    normalizer: Any,
    rows: Tensor | None,
    entropy: str,
    temperature: float | Tensor,
    transform: Transform | None,
    tuning: Tuning,
) -> PolicyLoss:
    """Run `linear_policy_loss` inside a compiled region."""
    transform = transform or Transform()
    head, temperatures, scaling, autocast = flat_head(weight, temperature, hidden)
    numbers = [scaling, transform.scale, transform.softcap or 0.0, objective.clip_low, objective.clip_high]
    numbers += [objective.kl_coef, objective.entropy_coef, objective.dual_clip or 0.0]
    numbers += [*objective.temperatures, *objective.covariance]
    needed = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, *head)]
    per_row = (batch.old_logp, batch.advantages, batch.mask, batch.ref_logp)
    lengths = None if batch.sequence_lengths is None else list(batch.sequence_lengths)
    named = normalizer if isinstance(normalizer, str) else "-"
    logits = "rounded" if tuning.round_logits else "exact"
    names = f"{objective.kind} {objective.kl} {named} {entropy} {logits}"
    divisor = None if isinstance(normalizer, str) else on_device(normalizer, hidden)
    constants = (lengths, names, numbers, tuning.budget or 0, autocast, needed)
    out = _policy_op(hidden, *head, targets, rows, temperatures, *per_row, divisor, *constants)
    keys = ["clip_fraction", "mean_ratio", "approx_kl"]
    keys += ["entropy"] if entropy != "none" or objective.entropy_coef else []
    metrics = dict(zip(keys, out[3].unbind(), strict=True))
    return PolicyLoss(out[0], out[1], out[2] if len(keys) == 4 else None, metrics)
