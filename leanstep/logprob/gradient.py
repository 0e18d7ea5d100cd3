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
from typing import Any

import torch
from torch import Tensor

from leanstep.logprob.dispatch import kernels_for
from leanstep.logprob.parallel import VocabShard
from leanstep.logprob.statistics import EXPONENT_FLOOR, FinalStatistics


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


def logit_gradient_(
    z: Tensor,
    work: Tensor | None,
    final: FinalStatistics,
    gradients: RowGradients,
    tokens: Tensor,
    shard: VocabShard,
    columns: slice,
    *,
    smoothing: float = 0.0,
    vocabulary: int = 0,
    one_hot: bool = True,
    source: Tensor | None = None,
) -> Tensor:
    """Overwrite the tile `z` [R, W] with its gradient.

    Args:
        work: a second tile; needed only when an entropy gradient flows.
        tokens: [R] or [R, K], global ids; `columns` are the tile's within the shard.
        smoothing: label smoothing, over `vocabulary` real columns.
        source: where the logits are read from when `z` holds nothing yet.
        one_hot: False leaves out `g 1[v=y]` (restricted softmax: added by the caller).
    """
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
        slope = -gradients.entropy * inverse_sum
    dz = _scaled_exponentials(z, work, final.max, constant * inverse_sum, slope, source)
    if target is not None and one_hot:
        if smoothing:
            total = target if target.dim() == 1 else target.sum(-1)
            dz.add_((total * (smoothing / vocabulary)).unsqueeze(-1))
            target = target * (1.0 - smoothing)
        add_at_targets_(dz, tokens, target, shard, columns)
    return dz


def _scaled_exponentials(
    z: Tensor,
    work: Tensor | None,
    maximum: Tensor,
    constant: Tensor,
    slope: Tensor | None,
    source: Tensor | None,
) -> Tensor:
    """z <- e^x (constant + slope x), x = z - m, per row; 0 where e^x is 0."""
    kernels = kernels_for(z)
    if kernels is not None:
        if source is not None and source is not z:
            z.copy_(source)
        return kernels.scale_exponentials(z, maximum, constant, slope)
    x = torch.sub(z if source is None else source, maximum.unsqueeze(-1), out=z)
    if slope is None:
        return x.exp_().mul_(constant.unsqueeze(-1))
    assert work is not None
    e = torch.exp(x, out=work)
    x.clamp_(min=EXPONENT_FLOOR[z.dtype])
    return x.mul_(slope.unsqueeze(-1)).add_(constant.unsqueeze(-1)).mul_(e)


def add_at_targets_(dz: Tensor, tokens: Tensor, values: Tensor, shard: VocabShard, columns: slice) -> None:
    """dz[i, y_i] += values[i] where the tile holds column y_i; static shapes, no sync."""
    local, held = tile_ids(tokens, shard, columns)
    values = torch.where(held, values, 0.0)
    if local.dim() == 1:
        local, values = local.unsqueeze(-1), values.unsqueeze(-1)
    dz.scatter_add_(1, local, values)


def target_logits(z: Tensor, tokens: Tensor, shard: VocabShard, columns: slice) -> Tensor:
    """z at the targets that this tile holds, 0 at the others; shaped like `tokens`."""
    local, held = tile_ids(tokens, shard, columns)
    picked = z.gather(1, local.unsqueeze(-1) if local.dim() == 1 else local)
    return torch.where(held, picked.view_as(local), 0.0)


def tile_ids(tokens: Tensor, shard: VocabShard, columns: slice) -> tuple[Tensor, Tensor]:
    """Column within the tile, clamped into range, and whether the tile really holds the token."""
    local = tokens - (shard.start + columns.start)
    width = columns.stop - columns.start
    held = (local >= 0).logical_and_(local < width)
    return local.clamp_(0, width - 1), held
