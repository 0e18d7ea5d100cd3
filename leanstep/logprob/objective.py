"""Policy objectives as functions of log-probs: the loss math, written once.

`policy_losses` is plain differentiable torch on [N] vectors. The fused path differentiates this very function
on each row chunk, so that fused and unfused losses cannot drift apart.

    ratio r = exp(logp - old), advantage A, clip to [1 - low, 1 + high]
    clip    max(-r A, -clip(r) A); with dual clip k, at most -k A where A < 0
    cispo   -stop_gradient(clip(r)) A logp
    gspo    clip, with r = exp(mean over the sequence of (logp - old))

At an exact clip boundary the gradient flows.
"""

# N rows · S sequences

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Normalizer = Literal["token_mean", "sequence_mean", "sum"]


@dataclass(frozen=True)
class PolicyObjective:
    """What is minimised per row.

    Args:
        kind: "clip" (PPO, GRPO, DAPO), "cispo" or "gspo".
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: k > 1 bounds the loss of negative advantages at -k A.
        kl: estimator of the KL to a reference: "k1" = -d, "k2" = d^2 / 2, "k3" = e^d - 1 - d, d = ref - logp.
        kl_coef, entropy_coef: weights of the KL and of the entropy bonus.
    """

    kind: Literal["clip", "cispo", "gspo"] = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl: Literal["k1", "k2", "k3"] = "k3"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("clip", "cispo", "gspo"):
            raise ValueError(f"kind: expected clip, cispo or gspo, got {self.kind!r}")
        if self.kl not in ("k1", "k2", "k3"):
            raise ValueError(f"kl: expected k1, k2 or k3, got {self.kl!r}")
        if self.clip_low < 0 or self.clip_high < 0:
            raise ValueError(
                f"clip_low, clip_high: expected values >= 0, got {self.clip_low}, {self.clip_high}"
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip: expected a value > 1 or None, got {self.dual_clip}")


# The papers' own settings; the normaliser is chosen apart (DAPO: token_mean, GRPO: sequence_mean).
OBJECTIVES = {
    "ppo": PolicyObjective(),
    "grpo": PolicyObjective(),
    "dapo": PolicyObjective(clip_high=0.28),
    "cispo": PolicyObjective(kind="cispo", clip_low=1.0, clip_high=0.28),
    "gspo": PolicyObjective(kind="gspo", clip_low=3e-4, clip_high=4e-4),
}


@dataclass(frozen=True)
class PolicyBatch:
    """What a policy objective needs per scored row, besides the log-probs: tensors [T'], all constant.

    Args:
        old_logp: log-probs under the policy that sampled.
        advantages: one per row.
        mask: 0 (or False) takes a row out: whatever it holds, it adds nothing.
        ref_logp: log-probs under the reference policy; for `kl_coef`.
        sequence_lengths: rows per sequence, in order; for gspo and "sequence_mean".
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
    """The loss of every row [N], before normalisers; differentiable in `logp` and `entropy`.

    A row with mask 0 may hold anything: its numbers are replaced by zeros before any function sees them, so
    that neither its loss nor its gradient is ever 0 times infinity.
    """
    if mask is not None:
        masked = mask == 0
        logp, old_logp, advantages = (torch.where(masked, 0.0, x) for x in (logp, old_logp, advantages))
        ref_logp = None if ref_logp is None else torch.where(masked, 0.0, ref_logp)
        entropy = None if entropy is None else torch.where(masked, 0.0, entropy)
    difference = logp - old_logp
    if objective.kind == "gspo":
        difference = _sequence_mean(difference, mask, checked_sequences(sequence_lengths, len(logp)))
    ratio = difference.exp()
    low, high = 1.0 - objective.clip_low, 1.0 + objective.clip_high
    bounded = ratio.detach().clamp(low, high)
    if objective.kind == "cispo":
        clipped = bounded != ratio.detach()
        losses = -bounded * advantages * logp
    else:
        clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
        losses = torch.where(clipped, -bounded * advantages, -ratio * advantages)
        if objective.dual_clip is not None:
            floored = (advantages < 0) & (ratio > objective.dual_clip)
            losses = torch.where(floored, -objective.dual_clip * advantages, losses)
            clipped = clipped | floored
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
    """The unfused objective on log-probs from anywhere; `linear_policy_loss` gives the same number.

    Equivalent to, for "grpo" with neither mask nor entropy:
        ratio = (logp - old_logp).exp()
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()

    Args:
        logp, old_logp, advantages: [N]. `entropy`, `ref_logp`, `mask` likewise.
        objective: a `PolicyObjective` or a name: ppo, grpo, dapo, cispo, gspo.
        normalizer: "token_mean", "sequence_mean" (mean over sequences of their token means), "sum", or a
            number (or tensor without gradient) to divide by. Nothing that depends on the log-probs.
        sequence_lengths: rows per sequence, in order; for gspo and "sequence_mean".
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
    # The metrics of a masked row may be infinite; select, do not multiply. Losses are cleaned before.
    return torch.where(weights == 0, 0.0, losses * weights).sum()


def row_weights(
    mask: Tensor | None,
    num_rows: int,
    normalizer: Normalizer | float | Tensor,
    sequence_lengths: Sequence[int] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """mask / normaliser per row [N]: known before any log-prob is."""
    if mask is not None and mask.shape != (num_rows,):
        raise ValueError(f"mask: expected [{num_rows}], got {tuple(mask.shape)}")
    mask = torch.ones(num_rows, dtype=dtype, device=device) if mask is None else mask.to(dtype)
    if isinstance(normalizer, Tensor):
        if normalizer.requires_grad or normalizer.dim() > 0:
            raise ValueError(
                "normalizer: expected a 0-dimensional constant (the results are not known yet), "
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
    if normalizer == "sequence_mean":
        lengths = checked_sequences(sequence_lengths, num_rows)
        totals, sequence_of = _sequence_sums(mask, lengths)
        return mask / (totals.clamp(min=1.0)[sequence_of] * max(len(lengths), 1))
    raise ValueError(f"normalizer: expected token_mean, sequence_mean, sum or a number, got {normalizer!r}")


def policy_metrics(
    rows: RowLosses, logp: Tensor, old_logp: Tensor, entropy: Tensor | None, mask: Tensor | None
) -> dict[str, Tensor]:
    """Masked means: clip_fraction, mean_ratio, approx_kl (r - 1 - log r, to the old policy), entropy."""
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
            "sequence_lengths: expected rows per sequence for this objective or normaliser, got None"
        )
    lengths = [int(n) for n in lengths]
    if sum(lengths) != num_rows or any(n < 0 for n in lengths):
        raise ValueError(
            f"sequence_lengths: expected lengths that add up to {num_rows} rows, got {sum(lengths)}"
        )
    return lengths


def _sequence_sums(values: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Sum per sequence [S], and the sequence of each row [N]."""
    counts = torch.tensor(lengths, dtype=torch.int64, device=values.device)
    sequence_of = torch.repeat_interleave(counts, output_size=len(values))
    return values.new_zeros(len(lengths)).index_add(0, sequence_of, values), sequence_of


def _sequence_mean(values: Tensor, mask: Tensor | None, lengths: list[int]) -> Tensor:
    mask = torch.ones_like(values) if mask is None else mask.to(values.dtype)
    sums, sequence_of = _sequence_sums(torch.where(mask == 0, 0.0, values * mask), lengths)
    totals, _ = _sequence_sums(mask, lengths)
    return (sums / totals.clamp(min=1.0))[sequence_of]
