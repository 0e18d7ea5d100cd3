"""Divergences between a teacher q and a student p: one family with value and gradient.

    D = a KL(q || m) + b KL(p || m),    m = mix q + (1 - mix) p

    forward KL    a = 1     b = 0       mix = 0            KL(q || p)
    reverse KL    a = 0     b = 1       mix = 1            KL(p || q)
    JSD(beta)     a = beta  b = 1-beta  mix = beta         generalized JSD of GKD (Agarwal et al. 2023, eq. 1)
    skewed KL     a = 1     b = 0       mix = alpha        KL(q || alpha q + (1-alpha) p), DistiLLM 2024
    skewed reverse KL       b = 1       mix = 1 - alpha    KL(p || alpha p + (1-alpha) q)

With S_v = p_v dD/dp_v + c p_v, for any constant c, the gradient of the logits is dz = S - p sum(S). With
c = b the S of JSD is small where student and teacher agree. Without c, dz would be a small difference of
large numbers:

    S = p (b log(p / m) + k q / m),    k = b mix - a (1-mix),    0 for JSD

Both sums merge over tiles and shards by addition. An outcome with p = 0 or q = 0 contributes its limit.
"""

# N, R rows · V outcomes · W columns of a tile

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leanstep.logprob.engine.softmax import EXPONENT_FLOOR, exponentials

NAMES = ("forward_kl", "reverse_kl", "jsd", "skew_kl", "skew_reverse_kl", "cross_entropy")


@dataclass(frozen=True)
class Divergence:
    """a KL(q || m) + b KL(p || m) with m = mix q + (1 - mix) p.

    Args:
        teacher: a.
        student: b.
        mix: the teacher's weight in m.
        cross_entropy: omit q log q: -sum q log p; only with a = 1, b = 0, mix = 0.
    """

    teacher: float = 1.0
    student: float = 0.0
    mix: float = 0.0
    cross_entropy: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.mix <= 1 or self.teacher < 0 or self.student < 0:
            raise ValueError(f"divergence: expected weights >= 0 and 0 <= mix <= 1, got {self}")
        if self.cross_entropy and (self.teacher, self.student, self.mix) != (1.0, 0.0, 0.0):
            raise ValueError(f"divergence: expected cross_entropy with a = 1, b = 0, mix = 0, got {self}")

    def mode(self, is_probability: bool) -> int:
        """Return the number of this formula in `logprob.engine.pass_interface.Compared`."""
        if self.cross_entropy:
            return 4 if is_probability else 3
        return {0.0: 0, 1.0: 1}.get(self.mix, 2)


def checked_divergence(kind: Divergence | str | tuple[str, float]) -> Divergence:
    """Return the `Divergence` for a name ("forward_kl"), or for a name and its parameter: ("jsd", 0.5)."""
    if isinstance(kind, Divergence):
        return kind
    name, value = (kind, None) if isinstance(kind, str) else kind
    if name not in NAMES:
        raise ValueError(f"divergence: expected one of {', '.join(NAMES)}, got {kind!r}")
    if (value is None) != (name in ("forward_kl", "reverse_kl", "cross_entropy")):
        wanted = f'("{name}", value)' if value is None else f'"{name}" without a value'
        raise ValueError(f"divergence: expected {wanted}, got {kind!r}")
    if value is not None and not 0 <= value <= 1:
        raise ValueError(f"divergence: expected 0 <= value <= 1, got {kind!r}")
    # As in GKD, the ends of JSD are the KLs themselves; the limit of JSD would be 0.
    if name == "reverse_kl" or (name == "jsd" and value == 1):
        return Divergence(0.0, 1.0, 1.0)
    if name in ("forward_kl", "cross_entropy") or (name == "jsd" and value == 0):
        return Divergence(cross_entropy=name == "cross_entropy")
    assert value is not None
    if name == "jsd":
        return Divergence(value, 1.0 - value, value)
    return Divergence(1.0, 0.0, value) if name == "skew_kl" else Divergence(0.0, 1.0, 1.0 - value)


def divergence(log_p: Tensor, log_q: Tensor, kind: Divergence | str | tuple[str, float]) -> Tensor:
    """Return D [...] of a student `log_p` and a teacher `log_q`, [..., V] each; plain differentiable torch.

    Equivalent to, for "forward_kl":
        d = (log_q.exp() * (log_q - log_p)).sum(-1)

    Outcomes with probability 0 are omitted if their limit is 0, in the value and in the gradient.
    """
    kind = checked_divergence(kind)
    if kind.mix == 0.0:
        log_m = log_p
    elif kind.mix == 1.0:
        log_m = log_q
    else:
        weights = log_p.new_tensor([1.0 - kind.mix, kind.mix]).log()
        # Where neither side has mass, the gradient of logaddexp would be NaN.
        nowhere = (log_p == -torch.inf) & (log_q == -torch.inf)
        ends = (torch.where(nowhere, 0.0, x) + w for x, w in zip((log_p, log_q), weights, strict=True))
        log_m = torch.where(nowhere, -torch.inf, torch.logaddexp(*ends))
    total = log_p.new_zeros(log_p.shape[:-1])
    if kind.cross_entropy:
        return total - _expected(log_q, log_p)
    if kind.teacher:
        total = total + kind.teacher * _expected(log_q, log_q - log_m)
    if kind.student:
        total = total + kind.student * _expected(log_p, log_p - log_m)
    return total


def _expected(log_weight: Tensor, value: Tensor) -> Tensor:
    """Return sum e^log_weight value; a weight of 0 excludes its value, even if that is not finite."""
    present = log_weight != -torch.inf
    weight = torch.where(present, log_weight, 0.0).exp()
    return torch.where(present, weight * torch.where(present, value, 0.0), 0.0).sum(-1)


def tile_terms_(
    kind: Divergence, log_p: Tensor, p: Tensor, log_q: Tensor | None, q: Tensor, work: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return this tile's contribution to D, [R], and its S [R, W], stored in the first tile of `work`.

    Args:
        log_p, p, log_q, q: [R, W]; `log_q` is not read for a cross-entropy. Not modified.
        work: three tiles like them.
    """
    a, b, mix = kind.teacher, kind.student, kind.mix
    slope, first, second = work
    if mix == 0.0:
        # S = -a q: b KL(p || p) is 0.
        gap = torch.neg(log_p, out=first) if kind.cross_entropy else torch.sub(log_q, log_p, out=first)  # type: ignore[arg-type]
        value = _select(q, gap).sum(-1)
        return value.mul_(a), torch.mul(q, -a, out=slope)
    if mix == 1.0:
        assert log_q is not None
        terms = _select(p, torch.sub(log_p, log_q, out=first))
        return terms.sum(-1).mul_(b), torch.mul(terms, b, out=slope)
    assert log_q is not None
    floor = EXPONENT_FLOOR[p.dtype]
    m = torch.mul(q, mix, out=first).add_(p, alpha=1.0 - mix).clamp_(min=torch.finfo(p.dtype).tiny)
    log_m = torch.log(m, out=second)
    value = torch.zeros_like(p[:, 0])
    # S / p; log m is finite, and 0 times a clamped log is 0.
    if b:
        terms = torch.clamp(log_p, min=floor, out=slope).sub_(log_m)
        value.add_(torch.linalg.vecdot(terms, p), alpha=b)
        slope.mul_(b)
    else:
        slope.zero_()
    share = b * mix - a * (1.0 - mix)
    if share:
        slope.addcdiv_(q, m, value=share)
    slope.mul_(p)
    if a:
        terms = torch.clamp(log_q, min=floor, out=first).sub_(log_m)
        value.add_(torch.linalg.vecdot(terms, q), alpha=a)
    return value, slope


def _select(weight: Tensor, values: Tensor) -> Tensor:
    """Multiply `values` by `weight` in place; 0 where the weight is 0, even if the value is infinite."""
    absent = weight == 0
    return values.mul_(weight).masked_fill_(absent, 0.0)


def log_probs_(z: Tensor, shift: Tensor, log_sum: Tensor, out: Tensor, prob: Tensor) -> tuple[Tensor, Tensor]:
    """Write log p = (z - m) - log s to `out` and p to `prob`, for a tile of logits; `out` may be `z`."""
    log_p = torch.sub(z, shift.unsqueeze(-1), out=out).sub_(log_sum.unsqueeze(-1))
    return log_p, exponentials(log_p, prob)


def log_one_minus_exp(x: Tensor) -> Tensor:
    """Return log(1 - e^x) for x <= 0, elementwise; -inf at 0, without gradient there."""
    below = x < 0
    safe = torch.where(below, x, -1.0)
    # expm1 near 0, log1p elsewhere: each is accurate where the other loses digits.
    near = safe > -0.6931471805599453
    near_value = torch.where(near, safe, -0.5)
    far_value = torch.where(near, -1.0, safe)
    value = torch.where(near, (-torch.expm1(near_value)).log(), torch.log1p(-far_value.exp()))
    return torch.where(below, value, -torch.inf)
