"""The planner's closed forms reproduce the published figures."""

from __future__ import annotations

import pytest
import torch

from leanstep.logprob.engine.peak_memory import METHODS, plan_memory

GIB = 2**30
T, V, D = 205280, 76032, 2560


def gib(value: int) -> float:
    return value / GIB


def test_the_failing_allocation_is_one_fp32_logits_buffer():
    plan = plan_memory(T, V, D, 1.0, method="gathered-loss", dtype=torch.float32)
    assert plan.parts["kept logits [T', V]"] == 62_431_395_840
    assert gib(62_431_395_840) == pytest.approx(58.14, abs=0.005)


@pytest.mark.parametrize(("rho", "expected"), [(1, 174.4), (0.5, 87.2), (0.25, 43.61), (0.1, 17.4)])
def test_gathering_logits_peaks_at_three_kept_buffers(rho, expected):
    plan = plan_memory(T, V, D, rho, method="gathered-loss", dtype=torch.float32, chunk=1024)
    assert gib(plan.total_bytes) == pytest.approx(expected, abs=0.05)
    assert len(plan.parts) == 3


def test_gathering_in_training_also_holds_the_logits_it_gathers_from():
    plan = plan_memory(T, V, D, 0.25, method="gathered-step", dtype=torch.float32)
    assert gib(plan.extra_bytes) == pytest.approx(145.4, abs=0.1)


@pytest.mark.parametrize(
    ("rho", "kept", "total", "frozen", "recompute_tflop", "policy_tflop"),
    [
        (1, 205280, 2.45, 3.68, 319.6, 239.7),
        (0.5, 102640, 2.45, 2.70, 159.8, 119.9),
        (0.25, 51320, 2.44, 2.21, 79.9, 59.9),
        (0.1, 20528, 2.44, 1.92, 32.0, 24.0),
    ],
)
def test_hidden_level_figures(rho, kept, total, frozen, recompute_tflop, policy_tflop):
    plan = plan_memory(T, V, D, rho)
    assert plan.kept_rows == kept
    assert gib(plan.parts["hidden gradient"]) == pytest.approx(0.98, abs=0.005)
    assert gib(plan.parts["weight gradient"]) == pytest.approx(0.73, abs=0.005)
    assert gib(plan.parts["tiles"]) == pytest.approx(0.73, abs=0.005)
    assert gib(plan.extra_bytes) == pytest.approx(total, abs=0.006)
    assert gib(plan.input_bytes) == pytest.approx(0.98 + 0.36, abs=0.01)
    assert plan.flops / 1e12 == pytest.approx(recompute_tflop, abs=0.06)
    assert gib(plan_memory(T, V, D, rho, method="frozen").extra_bytes) == pytest.approx(frozen, abs=0.006)
    assert plan_memory(T, V, D, rho, method="policy").flops / 1e12 == pytest.approx(policy_tflop, abs=0.06)


def test_narrow_tiles_cost_less():
    plan = plan_memory(T, V, D, 1.0, chunk=2048, tile=8192)
    assert gib(plan.parts["tiles"]) == pytest.approx(0.16, abs=0.005)
    assert gib(plan.extra_bytes) == pytest.approx(1.89, abs=0.01)


def test_kernels_need_no_second_tile():
    for method, tiles in (("linear", 1), ("policy", 1), ("no-grad", 1), ("frozen", 0), ("logits", 2)):
        plain, lean = (plan_memory(T, V, D, 0.25, method=method, kernels=k) for k in (False, True))
        assert plain.extra_bytes - lean.extra_bytes == tiles * 1024 * V * 4


def test_hidden_level_stays_under_six_gib_in_fp32_with_its_inputs():
    plan = plan_memory(T, V, D, 1.0, dtype=torch.float32, chunk=1024)
    assert gib(plan.total_bytes) < 6


@pytest.mark.parametrize("method", METHODS)
def test_peaks_do_not_grow_when_rows_are_dropped(method):
    totals = [plan_memory(4096, 32000, 1024, rho, method=method).total_bytes for rho in (1, 0.5, 0.1, 0)]
    assert totals == sorted(totals, reverse=True)
    if method in ("linear", "policy", "no-grad", "frozen"):
        # No term in T x V: doubling the vocabulary at one row per tile costs far less than a logits buffer.
        small, large = (plan_memory(10**6, v, 64, 0.1, method=method, chunk=1) for v in (10**5, 2 * 10**5))
        assert large.total_bytes - small.total_bytes < 10**6 * 10**5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"T": 0}, "T: expected at least 1, got 0"),
        ({"rho": 1.5}, "rho: expected a fraction"),
        ({"chunk": 0}, "chunk: expected at least 1"),
        ({"tile": -1}, "tile: expected at least 1"),
        ({"method": "magic"}, "method: got 'magic'"),
        ({"dtype": torch.int64}, "dtype: expected a floating dtype"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_memory(**{"T": 8, "V": 8, "D": 8, **arguments})
