"""Softmax of rows that arrive one tile of columns at a time: running statistics, targets, gradient of a tile.

For logits z seen so far:  m = max z,  s = sum e^(z-m),  t = sum e^(z-m) (z-m),  z_y = the target's logit.
Every output follows from them. m and log s stay apart, because their sum loses digits at large |m|. Columns
with p = 0 (z = -inf, or underflow) contribute nothing: exponents are clamped where exp is 0 anyway, so that
no 0 * inf is ever formed. A vocabulary shard computes its own statistics; ranks then exchange `maxima()`
(MAX), rescale with `sums_under()` (SUM) and read the result with `replaced()`:

    maxima = stats.maxima();             all_reduce(maxima, MAX)
    sums = stats.sums_under(maxima);     all_reduce(sums, SUM)
    stats = stats.replaced(maxima, sums)

Backward, with x = z - m and mu = t / s (so that log p + H = x - mu), one exp and a few cheap passes:

    dz = g (1[v=y] - p) - g_H p (log p + H) + g_lse p
       = e^x (constant + slope x) + g 1[v=y],     slope = -g_H / s,  constant = (g_lse - g + g_H mu) / s
"""

# N rows · R rows of a chunk · W columns of a tile · K targets per row

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leanstep.logprob.engine.pass_interface import Passes

# exp of these is exactly 0, also as a subnormal: a finite stand-in for -inf in products.
EXPONENT_FLOOR = {torch.float32: -110.0, torch.float64: -800.0}
LOG2_E = 1.4426950408889634


class FinalStatistics(NamedTuple):
    """What outputs and the backward read.

    A row whose logits are all -inf is not `alive`: there `max`, `log_sum` and `entropy` are 0.
    """

    max: Tensor
    log_sum: Tensor
    entropy: Tensor | None
    alive: Tensor

    def saved(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Three vectors for the backward; -inf in log s stands for a row that is not alive."""
        return self.max, torch.where(self.alive, self.log_sum, -torch.inf), self.entropy

    @classmethod
    def restored(cls, maximum: Tensor, log_sum: Tensor, entropy: Tensor | None) -> FinalStatistics:
        alive = log_sum != -torch.inf
        return cls(maximum, torch.where(alive, log_sum, 0.0), entropy, alive)

    def rows(self, part: slice) -> FinalStatistics:
        entropy = None if self.entropy is None else self.entropy[part]
        return FinalStatistics(self.max[part], self.log_sum[part], entropy, self.alive[part])

    def log_prob(self, target: Tensor) -> Tensor:
        """log p of a logit; -inf where no logit is finite. `target` is [N] or [N, K]."""
        columns = (slice(None),) + (None,) * (target.dim() - 1)
        logp = (target - self.max[columns]) - self.log_sum[columns]
        return torch.where(self.alive[columns], logp, -torch.inf)

    def log_sum_exp(self) -> Tensor:
        return torch.where(self.alive, self.max + self.log_sum, -torch.inf)


@dataclass
class RowStatistics:
    """Statistics of N rows over the columns seen so far. Tensors are in the accumulation dtype.

    Args:
        max: [N], m; -inf before the first column.
        sum: [N], s.
        moment: [N], t; None when no entropy is wanted.
        target: [N] or [N, K], z_y; 0 where this shard does not hold the target.
        total: [N], sum of z over all real columns; label smoothing only.
        allowed_max, allowed_sum: [N], m and s of the softmax restricted to allowed ids and the target.
        ref_max, ref_sum: [N], m and s of a reference head (exact KL).
        cross: [N], sum e^(z-m) ((z-m) - (q-m_q)) for KL(p||q), with q the reference head's logits.
        reverse_cross: [N], sum e^(q-m_q) ((q-m_q) - (z-m)) for KL(q||p).
    """

    max: Tensor
    sum: Tensor
    moment: Tensor | None
    target: Tensor
    total: Tensor | None = None
    allowed_max: Tensor | None = None
    allowed_sum: Tensor | None = None
    ref_max: Tensor | None = None
    ref_sum: Tensor | None = None
    cross: Tensor | None = None
    reverse_cross: Tensor | None = None

    @classmethod
    def empty(
        cls,
        rows: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        moment: bool = False,
        num_targets: int | None = None,
        total: bool = False,
        allowed: bool = False,
        reference: bool = False,
        reverse: bool = False,
    ) -> RowStatistics:
        """The state before the first tile, zeros in one fill. `num_targets` None: target [N], else [N, K]."""
        flat, either, like = num_targets is None, reference or reverse, {"dtype": dtype, "device": device}
        count = sum((1, flat, moment, total, allowed, either, reference, reverse))
        spare = iter(torch.zeros((count, rows), **like).unbind())

        def zeros(wanted: bool) -> Tensor | None:
            return next(spare) if wanted else None

        def lowest(wanted: bool) -> Tensor | None:
            return torch.full((rows,), -torch.inf, **like) if wanted else None

        return cls(
            max=torch.full((rows,), -torch.inf, **like),
            sum=next(spare),
            moment=zeros(moment),
            target=next(spare) if num_targets is None else torch.zeros((rows, num_targets), **like),
            total=zeros(total),
            allowed_max=lowest(allowed),
            allowed_sum=zeros(allowed),
            ref_max=lowest(either),
            ref_sum=zeros(either),
            cross=zeros(reference),
            reverse_cross=zeros(reverse),
        )

    def rows(self, start: int, stop: int) -> RowStatistics:
        """A view of some rows; updating it updates this object's tensors."""
        return RowStatistics(*(None if v is None else v[start:stop] for v in self._values()))  # type: ignore[arg-type]

    def update_(
        self,
        z: Tensor,
        scratch: Sequence[Tensor],
        targets: Tensor | None = None,
        first: int = 0,
        *,
        kernels: Passes | None = None,
        **finishing: Any,
    ) -> None:
        """Add the columns of a tile [N, W], and read the logits of `targets` that it holds.

        Args:
            scratch: without kernels one tile, two when a moment is kept; the first may be `z`.
            targets: [N] or [N, K], global ids; `first` is that of the tile's first column.
            finishing: for kernels that can: `finish`, what they must still do to `z`; `keep` it there.
        """
        if targets is not None and (kernels is None or targets.dim() == 2):
            read_targets_(self.target, z, targets, first)
            targets = None
        if kernels is not None:
            vectors = (self.max, self.sum, self.moment)
            kernels.update_statistics(z, *vectors, targets, first, self.target, **finishing)
            return
        shift, _, shrink = self.raise_max_(z.amax(-1))
        x = torch.sub(z, shift.unsqueeze(-1), out=scratch[0])
        e = exponentials(x, scratch[-1])
        self.sum.mul_(shrink).add_(e.sum(-1))
        if self.moment is not None:
            # In place: vecdot would make a third tile for the products.
            x.clamp_(min=EXPONENT_FLOOR[z.dtype]).mul_(e)
            self.moment.add_(x.sum(-1))

    def allowed_part(self) -> RowStatistics:
        """The restricted softmax as statistics of its own; updating it updates those here."""
        assert self.allowed_max is not None and self.allowed_sum is not None
        return RowStatistics(self.allowed_max, self.allowed_sum, None, self.target)

    def raise_max_(self, tile_max: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Move m up to cover `tile_max`, carrying t along.

        Returns the finite shift, the step m - m' (clamped) and alpha = exp(step), not yet applied to s.
        """
        new_max = torch.maximum(self.max, tile_max)
        # Lowest finite number in place of -inf: -inf minus it is -inf again, and not NaN.
        shift = new_max.clamp(min=torch.finfo(new_max.dtype).min)
        step = (self.max - shift).clamp_(min=EXPONENT_FLOOR[new_max.dtype])
        shrink = step.exp()
        if self.moment is not None:
            self.moment.addcmul_(step, self.sum).mul_(shrink)
        self.max.copy_(new_max)
        return shift, step, shrink

    def maxima(self) -> Tensor:
        """[k, N], k = 1..3: what a MAX across shards combines."""
        return torch.stack([m for m in (self.max, self.allowed_max, self.ref_max) if m is not None])

    def sums_under(self, maxima: Tensor) -> Tensor:
        """[j, N]: every additive statistic, rescaled to `maxima`: what a SUM across shards combines."""
        floor = EXPONENT_FLOOR[self.max.dtype]
        levels = iter(finite_shift(maxima))
        step = (self.max - next(levels)).clamp_(min=floor)
        shrink = step.exp()
        packed = [self.sum * shrink]
        if self.moment is not None:
            packed.append((self.moment + step * self.sum) * shrink)
        packed.extend(self.target.unsqueeze(-1).flatten(1).unbind(1))
        if self.total is not None:
            packed.append(self.total)
        if self.allowed_max is not None and self.allowed_sum is not None:
            packed.append(self.allowed_sum * (self.allowed_max - next(levels)).clamp_(min=floor).exp())
        if self.ref_max is not None and self.ref_sum is not None:
            ref_step = (self.ref_max - next(levels)).clamp_(min=floor)
            ref_shrink = ref_step.exp()
            packed.append(self.ref_sum * ref_shrink)
            moved = self.cross_under(finite_shift(maxima[0]), finite_shift(maxima[-1]))
            packed.extend(value for value in moved if value is not None)
        return torch.stack(packed)

    def cross_under(self, shift: Tensor, ref_shift: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """`cross` and `reverse_cross` under new maxima.

        The head that is not exponentiated keeps its exact step: no factor of exp(step) hides a clamped one.
        """
        assert self.ref_max is not None and self.ref_sum is not None
        # Before the first column both sums are 0 and the step has no meaning.
        step = torch.where(self.max == -torch.inf, 0.0, self.max - shift)
        ref_step = torch.where(self.ref_max == -torch.inf, 0.0, self.ref_max - ref_shift)
        cross, reverse = self.cross, self.reverse_cross
        if cross is not None:
            shrink = step.exp()
            # An infinite term whose p has since vanished counts for nothing: select, do not multiply.
            cross = torch.where(shrink == 0, 0.0, (cross + self.sum * (step - ref_step)) * shrink)
        if reverse is not None:
            shrink = ref_step.exp()
            reverse = torch.where(shrink == 0, 0.0, (reverse + self.ref_sum * (ref_step - step)) * shrink)
        return cross, reverse

    def replaced(self, maxima: Tensor, sums: Tensor) -> RowStatistics:
        """The statistics that `maxima` and `sums` (in the order of `sums_under`) stand for."""
        levels, packed = iter(maxima), iter(sums)
        new: dict[str, Tensor] = {"max": next(levels), "sum": next(packed)}
        if self.moment is not None:
            new["moment"] = next(packed)
        columns = 1 if self.target.dim() == 1 else self.target.shape[1]
        targets = [next(packed) for _ in range(columns)]
        if self.target.dim() == 1:
            new["target"] = targets[0]
        else:
            new["target"] = torch.stack(targets, 1) if targets else self.target
        for level, names in (
            (None, ("total",)),
            ("allowed_max", ("allowed_sum",)),
            ("ref_max", ("ref_sum", "cross", "reverse_cross")),
        ):
            if level is not None and getattr(self, level) is not None:
                new[level] = next(levels)
            for name in names:
                if getattr(self, name) is not None:
                    new[name] = next(packed)
        return replace(self, **new)

    def final(self) -> FinalStatistics:
        """m, log s and H, made finite for rows in which every logit is -inf (`alive` False there)."""
        # NaN sums stay alive, so that a NaN logit shows.
        alive = self.sum != 0
        log_sum = torch.where(alive, self.sum, 1.0).log()
        entropy = None
        if self.moment is not None:
            entropy = log_sum - self.moment / torch.where(alive, self.sum, 1.0)
        return FinalStatistics(finite_shift(self.max), log_sum, entropy, alive)

    def allowed_final(self) -> FinalStatistics | None:
        return None if self.allowed_max is None else self.allowed_part().final()

    def _values(self) -> list[Tensor | None]:
        return [getattr(self, f.name) for f in fields(self)]


def merge(first: RowStatistics, second: RowStatistics) -> RowStatistics:
    """The statistics of the union of two disjoint sets of columns; ranks apply the same rule."""
    maxima = torch.maximum(first.maxima(), second.maxima())
    return first.replaced(maxima, first.sums_under(maxima) + second.sums_under(maxima))


def exponentials(x: Tensor, out: Tensor) -> Tensor:
    """e^x in `out`, which may be `x`, for x <= 0.

    In fp32 on a CPU as 2^(x log2 e): torch.exp goes through MKL, which takes three times as long on CPUs that
    are not Intel's. Rounding the product costs |x| 6e-8, no more than subtracting log s from x would.
    """
    if x.dtype == torch.float32 and x.device.type == "cpu":
        return torch.mul(x, LOG2_E, out=out).exp2_()
    return torch.exp(x, out=out)


def finite_shift(maxima: Tensor) -> Tensor:
    """`maxima`, with 0 in place of -inf: subtracting it from -inf gives -inf and not NaN."""
    return torch.where(maxima == -torch.inf, 0.0, maxima)


def tile_ids(targets: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Column within the tile that begins at id `first`, clamped into it, and whether it holds the token."""
    local = targets - first
    inside = local.clamp(0, width - 1)
    return inside, inside == local


def read_targets_(target: Tensor, z: Tensor, targets: Tensor, first: int) -> None:
    """target <- z [R, W] at the targets that this tile holds; the others stay. Shaped like `targets`."""
    local, held = tile_ids(targets, first, z.shape[1])
    picked = z.gather(1, local.unsqueeze(-1) if local.dim() == 1 else local)
    torch.where(held, picked.view_as(local), target, out=target)


def add_at_targets_(dz: Tensor, targets: Tensor, values: Tensor, first: int) -> None:
    """dz[i, y_i] += values[i] where the tile holds column y_i."""
    local, held = tile_ids(targets, first, dz.shape[1])
    values = values * held
    if local.dim() == 1:
        local, values = local.unsqueeze(-1), values.unsqueeze(-1)
    dz.scatter_add_(1, local, values)


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
    targets: Tensor,
    first: int,
    *,
    smoothing: float = 0.0,
    vocabulary: int = 0,
    kernels: Passes | None = None,
    **finishing: Any,
) -> Tensor:
    """The gradient of the tile of logits `z` [R, W], in the first tile of `scratch`.

    Args:
        scratch: one tile, which may be `z`; without kernels a second where an entropy gradient flows.
        targets: [R] or [R, K], global ids; `first` is that of the tile's first column.
        smoothing: label smoothing, over `vocabulary` real columns.
        finishing: for kernels that can: `finish`, and `column_sums` [W], to which those of dz are added.
    """
    maximum, constant, slope, target = factors
    if kernels is not None:
        # The kernel adds at one target per row; what is more complicated follows it.
        simple = target if target is not None and target.dim() == 1 and not smoothing else None
        dz = kernels.scale_exponentials(
            z, scratch[0], maximum, constant, slope, targets, first, simple, **finishing
        )
        target = None if simple is not None else target
    else:
        dz = _scaled_exponentials(z, scratch, maximum, constant, slope)
    if target is not None:
        if smoothing:
            total = target if target.dim() == 1 else target.sum(-1)
            dz.add_((total * (smoothing / vocabulary)).unsqueeze(-1))
            target = target * (1.0 - smoothing)
        add_at_targets_(dz, targets, target, first)
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
