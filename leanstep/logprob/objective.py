"""Policy objectives as functions of log-probs.

`policy_losses` is plain differentiable torch on [N] vectors. The fused path differentiates the same function
on each row chunk, so that fused and unfused losses cannot diverge.

    ratio r = exp(logp - old), advantage A, clip to [1 - low, 1 + high]
    clip      max(-r A, -clip(r) A); with dual clip k, at most -k A where A < 0
    cispo     -sg(clip(r)) A logp, sg = no gradient
    gspo      clip, with r = exp(mean over the sequence of (logp - old)); LUSPO is gspo with "sequence_sum"
    gpg       -A logp                                                     (Chu et al. 2025, arXiv 2504.02546)
    sapo      -A (4 / tau) sigma(tau (r - 1)), tau by the sign of A       (Gao et al. 2025, arXiv 2511.20347)
    dppo_tv   -sg(r) A logp; 0 where A pushes p beyond a bound on the     (arXiv 2602.04879, binary TV and KL
    dppo_kl   distance from the old p: p - p_old, or KL of (p, 1 - p)      of the sampled token)
    clip_cov  clip; 0 on some rows whose (A - mean A)(logp - mean logp)   (Cui et al. 2025, arXiv 2505.22617,
              is within a band                                             as in verl 0.9)
    kl_cov    -r A; plus coef |logp - old| on the rows where it is largest

At an exact clip boundary the gradient is not clipped.
"""

# N rows · S sequences

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from leanstep.logprob.layout import to_device

Normalizer = Literal["token_mean", "sequence_mean", "sequence_sum", "sum"]
KINDS = ("clip", "cispo", "gspo", "gpg", "sapo", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov")
# Each row depends on all others, so the fused path computes them in one chunk.
WHOLE_BATCH = ("clip_cov", "kl_cov")
# Keeps exp finite for objectives that do not clip the ratio; the same bound as in verl.
LOG_RATIO_BOUND = 20.0


class CovarianceChoice(NamedTuple):
    """Which rows clip_cov and kl_cov select, by c = (A - mean A)(logp - mean logp) over unmasked rows.

    Args:
        share: fraction of the unmasked rows, rounded down, at least one row.
        low, high: clip_cov selects from rows with low < c < high that are not already clipped.
        coef: kl_cov's weight of |logp - old|.
    """

    share: float = 2e-4
    low: float = 1.0
    high: float = 5.0
    coef: float = 1.0


COVARIANCE = CovarianceChoice()


@dataclass(frozen=True)
class PolicyObjective:
    """The loss per row.

    Args:
        kind: one of `KINDS`; "clip" is the objective of PPO, GRPO and DAPO.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high]; dppo: bounds of the
            divergence for advantages <= 0 and > 0.
        dual_clip: k > 1 bounds the loss of negative advantages at -k A; dppo: the ratio is clipped at k.
        kl: estimator of the KL to a reference: "k1" = -d, "k2" = d^2 / 2, "k3" = e^d - 1 - d, d = ref - logp.
        kl_coef, entropy_coef: weights of the KL and of the entropy bonus.
        temperatures: sapo's tau for advantages > 0 and <= 0.
        covariance: row selection of clip_cov and kl_cov.
    """

    kind: str = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl: Literal["k1", "k2", "k3"] = "k3"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    temperatures: tuple[float, float] = (1.0, 1.05)
    covariance: CovarianceChoice = COVARIANCE

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        if len(self.temperatures) != 2 or not min(self.temperatures) > 0:
            raise ValueError(f"temperatures: expected two values > 0, got {self.temperatures}")
        if not 0 < self.covariance.share <= 1:
            raise ValueError(f"covariance.share: expected 0 < value <= 1, got {self.covariance.share}")
        if self.kl not in ("k1", "k2", "k3"):
            raise ValueError(f"kl: expected k1, k2 or k3, got {self.kl!r}")
        if self.clip_low < 0 or self.clip_high < 0:
            raise ValueError(
                f"clip_low, clip_high: expected values >= 0, got {self.clip_low}, {self.clip_high}"
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip: expected a value > 1 or None, got {self.dual_clip}")


# The settings of the papers. The normalizer is a separate argument (DAPO: token_mean, GRPO, SAPO:
# sequence_mean, LUSPO: sequence_sum). DPPO: the bounds of verl's example, the clip of its function.
OBJECTIVES = {
    "ppo": PolicyObjective(),
    "grpo": PolicyObjective(),
    "dapo": PolicyObjective(clip_high=0.28),
    "cispo": PolicyObjective(kind="cispo", clip_low=1.0, clip_high=0.28),
    "gspo": PolicyObjective(kind="gspo", clip_low=3e-4, clip_high=4e-4),
    "gpg": PolicyObjective(kind="gpg"),
    "sapo": PolicyObjective(kind="sapo"),
    "dppo_tv": PolicyObjective(kind="dppo_tv", clip_low=0.15, clip_high=0.15, dual_clip=20.0),
    "dppo_kl": PolicyObjective(kind="dppo_kl", clip_low=0.05, clip_high=0.05, dual_clip=20.0),
    "clip_cov": PolicyObjective(kind="clip_cov"),
    "kl_cov": PolicyObjective(kind="kl_cov"),
}


@dataclass(frozen=True)
class PolicyBatch:
    """The inputs of a policy objective per scored row, besides the log-probs: constant tensors [T'].

    Args:
        old_logp: log-probs under the policy that sampled.
        advantages: one per row.
        mask: 0 (or False) excludes a row; its values may be anything, including NaN.
        ref_logp: log-probs under the reference policy; for `kl_coef`.
        sequence_lengths: rows per sequence, in order; for gspo, "sequence_mean" and "sequence_sum".
    """

    old_logp: Tensor
    advantages: Tensor
    mask: Tensor | None = None
    ref_logp: Tensor | None = None
    sequence_lengths: Sequence[int] | None = None


class PolicyLoss(NamedTuple):
    """`loss` is differentiable; the rest is detached. `metrics` are masked means, 0-dimensional tensors."""

    loss: Tensor
    logp: Tensor
    entropy: Tensor | None
    metrics: dict[str, Tensor]


class RowLosses(NamedTuple):
    losses: Tensor
    ratio: Tensor
    clipped: Tensor


def policy_losses(
    objective: PolicyObjective,
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    *,
    entropy: Tensor | None = None,
    ref_logp: Tensor | None = None,
    mask: Tensor | None = None,
    sequence_lengths: Sequence[int] | None = None,
) -> RowLosses:
    """Return the loss of every row [N] before normalization; differentiable in `logp` and `entropy`.

    A row with mask 0 may hold any values: they are replaced by zeros before any computation, so that neither
    its loss nor its gradient is ever 0 times infinity.
    """
    if mask is not None:
        masked = mask == 0
        logp, old_logp, advantages = (torch.where(masked, 0.0, x) for x in (logp, old_logp, advantages))
        ref_logp = None if ref_logp is None else torch.where(masked, 0.0, ref_logp)
        entropy = None if entropy is None else torch.where(masked, 0.0, entropy)
    difference = logp - old_logp
    if objective.kind == "gspo":
        difference = _sequence_mean(difference, mask, checked_sequences(sequence_lengths, len(logp)))
    if objective.kind not in ("clip", "cispo", "gspo"):
        difference = difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = difference.exp()
    losses, clipped = _policy_term(objective, logp, old_logp, ratio, advantages, mask)
    if objective.kl_coef:
        if ref_logp is None:
            raise ValueError("ref_logp: expected reference log-probs because kl_coef is not 0, got None")
        d = ref_logp - logp
        penalty = {"k1": lambda: -d, "k2": lambda: d.square() / 2, "k3": lambda: d.exp() - 1.0 - d}[
            objective.kl
        ]()
        losses = losses + objective.kl_coef * penalty
    if objective.entropy_coef:
        if entropy is None:
            raise ValueError("entropy: expected a tensor because entropy_coef is not 0, got None")
        losses = losses - objective.entropy_coef * entropy
    return RowLosses(losses, ratio.detach(), clipped.detach())


def _policy_term(
    objective: PolicyObjective,
    logp: Tensor,
    old_logp: Tensor,
    ratio: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the rows' losses before KL and entropy, and a mask of the rows with zero or reduced gradient."""
    kind, fixed = objective.kind, ratio.detach()
    if kind == "gpg":
        return -advantages * logp, torch.zeros_like(fixed, dtype=torch.bool)
    if kind == "sapo":
        tau = _by_sign(advantages, *objective.temperatures)
        return -advantages * torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau), fixed != fixed
    if kind in ("dppo_tv", "dppo_kl"):
        outside = _outside_trust_region(objective, logp.detach(), old_logp, advantages)
        weight = fixed if objective.dual_clip is None else fixed.clamp(max=objective.dual_clip)
        return torch.where(outside, 0.0, -advantages * weight * logp), outside
    if kind == "kl_cov":
        covariance, counts = _covariance(logp, advantages, mask)
        chosen = _highest(covariance, counts, objective.covariance.share)
        penalty = objective.covariance.coef * (logp - old_logp).abs()
        return torch.where(chosen, penalty, 0.0) - advantages * ratio, chosen
    low, high = 1.0 - objective.clip_low, 1.0 + objective.clip_high
    bounded = fixed.clamp(low, high)
    if kind == "cispo":
        return -bounded * advantages * logp, bounded != fixed
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    losses = torch.where(clipped, -bounded * advantages, -ratio * advantages)
    if kind == "clip_cov":
        covariance, counts = _covariance(logp, advantages, mask)
        choice = objective.covariance
        in_band = counts & ~clipped & (covariance > choice.low) & (covariance < choice.high)
        # The paper samples from the band. A hash of the row index and the caller's inputs does the same, but
        # the result does not depend on the rank, the run or the rounding of logp.
        place = torch.arange(len(covariance), device=covariance.device, dtype=torch.float64)
        value = old_logp.double() + advantages.double()
        draw = ((place * 12.9898 + value * 78.233).sin() * 43758.5453).frac().abs()
        chosen = _highest(torch.where(in_band, draw, -1.0), counts, choice.share) & in_band
        return torch.where(chosen, 0.0, losses), clipped | chosen
    if objective.dual_clip is not None:
        floored = (advantages < 0) & (ratio > objective.dual_clip)
        losses = torch.where(floored, -objective.dual_clip * advantages, losses)
        clipped = clipped | floored
    return losses, clipped


def _by_sign(advantages: Tensor, positive: float, other: float) -> Tensor:
    """Return [N] values in the dtype of `advantages`: `positive` where the advantage is > 0, else `other`."""
    return torch.full_like(advantages, other).masked_fill(advantages > 0, positive)


def _outside_trust_region(
    objective: PolicyObjective, logp: Tensor, old_logp: Tensor, advantages: Tensor
) -> Tensor:
    """Return where the token's probability has moved beyond DPPO's bound, in the advantage's direction."""
    p, old_p = logp.exp(), old_logp.exp()
    bound = _by_sign(advantages, objective.clip_high, objective.clip_low)
    moved = torch.where(advantages > 0, p - old_p, old_p - p)
    if objective.kind == "dppo_tv":
        return moved > bound
    rest = torch.log((1.0 - old_p + 1e-8) / (1.0 - p + 1e-8))
    return (old_p * (old_logp - logp) + (1.0 - old_p) * rest > bound) & (moved > 0)


def _covariance(logp: Tensor, advantages: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (A - mean A)(logp - mean logp) per row, without gradient, and the unmasked rows."""
    counts = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask != 0
    total = counts.sum().clamp(min=1)

    def centered(values: Tensor) -> Tensor:
        return values - torch.where(counts, values, 0.0).sum() / total

    return centered(advantages) * centered(logp.detach()), counts


def _highest(values: Tensor, counts: Tensor, share: float) -> Tensor:
    """Return [N] bool: the rows with the largest values, `share` of the rows in `counts`, at least one.

    No host read.
    """
    num_selected = (counts.sum().double() * share).floor().clamp(min=1)
    order = torch.where(counts, values, -torch.inf).argsort(descending=True, stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return (place < num_selected) & counts


def policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    *,
    objective: PolicyObjective | str = "grpo",
    entropy: Tensor | None = None,
    ref_logp: Tensor | None = None,
    mask: Tensor | None = None,
    normalizer: Normalizer | float | Tensor = "token_mean",
    sequence_lengths: Sequence[int] | None = None,
) -> PolicyLoss:
    """Compute the unfused objective from log-probs; `linear_policy_loss` returns the same loss.

    Equivalent to, for "grpo" with neither mask nor entropy:
        ratio = (logp - old_logp).exp()
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()

    Args:
        logp, old_logp, advantages: [N]. `entropy`, `ref_logp`, `mask` likewise.
        objective: a `PolicyObjective` or a name of `OBJECTIVES`: ppo, grpo, dapo, cispo, gspo, gpg, sapo, ...
        normalizer: "token_mean", "sequence_mean" (mean over sequences of their token means), "sequence_sum"
            (mean over sequences of their token sums), "sum", or a number (or tensor without gradient) to
            divide by. It must not depend on the log-probs.
        sequence_lengths: rows per sequence, in order; for gspo, "sequence_mean" and "sequence_sum".
    """
    objective = checked_objective(objective)
    weights = row_weights(mask, len(logp), normalizer, sequence_lengths, logp.dtype, logp.device)
    rows = policy_losses(
        objective, logp, old_logp, advantages,
        entropy=entropy, ref_logp=ref_logp, mask=mask, sequence_lengths=sequence_lengths,
    )  # fmt: skip
    loss = weighted_sum(rows.losses, weights)
    metrics = policy_metrics(rows, logp.detach(), old_logp, entropy, mask)
    return PolicyLoss(loss, logp.detach(), None if entropy is None else entropy.detach(), metrics)


def weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    # Select instead of multiplying: metrics of a masked row may be infinite. Losses are already cleaned.
    return torch.where(weights == 0, 0.0, losses * weights).sum()


def row_weights(
    mask: Tensor | None,
    num_rows: int,
    normalizer: Normalizer | float | Tensor,
    sequence_lengths: Sequence[int] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return mask / normalizer per row [N]; it does not depend on the log-probs."""
    if mask is not None and mask.shape != (num_rows,):
        raise ValueError(f"mask: expected [{num_rows}], got {tuple(mask.shape)}")
    mask = torch.ones(num_rows, dtype=dtype, device=device) if mask is None else mask.to(dtype)
    if isinstance(normalizer, Tensor):
        if normalizer.requires_grad or normalizer.dim() > 0:
            raise ValueError(
                "normalizer: expected a 0-dimensional constant that does not depend on the log-probs, "
                f"got shape {tuple(normalizer.shape)}, requires_grad={normalizer.requires_grad}"
            )
        return mask / normalizer.to(dtype)
    if isinstance(normalizer, (int, float)):
        if not normalizer > 0:
            raise ValueError(f"normalizer: expected a number > 0, got {normalizer}")
        return mask / normalizer
    if normalizer == "sum":
        return mask
    if normalizer == "token_mean":
        return mask / mask.sum().clamp(min=1.0)
    if normalizer == "sequence_sum":
        return mask / max(len(checked_sequences(sequence_lengths, num_rows)), 1)
    if normalizer == "sequence_mean":
        lengths = checked_sequences(sequence_lengths, num_rows)
        totals, sequence_of = _sequence_sums(mask, lengths)
        return mask / (totals.clamp(min=1.0)[sequence_of] * max(len(lengths), 1))
    expected = "token_mean, sequence_mean, sequence_sum, sum or a number"
    raise ValueError(f"normalizer: expected {expected}, got {normalizer!r}")


def policy_metrics(
    rows: RowLosses, logp: Tensor, old_logp: Tensor, entropy: Tensor | None, mask: Tensor | None
) -> dict[str, Tensor]:
    """Return masked means: clip_fraction, mean_ratio, approx_kl to the old policy (r - 1 - log r), entropy.

    The mask has one entry per row; masked rows may hold any values.
    """
    weight = torch.ones_like(logp) if mask is None else mask.to(logp.dtype)
    weight = weight / weight.sum().clamp(min=1.0)
    difference = (logp - old_logp).detach()
    values = {
        "clip_fraction": rows.clipped.to(logp.dtype),
        "mean_ratio": rows.ratio,
        "approx_kl": difference.exp() - 1.0 - difference,
    }
    if entropy is not None:
        values["entropy"] = entropy.detach()
    return {name: weighted_sum(value, weight) for name, value in values.items()}


def checked_objective(objective: PolicyObjective | str) -> PolicyObjective:
    if isinstance(objective, str):
        if objective not in OBJECTIVES:
            raise ValueError(f"objective: expected one of {', '.join(OBJECTIVES)}, got {objective!r}")
        return OBJECTIVES[objective]
    return objective


def checked_sequences(lengths: Sequence[int] | None, num_rows: int) -> list[int]:
    if lengths is None:
        raise ValueError(
            "sequence_lengths: expected rows per sequence for this objective or normalizer, got None"
        )
    lengths = [int(n) for n in lengths]
    if sum(lengths) != num_rows or any(n < 0 for n in lengths):
        raise ValueError(
            f"sequence_lengths: expected lengths that add up to {num_rows} rows, got {sum(lengths)}"
        )
    return lengths


def sequence_of_rows(lengths: list[int], device: torch.device) -> Tensor:
    """Return the index of each row's sequence, [N] int64."""
    counts = to_device(torch.tensor(lengths, dtype=torch.int64), device)
    return torch.repeat_interleave(counts, output_size=sum(lengths))


def _sequence_sums(values: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Return the sum per sequence [S] and the sequence of each row [N]."""
    sequence_of = sequence_of_rows(lengths, values.device)
    return values.new_zeros(len(lengths)).index_add(0, sequence_of, values), sequence_of


def _sequence_mean(values: Tensor, mask: Tensor | None, lengths: list[int]) -> Tensor:
    mask = torch.ones_like(values) if mask is None else mask.to(values.dtype)
    sums, sequence_of = _sequence_sums(torch.where(mask == 0, 0.0, values * mask), lengths)
    totals, _ = _sequence_sums(mask, lengths)
    return (sums / totals.clamp(min=1.0))[sequence_of]
