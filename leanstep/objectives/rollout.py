"""Rollout correction: importance weights and rejection for a sampler that differs from the trainer.

An inference engine computes log-probs that differ from the trainer's for the same weights. The correction is
constant (it has no gradient), so it changes the batch and not the objective: a weight w >= 0 per row
multiplies the advantage, and thus max(-r A, -clip(r) A) and every other term that is linear in A; a rejected
row is removed from the mask. KL and entropy terms are not weighted, as in verl's actor. It works with every
`PolicyObjective`, fused or not.

Names and thresholds follow verl's rollout correction (its docs/algo/rollout_corr.md): truncated importance
sampling (TIS) per token or per sequence, weights outside a band set to 0 (IcePop, masked importance
sampling), and rejection by the estimators k1 = -d, k2 = d^2 / 2, k3 = e^d - 1 - d of a row or of a sequence's
sum, mean (the geometric mean of the ratios) or maximum, d = trainer's minus sampler's log-prob.
"""

# N rows · S sequences

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leanstep.logprob import PolicyBatch
from leanstep.logprob.objective import checked_sequences, sequence_of_rows

# Bound of the log weights, which keeps exp finite; the same as in verl.
LOG_BOUND = 20.0
REJECTIONS = tuple(f"{level}_{k}" for level in ("token", "seq_sum", "seq_mean") for k in ("k1", "k2", "k3"))
REJECTIONS += ("seq_max_k2", "seq_max_k3")


@dataclass(frozen=True)
class RolloutCorrection:
    """How to correct for the difference between trainer and sampler.

    Args:
        level: the ratio that becomes the weight: "token", "sequence" (the product over its rows) or None: no
            weights.
        upper: weights are clipped to it (TIS).
        lower: if set, weights outside [lower, upper] become 0 instead (IcePop, masked IS).
        reject: (kind, low, high) each: rows outside the bounds are removed from the mask, whole sequences
            with a "seq_" kind. For k1 the bounds are ratios around 1; k2 and k3 have only `high` (low is
            None). A row must satisfy all rules.
        normalize: divide the weights by their mean, over rows or over sequences.
    """

    level: str | None = "token"
    upper: float = 2.0
    lower: float | None = None
    reject: Sequence[tuple[str, float | None, float]] = ()
    normalize: bool = False

    def __post_init__(self) -> None:
        if self.level not in ("token", "sequence", None):
            raise ValueError(f"level: expected token, sequence or None, got {self.level!r}")
        if not self.upper > 0 or (self.lower is not None and not 0 < self.lower <= self.upper):
            raise ValueError(f"lower, upper: expected 0 < lower <= upper, got {self.lower}, {self.upper}")
        for rule in self.reject:
            if len(rule) != 3 or rule[0] not in REJECTIONS:
                raise ValueError(
                    f"reject: expected (kind, low, high) with kind one of {', '.join(REJECTIONS)}, got {rule}"
                )
            kind, low, high = rule
            if (
                kind.endswith("k1") != (low is not None)
                or not high > 0
                or (low is not None and not 0 < low <= high)
            ):
                expected = "0 < low <= high" if kind.endswith("k1") else "low None and high > 0"
                raise ValueError(f"reject: expected {expected} for {kind}, got {low}, {high}")


def correct_rollout(
    batch: PolicyBatch, rollout_logp: Tensor, correction: RolloutCorrection
) -> tuple[PolicyBatch, dict[str, Tensor]]:
    """Multiply the advantages by the importance weights and remove rejected rows from the mask.

    Equivalent to, for the default (truncated importance sampling per token):
        weights = (batch.old_logp - rollout_logp).clamp(-20, 20).exp().clamp(max=2.0)
        batch = replace(batch, advantages=batch.advantages * weights)

    Args:
        batch: `old_logp` is the trainer's log-prob of the sampled tokens; with a sequence level or a "seq_"
            kind also `sequence_lengths`.
        rollout_logp: [N], the sampler's log-probs.

    Returns:
        The new batch, and 0-dimensional metrics: mean_weight, truncated (the fraction of rows that are
        clipped or set to 0), rejected (the fraction of rejected rows).

    Collectives: none. Host reads: none.
    """
    old = batch.old_logp
    if rollout_logp.shape != old.shape:
        raise ValueError(f"rollout_logp: expected {tuple(old.shape)}, got {tuple(rollout_logp.shape)}")
    mask = torch.ones_like(old) if batch.mask is None else batch.mask.to(old.dtype)
    counts = mask != 0
    # A masked row may hold any value.
    d = torch.where(counts, (old - rollout_logp).detach(), 0.0)
    sequences = None
    needs_sequences = correction.level == "sequence" or any(r[0].startswith("seq") for r in correction.reject)
    if needs_sequences:
        sequences = _Sequences(checked_sequences(batch.sequence_lengths, len(old)), mask)
    keep = torch.ones_like(counts)
    for kind, low, high in correction.reject:
        keep &= _passes(kind, low, high, d.clamp(-LOG_BOUND, LOG_BOUND), sequences)
    metrics = {"rejected": _mean((~keep).to(old.dtype), mask)}
    advantages = batch.advantages
    if correction.level is not None:
        log_weight = d if sequences is None or correction.level == "token" else sequences.sum(d)
        raw = log_weight.clamp(-LOG_BOUND, LOG_BOUND).exp()
        outside = raw > correction.upper
        weights = raw.clamp(max=correction.upper)
        if correction.lower is not None:
            outside = outside | (raw < correction.lower)
            weights = torch.where(outside, 0.0, raw)
        if correction.normalize:
            mean = _mean(weights, mask) if correction.level == "token" else sequences.mean_of_means(weights)  # type: ignore[union-attr]
            weights = torch.where(mean > 1e-8, weights / mean, weights)
        metrics |= {"mean_weight": _mean(weights, mask), "truncated": _mean(outside.to(old.dtype), mask)}
        advantages = torch.where(counts, advantages * weights.to(advantages.dtype), 0.0)
    if not correction.reject:
        return replace(batch, advantages=advantages), metrics
    new_mask = (
        keep.to(old.dtype)
        if batch.mask is None
        else torch.where(keep, batch.mask, torch.zeros_like(batch.mask))
    )
    return replace(batch, advantages=advantages, mask=new_mask), metrics


def _passes(kind: str, low: float | None, high: float, d: Tensor, sequences: _Sequences | None) -> Tensor:
    """Return whether each row, or its whole sequence, is within the bounds, [N] bool."""
    estimate = kind[-2:]
    values = {"k1": -d, "k2": d.square() / 2, "k3": d.exp() - 1.0 - d}[estimate]
    if sequences is not None and kind.startswith("seq"):
        values = {"seq_sum": sequences.sum, "seq_mean": sequences.mean, "seq_max": sequences.max}[kind[:-3]](
            values
        )
    if low is None:
        return values <= high
    return (values >= math.log(low)) & (values <= math.log(high))


class _Sequences:
    """Masked reductions over the rows of each sequence, broadcast to its rows: [N]."""

    def __init__(self, lengths: list[int], mask: Tensor) -> None:
        self.of, self.mask, self.count = sequence_of_rows(lengths, mask.device), mask, len(lengths)
        self.rows = self._add(mask)

    def _add(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.count).index_add(0, self.of, values)

    def sum(self, values: Tensor) -> Tensor:
        return self._add(values * self.mask)[self.of]

    def mean(self, values: Tensor) -> Tensor:
        return (self._add(values * self.mask) / (self.rows + 1e-8))[self.of]

    def max(self, values: Tensor) -> Tensor:
        start = values.new_full((self.count,), -torch.inf)
        masked = torch.where(self.mask != 0, values, -torch.inf)
        top = start.scatter_reduce(0, self.of, masked, "amax")
        return torch.where(top == -torch.inf, 0.0, top)[self.of]

    def mean_of_means(self, values: Tensor) -> Tensor:
        """Return the mean over non-empty sequences of the mean over their rows, 0-dimensional."""
        means = self._add(values * self.mask) / (self.rows + 1e-8)
        has_rows = (self.rows > 0).to(values.dtype)
        return (means * has_rows).sum() / has_rows.sum().clamp(min=1e-8)


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / (mask.sum() + 1e-8)
