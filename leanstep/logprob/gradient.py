"""The gradient of row outputs with respect to a tile of logits, formed in place.

With x = z - m, e = exp(x), s = sum e, mu = t / s (so that log p + H = x - mu):

    dz = g (1[v=y] - p) - g_H p (log p + H) + g_lse p
       = e (constant + slope x) + g 1[v=y],     slope = -g_H / s,  constant = (g_lse - g + g_H mu) / s

One exp and four cheap passes; nothing depends on m + log s, which loses digits at large |m|.
"""

# R rows · W columns of a tile · K targets per row

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leanstep.logprob.statistics import EXPONENT_FLOOR, FinalStatistics, exponentials
from leanstep.logprob.targets import add_at_targets_


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


def logit_gradient(
    z: Tensor,
    scratch: Sequence[Tensor],
    factors: RowFactors,
    tokens: Tensor,
    first: int,
    *,
    smoothing: float = 0.0,
    vocabulary: int = 0,
    kernels: ModuleType | None = None,
) -> Tensor:
    """The gradient of the tile of logits `z` [R, W], in the first tile of `scratch`.

    Args:
        scratch: one tile, which may be `z`; without kernels a second where an entropy gradient flows.
        tokens: [R] or [R, K], global ids; `first` is that of the tile's first column.
        smoothing: label smoothing, over `vocabulary` real columns.
    """
    maximum, constant, slope, target = factors
    if kernels is not None:
        # The kernel adds at one target per row; what is more complicated follows it.
        simple = target if target is not None and target.dim() == 1 and not smoothing else None
        dz = kernels.scale_exponentials(z, scratch[0], maximum, constant, slope, tokens, first, simple)
        target = None if simple is not None else target
    else:
        dz = _scaled_exponentials(z, scratch, maximum, constant, slope)
    if target is not None:
        if smoothing:
            total = target if target.dim() == 1 else target.sum(-1)
            dz.add_((total * (smoothing / vocabulary)).unsqueeze(-1))
            target = target * (1.0 - smoothing)
        add_at_targets_(dz, tokens, target, first)
    return dz


def _scaled_exponentials(
    z: Tensor, scratch: Sequence[Tensor], maximum: Tensor, constant: Tensor, slope: Tensor | None
) -> Tensor:
    """e^x (constant + slope x), x = z - m, per row; 0 where e^x is 0."""
    x = torch.sub(z, maximum, out=scratch[0])
    if slope is None:
        return exponentials(x, x).mul_(constant)
    e = exponentials(x, scratch[1])
    x.clamp_(min=EXPONENT_FLOOR[z.dtype])
    return x.mul_(slope).add_(constant).mul_(e)
