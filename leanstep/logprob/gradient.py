"""The gradient of row outputs with respect to a tile of logits, formed in place.

With x = z - m, e = exp(x), s = sum e, mu = t / s (so that log p + H = x - mu):

    dz = g (1[v=y] - p) - g_H p (log p + H) + g_lse p
       = e (constant + slope x) + g 1[v=y],     slope = -g_H / s,  constant = (g_lse - g + g_H mu) / s

One exp and four cheap passes; nothing depends on m + log s, which loses digits at large |m|.
"""

# R rows · W columns of a tile · K targets per row

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leanstep.logprob.dispatch import kernels_for
from leanstep.logprob.parallel import VocabShard
from leanstep.logprob.statistics import EXPONENT_FLOOR, FinalStatistics, exponentials


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse `create_graph=True`: a gradient cut off from its graph would silently lose a term."""

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "no second derivatives here (create_graph=True): use leanstep.logprob.reference"
            )
        return backward(ctx, *gradients)

    return checked


@dataclass
class RowGradients:
    """Incoming gradients of the row outputs; None where nothing flows. All in the accumulation dtype.

    Args:
        logp: [R] or [R, K].
        entropy, lse: [R]. The z-loss arrives through `lse`: d lse^2 = 2 lse d lse.
        kl, reverse_kl: [R].
    """

    logp: Tensor | None = None
    entropy: Tensor | None = None
    lse: Tensor | None = None
    kl: Tensor | None = None
    reverse_kl: Tensor | None = None

    def rows(self, part: slice, slope: float | Tensor) -> RowGradients:
        """Some rows, times the part of the head's derivative that is common to a row."""

        def pick(value: Tensor | None) -> Tensor | None:
            if value is None:
                return None
            value = value[part]
            return value * (slope.unsqueeze(-1) if isinstance(slope, Tensor) and value.dim() == 2 else slope)

        return RowGradients(*(pick(v) for v in (self.logp, self.entropy, self.lse, self.kl, self.reverse_kl)))


class RowFactors(NamedTuple):
    """What the gradient of a row needs besides its logits, worked out once for all tiles of the row.

    Args:
        max, constant, slope: [R, 1]; slope None where no entropy gradient flows.
        target: [R] or [R, K], added at the targets; None where no log-prob gradient flows.
    """

    max: Tensor
    constant: Tensor
    slope: Tensor | None
    target: Tensor | None

    @classmethod
    def of(cls, final: FinalStatistics, gradients: RowGradients) -> RowFactors:
        inverse_sum = torch.exp(-final.log_sum)
        target = gradients.logp
        constant = torch.zeros_like(inverse_sum) if gradients.lse is None else gradients.lse.clone()
        if target is not None:
            # A row with every logit at -inf has no gradient at all, not even at its target.
            target = torch.where(final.alive if target.dim() == 1 else final.alive.unsqueeze(-1), target, 0.0)
            constant -= target if target.dim() == 1 else target.sum(-1)
        slope = None
        if gradients.entropy is not None:
            assert final.entropy is not None
            constant += gradients.entropy * (final.log_sum - final.entropy)
            slope = (-gradients.entropy * inverse_sum).unsqueeze(-1)
        return cls(final.max.unsqueeze(-1), (constant * inverse_sum).unsqueeze(-1), slope, target)

    def rows(self, part: slice) -> RowFactors:
        return RowFactors(*(None if v is None else v[part] for v in self))  # type: ignore[arg-type]


def logit_gradient_(
    z: Tensor,
    work: Tensor | None,
    factors: RowFactors,
    tokens: Tensor,
    shard: VocabShard,
    columns: slice,
    *,
    smoothing: float = 0.0,
    vocabulary: int = 0,
    source: Tensor | None = None,
) -> Tensor:
    """Overwrite the tile `z` [R, W] with its gradient.

    Args:
        work: a second tile; needed only when an entropy gradient flows.
        tokens: [R] or [R, K], global ids; `columns` are the tile's within the shard.
        smoothing: label smoothing, over `vocabulary` real columns.
        source: where the logits are read from when `z` holds nothing yet.
    """
    dz = _scaled_exponentials(z, work, factors, source)
    target = factors.target
    if target is not None:
        if smoothing:
            total = target if target.dim() == 1 else target.sum(-1)
            dz.add_((total * (smoothing / vocabulary)).unsqueeze(-1))
            target = target * (1.0 - smoothing)
        add_at_targets_(dz, tokens, target, shard, columns)
    return dz


def _scaled_exponentials(
    z: Tensor, work: Tensor | None, factors: RowFactors, source: Tensor | None
) -> Tensor:
    """z <- e^x (constant + slope x), x = z - m, per row; 0 where e^x is 0."""
    maximum, constant, slope, _ = factors
    kernels = kernels_for(z)
    if kernels is not None:
        if source is not None and source is not z:
            z.copy_(source)
        vectors = (None if v is None else v.squeeze(-1) for v in (maximum, constant, slope))
        return kernels.scale_exponentials(z, *vectors)
    x = torch.sub(z if source is None else source, maximum, out=z)
    if slope is None:
        return exponentials(x, x).mul_(constant)
    assert work is not None
    e = exponentials(x, work)
    x.clamp_(min=EXPONENT_FLOOR[z.dtype])
    return x.mul_(slope).add_(constant).mul_(e)


def add_at_targets_(dz: Tensor, tokens: Tensor, values: Tensor, shard: VocabShard, columns: slice) -> None:
    """dz[i, y_i] += values[i] where the tile holds column y_i; static shapes, no sync."""
    local, held = tile_ids(tokens, shard, columns)
    values = values * held
    if local.dim() == 1:
        local, values = local.unsqueeze(-1), values.unsqueeze(-1)
    dz.scatter_add_(1, local, values)


def read_targets_(target: Tensor, z: Tensor, tokens: Tensor, shard: VocabShard, columns: slice) -> None:
    """target <- z at the targets that this tile holds; the others stay. Shaped like `tokens`."""
    local, held = tile_ids(tokens, shard, columns)
    picked = z.gather(1, local.unsqueeze(-1) if local.dim() == 1 else local)
    torch.where(held, picked.view_as(local), target, out=target)


def tile_ids(tokens: Tensor, shard: VocabShard, columns: slice) -> tuple[Tensor, Tensor]:
    """Column within the tile, clamped into range, and whether the tile really holds the token."""
    local = tokens - (shard.start + columns.start)
    inside = local.clamp(0, columns.stop - columns.start - 1)
    return inside, inside == local
