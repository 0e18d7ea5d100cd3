"""Hyperparameters of the controller objective in three records; every value is checked on construction."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

TERMS = ("pref", "rank", "budget", "smooth", "kl", "coverage")


def _check_choice(record: Any, name: str, *choices: str) -> None:
    if getattr(record, name) not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {getattr(record, name)!r}")


def _check_integers(record: Any, least: int, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ValueError(f"{name}: expected an integer >= {least}, got {value!r}")


def _check_record(config: Any, name: str, record: type) -> None:
    if not isinstance(getattr(config, name), record):
        raise ValueError(f"{name}: expected {record.__name__}, got {getattr(config, name)!r}")


def _check_finite(record: Any) -> None:
    for entry in fields(record):
        value = getattr(record, entry.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{entry.name}: expected a finite number, got {value}")


@dataclass(frozen=True)
class ObjectiveConfig:
    """Terms of the objective and their weights. The defaults reproduce value and gradient of the original.

    Equivalent to, with the terms [P] of `lens_loss_reference`:
        weights = config.objective.weights
        per_pair = sum(weights[name] * terms[name] for name in config.objective.active_terms())

    Args:
        lens_loss_weight: factor by which the training step multiplies the objective.
        rank_weight, margin: relu(margin - (mean score to expand - mean score to collapse)).
        budget_weight: squared imbalance between expanding and collapsing mass, in tokens.
        budget_smooth_weight, budget_smooth_beta: the same imbalance against its moving average.
        kl_weight: symmetric KL to a previous policy's scores on the same contexts.
        coverage_weight, coverage_target, coverage_capacity: penalty for pushing old tokens out of a context
            of `coverage_capacity` entries (None: its current length).
        temperature: divides every score.
        collapse_weight: weight of collapse targets in the preference term.
        form, hinge_margin: logistic | hinge | squared_hinge, and the hinge's margin.
        normalize: divide by the number of pairs with a target on this rank ("local") or all ranks ("global").
    """

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
    form: str = "logistic"
    hinge_margin: float = 1.0
    normalize: str = "local"

    def __post_init__(self) -> None:
        _check_finite(self)
        _check_choice(self, "form", "logistic", "hinge", "squared_hinge")
        _check_choice(self, "normalize", "local", "global")
        for entry in fields(self):
            if entry.name.endswith("_weight") and getattr(self, entry.name) < 0:
                raise ValueError(f"{entry.name}: expected a weight >= 0, got {getattr(self, entry.name)}")
        if self.temperature <= 0:
            raise ValueError(f"temperature: expected a positive number, got {self.temperature}")
        if not 0 < self.budget_smooth_beta < 1:
            raise ValueError(f"budget_smooth_beta: expected a value in (0, 1), got {self.budget_smooth_beta}")
        if not 0 <= self.coverage_target <= 1:
            raise ValueError(f"coverage_target: expected a value in [0, 1], got {self.coverage_target}")
        if self.coverage_capacity is not None and self.coverage_capacity <= 0:
            raise ValueError(f"coverage_capacity: expected a positive number, got {self.coverage_capacity}")

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

    def active_terms(self, terms: Iterable[str] | None = None) -> tuple[str, ...]:
        """Return the terms to compute, in order: those with a positive weight and, if set, in `terms`."""
        if terms is not None:
            asked = set(terms)
            if unknown := asked - set(TERMS):
                raise ValueError(f"terms: expected a subset of {', '.join(TERMS)}, got {sorted(unknown)}")
        else:
            asked = set(TERMS)
        weights = self.weights
        return tuple(t for t in TERMS if t in asked and weights[t] > 0)


@dataclass(frozen=True)
class SamplingConfig:
    """Which variants, pairs and entries the objective uses.

    The default is every masked entry of the first `max_pairs` pairs of each sample.

    Example:
        cheaper = SamplingConfig(span_sampling="random", span_k=16)
        pref = lens_loss(scores, batch, replace(config, sampling=cheaper)).terms["pref"]       # [P], unbiased

    Args:
        num_random_variants: variants per sample in addition to the baseline.
        recent_tokens: tail of the sequence that variants do not change.
        max_pairs: pairs per sample.
        hard_negative_ratio: fraction of the pairs without the best variant to use, largest delta first.
        pair_sampling, pairs_sampled: "random" evaluates `pairs_sampled` pairs with delta > 0, drawn
            uniformly.
        pairs_per_variant: at most this many pairs per worse variant, largest delta first (biased).
        span_sampling, span_k, span_stride: none | topk | random | stride: the masked entries that the
            preference term uses.
        aux_on_full: rank and budget use all masked entries even if the preference term is sampled.
    """

    num_random_variants: int = 2
    recent_tokens: int = 128
    max_pairs: int = 8
    hard_negative_ratio: float = 1.0
    pair_sampling: str = "none"
    pairs_sampled: int | None = None
    pairs_per_variant: int | None = None
    span_sampling: str = "none"
    span_k: int = 64
    span_stride: int = 1
    aux_on_full: bool = True

    def __post_init__(self) -> None:
        _check_finite(self)
        _check_choice(self, "span_sampling", "none", "topk", "random", "stride")
        _check_choice(self, "pair_sampling", "none", "random")
        _check_integers(self, 1, "max_pairs", "span_k", "span_stride", "pairs_per_variant", "pairs_sampled")
        _check_integers(self, 0, "num_random_variants", "recent_tokens")
        if not 0 < self.hard_negative_ratio <= 1:
            raise ValueError(
                f"hard_negative_ratio: expected a value in (0, 1], got {self.hard_negative_ratio}"
            )
        if self.pair_sampling == "random" and self.pairs_sampled is None:
            raise ValueError(
                'pairs_sampled: expected a number of pairs with pair_sampling="random", got None'
            )


@dataclass(frozen=True)
class GateConfig:
    """Run the objective only on some steps. Counters decide, so that all ranks agree.

    Equivalent to:
        last = gate.every - 1 if gate.mode == "accumulate" else 0
        runs = counter % gate.every == last

    Args:
        every: run on one of this many steps.
        unit: micro | step: the counter counts micro-steps or optimizer steps.
        mode: skip (unscaled when it runs), scale (times `every`: same expected gradient) or accumulate (the
            mean over the skipped micro-steps and the current one).
    """

    every: int = 1
    unit: str = "micro"
    mode: str = "skip"

    def __post_init__(self) -> None:
        _check_choice(self, "unit", "micro", "step")
        _check_choice(self, "mode", "skip", "scale", "accumulate")
        _check_integers(self, 1, "every")

    def runs(self, counter: int) -> bool:
        """Return whether the objective runs at this count."""
        return counter % self.every == (self.every - 1 if self.mode == "accumulate" else 0)


@dataclass(frozen=True)
class LensConfig:
    """Configuration of the objective: geometry of the tree, and one record each for terms, sampling and gate.

    Example:
        config = LensConfig(block_size=32, objective=ObjectiveConfig(kl_weight=0.1), gate=GateConfig(every=4))
        colder = replace(config, objective=replace(config.objective, temperature=0.5))

    Args:
        block_size: children per gist (b); an entry at LOD l spans `block_size**l` tokens.
        max_lod: the coarsest level (L), 1..7.
        objective: terms and weights.
        sampling: variants, pairs and entries to use.
        gate: steps on which the objective runs.
    """

    block_size: int = 32
    max_lod: int = 2
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    gate: GateConfig = field(default_factory=GateConfig)

    def __post_init__(self) -> None:
        _check_record(self, "objective", ObjectiveConfig)
        _check_record(self, "sampling", SamplingConfig)
        _check_record(self, "gate", GateConfig)
        _check_integers(self, 2, "block_size")
        if not isinstance(self.max_lod, int) or not 1 <= self.max_lod <= 7:
            raise ValueError(f"max_lod: expected an integer in 1..7, got {self.max_lod!r}")
