"""Online softmax over tiles of columns: running statistics, targets, and the gradient of a tile.

For the logits z so far:  m = max z,  s = sum e^(z-m),  t = sum e^(z-m) (z-m),  z_y = the target's logit.
Every output is computed from them. m and log s are stored separately, because their sum loses digits at large
|m|. Columns with p = 0 (z = -inf, or underflow) contribute nothing: exponents are clamped where exp is 0
anyway, so that 0 * inf never occurs. Each vocabulary shard computes its own statistics; ranks then exchange
`maxima()` (MAX), rescale with `sums_under()` (SUM) and read the result with `replaced()`:

    maxima = stats.maxima();             all_reduce(maxima, MAX)
    sums = stats.sums_under(maxima);     all_reduce(sums, SUM)
    stats = stats.replaced(maxima, sums)

The backward pass, with x = z - m and mu = t / s (so that log p + H = x - mu), takes one exp and a few cheap
passes:

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

# exp of these is exactly 0, not even a subnormal: finite replacements for -inf in products.
EXPONENT_FLOOR = {torch.float32: -110.0, torch.float64: -800.0}
LOG2_E = 1.4426950408889634


class FinalStatistics(NamedTuple):
    """The statistics that outputs and the backward pass read.

    A row whose logits are all -inf is not `alive`: its `max`, `log_sum` and `entropy` are 0.
    """

    max: Tensor
    log_sum: Tensor
    entropy: Tensor | None
    alive: Tensor

    def saved(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return three vectors for the backward pass; log s is -inf for a row that is not alive."""
        return self.max, torch.where(self.alive, self.log_sum, -torch.inf), self.entropy

    @classmethod
    def restored(cls, maximum: Tensor, log_sum: Tensor, entropy: Tensor | None) -> FinalStatistics:
        alive = log_sum != -torch.inf
        return cls(maximum, torch.where(alive, log_sum, 0.0), entropy, alive)

    def rows(self, part: slice) -> FinalStatistics:
        entropy = None if self.entropy is None else self.entropy[part]
        return FinalStatistics(self.max[part], self.log_sum[part], entropy, self.alive[part])

    def log_prob(self, target: Tensor) -> Tensor:
        """Return log p of a logit; -inf if no logit is finite. `target` is [N] or [N, K]."""
        columns = (slice(None),) + (None,) * (target.dim() - 1)
        logp = (target - self.max[columns]) - self.log_sum[columns]
        return torch.where(self.alive[columns], logp, -torch.inf)

    def log_sum_exp(self) -> Tensor:
        return torch.where(self.alive, self.max + self.log_sum, -torch.inf)


@dataclass
class RowStatistics:
    """Statistics of N rows over the columns so far. Tensors are in the accumulation dtype.

    Args:
        max: [N], m; -inf before the first column.
        sum: [N], s.
        moment: [N], t; None without entropy.
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
        """Return the state before the first tile. `num_targets`: None for targets [N], K for [N, K]."""
        flat, either, like = num_targets is None, reference or reverse, {"dtype": dtype, "device": device}
        count = sum((1, flat, moment, total, allowed, either, reference, reverse))
        # All zero vectors in one fill.
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
        """Return a view of some rows; updating it updates this object's tensors."""
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
        """Add the columns of a tile [N, W], and read the logits of the `targets` within it.

        Args:
            scratch: without kernels one tile, two with a moment; the first may be `z`.
            targets: [N] or [N, K], global ids; `first` is the id of the tile's first column.
            finishing: for kernels that support it: `finish`, the steps still to apply to `z`; `keep`: write
                the result back to `z`.
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
            # In place: vecdot would allocate a third tile for the products.
            x.clamp_(min=EXPONENT_FLOOR[z.dtype]).mul_(e)
            self.moment.add_(x.sum(-1))

    def allowed_part(self) -> RowStatistics:
        """Return the restricted softmax as separate statistics; updating them updates this object."""
        assert self.allowed_max is not None and self.allowed_sum is not None
        return RowStatistics(self.allowed_max, self.allowed_sum, None, self.target)

    def raise_max_(self, tile_max: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Raise m to cover `tile_max` and rescale t.

        Returns the finite shift, the step m - m' (clamped) and alpha = exp(step), not yet applied to s.
        """
        new_max = torch.maximum(self.max, tile_max)
        # Use the lowest finite number instead of -inf: -inf minus it is -inf, not NaN.
        shift = new_max.clamp(min=torch.finfo(new_max.dtype).min)
        step = (self.max - shift).clamp_(min=EXPONENT_FLOOR[new_max.dtype])
        shrink = step.exp()
        if self.moment is not None:
            self.moment.addcmul_(step, self.sum).mul_(shrink)
        self.max.copy_(new_max)
        return shift, step, shrink

    def maxima(self) -> Tensor:
        """Return the statistics that shards combine with MAX: [k, N], k = 1..3."""
        return torch.stack([m for m in (self.max, self.allowed_max, self.ref_max) if m is not None])

    def sums_under(self, maxima: Tensor) -> Tensor:
        """Return the statistics that shards combine with SUM, rescaled to `maxima`: [j, N]."""
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
        """Return `cross` and `reverse_cross` under new maxima.

        The step of the head that is not exponentiated is not clamped, because no factor exp(step) would hide
        the clamping.
        """
        assert self.ref_max is not None and self.ref_sum is not None
        # Before the first column, both sums are 0 and the step is undefined.
        step = torch.where(self.max == -torch.inf, 0.0, self.max - shift)
        ref_step = torch.where(self.ref_max == -torch.inf, 0.0, self.ref_max - ref_shift)
        cross, reverse = self.cross, self.reverse_cross
        if cross is not None:
            shrink = step.exp()
            # An infinite term whose p has become 0 must not contribute: select, do not multiply.
            cross = torch.where(shrink == 0, 0.0, (cross + self.sum * (step - ref_step)) * shrink)
        if reverse is not None:
            shrink = ref_step.exp()
            reverse = torch.where(shrink == 0, 0.0, (reverse + self.ref_sum * (ref_step - step)) * shrink)
        return cross, reverse

    def replaced(self, maxima: Tensor, sums: Tensor) -> RowStatistics:
        """Return the statistics with the values of `maxima` and `sums` (in the order of `sums_under`)."""
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
        """Return m, log s and H, with finite values for rows whose logits are all -inf (`alive` is False)."""
        # Rows with a NaN sum stay alive, so that NaN logits propagate.
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
    """Return the statistics of the union of two disjoint sets of columns; ranks apply the same rule."""
    maxima = torch.maximum(first.maxima(), second.maxima())
    return first.replaced(maxima, first.sums_under(maxima) + second.sums_under(maxima))


def exponentials(x: Tensor, out: Tensor) -> Tensor:
    """Compute e^x into `out`, which may be `x`, for x <= 0.

    In fp32 on a CPU it is 2^(x log2 e): torch.exp uses MKL, which takes three times as long on non-Intel
    CPUs. The error from rounding the product is |x| 6e-8, no larger than from subtracting log s from x.
    """
    if x.dtype == torch.float32 and x.device.type == "cpu":
        return torch.mul(x, LOG2_E, out=out).exp2_()
    return torch.exp(x, out=out)


def finite_shift(maxima: Tensor) -> Tensor:
    """Return `maxima` with -inf replaced by 0: subtracting it from -inf gives -inf, not NaN."""
    return torch.where(maxima == -torch.inf, 0.0, maxima)


def tile_ids(targets: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the column within the tile that begins at id `first`, clamped, and whether the tile has it."""
    local = targets - first
    inside = local.clamp(0, width - 1)
    return inside, inside == local


def read_targets_(target: Tensor, z: Tensor, targets: Tensor, first: int) -> None:
    """Write z [R, W] at the targets within this tile to `target`, shaped like `targets`; others stay."""
    local, held = tile_ids(targets, first, z.shape[1])
    logits = z.gather(1, local.unsqueeze(-1) if local.dim() == 1 else local)
    torch.where(held, logits.view_as(local), target, out=target)


def add_at_targets_(dz: Tensor, targets: Tensor, values: Tensor, first: int) -> None:
    """Add values[i] to dz[i, y_i] if the tile contains column y_i."""
    local, held = tile_ids(targets, first, dz.shape[1])
    values = values * held
    if local.dim() == 1:
        local, values = local.unsqueeze(-1), values.unsqueeze(-1)
    dz.scatter_add_(1, local, values)


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Reject `create_graph=True`: a gradient detached from its graph would silently lose a term."""

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
    """Incoming gradients of the row outputs in the accumulation dtype; None where there is none.

    Args:
        logp: [R] or [R, K].
        entropy, lse: [R]. `lse` includes the z-loss: d lse^2 = 2 lse d lse.
        kl, reverse_kl: [R].
    """

    logp: Tensor | None = None
    entropy: Tensor | None = None
    lse: Tensor | None = None
    kl: Tensor | None = None
    reverse_kl: Tensor | None = None

    def rows(self, part: slice, slope: float | Tensor) -> RowGradients:
        """Return some rows, multiplied by the part of the head's derivative that is common to a row."""

        def pick(value: Tensor | None) -> Tensor | None:
            if value is None:
                return None
            value = value[part]
            return value * (slope.unsqueeze(-1) if isinstance(slope, Tensor) and value.dim() == 2 else slope)

        return RowGradients(*(pick(v) for v in (self.logp, self.entropy, self.lse, self.kl, self.reverse_kl)))


class RowFactors(NamedTuple):
    """Factors of a row's logit gradient, computed once for all tiles of the row.

    Args:
        max, constant, slope: [R, 1]; slope is None without an entropy gradient.
        target: [R] or [R, K], added at the targets; None without a log-prob gradient.
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
            # A row whose logits are all -inf has no gradient, not even at its target.
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
    """Compute the gradient of the tile of logits `z` [R, W] into the first tile of `scratch`.

    Args:
        scratch: one tile, which may be `z`; an entropy gradient without kernels needs a second one.
        targets: [R] or [R, K], global ids; `first` is the id of the tile's first column.
        smoothing: label smoothing, over `vocabulary` real columns.
        finishing: for kernels that support it: `finish`, and `column_sums` [W], to which the column sums of
            dz are added.
    """
    maximum, constant, slope, target = factors
    if kernels is not None:
        # The kernel adds at one target per row; the code below handles the other cases.
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
    """Compute e^x (constant + slope x), x = z - m, per row; 0 where e^x is 0."""
    x = torch.sub(z, maximum, out=scratch[0])
    if slope is None:
        return exponentials(x, x).mul_(constant)
    e = exponentials(x, scratch[1])
    x.clamp_(min=EXPONENT_FLOOR[z.dtype])
    return x.mul_(slope).add_(constant).mul_(e)
