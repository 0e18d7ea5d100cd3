"""Interleaving, garbage collection, ratios that mean something."""

from __future__ import annotations

import functools
import gc
import importlib
import signal
import sys
import threading
import time

import pytest
import torch

from leanstep.measure import timing as timing_module
from leanstep.measure.timing import TimeUp, clock_of, interleave, time_box


class MadeTime:
    """A clock that only its own `sleep` advances, so that ratios do not depend on the load."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    monotonic = perf_counter

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def made_time(monkeypatch):
    clock = MadeTime()
    monkeypatch.setattr(timing_module, "time", clock)
    return clock


def test_medians_follow_the_true_ratio(made_time):
    steps = {"slow": lambda: made_time.sleep(0.03), "fast": lambda: made_time.sleep(0.003)}
    timings = interleave(steps, budget_s=0.5)
    assert timings["slow"].median_s / timings["fast"].median_s == pytest.approx(10)
    assert timings["slow"].samples >= 3 and timings["fast"].samples > timings["slow"].samples


def test_the_garbage_collector_is_off_inside_and_restored_after():
    seen = []
    interleave({"step": lambda: seen.append(gc.isenabled())}, budget_s=0.01, max_rounds=3)
    assert not any(seen) and gc.isenabled()


def endless():
    while True:
        time.sleep(0.005)


def test_a_time_box_ends_what_does_not_end_and_restores_the_timer():
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeUp), time_box(0.05):
        endless()
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    with time_box(60):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_code_that_falls_back_on_errors_does_not_swallow_the_end_of_its_time():
    def stubborn():
        try:
            endless()
        except Exception:
            endless()

    with pytest.raises(TimeUp), time_box(0.05):
        stubborn()


def test_off_the_main_thread_the_block_runs_to_its_end_and_is_over_all_the_same():
    seen = []

    def work():
        try:
            with time_box(0.01):
                time.sleep(0.03)
                seen.append("ran")
        except TimeUp:
            seen.append("over")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == ["ran", "over"]


def test_an_import_is_not_cut_in_half(tmp_path, monkeypatch):
    (tmp_path / "slow_module.py").write_text(
        "import time\nfor _ in range(40): time.sleep(0.005)\nwhole = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TimeUp), time_box(0.02):
        importlib.import_module("slow_module")
        endless()
    assert sys.modules.pop("slow_module").whole


def test_a_step_past_its_time_box_does_not_hold_up_the_others():
    timings = interleave({"endless": endless, "fast": lambda: None}, budget_s=0.02, box_s=2.0)
    assert list(timings) == ["fast"] and timings["fast"].samples >= 3


def test_rounds_that_would_take_longer_than_the_box_are_fewer():
    first_calls = {"step": 1.0}
    run = functools.partial(interleave, {"step": lambda: None}, budget_s=0.4, first_calls=first_calls)
    assert run(box_s=2.5)["step"].samples == 2
    assert run()["step"].samples == 3


def test_quick_steps_have_several_rounds_where_slow_ones_have_one(made_time):
    calls = []

    def step(name, seconds):
        return lambda: (calls.append(name), made_time.sleep(seconds))

    steps = {"S": step("S", 3.0), "T": step("T", 2.0), "q": step("q", 0.5), "r": step("r", 0.5)}
    timings = interleave(steps, budget_s=1.0, box_s=7.0)
    assert [timings[name].samples for name in "STqr"] == [1, 1, 5, 5]
    # One call of each before the rounds (a second takes too long); the slow ones then run in different
    # rounds.
    assert "".join(calls)[-12:] == "Sqr" + "Tqr" + "qr" + "rq" + "qr"


class FakeCuda:
    """A fake of the torch.cuda functions that EventClock uses, with a clock that the steps advance."""

    def __init__(self, monkeypatch, l2_bytes=1000):
        self.now, self.log = 0.0, []
        fake = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self, stream):
                self.at = fake.now
                fake.log.append(f"record on {stream}")

            def elapsed_time(self, other):
                return 1e3 * (other.at - self.at)

        class Buffer:
            def __init__(self, elements, dtype, device):
                fake.log.append(f"{elements * dtype.itemsize} bytes on {device}")

            def zero_(self):
                fake.now += 5.0
                fake.log.append("flush")

        properties = type("Properties", (), {"L2_cache_size": l2_bytes})
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.log.append(f"wait for {device}"))
        monkeypatch.setattr(torch, "empty", Buffer)

    def step(self, seconds):
        def run():
            self.now += seconds
            self.log.append("run")

        return run


def test_a_gpu_is_timed_by_events_on_its_own_stream_behind_a_flush(monkeypatch):
    cuda = FakeCuda(monkeypatch, l2_bytes=50 * 2**20)
    clock = clock_of("cuda:1")
    assert cuda.log == [f"{100 * 2**20} bytes on cuda:1"]
    cuda.log.clear()
    assert clock(cuda.step(0.25)) == pytest.approx(0.25)  # the flush of 5 s is outside
    record = "record on stream of cuda:1"
    assert cuda.log == ["flush", "wait for cuda:1", record, "run", record, "wait for cuda:1"]


def test_a_gpu_is_warmed_up_and_every_sample_is_one_call(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr(timing_module, "WARM_S", 0.0)
    timings = interleave(
        {"a": cuda.step(1e-5), "b": cuda.step(2e-5)}, budget_s=1e-3, max_rounds=3, device="cuda:0"
    )
    assert timings["a"].median_s == pytest.approx(1e-5) and timings["b"].median_s == pytest.approx(2e-5)
    # First call, warm-up, three rounds of several samples, each one call behind its own flush.
    calls = cuda.log.count("run")
    assert (
        calls
        == cuda.log.count("flush")
        == 2 + 2 * timing_module.WARM_CALLS + sum(t.samples for t in timings.values())
    )
