"""From the gradients of a row's outputs to the gradient of a tile of its logits, every output included.

What depends on the row alone is worked out once per sweep; a tile then costs its passes and a handful of
operations on vectors, which matters as much as the passes: a vector operation runs on one thread.
"""

# R rows of a chunk · W columns of a tile · T' selected rows

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from leanstep.logprob.extras import add_kl_gradient_
from leanstep.logprob.gradient import RowFactors, RowGradients, logit_gradient
from leanstep.logprob.statistics import FinalStatistics

if TYPE_CHECKING:
    from leanstep.logprob.keep import KeepIds
    from leanstep.logprob.sweep import Problem


class TileGradient:
    """Turns tiles of logits into gradients of u = h W^T + b.

    Args:
        kept_final: statistics of the restricted softmax, when `p.keep` is set.
        gradients: [T'] each, of the outputs.
        divergences: kl, reverse_kl, reference max and log-sum per row, when a KL gradient flows.
    """

    def __init__(
        self,
        p: Problem,
        final: FinalStatistics,
        kept_final: FinalStatistics | None,
        gradients: RowGradients,
        divergences: Sequence[Tensor | None] = (),
    ) -> None:
        self.p, self.final, self.divergences = p, final, divergences
        everything = slice(0, p.num_rows)
        some = gradients.rows(everything, p.head.row_slope(everything))
        self.kl = some if some.kl is not None or some.reverse_kl is not None else None
        # With kept ids the log-prob has a softmax of its own; the entropy's, if wanted, is a second one.
        self.restricts, self.second = False, None
        if p.keep is not None and some.logp is not None and kept_final is not None:
            self.restricts = True
            if some.entropy is None:
                final = kept_final
            else:
                self.second = RowFactors.of(kept_final, RowGradients(some.logp))
                some = RowGradients(None, some.entropy, some.lse)
        self.main = RowFactors.of(final, some)
        self.scratch_tiles = 2 if self.main.slope is not None and p.kernels is None else 1
        self._rows: slice | None = None
        self._part = self.main

    def tile(self, z: Tensor, scratch: Sequence[Tensor], rows: slice, columns: slice) -> Tensor:
        """The gradient for the tile of logits `z` [R, W], in the first tile of `scratch`."""
        p, head = self.p, self.p.head
        if rows is not self._rows:
            self._rows, self._part = rows, self.main.rows(rows)
        cap = None if head.softcap is None else head.cap_slope(z, rows)
        where = (p.tokens[rows], head.shard.start + columns.start)
        addition = None
        if self.kl is not None:
            addition = torch.zeros_like(z)
            q = reference_logits(p, rows, columns)
            saved = [None if d is None else d[rows] for d in self.divergences]
            add_kl_gradient_(addition, z, q, self.final.rows(rows), self.kl.rows(rows, 1.0), saved)
        if self.restricts and p.keep is not None:
            kept = restricted(p, p.keep, z, rows, columns)
            if self.second is None:
                z = kept
            else:
                addition = logit_gradient(kept, [kept], self.second.rows(rows), *where, kernels=p.kernels)
        smoothing: Any = {"smoothing": p.smoothing, "vocabulary": head.vocabulary or 0}
        dz = logit_gradient(z, scratch, self._part, *where, **smoothing, kernels=p.kernels)
        if addition is not None:
            dz.add_(addition)
        return dz if cap is None else dz.mul_(cap)


def restricted(p: Problem, keep: KeepIds, z: Tensor, rows: slice, columns: slice) -> Tensor:
    """A copy of the tile with -inf outside the kept ids and the target."""
    first, width = p.head.shard.start + columns.start, columns.stop - columns.start
    mask = keep.mask(rows, p.tokens[rows], first, width)
    return z.masked_fill(mask.logical_not_(), -torch.inf)


def reference_logits(p: Problem, rows: slice, columns: slice) -> Tensor:
    """The tile of the reference head's logits."""
    assert p.reference is not None
    head, source = p.reference
    out = torch.empty(
        rows.stop - rows.start, columns.stop - columns.start, dtype=head.dtype, device=p.tokens.device
    )
    h = source.chunk(rows, head.operand_dtype)
    return head.logits(h, None, head.weight_tile(columns), rows, columns, out)
