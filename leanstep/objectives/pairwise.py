"""Preference objectives as functions of sequence log-probs.

    s = sum of a completion's token log-probs, r = s - reference,  d = r_chosen - r_rejected
    dpo     -log sigma(beta d); label smoothing: 1 - eps and eps of both signs (Rafailov et al. 2023)
    robust  unbiased under flipped labels: 1 - eps and -eps, over 1 - 2 eps (Chowdhury et al. 2024)
    hinge   max(0, 1 - beta d)                                            (SLiC, Zhao et al. 2023)
    ipo     (d' - 1 / (2 beta))^2, d' of token means                      (Azar et al. 2023, eq. 17)
    kto     weight (1 - sigma(+-beta (r - kl)))                           (Ethayarajh et al. 2024, eq. 7)
    cpo     dpo without a reference, plus nll                             (Xu et al. 2024)
    simpo   -log sigma(beta (m_chosen - m_rejected) - gamma), m = mean    (Meng et al. 2024)
    orpo    nll - beta log sigma(log odds ratio) of mean log-probs        (Hong et al. 2024, eq. 6 and 7)

Plain differentiable torch on [P] pairs, for log-probs from hidden states (`linear_preference_loss`) or
logits.
"""

# P pairs · S sequences

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from leanstep.objectives.divergences import log_one_minus_exp

KINDS = ("dpo", "robust", "hinge", "ipo", "kto", "cpo", "simpo", "orpo")
# Kinds that compare token means (the others: sums), and kinds without a reference.
MEANS = ("ipo", "simpo", "orpo")
REFERENCE_FREE = ("cpo", "simpo", "orpo")


@dataclass(frozen=True)
class PreferenceObjective:
    """The loss per pair, or per sequence for "kto".

    Args:
        kind: one of `KINDS`.
        beta: the temperature of the implicit reward.
        label_smoothing: eps, the fraction of flipped labels; dpo, robust, cpo, simpo.
        gamma: simpo's margin, subtracted from beta times the difference.
        nll_coef: weight of the mean negative log-prob of the chosen tokens.
        desirable, undesirable: kto's weights of the two classes.
    """

    kind: str = "dpo"
    beta: float = 0.1
    label_smoothing: float = 0.0
    gamma: float = 0.5
    nll_coef: float = 0.0
    desirable: float = 1.0
    undesirable: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        if not self.beta > 0:
            raise ValueError(f"beta: expected a value > 0, got {self.beta}")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing: expected 0 <= value < 0.5, got {self.label_smoothing}")
        if self.label_smoothing and self.kind not in ("dpo", "robust", "cpo", "simpo"):
            raise ValueError(f"label_smoothing: expected 0 for {self.kind}, got {self.label_smoothing}")


PREFERENCES = {
    **{kind: PreferenceObjective(kind) for kind in ("dpo", "robust", "hinge", "ipo", "kto")},
    "cpo": PreferenceObjective("cpo", nll_coef=1.0),
    "simpo": PreferenceObjective("simpo", beta=2.0, gamma=1.0),
    "orpo": PreferenceObjective("orpo", nll_coef=1.0),
}


class PairLosses(NamedTuple):
    """losses: [P], differentiable. chosen, rejected: rewards [P], detached."""

    losses: Tensor
    chosen: Tensor
    rejected: Tensor


def pair_losses(
    objective: PreferenceObjective | str,
    chosen: Tensor,
    rejected: Tensor,
    *,
    ref_chosen: Tensor | None = None,
    ref_rejected: Tensor | None = None,
    chosen_lengths: Tensor | None = None,
    rejected_lengths: Tensor | None = None,
) -> PairLosses:
    """Return the loss of every pair [P] before nll and means, and the implicit rewards that trainers log.

    Equivalent to, for "dpo":
        margins = (chosen - ref_chosen) - (rejected - ref_rejected)
        losses = -torch.nn.functional.logsigmoid(0.1 * margins)

    Args:
        objective: a `PreferenceObjective` or a name; every kind but "kto".
        chosen, rejected: [P] sums of token log-probs, for every kind.
        ref_chosen, ref_rejected: [P] under the reference policy; None: reference-free.
        chosen_lengths, rejected_lengths: [P] scored tokens; for ipo, simpo and orpo. An empty completion
            is treated as one token with log-prob 0.
    """
    objective = checked_preference(objective)
    kind, beta = objective.kind, objective.beta
    if kind == "kto":
        raise ValueError("objective: expected a pairwise one, got kto; use kto_losses")
    if (ref_chosen is None) != (ref_rejected is None):
        raise ValueError("ref_chosen, ref_rejected: expected both or neither, got one")
    if ref_chosen is not None and kind in REFERENCE_FREE:
        raise ValueError(f"ref_chosen: expected None, because {kind} has no reference")
    if kind in MEANS and (chosen_lengths is None or rejected_lengths is None):
        raise ValueError(f"chosen_lengths, rejected_lengths: expected tokens per completion for {kind}")
    if ref_chosen is not None and ref_rejected is not None:
        chosen, rejected = chosen - ref_chosen, rejected - ref_rejected
    rewards = beta * chosen.detach(), beta * rejected.detach()
    if kind in MEANS and chosen_lengths is not None and rejected_lengths is not None:
        chosen = chosen / chosen_lengths.clamp(min=1)
        rejected = rejected / rejected_lengths.clamp(min=1)
        # For IPO, trainers log the rewards of the sums.
        if kind != "ipo":
            rewards = beta * chosen.detach(), beta * rejected.detach()
    difference = chosen - rejected
    if kind == "ipo":
        return PairLosses((difference - 1.0 / (2.0 * beta)).square(), *rewards)
    if kind == "hinge":
        return PairLosses(torch.relu(1.0 - beta * difference), *rewards)
    if kind == "orpo":
        log_odds = difference - (log_one_minus_exp(chosen) - log_one_minus_exp(rejected))
        return PairLosses(-beta * logsigmoid(log_odds), *rewards)
    logits = beta * difference - (objective.gamma if kind == "simpo" else 0.0)
    eps = objective.label_smoothing
    if kind == "robust":
        losses = -((1.0 - eps) * logsigmoid(logits) - eps * logsigmoid(-logits)) / (1.0 - 2.0 * eps)
    elif eps:
        losses = -(1.0 - eps) * logsigmoid(logits) - eps * logsigmoid(-logits)
    else:
        losses = -logsigmoid(logits)
    return PairLosses(losses, *rewards)


def kto_losses(
    objective: PreferenceObjective | str,
    logps: Tensor,
    ref_logps: Tensor,
    desirable: Tensor,
    kl: Tensor | float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return KTO's loss and reward of every sequence, [S] each; only the loss is differentiable.

    Equivalent to:
        sign = torch.where(desirable, 1.0, -1.0)
        losses = 1 - torch.sigmoid(0.1 * sign * (logps - ref_logps - kl))

    Args:
        logps, ref_logps: [S] sums of token log-probs.
        desirable: [S] bool.
        kl: the KL estimate from mismatched completions, 0-dimensional and constant; clamped at 0 here.
    """
    objective = checked_preference(objective)
    if objective.kind != "kto":
        raise ValueError(f"objective: expected kto, got {objective.kind}")
    if desirable.dtype != torch.bool or desirable.shape != logps.shape:
        got = f"{desirable.dtype} {tuple(desirable.shape)}"
        raise ValueError(f"desirable: expected bool {tuple(logps.shape)}, got {got}")
    ratio = logps - ref_logps
    point = kl.detach().clamp(min=0.0) if isinstance(kl, Tensor) else max(kl, 0.0)
    sign = torch.where(desirable, 1.0, -1.0).to(ratio.dtype)
    weight = torch.full_like(ratio.detach(), objective.undesirable).masked_fill(
        desirable, objective.desirable
    )
    losses = weight * (1.0 - torch.sigmoid(objective.beta * sign * (ratio - point)))
    return losses, objective.beta * ratio.detach()


def preference_metrics(pairs: PairLosses, chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Return means over pairs under the names that TRL's trainers log; 0-dimensional, on the device."""
    return {
        "rewards/chosen": pairs.chosen.mean(),
        "rewards/rejected": pairs.rejected.mean(),
        "rewards/accuracies": (pairs.chosen > pairs.rejected).to(pairs.chosen.dtype).mean(),
        "rewards/margins": (pairs.chosen - pairs.rejected).mean(),
        "logps/chosen": chosen.detach().mean(),
        "logps/rejected": rejected.detach().mean(),
    }


def checked_preference(objective: PreferenceObjective | str, **changes: float) -> PreferenceObjective:
    """Return the objective of a name; `changes` replace its fields."""
    if isinstance(objective, str):
        if objective not in PREFERENCES:
            raise ValueError(f"objective: expected one of {', '.join(PREFERENCES)}, got {objective!r}")
        objective = PREFERENCES[objective]
    return replace(objective, **changes) if changes else objective
