"""Replayed sampling masks: log-prob, entropy and KL over only the ids that the sampler kept.

A sampler with top-p or top-k draws from a few ids; training scores its tokens under the same restriction
(ids and offsets in vLLM's format). Forward and backward read only the kept rows of the weight: O(sum |K_i| D)
instead of O(T' V D) (logprob/engine/vocab_subset.py). A row that allows only its target is not projected: its
log-prob, entropy, KL and gradients are 0.
"""

# T rows · R selected rows · M (row, id) pairs of this shard · D model · V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from leanstep.logprob import Allowed, LMHead, ReferenceHead, Transform, Tuning, VocabShards, linear_logprobs
from leanstep.logprob.checks import (
    HeadTensors,
    accumulation_dtype,
    check_head_call,
    check_options,
    check_vocabulary,
    checked_allowed,
    full_tensor,
)
from leanstep.logprob.engine.lm_head import Head
from leanstep.logprob.engine.tiles import even_slices
from leanstep.logprob.engine.torch_ops import (
    allowed_of,
    fake_gradients,
    flat_allowed,
    flat_head,
    gradients_of,
    leaves_of,
    or_empty,
    outside_graph,
    recording,
    temperature_of,
    under_autocast,
)
from leanstep.logprob.engine.vocab_subset import (
    SPARSE_FRACTION,
    AllowedIds,
    Pairs,
    SparseCall,
    sparse_logprobs,
)
from leanstep.logprob.inputs import Entropy
from leanstep.logprob.layout import to_device

# logp, entropy and KL, [R] each; None unless requested.
RowOutputs = tuple[Tensor, Tensor | None, Tensor | None]


class MaskPath(NamedTuple):
    """How many rows used only their kept ids, only their target (not projected), or the whole vocabulary.

    Inside torch.compile these are 0-dimensional tensors on the host.
    """

    sparse: Any
    singletons: Any
    dense: Any


class MaskedLogProbs(NamedTuple):
    """logp: [R]. entropy, kl: [R] or None. path: `MaskPath`, the number of rows per code path."""

    logp: Tensor
    entropy: Tensor | None
    kl: Tensor | None
    path: MaskPath


def linear_masked_logprobs(
    hidden: Tensor,
    weight: Any,
    targets: Tensor,
    kept: Allowed | tuple[Tensor, ...],  # a public name; prose: ignore
    *,
    rows: Tensor | None = None,
    entropy: Entropy = "none",
    temperature: float | Tensor = 1.0,
    reference: ReferenceHead | None = None,
    transform: Transform | None = None,
    shards: VocabShards | None = None,
    tuning: Tuning | None = None,
) -> MaskedLogProbs:
    """Compute the targets' log-prob, entropy and KL to a reference over each row's kept ids and its target.

    Equivalent to, with `mask` [T', V] True at the kept ids and at the targets:
        logits = (hidden[rows] @ weight.T / temperature).masked_fill(~mask, -torch.inf)
        log_p = torch.log_softmax(logits, -1)
        logp = log_p.gather(1, targets[:, None])[:, 0]
        entropy = -torch.where(mask, log_p.exp() * log_p, 0.0).sum(-1)

    `linear_logprobs(allowed=kept)` returns the same log-prob, and the same entropy if `kept` has
    `whole_entropy=False`. This function also returns a KL, and rows with a set still read only their kept ids
    when the vocabulary is sharded or other rows have no set.

    Args:
        hidden: [T, D].
        weight: [V, D], or a head that `linear_logprobs` accepts, without LoRA.
        targets: [T'] ids aligned with `rows`.
        kept: `Allowed(ids, offsets, has_set)`; a row with has_set False covers the whole vocabulary. If
            `kept` and `targets` are on the host, there is no host sync; from a device they are copied in one
            sync. `whole_entropy=True`: the entropy covers the whole vocabulary, which costs an additional
            `linear_logprobs` call without a set.
        rows: [T'] int64, rows to score.
        entropy: "none", "metric" or "grad".
        temperature: > 0, a float or one per row.
        reference: `ReferenceHead(weight, hidden, bias)`: also return KL(p || q), with q restricted to the
            same ids.
        transform: `Transform(scale, softcap)`. shards: as in `linear_logprobs`, no sequence parallelism.
        tuning: `Tuning(budget, main_grad)`; the weight's gradient is added to main_grad only at kept ids.

    Returns:
        MaskedLogProbs; `path` counts the rows per code path. Rows without a set use the whole vocabulary;
        without shards, all rows do if the sets hold more than 1/16 of it.

    Peak extra memory: two [m, D] blocks of gathered rows (budget), one [unique ids, D] sum; dW, or main_grad.
    Collectives: 2 forward, 1 backward with a group; 2 and 1 more if some rows have no set; otherwise none.
    """
    tuning = check_options(transform, shards, tuning, entropy=entropy, only_budget=False)
    _check_flat(kept)
    if torch.compiler.is_compiling():
        traced: dict[str, Any] = {"rows": rows, "entropy": entropy, "temperature": temperature}
        traced |= {"reference": reference, "transform": transform, "tuning": tuning}
        if shards is None and tuning.main_grad is None:
            return _traced(hidden, weight, targets, kept, **traced)
        return _outside_graph(hidden, weight, targets, kept, shards=shards, **traced)
    *sets, targets = _on_host([*kept, targets])
    checked = check_head_call(
        hidden,
        weight,
        rows=rows,
        temperature=temperature,
        transform=transform,
        shards=shards,
        main_grad=tuning.main_grad,
    )
    head, tensors = checked.head, checked.tensors
    if checked.low is not None:
        raise ValueError("weight: expected a head without LoRA here; merge it first")
    vocabulary = check_vocabulary(head, "with unequal shards")
    targets = checked.targets(targets)
    allowed = checked_allowed(sets, len(targets), vocabulary, targets.device, whole_entropy=False)
    assert allowed is not None
    plan = _plan(allowed, targets, head, hidden.device)
    call = SparseCall(
        head,
        rows,
        plan.pairs,
        "none" if allowed.whole_entropy else entropy,
        _reference(reference, head, hidden),
        checked.group,
        checked.reduce_grad,
        tuning.budget,
        tuning.main_grad,
    )
    with torch.autocast(hidden.device.type, enabled=False):
        if _is_dense(plan, call):
            outputs, path = _dense(hidden, tensors, call, plan, allowed), MaskPath(0, 0, len(targets))
        else:
            outputs = sparse_logprobs(tensors[0], tensors[1], tensors[2], call)
            path = MaskPath(plan.sparse_rows, plan.singletons, 0)
    options = {"transform": transform, "shards": shards, "tuning": replace(tuning, tile=None)}
    if plan.whole is not None:
        outputs = _with_whole_rows(outputs, hidden, weight, call, plan, reference, options)
        path = path._replace(dense=len(plan.whole))
    logp, entropies, kl = outputs
    if allowed.whole_entropy and entropy != "none":
        entropies = linear_logprobs(
            hidden,
            weight,
            plan.targets,
            rows=rows,
            entropy=entropy,
            temperature=head.temperature,
            **options,
        ).entropy
    return MaskedLogProbs(logp, entropies, kl, path)


_outside_graph = outside_graph(linear_masked_logprobs)


def _check_flat(allowed: Any) -> None:
    """Raise an error for lists of ids instead of flat tensors."""
    for values in allowed[:3]:
        if values is not None and not isinstance(values, Tensor):
            got = type(values).__name__
            raise ValueError(f"kept: expected Allowed(ids, offsets) of flat tensors, got one with a {got}")


@dataclass
class _Plan:
    """The work of a call: the pairs of this shard, without those of rows that allow only their target.

    Args:
        targets: [R].
        whole: rows without a set, or None.
        num_pairs: number of pairs over all shards.
        sparse_rows, singletons: number of rows with pairs, and of rows that allow only their target.
    """

    targets: Tensor
    pairs: Pairs
    whole: Tensor | None
    num_pairs: int
    sparse_rows: int
    singletons: int


def _on_host(values: list[Any]) -> list[Any]:
    """Copy tensors to the host; all tensors of a device in one copy, i.e. one host sync."""
    on_device = [x for x in values if isinstance(x, Tensor) and x.device.type != "cpu"]
    if not on_device:
        return values
    packed = torch.cat([x.flatten().long() for x in on_device]).cpu()
    copied = iter(packed.split([x.numel() for x in on_device]))
    return [
        next(copied).view(x.shape).to(x.dtype) if isinstance(x, Tensor) and x.device.type != "cpu" else x
        for x in values
    ]


def _plan(allowed: AllowedIds, targets: Tensor, head: Head, device: torch.device) -> _Plan:
    """Compute the pairs of kept ids and targets on the host, then copy them to `device`."""
    assert head.vocabulary is not None
    row_of, ids = allowed.unique_pairs(targets, head.vocabulary)
    counts = torch.bincount(row_of, minlength=len(targets))
    restricted = allowed.has_set
    alone = restricted & (counts == 1)
    take = (restricted & ~alone)[row_of]
    num_pairs = int(take.sum())
    shard = head.shard
    take &= (ids >= shard.start) & (ids < shard.start + head.columns)
    row_of, ids = row_of[take], ids[take]
    is_target = ids == targets[row_of]
    ids = ids - shard.start
    unique_ids, slot = torch.unique(ids, return_inverse=True)
    whole = None if allowed.everywhere else (~restricted).nonzero().flatten()
    whole = None if whole is None or not len(whole) else whole
    singletons = int(alone.sum())
    return _Plan(
        targets=to_device(targets, device),
        pairs=Pairs(
            num_rows=len(targets),
            row_of=to_device(row_of, device),
            ids=to_device(ids, device),
            is_target=to_device(is_target, device),
            unique_ids=to_device(unique_ids, device),
            slot=to_device(slot, device),
            alone=to_device(alone, device),
        ),
        whole=None if whole is None else to_device(whole, device),
        num_pairs=num_pairs,
        sparse_rows=len(targets) - singletons - (0 if whole is None else len(whole)),
        singletons=singletons,
    )


def _is_dense(plan: _Plan, call: SparseCall) -> bool:
    """Whether projecting onto all columns of the head is cheaper than gathering weight rows per pair."""
    if call.group is not None or plan.whole is not None or call.main_grad is not None:
        return False
    return plan.num_pairs > SPARSE_FRACTION * call.head.columns * len(plan.targets)


def _dense(
    hidden: Tensor, tensors: HeadTensors, call: SparseCall, plan: _Plan, allowed: AllowedIds
) -> RowOutputs:
    """Process large sets in plain torch: all columns of a row chunk, masked; backward recomputes them."""
    head, rows, reference = call.head, call.rows, call.reference
    size = max((call.budget or (64 << 20)) // (6 * head.dtype.itemsize * max(head.columns, 1)), 1)
    ids, row_of = allowed.ids.to(hidden.device), allowed.row_of.to(hidden.device)
    chunks = []
    for part in even_slices(len(plan.targets), size):
        inside = slice(allowed.starts[part.start], allowed.starts[part.stop])
        where = (row_of[inside] - part.start, ids[inside])

        def run(h: Tensor, w: Tensor, b: Tensor | None, part: slice = part, where: Any = where) -> Any:
            mask = torch.zeros((part.stop - part.start, head.columns), dtype=torch.bool, device=h.device)
            mask[where] = True
            targets = plan.targets[part].unsqueeze(-1)
            mask.scatter_(1, targets, True)
            log_p = _masked_log_softmax(head, h, w, b, mask, part)
            p = log_p.exp()
            finite = torch.where(p > 0, log_p, 0.0)
            kl = None
            if reference is not None:
                other, ref_hidden = reference
                ref_rows = ref_hidden[part] if rows is None else ref_hidden.index_select(0, rows[part])
                log_q = _masked_log_softmax(other, ref_rows, other.weight, other.bias, mask, part)
                kl = (p * (finite - torch.where(mask, log_q, 0.0))).sum(-1)
            return log_p.gather(1, targets).squeeze(-1), -(p * finite).sum(-1), kl

        hidden_rows = hidden[part] if rows is None else hidden.index_select(0, rows[part])
        chunks.append(checkpoint(run, hidden_rows, tensors[1], tensors[2], use_reentrant=False))
    logps, entropies, kls = zip(*chunks, strict=True)
    entropy = None if call.entropy == "none" else torch.cat(entropies)
    if entropy is not None and call.entropy == "metric":
        entropy = entropy.detach()
    return torch.cat(logps), entropy, None if reference is None else torch.cat(kls)


def _masked_log_softmax(
    head: Head, hidden: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor, part: slice
) -> Tensor:
    dtype = head.dtype
    bias = None if bias is None else bias[: head.columns].to(dtype)
    z = head.scale * torch.nn.functional.linear(hidden.to(dtype), weight[: head.columns].to(dtype), bias)
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    temperature = head.temperature
    z = z / (temperature[part].unsqueeze(-1) if isinstance(temperature, Tensor) else temperature)
    return torch.log_softmax(z.masked_fill(~mask, -torch.inf), -1)


def _with_whole_rows(
    outputs: RowOutputs,
    hidden: Tensor,
    weight: Any,
    call: SparseCall,
    plan: _Plan,
    reference: ReferenceHead | None,
    options: dict[str, Any],
) -> RowOutputs:
    """Compute the rows without a set with `linear_logprobs` and insert them into `outputs`."""
    rows, temperature, whole = call.rows, call.head.temperature, plan.whole
    assert whole is not None
    out = linear_logprobs(
        hidden,
        weight,
        plan.targets[whole],
        rows=whole if rows is None else rows[whole],
        entropy=call.entropy,  # type: ignore[arg-type]
        temperature=temperature[whole] if isinstance(temperature, Tensor) else temperature,
        outputs=() if reference is None else ("kl",),
        reference=reference,
        **options,
    )
    return tuple(  # type: ignore[return-value]
        None if sparse is None or dense is None else sparse.index_copy(0, whole, dense)
        for sparse, dense in zip(outputs, (out.logp, out.entropy, out.kl), strict=True)
    )


def _reference(reference: ReferenceHead | None, head: Head, hidden: Tensor) -> tuple[Head, Tensor] | None:
    if reference is None:
        return None
    if reference.weight is None and reference.hidden is None:
        raise ValueError("reference: expected a ReferenceHead with weight or hidden, got neither")
    ref_head = LMHead(head.weight, head.bias if reference.bias is None else reference.bias)
    if reference.weight is not None:
        ref_head = LMHead(reference.weight, reference.bias)
    ref_hidden = hidden if reference.hidden is None else reference.hidden
    if ref_head.weight.shape != (head.weight.shape[0], ref_hidden.shape[1]) or len(ref_hidden) != len(hidden):
        expected = f"weight [{head.weight.shape[0]}, D'] and hidden [{len(hidden)}, D']"
        got = f"{tuple(ref_head.weight.shape)} and {tuple(ref_hidden.shape)}"
        raise ValueError(f"reference: expected {expected}, got {got}")
    bias = None if ref_head.bias is None else ref_head.bias.detach()
    return replace(head, weight=ref_head.weight.detach(), bias=bias), ref_hidden.detach()


# linear_masked_logprobs as a torch.library op. numbers: scale, softcap. counts: budget, whole_entropy.


def _op_outputs(
    tensors: Sequence[Any], numbers: Sequence[float], counts: Sequence[int], entropy: Any,
    autocast: torch.dtype | None,
) -> MaskedLogProbs:  # fmt: skip
    hidden, weight, bias, targets, rows, temperatures, ids, offsets, has_set, *of_reference = tensors
    allowed = allowed_of((ids, offsets, has_set), counts[1])
    assert allowed is not None
    with under_autocast(autocast, hidden):
        return linear_masked_logprobs(
            hidden,
            LMHead(weight, bias),
            targets,
            allowed,
            rows=rows,
            entropy=entropy,
            temperature=temperature_of(temperatures),
            reference=None if all(t is None for t in of_reference) else ReferenceHead(*of_reference),
            transform=Transform(numbers[0], numbers[1] or None),
            tuning=Tuning(counts[0] or None),
        )


@torch.library.custom_op("leanstep::linear_masked_logprobs", mutates_args=())
def _masked_op(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rows: Tensor | None,
    temperatures: Tensor | None, ids: Tensor, offsets: Tensor, has_set: Tensor | None,
    reference_weight: Tensor | None, reference_hidden: Tensor | None, reference_bias: Tensor | None,
    numbers: list[float], counts: list[int], entropy: str, autocast: torch.dtype | None,
) -> list[Tensor]:  # fmt: skip
    """Return logp, entropy and KL, [R] each, and the path, [3] on the host."""
    tensors = (hidden, weight, bias, targets, rows, temperatures, ids, offsets, has_set)
    tensors += (reference_weight, reference_hidden, reference_bias)
    with torch.no_grad():
        out = _op_outputs(tensors, numbers, counts, entropy, autocast)
    return [*or_empty([out.logp, out.entropy, out.kl], out.logp), torch.tensor(out.path)]


@_masked_op.register_fake
def _(
    hidden, weight, bias, targets, rows, temperatures, ids, offsets, has_set, reference_weight,
    reference_hidden, reference_bias, numbers, counts, entropy, autocast,
):  # fmt: skip
    num_rows = hidden.shape[0] if rows is None else rows.shape[0]
    dtype = accumulation_dtype(hidden.dtype, weight.dtype)
    has_kl = reference_weight is not None or reference_hidden is not None
    shapes = (num_rows, num_rows if entropy != "none" else 0, num_rows if has_kl else 0)
    path = hidden.new_empty(3, dtype=torch.int64, device="cpu")
    return [*(hidden.new_empty(shape, dtype=dtype) for shape in shapes), path]


@torch.library.custom_op("leanstep::linear_masked_logprobs_backward", mutates_args=())
def _masked_backward_op(
    upstream: list[Tensor], needed: list[bool],
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rows: Tensor | None,
    temperatures: Tensor | None, ids: Tensor, offsets: Tensor, has_set: Tensor | None,
    reference_weight: Tensor | None, reference_hidden: Tensor | None, reference_bias: Tensor | None,
    numbers: list[float], counts: list[int], entropy: str, autocast: torch.dtype | None,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of hidden, weight and bias; reads the kept ids once more."""
    leaves = leaves_of((hidden, weight, bias), needed)
    tensors = (*leaves, targets, rows, temperatures, ids, offsets, has_set)
    tensors += (reference_weight, reference_hidden, reference_bias)
    with recording():
        out = _op_outputs(tensors, numbers, counts, entropy, autocast)
        outputs = [out.logp, out.entropy if entropy == "grad" else None, out.kl]
        return gradients_of(outputs, upstream, leaves)


@_masked_backward_op.register_fake
def _(upstream, needed, hidden, weight, bias, *_constants):
    return fake_gradients((hidden, weight, bias), needed, upstream[0])


_NUM_TENSORS = 12  # the op's leading arguments that are tensors


def _save_masked(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.constants = inputs[_NUM_TENSORS:]
    ctx.save_for_backward(*inputs[:_NUM_TENSORS])
    ctx.mark_non_differentiable(output[3], *([output[1]] if inputs[-2] != "grad" else []))


def _masked_backward(ctx: Any, upstream: Sequence[Tensor]) -> Any:
    needed = list(ctx.needs_input_grad[:3])
    grads = _masked_backward_op(list(upstream[:3]), needed, *ctx.saved_tensors, *ctx.constants)
    grads = [grad if need else None for grad, need in zip(grads, needed, strict=True)]
    return *grads, *(None,) * (_NUM_TENSORS - 3 + len(ctx.constants))


_masked_op.register_autograd(_masked_backward, setup_context=_save_masked)


def _traced(
    hidden: Tensor,
    weight: Any,
    targets: Tensor,
    allowed: Any,
    *,
    rows: Tensor | None,
    entropy: str,
    temperature: float | Tensor,
    reference: ReferenceHead | None,
    transform: Transform | None,
    tuning: Tuning,
) -> MaskedLogProbs:
    """Run `linear_masked_logprobs` inside a compiled region."""
    (tensor, bias, down, _), temperatures, _, autocast = flat_head(weight, temperature, hidden)
    if down is not None:
        raise ValueError("weight: expected a head without LoRA here; merge it first")
    transform, of_reference = transform or Transform(), (None, None, None)
    if reference is not None:
        if reference.weight is None and reference.hidden is None:
            raise ValueError("reference: expected a ReferenceHead with weight or hidden, got neither")
        of_reference = (full_tensor(reference.weight), reference.hidden, full_tensor(reference.bias))
    sets, whole = flat_allowed(allowed)
    numbers = [transform.scale, transform.softcap or 0.0]
    tensors = (hidden, tensor, bias, targets, rows, temperatures, *sets, *of_reference)
    out = _masked_op(*tensors, numbers, [tuning.budget or 0, whole], entropy, autocast)
    entropies, kl = out[1] if entropy != "none" else None, None if reference is None else out[2]
    return MaskedLogProbs(out[0], entropies, kl, MaskPath(*out[3].unbind()))
