"""Test whether a mathematically equivalent variant shifts the loss of a training run.

Kernel boundaries and summation orders change rounding, and rounding changes a training run. Whether it
changes the *result* is a statistical question. Two variants are trained from the same seeds on the same data,
and a paired t-test compares their final losses. The report also states the smallest shift that this number of
runs can detect: "no significant difference" from four runs means little.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from leanstep.case import Case
from leanstep.extras import require
from leanstep.measure import parity

CONFIDENCE = 0.95
POWER = 0.80
# Per-step losses count as diverged above this relative difference.
DIVERGED = 1e-6


@dataclass(frozen=True)
class DriftRow:
    """One variant compared with the reference. Losses are in the recipe's unit (usually nats per token)."""

    case: str
    impl: str
    runs: int
    steps: int
    loss_reference: float
    loss_variant: float
    shift: float
    shift_low: float
    shift_high: float
    p_value: float
    detectable_shift: float
    first_divergence: int | None
    fp64_error: float
    fp64_error_reference: float
    fp64_rank: int
    ok: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def paired_shift(reference: list[float], variant: list[float]) -> dict[str, float]:
    """Return the mean of variant - reference, its interval, two-sided p-value and detectable shift.

    `detectable_shift` is the true shift that this many pairs find significant with 80 % probability:
    (t_{0.975} + z_{0.80}) * sd / sqrt(n).
    """
    require("--drift", "stats", "scipy")
    from scipy import stats

    if len(reference) != len(variant):
        raise ValueError(f"variant: expected {len(reference)} losses to match reference, got {len(variant)}")
    if len(reference) < 2:
        raise ValueError(f"runs: expected at least 2 paired runs, got {len(reference)}")
    differences = [b - a for a, b in zip(reference, variant, strict=True)]
    n = len(differences)
    mean = math.fsum(differences) / n
    sd = math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (n - 1))
    error = sd / math.sqrt(n)
    t_critical = float(stats.t.ppf(0.5 + CONFIDENCE / 2, n - 1))
    if error == 0.0:
        # No spread: bitwise equal runs (p = 1), or a constant shift that noise cannot explain (p = 0).
        p_value = 1.0 if mean == 0.0 else 0.0
    else:
        p_value = float(2 * stats.t.sf(abs(mean / error), n - 1))
    return {
        "shift": mean,
        "shift_low": mean - t_critical * error,
        "shift_high": mean + t_critical * error,
        "p_value": p_value,
        "detectable_shift": (t_critical + float(stats.norm.ppf(POWER))) * error,
    }


def first_divergence(reference: list[float], variant: list[float]) -> int | None:
    """Return the first step whose losses differ by more than 1e-6 relative, or None."""
    for step, (a, b) in enumerate(zip(reference, variant, strict=True)):
        if abs(a - b) > DIVERGED * max(abs(a), abs(b)):
            return step
    return None


def run_drift(
    case: Case,
    *,
    runs: int = 8,
    steps: int = 60,
    on_run: Callable[[str, int, int], None] | None = None,
) -> list[DriftRow]:
    """Train every fast path of the case and the reference; return one row each, closest to fp64 first."""
    assert case.drift is not None, case.name
    curves = {case.reference.name: [case.drift(case.reference.name, seed, steps) for seed in range(runs)]}
    variants = [
        i for i in case.implementations if i.kind == "fast" and i.missing(case.params("tiny")) is None
    ]
    for implementation in variants:
        curves[implementation.name] = []
        for seed in range(runs):
            curves[implementation.name].append(case.drift(implementation.name, seed, steps))
            if on_run:
                on_run(implementation.name, seed + 1, runs)
    errors = {i.name: _fp64_error(case, i.name) for i in (case.reference, *variants)}
    ranking = sorted(errors, key=lambda name: errors[name])
    reference_curves = curves[case.reference.name]
    rows = []
    for implementation in variants:
        own = curves[implementation.name]
        final_reference = [_tail(c) for c in reference_curves]
        final_own = [_tail(c) for c in own]
        statistics = paired_shift(final_reference, final_own)
        diverged = [first_divergence(a, b) for a, b in zip(reference_curves, own, strict=True)]
        seen = [d for d in diverged if d is not None]
        rows.append(
            DriftRow(
                case=case.name,
                impl=implementation.name,
                runs=runs,
                steps=steps,
                loss_reference=sum(final_reference) / runs,
                loss_variant=sum(final_own) / runs,
                first_divergence=min(seen) if seen else None,
                fp64_error=errors[implementation.name],
                fp64_error_reference=errors[case.reference.name],
                fp64_rank=ranking.index(implementation.name) + 1,
                # A significant shift to a worse loss fails; a better loss is not an error.
                ok=not (statistics["p_value"] < 1 - CONFIDENCE and statistics["shift"] > 0),
                **statistics,
            )
        )
    return sorted(rows, key=lambda row: row.fp64_rank)


def _tail(losses: list[float]) -> float:
    """Return the mean of the last tenth: the loss of a single step depends mostly on its batch."""
    count = max(1, len(losses) // 10)
    return sum(losses[-count:]) / count


def _fp64_error(case: Case, name: str) -> float:
    """Return the largest distance from fp64 over all tensors of the tiny size."""
    workload = case.workload(case.params("tiny"), case.bench_dtype)
    truth = parity.truth_of(case, workload)
    own = case.implementation(name).build(workload)()
    return max((parity.relative_error(own[key], t) for key, t in truth.items() if key in own), default=0.0)
