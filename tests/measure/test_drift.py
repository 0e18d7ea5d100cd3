"""Paired runs: figures agree with scipy and the literature; a real shift is detected, noise is not."""

from __future__ import annotations

import random

import pytest
from scipy import stats

from leanstep.measure.drift import first_divergence, paired_shift


def test_the_paired_test_equals_scipy():
    a = [3.21, 3.19, 3.25, 3.22, 3.20]
    b = [3.22, 3.21, 3.25, 3.24, 3.20]
    shift = paired_shift(a, b)
    expected = stats.ttest_rel(b, a)
    assert shift["p_value"] == pytest.approx(expected.pvalue)
    interval = expected.confidence_interval(0.95)
    assert (shift["shift_low"], shift["shift_high"]) == pytest.approx((interval.low, interval.high))


def test_bit_equal_runs_have_no_shift_and_p_one():
    shift = paired_shift([3.2, 3.3, 3.1], [3.2, 3.3, 3.1])
    assert shift["shift"] == 0 and shift["p_value"] == 1 and shift["detectable_shift"] == 0


def test_four_runs_cannot_see_a_small_shift():
    generator = random.Random(0)
    a = [3.28 + generator.gauss(0, 0.0012) for _ in range(4)]
    b = [3.2806 + generator.gauss(0, 0.0012) for _ in range(4)]
    assert paired_shift(a, b)["detectable_shift"] > 0.0006


def test_unequal_numbers_of_runs_are_refused():
    with pytest.raises(ValueError, match="expected 2 losses to match reference, got 3"):
        paired_shift([1.0, 2.0], [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="at least 2 paired runs"):
        paired_shift([1.0], [1.0])


def test_first_divergence_ignores_rounding():
    assert first_divergence([1.0, 1.0, 1.0], [1.0, 1.0 + 1e-8, 1.1]) == 2
    assert first_divergence([1.0], [1.0]) is None
