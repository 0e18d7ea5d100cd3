"""Softmax restricted to allowed ids (top-p or top-k replay), dense and sparse.

A row's log-prob runs over its allowed ids plus its target, always; entropy never looks at the restriction.
Dense: a mask for one tile at a time ([N, V] booleans would cost N V bytes). Sparse, where every row has a
short set and no entropy is wanted: only the allowed rows of the weight are read, both ways, O(sum |K_i| D)
instead of O(T' V D).
"""

# N rows · M allowed ids of all rows, or (row, id) pairs · W columns of a tile · T' selected rows · D model

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leanstep.logprob.engine.lm_head import Head, RowSource
from leanstep.logprob.engine.softmax import first_order_only, tile_ids
from leanstep.logprob.engine.tiles import default_budget, even_slices

# Below this share of the vocabulary, gathering weight rows beats projecting onto all of them.
SPARSE_FRACTION = 1 / 16


@dataclass
class AllowedIds:
    """Ragged lists of global ids, one per row.

    Args:
        ids: [M] int64, all rows' ids in row order.
        row_of: [M] int64, the row of each id.
        starts: host copy of the offsets, N + 1 numbers.
        has_set: [N] bool; False leaves a row unrestricted.
        everywhere: whether it is known on the host that every row has a set.
    """

    ids: Tensor
    row_of: Tensor
    starts: list[int]
    has_set: Tensor
    everywhere: bool

    @property
    def mean_size(self) -> float:
        return len(self.ids) / max(len(self.starts) - 1, 1)

    def restrict(self, z: Tensor, rows: slice, targets: Tensor, first: int) -> Tensor:
        """A copy of the tile of logits `z` [R, W] with -inf outside the rows' allowed ids and targets [R]."""
        mask = self.mask(rows, targets, first, z.shape[1])
        return z.masked_fill(mask.logical_not_(), -torch.inf)

    def mask(self, rows: slice, targets: Tensor, first: int, width: int) -> Tensor:
        """[R, W] bool: True where a column of the tile, from id `first` on, is in the row's log-prob."""
        unrestricted = ~self.has_set[rows]
        # One spare column receives every id that lies outside the tile: static shapes, no sync.
        mask = unrestricted.unsqueeze(-1).expand(-1, width + 1).contiguous()
        pairs = slice(self.starts[rows.start], self.starts[rows.stop])
        local, held = tile_ids(self.ids[pairs], first, width)
        mask[self.row_of[pairs] - rows.start, torch.where(held, local, width)] = True
        local, held = tile_ids(targets, first, width)
        mask.scatter_(1, torch.where(held, local, width).unsqueeze(-1), True)
        return mask[:, :width]

    def unique_pairs(self, targets: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
        """(row, id) of every allowed id and every target, each once, in row order."""
        rows = torch.cat([self.row_of, torch.arange(len(targets), device=targets.device)])
        keys = torch.cat([self.ids, targets]) + rows * vocabulary
        keys = torch.unique(keys)
        return keys // vocabulary, keys % vocabulary

    def sorted_pairs(self, targets: Tensor, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
        """(row, id) of every allowed id and every target in row order, and which repeat the one before.

        As many as came in: a device need not tell the host how many are left.
        """
        rows = torch.cat([self.row_of, torch.arange(len(targets), device=targets.device)])
        keys = (torch.cat([self.ids, targets]) + rows * vocabulary).sort().values
        repeats = torch.zeros_like(keys, dtype=torch.bool)
        repeats[1:] = keys[1:] == keys[:-1]
        return keys // vocabulary, keys % vocabulary, repeats


def sparse_logprobs(hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor | None, head: Head,
                    targets: Tensor, allowed: AllowedIds, budget: int | None) -> Tensor:  # fmt: skip
    """logp [T'] over allowed ids and targets, differentiable in hidden, weight and bias."""
    row_of, ids, repeats = allowed.sorted_pairs(targets, head.columns)
    step = max(
        (budget or default_budget(hidden.device)) // (3 * head.dtype.itemsize * max(hidden.shape[1], 1)), 1
    )
    return _Sparse.apply(hidden, weight, bias, rows, head, targets, (row_of, ids, repeats), step)  # type: ignore[return-value]


class _Sparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, rows, head, targets, pairs, step):  # type: ignore[override, no-untyped-def]
        row_of, ids, repeats = pairs
        ctx.set_materialize_grads(False)
        u = torch.zeros(len(ids), dtype=head.dtype, device=hidden.device)
        for part, h, w in _pairs(hidden, weight, rows, head, row_of, ids, step):
            u[part] = torch.linalg.vecdot(h, w)
        if bias is not None:
            u += bias[ids].to(u.dtype)
        temperature = head.temperature
        if isinstance(temperature, Tensor):
            temperature = temperature[row_of]
        z, slope = u * head.scale, torch.full_like(u, head.scale)
        if head.softcap is not None:
            tanh = torch.tanh(z / head.softcap)
            z, slope = head.softcap * tanh, slope * (1.0 - tanh.square())
        z, slope = (z / temperature).masked_fill(repeats, -torch.inf), slope / temperature
        top = torch.full((len(targets),), -torch.inf, dtype=z.dtype, device=z.device)
        top = top.scatter_reduce(0, row_of, z, "amax")
        shift = torch.where(top == -torch.inf, 0.0, top)
        x = z - shift[row_of]
        sums = torch.zeros_like(shift).index_add_(0, row_of, x.exp())
        log_p = x - torch.where(sums == 0, 1.0, sums).log()[row_of]
        is_target = (ids == targets[row_of]) & ~repeats
        # Each row has its target exactly once.
        logp = torch.zeros_like(shift).index_add_(0, row_of, torch.where(is_target, log_p, 0.0))
        ctx.save_for_backward(hidden, weight, bias, rows, row_of, ids, log_p.exp(), slope, is_target)
        ctx.head, ctx.step = head, step
        return logp

    @staticmethod
    @first_order_only
    def backward(ctx: Any, g: Tensor | None):  # type: ignore[no-untyped-def]
        hidden, weight, bias, rows, row_of, ids, prob, slope, is_target = ctx.saved_tensors
        head = ctx.head
        if g is None:
            return (None,) * 8
        du = g.to(prob.dtype)[row_of] * (is_target.to(prob.dtype) - prob) * slope
        selected = hidden.shape[0] if rows is None else rows.shape[0]
        d_hidden = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            d_hidden = hidden.new_zeros((selected, hidden.shape[1]), dtype=head.dtype)
        if ctx.needs_input_grad[1]:
            d_weight = torch.zeros_like(weight, dtype=head.dtype, memory_format=torch.contiguous_format)
        if bias is not None and ctx.needs_input_grad[2]:
            d_bias = torch.zeros_like(bias, dtype=head.dtype).index_add_(0, ids, du).to(bias.dtype)
        for part, h, w in _pairs(hidden, weight, rows, head, row_of, ids, ctx.step):
            if d_hidden is not None:
                d_hidden.index_add_(0, row_of[part], w * du[part].unsqueeze(-1))
            if d_weight is not None:
                d_weight.index_add_(0, ids[part], h * du[part].unsqueeze(-1))
        if d_hidden is not None:
            d_hidden = d_hidden.to(hidden.dtype)
            if rows is not None:
                d_hidden = torch.zeros_like(hidden).index_add_(0, rows, d_hidden)
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), d_bias, *(None,) * 5


def _pairs(
    hidden: Tensor, weight: Tensor, rows: Tensor | None, head: Head, row_of: Tensor, ids: Tensor, step: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    source = RowSource(hidden, rows)
    for part in even_slices(len(ids), step):
        picked = row_of[part] if source.rows is None else source.rows[row_of[part]]
        yield (
            part,
            hidden.index_select(0, picked).to(head.dtype),
            weight.index_select(0, ids[part]).to(head.dtype),
        )
