"""Replayed sampling masks: log-prob, entropy and KL over the ids that the sampler kept, at their cost.

A sampler with top-p or top-k draws from a few ids; training scores its tokens under the same restriction
(ids and offsets as vLLM emits them). Only the kept rows of the weight are read, both ways: O(sum |K_i| D)
instead of O(T' V D). A row whose support is its target alone never enters the head: log-prob, entropy and KL
are 0, and so are its gradients. With x = z - m over the kept ids of a row, and y those of the reference:

    logp = x_target - log s           H = log s - t / s,  t = sum e^x x
    KL(p || q) = sum e^x (x - y) / s - log s + log s_q

    dz = g (1[target] - p) - g_H p (log p + H) + g_kl p (log p - log q - KL)
"""

# T rows · R selected rows · M (row, id) pairs of this shard · D model · V vocabulary

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from leanstep.cpu import sparse_zeros
from leanstep.logprob import Allowed, LMHead, ReferenceHead, Transform, Tuning, VocabShards, linear_logprobs
from leanstep.logprob.checks import check_head_call, check_options, check_vocabulary, checked_allowed
from leanstep.logprob.engine.lm_head import Head
from leanstep.logprob.engine.softmax import EXPONENT_FLOOR, finite_shift, first_order_only
from leanstep.logprob.engine.tiles import default_budget, even_slices
from leanstep.logprob.engine.vocab_subset import SPARSE_FRACTION, AllowedIds
from leanstep.logprob.inputs import Entropy
from leanstep.logprob.layout import to_device
from leanstep.logprob.parallel import reduce_hidden_grad
from leanstep.objectives.distill_tiles import all_reduce_


class MaskPath(NamedTuple):
    """Which way the rows went: kept ids alone, not at all (target alone), or the whole vocabulary."""

    sparse: int
    singletons: int
    dense: int


class MaskedLogProbs(NamedTuple):
    """logp: [R]. entropy, kl: [R] or None. path: `MaskPath`, rows by the way they took."""

    logp: Tensor
    entropy: Tensor | None
    kl: Tensor | None
    path: MaskPath


def linear_masked_logprobs(
    hidden: Tensor,
    weight: Any,
    targets: Tensor,
    kept: Allowed | tuple[Tensor, ...],
    *,
    rows: Tensor | None = None,
    entropy: Entropy = "none",
    temperature: float | Tensor = 1.0,
    reference: ReferenceHead | None = None,
    transform: Transform | None = None,
    shards: VocabShards | None = None,
    tuning: Tuning | None = None,
) -> MaskedLogProbs:
    """Log-prob of the targets, entropy and KL to a reference over each row's kept ids and its target.

    Equivalent to, with `mask` [T', V] True at the kept ids and at the targets:
        logits = (hidden[rows] @ weight.T / temperature).masked_fill(~mask, -torch.inf)
        log_p = torch.log_softmax(logits, -1)
        logp = log_p.gather(1, targets[:, None])[:, 0]
        entropy = -torch.where(mask, log_p.exp() * log_p, 0.0).sum(-1)

    (`linear_logprobs(allowed=)` restricts the log-prob alone; its entropy is that of the whole vocabulary.)

    Args:
        hidden: [T, D].
        weight: [V, D], or a head that `linear_logprobs` takes, without LoRA.
        targets: [T'] ids aligned with `rows`.
        kept: `Allowed(ids, offsets, has_set)`; a row with has_set False runs over the whole vocabulary. On
            the host together with `targets` the pairs are found without a host read of the device; from a
            device they are read in one.
        rows: [T'] int64, rows to score.
        entropy: "none", "metric" or "grad".
        temperature: > 0, a float or one per row.
        reference: `ReferenceHead(weight, hidden, bias)`: also returns KL(p || q), q restricted likewise.
        transform: `Transform(scale, softcap)`. shards: as in `linear_logprobs`, no sequence parallelism.
        tuning: `Tuning(budget, main_grad)`; the weight's gradient is added to main_grad at kept ids alone.

    Returns:
        MaskedLogProbs; `path` says how many rows went which way. Rows go to the whole vocabulary where they
        have no set, or, without shards, all together where the sets hold more than 1/16 of it.

    Peak extra memory: two [m, D] blocks of gathered rows (budget), one [unique ids, D] sum; dW, or main_grad.
    Collectives: 2 forward, 1 backward with a group; 2 and 1 more if some rows have no set; else none.
    """
    tuning = check_options(transform, shards, tuning, entropy=entropy, only_budget=False)
    if not all(x is None or isinstance(x, Tensor) for x in kept):
        got = type(next(x for x in kept if x is not None and not isinstance(x, Tensor))).__name__
        raise ValueError(f"kept: expected Allowed(ids, offsets) of flat tensors, got one with a {got}")
    *sets, targets = _on_host([*kept, targets])
    checked = check_head_call(
        hidden, weight, rows=rows, temperature=temperature, transform=transform, shards=shards
    )
    head, tensors, group = checked.head, checked.tensors, checked.group
    if checked.low is not None:
        raise ValueError("weight: expected a head without LoRA here; merge it first")
    vocabulary = check_vocabulary(head, "with unequal shards")
    targets = checked.targets(targets)
    allowed = checked_allowed(sets, len(targets), vocabulary, targets.device)
    assert allowed is not None
    plan = _plan(allowed, targets, head, hidden.device)
    own = _reference(reference, head, hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        if (
            group is None
            and plan.whole is None
            and plan.num_pairs > SPARSE_FRACTION * head.columns * len(targets)
        ):
            found = _dense(hidden, tensors, rows, head, plan, allowed, own, tuning.budget)
            path = MaskPath(0, 0, len(targets))
        else:
            call = _Call(
                head, rows, plan, own, entropy, group, checked.reduce_grad,
                _step(tuning.budget, hidden, head), tuning.main_grad,
            )  # fmt: skip
            found = _SparseMask.apply(*tensors[:3], call)
            path = MaskPath(plan.sparse_rows, plan.singletons, 0)
    logp, entropies, kl = found  # type: ignore[misc]
    if plan.whole is not None:
        options = {"transform": transform, "shards": shards, "tuning": replace(tuning, tile=None)}
        whole = (hidden, weight, rows, head.temperature, entropy, reference, options)
        logp, entropies, kl = _whole_vocabulary(whole, plan, (logp, entropies, kl))
        path = path._replace(dense=len(plan.whole))
    wants = entropy != "none"
    if entropy == "metric" and entropies is not None:
        entropies = entropies.detach()
    return MaskedLogProbs(logp, entropies if wants else None, kl if own is not None else None, path)


@dataclass
class _Plan:
    """Pairs (row, id) of this shard, in row order, without those of rows whose target stands alone.

    Args:
        row_of, ids: [M]; ids are local. is_target: [M]. touched, slot: the ids that occur, and which of them.
        whole: rows without a set, or None.
        num_pairs: over all shards.
    """

    targets: Tensor
    row_of: Tensor
    ids: Tensor
    is_target: Tensor
    touched: Tensor
    slot: Tensor
    alone: Tensor
    whole: Tensor | None
    num_pairs: int
    sparse_rows: int
    singletons: int


def _on_host(given: list[Any]) -> list[Any]:
    """Tensors on the host; those of a device come in one copy, which is one host read."""
    away = [x for x in given if isinstance(x, Tensor) and x.device.type != "cpu"]
    if not away:
        return given
    packed = torch.cat([x.flatten().long() for x in away]).cpu()
    arrived = iter(packed.split([x.numel() for x in away]))
    return [
        next(arrived).view(x.shape).to(x.dtype) if isinstance(x, Tensor) and x.device.type != "cpu" else x
        for x in given
    ]


def _plan(allowed: AllowedIds, targets: Tensor, head: Head, device: torch.device) -> _Plan:
    """Where kept ids and targets lie: worked out on the host, then moved to `device`."""
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
    touched, slot = torch.unique(ids, return_inverse=True)
    whole = None if allowed.everywhere else (~restricted).nonzero().flatten()
    whole = None if whole is None or not len(whole) else whole
    singletons = int(alone.sum())
    sparse_rows = len(targets) - singletons - (0 if whole is None else len(whole))
    moved = [to_device(x, device) for x in (targets, row_of, ids, is_target, touched, slot, alone)]
    whole = None if whole is None else to_device(whole, device)
    return _Plan(*moved, whole=whole, num_pairs=num_pairs, sparse_rows=sparse_rows, singletons=singletons)


@dataclass
class _Call:
    head: Head
    rows: Tensor | None
    plan: _Plan
    reference: tuple[Head, Tensor] | None
    entropy: str
    group: Any
    reduce_grad: Any
    step: int
    main_grad: Tensor | None

    def pairs(self, hidden: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Rows of hidden and of the weight for some pairs at a time, [m, D] each."""
        plan, dtype = self.plan, self.head.dtype
        for part in even_slices(len(plan.ids), self.step):
            picked = plan.row_of[part] if self.rows is None else self.rows[plan.row_of[part]]
            yield (
                part,
                hidden.index_select(0, picked).to(dtype),
                weight.index_select(0, plan.ids[part]).to(dtype),
            )

    def logits(self, head: Head, hidden: Tensor, slope: bool) -> tuple[Tensor, Tensor | None]:
        """z [M] of a head at the pairs, and dz/du."""
        u = torch.zeros(len(self.plan.ids), dtype=head.dtype, device=hidden.device)
        for part, h, w in self.pairs(hidden, head.weight):
            u[part] = torch.linalg.vecdot(h, w)
        if head.bias is not None:
            u += head.bias[self.plan.ids].to(u.dtype)
        temperature = head.temperature
        if isinstance(temperature, Tensor):
            temperature = temperature[self.plan.row_of]
        z, slopes = u * head.scale, torch.full_like(u, head.scale) if slope else None
        if head.softcap is not None:
            tanh = torch.tanh(z / head.softcap)
            z = head.softcap * tanh
            slopes = None if slopes is None else slopes * (1.0 - tanh.square())
        return z / temperature, None if slopes is None else slopes / temperature


class _SparseMask(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, call: _Call):  # type: ignore[override, no-untyped-def]
        ctx.set_materialize_grads(False)
        plan, head = call.plan, call.head
        num_rows, row_of = len(plan.targets), plan.row_of
        z, slope = call.logits(head, hidden, True)
        q = None if call.reference is None else call.logits(*call.reference, False)[0]
        heads = [z] if q is None else [z, q]
        maxima = z.new_full((len(heads), num_rows), -torch.inf)
        for number, values in enumerate(heads):
            maxima[number] = maxima[number].scatter_reduce(0, row_of, values, "amax")
        all_reduce_(maxima, call.group, dist.ReduceOp.MAX)
        shifts = finite_shift(maxima)
        x = z - shifts[0][row_of]
        e = x.exp()
        bounded = x.clamp(min=EXPONENT_FLOOR[x.dtype])
        columns = [e, e * bounded, torch.where(plan.is_target, x, 0.0)]
        y = None
        if q is not None:
            y = q - shifts[1][row_of]
            columns += [y.exp(), torch.where(e == 0, 0.0, e * (bounded - y))]
        sums = torch.stack([z.new_zeros(num_rows).index_add(0, row_of, c) for c in columns])
        all_reduce_(sums, call.group, dist.ReduceOp.SUM)
        # Rows that take no part have an empty sum here: as if their only outcome had probability 1.
        total = torch.where(sums[0] == 0, 1.0, sums[0])
        log_sum = total.log()
        dead = (sums[0] == 0) & (maxima[0] == -torch.inf) & ~plan.alone
        logp = torch.where(dead, -torch.inf, sums[2] - log_sum)
        entropy = log_sum - sums[1] / total
        kl = ref_log_sum = None
        if q is not None:
            ref_log_sum = torch.where(sums[3] == 0, 1.0, sums[3]).log()
            kl = sums[4] / total - log_sum + ref_log_sum
        log_p = x - log_sum[row_of]
        gap = None
        if y is not None and kl is not None and ref_log_sum is not None:
            gap = log_p - (y - ref_log_sum[row_of])
        ctx.save_for_backward(hidden, weight, bias, log_p, slope, entropy, kl, gap, dead)
        ctx.call = call
        return logp, entropy, kl

    @staticmethod
    @first_order_only
    def backward(ctx: Any, g, g_entropy, g_kl):  # type: ignore[no-untyped-def]
        hidden, weight, bias, log_p, slope, entropy, kl, gap, dead = ctx.saved_tensors
        call: _Call = ctx.call
        plan, head, row_of = call.plan, call.head, call.plan.row_of
        p = log_p.exp()
        dz = torch.zeros_like(p)
        if g is not None:
            # A row with every logit at -inf has no gradient, not even at its target.
            dz += torch.where(dead, 0.0, g.to(p.dtype))[row_of] * (plan.is_target.to(p.dtype) - p)
        finite = log_p.clamp(min=EXPONENT_FLOOR[p.dtype])
        if g_entropy is not None and call.entropy == "grad":
            dz -= g_entropy.to(p.dtype)[row_of] * p * (finite + entropy[row_of])
        if g_kl is not None and kl is not None:
            usable = (p > 0) & kl.isfinite()[row_of]
            dz += torch.where(usable, g_kl.to(p.dtype)[row_of] * p * (gap - kl[row_of]), 0.0)
        du = dz * slope
        selected = hidden.shape[0] if call.rows is None else call.rows.shape[0]
        needs = ctx.needs_input_grad
        d_hidden = hidden.new_zeros((selected, hidden.shape[1]), dtype=head.dtype) if needs[0] else None
        sums = hidden.new_zeros((len(plan.touched), hidden.shape[1]), dtype=head.dtype) if needs[1] else None
        for part, h, w in call.pairs(hidden, weight):
            if d_hidden is not None:
                d_hidden.index_add_(0, row_of[part], w.mul_(du[part].unsqueeze(-1)))
            if sums is not None:
                sums.index_add_(0, plan.slot[part], h.mul_(du[part].unsqueeze(-1)))
        d_weight = d_bias = None
        if sums is not None and call.main_grad is not None:
            call.main_grad.index_add_(0, plan.touched, sums.to(call.main_grad.dtype))
        elif sums is not None:
            d_weight = sparse_zeros(weight)
            d_weight.index_copy_(0, plan.touched, sums.to(weight.dtype))
        if bias is not None and needs[2]:
            d_bias = torch.zeros_like(bias, dtype=head.dtype).index_add_(0, plan.ids, du).to(bias.dtype)
        if d_hidden is not None:
            d_hidden = reduce_hidden_grad(d_hidden, call.group, call.reduce_grad).to(hidden.dtype)
            if call.rows is not None:
                d_hidden = torch.zeros_like(hidden).index_add_(0, call.rows, d_hidden)
        return d_hidden, d_weight, d_bias, None


def _dense(
    hidden: Tensor,
    tensors: Any,
    rows: Tensor | None,
    head: Head,
    plan: _Plan,
    allowed: AllowedIds,
    reference: tuple[Head, Tensor] | None,
    budget: int | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Large sets: all columns of a chunk of rows, masked, in plain torch; recomputed in the backward."""
    size = max((budget or (64 << 20)) // (6 * head.dtype.itemsize * max(head.columns, 1)), 1)
    ids, row_of = allowed.ids.to(hidden.device), allowed.row_of.to(hidden.device)
    found = []
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
                picked = ref_hidden[part] if rows is None else ref_hidden.index_select(0, rows[part])
                log_q = _masked_log_softmax(other, picked, other.weight, other.bias, mask, part)
                kl = (p * (finite - torch.where(mask, log_q, 0.0))).sum(-1)
            return log_p.gather(1, targets).squeeze(-1), -(p * finite).sum(-1), kl

        picked = hidden[part] if rows is None else hidden.index_select(0, rows[part])
        found.append(checkpoint(run, picked, tensors[1], tensors[2], use_reentrant=False))
    if not found:
        empty = hidden.new_zeros(0, dtype=head.dtype)
        return empty, empty, empty
    return tuple(None if parts[0] is None else torch.cat(parts) for parts in zip(*found, strict=True))  # type: ignore[return-value]


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


def _whole_vocabulary(
    call: tuple[Any, ...], plan: _Plan, found: tuple[Tensor, Tensor, Tensor | None]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows without a set: `linear_logprobs`, put among the others."""
    hidden, weight, rows, temperature, entropy, reference, options = call
    assert plan.whole is not None
    out = linear_logprobs(
        hidden,
        weight,
        plan.targets[plan.whole],
        rows=plan.whole if rows is None else rows[plan.whole],
        entropy=entropy,
        temperature=temperature[plan.whole] if isinstance(temperature, Tensor) else temperature,
        outputs=() if reference is None else ("kl",),
        reference=reference,
        **options,
    )
    merged = [
        None if mine is None or theirs is None else mine.index_copy(0, plan.whole, theirs)
        for mine, theirs in zip(found, (out.logp, out.entropy, out.kl), strict=True)
    ]
    return merged[0], merged[1] if merged[1] is not None else found[1], merged[2]  # type: ignore[return-value]


def _reference(reference: ReferenceHead | None, head: Head, hidden: Tensor) -> tuple[Head, Tensor] | None:
    if reference is None:
        return None
    if reference.weight is None and reference.hidden is None:
        raise ValueError("reference: expected a ReferenceHead with weight or hidden, got neither")
    given = LMHead(head.weight, head.bias if reference.bias is None else reference.bias)
    if reference.weight is not None:
        given = LMHead(reference.weight, reference.bias)
    ref_hidden = hidden if reference.hidden is None else reference.hidden
    if given.weight.shape != (head.weight.shape[0], ref_hidden.shape[1]) or len(ref_hidden) != len(hidden):
        expected = f"weight [{head.weight.shape[0]}, D'] and hidden [{len(hidden)}, D']"
        got = f"{tuple(given.weight.shape)} and {tuple(ref_hidden.shape)}"
        raise ValueError(f"reference: expected {expected}, got {got}")
    bias = None if given.bias is None else given.bias.detach()
    return replace(head, weight=given.weight.detach(), bias=bias), ref_hidden.detach()


def _step(budget: int | None, hidden: Tensor, head: Head) -> int:
    """Pairs at a time."""
    row_bytes = 3 * head.dtype.itemsize * max(hidden.shape[1], 1)
    return max((budget or default_budget(hidden.device)) // row_bytes, 1)
