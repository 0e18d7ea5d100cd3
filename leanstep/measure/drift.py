"""Test whether a mathematically equivalent variant shifts the loss of a training run.

Kernel boundaries and summation orders change rounding, and rounding changes a training run. Whether it
changes the *result* is a statistical question. Two variants are trained from the same seeds on the same data,
and a paired t-test compares their final losses. The report also states the smallest shift that this number of
runs can detect: "no significant difference" from four runs means little.
"""

from __future__ import annotations

import math

from leanstep.extras import require

CONFIDENCE = 0.95
POWER = 0.80
# Per-step losses count as diverged above this relative difference.
DIVERGED = 1e-6


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
