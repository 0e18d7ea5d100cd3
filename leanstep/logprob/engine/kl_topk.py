"""Further outputs of the tile loop: the top-k tokens, and the exact KL to a reference head.

KL(p||q) = sum p (log p - log q) needs both heads' logits of a tile at the same time. The running sums

    x = sum e^(z-m) ((z-m) - (q-m_q)),    KL(p||q) = x / s - log s + log s_q

merge over tiles like the other statistics (`RowStatistics.cross`); so do those of the reverse KL.
"""

# R rows of a chunk · W columns of a tile · k largest columns

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leanstep.logprob.engine.softmax import FinalStatistics, RowGradients, RowStatistics, finite_shift
from leanstep.logprob.parallel import gather_over_ranks


@dataclass
class TopK:
    """The k largest logits so far and their global ids; with k = 1 the lowest id wins a tie."""

    values: Tensor
    ids: Tensor

    @classmethod
    def empty(cls, rows: int, k: int, dtype: torch.dtype, device: torch.device) -> TopK:
        values = torch.full((rows, k), -torch.inf, dtype=dtype, device=device)
        return cls(values, torch.zeros(rows, k, dtype=torch.int64, device=device))

    def update_(self, z: Tensor, rows: slice, first_id: int) -> None:
        """Merge the top k of a tile into the top k so far."""
        k = self.values.shape[1]
        if k == 1:
            ids = z.argmax(-1, keepdim=True)
            values = z.gather(1, ids)
            better = values > self.values[rows]
            self.values[rows] = torch.where(better, values, self.values[rows])
            self.ids[rows] = torch.where(better, ids + first_id, self.ids[rows])
            return
        values, ids = z.topk(min(k, z.shape[1]), dim=-1)
        values, ids = (
            torch.cat([self.values[rows], values], 1),
            torch.cat([self.ids[rows], ids + first_id], 1),
        )
        self.values[rows], order = values.topk(k, dim=-1)
        self.ids[rows] = ids.gather(1, order)

    def over_ranks(self, group: Any) -> TopK:
        """Return the top k over all shards. Collectives: 2, none without a group."""
        values = gather_over_ranks(self.values.contiguous(), group)
        ids = gather_over_ranks(self.ids.contiguous(), group)
        k = self.values.shape[1]
        # Shards are in rank order, so the first of equal values has the lowest id.
        values, ids = (t.transpose(0, 1).flatten(1) for t in (values, ids))
        order = values.argsort(dim=-1, descending=True, stable=True)[:, :k]
        return TopK(values.gather(1, order), ids.gather(1, order))


def update_pair_(stats: RowStatistics, z: Tensor, q: Tensor) -> None:
    """Add a tile of both heads' logits to `ref_max`, `ref_sum`, `cross`, `reverse_cross`.

    Call it before `stats.update_(z)`: it reads the policy's running maximum and sum without changing them.
    """
    assert stats.ref_max is not None and stats.ref_sum is not None
    new_max = torch.maximum(stats.max, z.amax(-1))
    new_ref_max = torch.maximum(stats.ref_max, q.amax(-1))
    shift, ref_shift = finite_shift(new_max), finite_shift(new_ref_max)
    cross, reverse = stats.cross_under(shift, ref_shift)
    x, y = z - shift.unsqueeze(-1), q - ref_shift.unsqueeze(-1)
    e, f = x.exp(), y.exp()
    if cross is not None and stats.cross is not None:
        stats.cross.copy_(cross + torch.where(e == 0, 0.0, e * (x - y)).sum(-1))
    if reverse is not None and stats.reverse_cross is not None:
        stats.reverse_cross.copy_(reverse + torch.where(f == 0, 0.0, f * (y - x)).sum(-1))
    step = torch.where(stats.ref_max == -torch.inf, 0.0, stats.ref_max - ref_shift)
    stats.ref_sum.mul_(step.exp()).add_(f.sum(-1))
    stats.ref_max.copy_(new_ref_max)


def divergences(stats: RowStatistics) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """Return KL(p||q), KL(q||p), and the reference head's m and log s."""
    assert stats.ref_max is not None and stats.ref_sum is not None
    log_sum, ref_log_sum = stats.sum.log(), stats.ref_sum.log()
    forward = None if stats.cross is None else stats.cross / stats.sum - log_sum + ref_log_sum
    backward = None
    if stats.reverse_cross is not None:
        backward = stats.reverse_cross / stats.ref_sum - ref_log_sum + log_sum
    return forward, backward, finite_shift(stats.ref_max), ref_log_sum


def add_kl_gradient_(
    dz: Tensor,
    z: Tensor,
    q: Tensor,
    final: FinalStatistics,
    gradients: RowGradients,
    saved: Sequence[Tensor | None],
) -> None:
    """Add g_kl p ((log p - log q) - KL(p||q)) + g_reverse (p - q) to dz, except in rows with infinite KL."""
    kl, reverse_kl, ref_max, ref_log_sum = saved
    assert ref_max is not None and ref_log_sum is not None
    log_p = (z - final.max.unsqueeze(-1)) - final.log_sum.unsqueeze(-1)
    log_q = (q - ref_max.unsqueeze(-1)) - ref_log_sum.unsqueeze(-1)
    prob = log_p.exp()
    if gradients.kl is not None and kl is not None:
        usable = ((prob > 0) & kl.isfinite().unsqueeze(-1)).logical_and_(log_q > -torch.inf)
        gap = torch.where(usable, (log_p - log_q) - kl.unsqueeze(-1), 0.0)
        dz.add_(prob.mul(gap).mul_(gradients.kl.unsqueeze(-1)))
    if gradients.reverse_kl is not None and reverse_kl is not None:
        g = torch.where(reverse_kl.isfinite(), gradients.reverse_kl, 0.0)
        dz.add_((prob - log_q.exp()).mul_(g.unsqueeze(-1)))
