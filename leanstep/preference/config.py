"""The hyperparameters of the controller objective; every value is checked when the object is made."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

TERMS = ("pref", "rank", "budget", "smooth", "kl", "coverage")

_CHOICES = {
    "form": ("logistic", "hinge", "squared_hinge"),
    "span_sampling": ("none", "topk", "random", "stride"),
    "pair_sampling": ("none", "random"),
    "gate_unit": ("micro", "step"),
    "gate_mode": ("skip", "scale", "accumulate"),
    "normalize": ("local", "global"),
}
_AT_LEAST_ONE = (
    "block_size",
    "max_pairs",
    "span_k",
    "span_stride",
    "gate_every",
    "pairs_per_variant",
    "pairs_sampled",
)
_NOT_NEGATIVE = ("num_random_variants", "recent_tokens", "gate_phase")
_WEIGHTS = (
    "lens_loss_weight",
    "rank_weight",
    "budget_weight",
    "budget_smooth_weight",
    "kl_weight",
    "coverage_weight",
    "collapse_weight",
    "gist_delta_weight",
)


@dataclass(frozen=True)
class LensConfig:
    """What the objective computes. With the defaults, value and gradient equal the original per-pair loop.

    Args:
        block_size: children per gist (b); an entry at LOD l spans `block_size**l` tokens.
        max_lod: the coarsest level (L).
        lens_loss_weight: factor the training step puts on the objective.
        rank_weight, margin: relu(margin - (mean score to expand - mean score to collapse)).
        budget_weight: squared imbalance between expanding and collapsing mass, in tokens.
        budget_smooth_weight, budget_smooth_beta: the same imbalance against its moving average.
        kl_weight: symmetric KL to a previous policy's scores on the same contexts.
        coverage_weight, coverage_target, coverage_capacity: penalty for pushing old tokens out of a context
            of             `coverage_capacity` entries (None: its present length).
        temperature: divides every score.
        collapse_weight: weight of collapse targets in the preference term.
        hard_negative_ratio: share of the pairs without the best variant that is kept, largest delta first.
        max_pairs: pairs per sample.
        num_random_variants: variants per sample beside the baseline.
        recent_tokens: tail of the sequence that variants leave alone.
        gist_delta_weight: extra loss of a non-baseline variant per nat above the baseline.
        form, hinge_margin: logistic | hinge | squared_hinge, and the hinge's margin.
        span_sampling, span_k, span_stride: which masked entries the preference term looks at.
        aux_on_full: rank and budget see all masked entries although the preference term is sampled.
        pair_sampling, pairs_sampled: "random" evaluates `pairs_sampled` pairs with delta > 0, drawn
            uniformly.
        pairs_per_variant: at most that many pairs per worse variant, largest delta first (biased).
        gate_every, gate_unit, gate_mode, gate_phase: run the objective every so many micro-steps or steps.
        normalize: divide by the kept pairs of this rank ("local") or of all ranks ("global").
    """

    block_size: int = 32
    max_lod: int = 2
    lens_loss_weight: float = 0.1
    rank_weight: float = 0.5
    margin: float = 0.1
    budget_weight: float = 0.1
    budget_smooth_weight: float = 0.0
    budget_smooth_beta: float = 0.9
    kl_weight: float = 0.0
    coverage_weight: float = 0.0
    coverage_target: float = 1.0
    coverage_capacity: float | None = None
    temperature: float = 1.0
    collapse_weight: float = 1.0
    hard_negative_ratio: float = 1.0
    max_pairs: int = 8
    num_random_variants: int = 2
    recent_tokens: int = 128
    gist_delta_weight: float = 0.0
    form: str = "logistic"
    hinge_margin: float = 1.0
    span_sampling: str = "none"
    span_k: int = 64
    span_stride: int = 1
    aux_on_full: bool = True
    pair_sampling: str = "none"
    pairs_sampled: int | None = None
    pairs_per_variant: int | None = None
    gate_every: int = 1
    gate_unit: str = "micro"
    gate_mode: str = "skip"
    gate_phase: int = 0
    normalize: str = "local"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{field.name}: expected a finite number, got {value}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}: expected an integer >= 1, got {value!r}")
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{name}: expected an integer >= 0, got {value!r}")
        for name in _WEIGHTS:
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected a weight >= 0, got {getattr(self, name)}")
        if self.block_size < 2:
            raise ValueError(f"block_size: expected an integer >= 2, got {self.block_size}")
        if not 1 <= self.max_lod <= 7:
            raise ValueError(f"max_lod: expected 1..7, got {self.max_lod}")
        if self.temperature <= 0:
            raise ValueError(f"temperature: expected a positive number, got {self.temperature}")
        if not 0 < self.hard_negative_ratio <= 1:
            raise ValueError(
                f"hard_negative_ratio: expected a value in (0, 1], got {self.hard_negative_ratio}"
            )
        if not 0 < self.budget_smooth_beta < 1:
            raise ValueError(f"budget_smooth_beta: expected a value in (0, 1), got {self.budget_smooth_beta}")
        if not 0 <= self.coverage_target <= 1:
            raise ValueError(f"coverage_target: expected a value in [0, 1], got {self.coverage_target}")
        if self.coverage_capacity is not None and self.coverage_capacity <= 0:
            raise ValueError(f"coverage_capacity: expected a positive number, got {self.coverage_capacity}")
        if self.pair_sampling == "random" and self.pairs_sampled is None:
            raise ValueError(
                'pairs_sampled: expected a number of pairs with pair_sampling="random", got None'
            )

    @property
    def tau(self) -> float:
        return max(self.temperature, 1e-6)

    @property
    def weights(self) -> dict[str, float]:
        """The factor of each term in the total."""
        return {
            "pref": 1.0,
            "rank": self.rank_weight,
            "budget": self.budget_weight,
            "smooth": self.budget_smooth_weight,
            "kl": self.kl_weight,
            "coverage": self.coverage_weight,
        }

    def spans(self) -> list[int]:
        """Tokens covered by an entry, by LOD."""
        return [self.block_size**lod for lod in range(self.max_lod + 1)]

    def active_terms(self, terms: Iterable[str] | None = None) -> tuple[str, ...]:
        """The terms to compute, in order: weight above zero and, if `terms` is given, named there."""
        if terms is not None:
            asked = set(terms)
            if unknown := asked - set(TERMS):
                raise ValueError(f"terms: expected a subset of {', '.join(TERMS)}, got {sorted(unknown)}")
        else:
            asked = set(TERMS)
        weights = self.weights
        return tuple(t for t in TERMS if t in asked and weights[t] > 0)
