"""Interleaving, garbage collection, ratios that mean something."""

from __future__ import annotations

import gc
import time

import torch

from leanstep.measure.timing import interleave


def test_every_step_runs_in_every_round_and_the_order_rotates():
    calls = []

    def step(name, seconds):
        def run():
            calls.append(name)
            time.sleep(seconds)

        return run

    timings = interleave(
        {"a": step("a", 0.02), "b": step("b", 0.02)}, budget_s=0.2, min_rounds=3, max_rounds=3
    )
    # Two warm-up calls each, then a b | b a | a b ...: neither always goes first.
    assert "".join(calls) == "aabb" + "ab" + "ba" + "ab"
    assert timings["a"].samples == 3


def test_medians_follow_the_true_ratio():
    steps = {"slow": lambda: time.sleep(0.03), "fast": lambda: time.sleep(0.003)}
    timings = interleave(steps, budget_s=0.5)
    assert 5 < timings["slow"].median_s / timings["fast"].median_s < 12
    assert timings["slow"].p20_s <= timings["slow"].median_s <= timings["slow"].p80_s


def test_the_first_call_is_reported_apart():
    state = {"first": True}

    def step():
        if state.pop("first", False):
            time.sleep(0.2)

    timing = interleave({"step": step}, budget_s=0.05)["step"]
    assert timing.first_call_s > 0.19 and timing.median_s < 0.01


def test_the_garbage_collector_is_off_inside_and_restored_after():
    seen = []
    interleave({"step": lambda: seen.append(gc.isenabled())}, budget_s=0.01, max_rounds=3)
    assert not any(seen) and gc.isenabled()


def test_another_gpu_is_waited_for_by_its_name(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(device))
    interleave({"step": lambda: None}, budget_s=0.01, max_rounds=3, device="cuda:1")
    assert set(waited) == {torch.device("cuda:1")}


def test_a_failing_step_restores_the_garbage_collector():
    def boom():
        raise RuntimeError("on purpose")

    try:
        interleave({"step": boom}, budget_s=0.01)
    except RuntimeError:
        pass
    assert gc.isenabled()
