"""Softmax restricted to allowed ids (top-p or top-k replay), dense and sparse.

A row's log-prob always covers its allowed ids and its target. So does its entropy, unless the record requests
the entropy of the whole vocabulary. Dense: one mask per tile ([N, V] booleans would take N V bytes). Sparse,
if every row has a short set: forward and backward read only the allowed rows of the weight, O(sum |K_i| D)
instead of O(T' V D). With x = z - m over the allowed ids of a row, and y those of a reference:

    logp = x_target - log s           H = log s - t / s,  t = sum e^x x
    KL(p || q) = sum e^x (x - y) / s - log s + log s_q

    dz = g (1[target] - p) - g_H p (log p + H) + g_kl p (log p - log q - KL)
"""

# N rows · M allowed ids of all rows, or (row, id) pairs · W columns of a tile · R selected rows · D model

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from leanstep.cpu import sparse_zeros
from leanstep.logprob.engine.lm_head import Head, main_grad_mark
from leanstep.logprob.engine.softmax import EXPONENT_FLOOR, finite_shift, first_order_only, tile_ids
from leanstep.logprob.engine.tiles import default_budget, even_slices
from leanstep.logprob.parallel import all_reduce_, reduce_hidden_grad

# Below this fraction of the vocabulary, gathering weight rows is faster than projecting onto all of them.
SPARSE_FRACTION = 1 / 16


@dataclass
class AllowedIds:
    """Ragged lists of global ids, one per row.

    Args:
        ids: [M] int64, all rows' ids in row order.
        row_of: [M] int64, the row of each id.
        starts: host copy of the offsets, N + 1 numbers.
        has_set: [N] bool; False leaves a row unrestricted.
        everywhere: whether the host knows that every row has a set.
        whole_entropy: whether the entropy covers the whole vocabulary.
    """

    ids: Tensor
    row_of: Tensor
    starts: list[int]
    has_set: Tensor
    everywhere: bool
    whole_entropy: bool = False

    @property
    def mean_size(self) -> float:
        return len(self.ids) / max(len(self.starts) - 1, 1)

    def restrict(self, z: Tensor, rows: slice, targets: Tensor, first: int) -> Tensor:
        """Copy the tile of logits `z` [R, W] with -inf outside the rows' allowed ids and targets [R]."""
        mask = self.mask(rows, targets, first, z.shape[1])
        return z.masked_fill(mask.logical_not_(), -torch.inf)

    def mask(self, rows: slice, targets: Tensor, first: int, width: int) -> Tensor:
        """Return [R, W] bool, True where the row's log-prob covers the column; the tile begins at `first`."""
        unrestricted = ~self.has_set[rows]
        # Ids outside the tile are written to one spare column: static shapes, no sync.
        mask = unrestricted.unsqueeze(-1).expand(-1, width + 1).contiguous()
        pairs = slice(self.starts[rows.start], self.starts[rows.stop])
        local, held = tile_ids(self.ids[pairs], first, width)
        mask[self.row_of[pairs] - rows.start, torch.where(held, local, width)] = True
        local, held = tile_ids(targets, first, width)
        mask.scatter_(1, torch.where(held, local, width).unsqueeze(-1), True)
        return mask[:, :width]

    def unique_pairs(self, targets: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
        """Return (row, id) of every allowed id and every target without duplicates, in row order."""
        rows = torch.cat([self.row_of, torch.arange(len(targets), device=targets.device)])
        keys = torch.cat([self.ids, targets]) + rows * vocabulary
        keys = torch.unique(keys)
        return keys // vocabulary, keys % vocabulary

    def sorted_pairs(self, targets: Tensor, vocabulary: int) -> Pairs:
        """Return every allowed id and every target in row order, duplicates included: no host sync."""
        rows = torch.cat([self.row_of, torch.arange(len(targets), device=targets.device)])
        keys = (torch.cat([self.ids, targets]) + rows * vocabulary).sort().values
        repeats = torch.zeros_like(keys, dtype=torch.bool)
        repeats[1:] = keys[1:] == keys[:-1]
        row_of, ids = keys // vocabulary, keys % vocabulary
        return Pairs(len(targets), row_of, ids, (ids == targets[row_of]) & ~repeats, repeats)


class RestOfVocabulary:
    """Softmax over the columns that are not targets of the row: the denominator of the targets' log odds.

    It has the interface of `AllowedIds`; the entropy covers the whole vocabulary.
    """

    everywhere = False
    whole_entropy = True

    def restrict(self, z: Tensor, rows: slice, targets: Tensor, first: int) -> Tensor:
        """Copy the tile of logits `z` [R, W] with -inf at the rows' targets [R, K]."""
        local, held = tile_ids(targets, first, z.shape[1])
        # A target outside the tile changes nothing: the minimum with +inf.
        bound = z.new_full((), torch.inf).where(~held, -torch.inf)
        return z.scatter_reduce(1, local, bound, "amin")


@dataclass
class Pairs:
    """The (row, id) pairs of this shard that a sparse head computes, in row order.

    Args:
        num_rows: R, including rows without a pair.
        row_of, ids: [M]; ids are local columns.
        is_target: [M] bool.
        repeats: [M] bool, pairs that duplicate the previous one and are ignored; None: there are none.
        unique_ids, slot: the distinct ids, and the index of each pair's id among them; None: not known.
        alone: [R] bool, rows without a pair because they allow only their target; None: there are none.
    """

    num_rows: int
    row_of: Tensor
    ids: Tensor
    is_target: Tensor
    repeats: Tensor | None = None
    unique_ids: Tensor | None = None
    slot: Tensor | None = None
    alone: Tensor | None = None


@dataclass
class SparseCall:
    """Everything constant about one call of the sparse head.

    Args:
        rows: [R] rows of hidden, or None for all of them.
        entropy: "none", "metric" or "grad".
        reference: the KL's head and its hidden.
        budget: bytes for gathered rows; None: chosen for the device.
        main_grad: [V, D]; the weight's gradient is added to it and not returned.
    """

    head: Head
    rows: Tensor | None
    pairs: Pairs
    entropy: str = "none"
    reference: tuple[Head, Tensor] | None = None
    group: Any = None
    reduce_grad: Any = "none"
    budget: int | None = None
    main_grad: Tensor | None = None

    def gathered(self, hidden: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield rows of hidden and of the weight for some pairs at a time, [m, D] each."""
        pairs, dtype = self.pairs, self.head.dtype
        pair_bytes = 3 * dtype.itemsize * max(hidden.shape[1], 1)
        step = max((self.budget or default_budget(hidden.device)) // pair_bytes, 1)
        for part in even_slices(len(pairs.ids), step):
            rows = pairs.row_of[part] if self.rows is None else self.rows[pairs.row_of[part]]
            yield (
                part,
                hidden.index_select(0, rows).to(dtype),
                weight.index_select(0, pairs.ids[part]).to(dtype),
            )

    def logits(self, head: Head, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return z [M] of a head at the pairs, and dz/du."""
        pairs = self.pairs
        u = torch.zeros(len(pairs.ids), dtype=head.dtype, device=hidden.device)
        for part, h, w in self.gathered(hidden, head.weight):
            u[part] = torch.linalg.vecdot(h, w)
        if head.bias is not None:
            u += head.bias[pairs.ids].to(u.dtype)
        temperature = head.temperature
        if isinstance(temperature, Tensor):
            temperature = temperature[pairs.row_of]
        z, slope = u * head.scale, torch.full_like(u, head.scale)
        if head.softcap is not None:
            tanh = torch.tanh(z / head.softcap)
            z, slope = head.softcap * tanh, slope * (1.0 - tanh.square())
        z = z / temperature
        if pairs.repeats is not None:
            z = z.masked_fill(pairs.repeats, -torch.inf)
        return z, slope / temperature


def sparse_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, call: SparseCall
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return logp, entropy and KL to the reference over the pairs, [R] each; None unless requested.

    Differentiable in hidden, weight and bias. Of the rows without a pair, those that are `alone` have
    log-prob, entropy and KL 0; the caller replaces the values of the others.
    Collectives: 2 forward, 1 backward with a group; otherwise none.
    """
    return _Sparse.apply(hidden, weight, bias, call)  # type: ignore[return-value]


class _Sparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, call: SparseCall):  # type: ignore[override, no-untyped-def]
        ctx.set_materialize_grads(False)
        pairs, row_of = call.pairs, call.pairs.row_of
        z, slope = call.logits(call.head, hidden)
        q = None if call.reference is None else call.logits(*call.reference)[0]
        heads = [z] if q is None else [z, q]
        maxima = z.new_full((len(heads), pairs.num_rows), -torch.inf)
        for number, values in enumerate(heads):
            maxima[number] = maxima[number].scatter_reduce(0, row_of, values, "amax")
        all_reduce_(maxima, call.group, dist.ReduceOp.MAX)
        shifts = finite_shift(maxima)
        x = z - shifts[0][row_of]
        e = x.exp()
        bounded = x.clamp(min=EXPONENT_FLOOR[x.dtype])
        columns = {"sum": e, "target": torch.where(pairs.is_target, x, 0.0)}
        if call.entropy != "none":
            columns["moment"] = e * bounded
        y = None
        if q is not None:
            y = q - shifts[1][row_of]
            columns["ref_sum"] = y.exp()
            columns["gap"] = torch.where(e == 0, 0.0, e * (bounded - y))
        packed = torch.stack([z.new_zeros(pairs.num_rows).index_add(0, row_of, c) for c in columns.values()])
        all_reduce_(packed, call.group, dist.ReduceOp.SUM)
        sums = dict(zip(columns, packed, strict=True))
        # Rows without a pair have an empty sum: treat it as one outcome with probability 1.
        total = torch.where(sums["sum"] == 0, 1.0, sums["sum"])
        log_sum = total.log()
        dead = (sums["sum"] == 0) & (maxima[0] == -torch.inf)
        if pairs.alone is not None:
            dead &= ~pairs.alone
        logp = torch.where(dead, -torch.inf, sums["target"] - log_sum)
        log_p = x - log_sum[row_of]
        entropy = log_sum - sums["moment"] / total if "moment" in sums else None
        kl = gap = None
        if y is not None:
            ref_log_sum = torch.where(sums["ref_sum"] == 0, 1.0, sums["ref_sum"]).log()
            kl = sums["gap"] / total - log_sum + ref_log_sum
            gap = log_p - (y - ref_log_sum[row_of])
        ctx.save_for_backward(hidden, weight, bias, log_p, slope, entropy, kl, gap, dead)
        ctx.call = call
        if entropy is not None and call.entropy == "metric":
            ctx.mark_non_differentiable(entropy)
        return logp, entropy, kl

    @staticmethod
    @first_order_only
    def backward(ctx: Any, g, g_entropy, g_kl):  # type: ignore[no-untyped-def]
        hidden, weight, bias, log_p, slope, entropy, kl, gap, dead = ctx.saved_tensors
        call: SparseCall = ctx.call
        pairs, row_of = call.pairs, call.pairs.row_of
        p = log_p.exp()
        dz = torch.zeros_like(p)
        if g is not None:
            # A row whose logits are all -inf has no gradient, not even at its target.
            dz += torch.where(dead, 0.0, g.to(p.dtype))[row_of] * (pairs.is_target.to(p.dtype) - p)
        if g_entropy is not None:
            finite = log_p.clamp(min=EXPONENT_FLOOR[p.dtype])
            dz -= g_entropy.to(p.dtype)[row_of] * p * (finite + entropy[row_of])
        if g_kl is not None and kl is not None:
            usable = (p > 0) & kl.isfinite()[row_of]
            dz += torch.where(usable, g_kl.to(p.dtype)[row_of] * p * (gap - kl[row_of]), 0.0)
        du = dz * slope
        needs_hidden, needs_weight, needs_bias, _ = ctx.needs_input_grad
        d_hidden, d_weight = _input_gradients(call, hidden, weight, du, needs_hidden, needs_weight)
        d_bias = None
        if bias is not None and needs_bias:
            d_bias = torch.zeros_like(bias, dtype=p.dtype).index_add_(0, pairs.ids, du).to(bias.dtype)
        if d_hidden is not None:
            d_hidden = reduce_hidden_grad(d_hidden, call.group, call.reduce_grad).to(hidden.dtype)
            if call.rows is not None:
                d_hidden = torch.zeros_like(hidden).index_add_(0, call.rows, d_hidden)
        return d_hidden, d_weight, d_bias, None


def _input_gradients(
    call: SparseCall, hidden: Tensor, weight: Tensor, du: Tensor, needs_hidden: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the selected rows of hidden, in the accumulation dtype, and of the weight."""
    pairs, dtype, width = call.pairs, call.head.dtype, hidden.shape[1]
    d_hidden = hidden.new_zeros((pairs.num_rows, width), dtype=dtype) if needs_hidden else None
    slot, num_slots = pairs.slot, len(weight) if pairs.unique_ids is None else len(pairs.unique_ids)
    slot = pairs.ids if slot is None else slot
    sums = hidden.new_zeros((num_slots, width), dtype=dtype) if needs_weight else None
    for part, h, w in call.gathered(hidden, weight):
        if d_hidden is not None:
            d_hidden.index_add_(0, pairs.row_of[part], w.mul_(du[part].unsqueeze(-1)))
        if sums is not None:
            sums.index_add_(0, slot[part], h.mul_(du[part].unsqueeze(-1)))
    return d_hidden, None if sums is None else _weight_gradient(call, weight, sums)


def _weight_gradient(call: SparseCall, weight: Tensor, sums: Tensor) -> Tensor | None:
    """Return dW from the sums of all ids or of the unique ones; None if it is added to `main_grad`."""
    ids, main_grad = call.pairs.unique_ids, call.main_grad
    if main_grad is not None:
        if ids is None:
            main_grad.add_(sums)
        else:
            main_grad.index_add_(0, ids, sums.to(main_grad.dtype))
        return main_grad_mark(weight)
    if ids is None:
        return sums.to(weight.dtype)
    return sparse_zeros(weight).index_copy_(0, ids, sums.to(weight.dtype))
