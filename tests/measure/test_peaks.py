"""Measured peaks are exact."""

from __future__ import annotations

import torch

from leanstep.measure.peaks import measure_peak, memory_timeline

MIB = 2**20


def test_the_peak_counts_temporaries_and_extra_bytes_subtract_what_is_returned():
    x = torch.ones(256, 1024)

    def step():
        temporary = x + 1
        result = temporary * 2
        del temporary
        return {"result": result}

    peak = measure_peak(step, {"x": x})
    assert abs(peak.peak_bytes - 2 * MIB) < 4096
    assert peak.returned_bytes == MIB
    assert abs(peak.extra_bytes - MIB) < 4096


def test_a_view_of_an_input_is_not_returned_memory():
    x = torch.ones(256, 1024)
    peak = measure_peak(lambda: {"view": x[1:]}, {"x": x})
    assert peak.returned_bytes == 0 and peak.peak_bytes == 0


def test_memory_that_a_step_updates_in_place_is_not_returned_by_it():
    weight = torch.ones(256, 1024)

    def step():
        weight.add_(torch.ones(128, 1024).repeat(2, 1))
        return {"weight": weight}

    peak = measure_peak(step, {})
    assert peak.returned_bytes == 0 and abs(peak.extra_bytes - 1.5 * MIB) < 4096


def test_backward_memory_on_the_engines_thread_is_counted():
    x = torch.ones(256, 1024, requires_grad=True)

    def step():
        (grad,) = torch.autograd.grad((x * 2).exp().sum(), x)
        return {"grad": grad}

    # x*2, its exp (the gradient's factor) and the gradient: at least two of them together.
    assert measure_peak(step, {"x": x}).peak_bytes >= 2 * MIB


def test_another_gpus_own_statistics_are_read(monkeypatch):
    asked = {}

    def answer(name, value):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: asked.setdefault(name, device) and value)

    for name in ("synchronize", "reset_peak_memory_stats"):
        answer(name, None)
    answer("memory_allocated", 100)
    answer("max_memory_allocated", 150)
    x = torch.ones(4)
    assert measure_peak(lambda: {"x": x}, {"x": x}, "cuda:1").peak_bytes == 50
    assert set(asked.values()) == {torch.device("cuda:1")} and len(asked) == 4


def test_the_timeline_ends_at_what_is_still_held():
    outputs, timeline = memory_timeline(lambda: {"a": torch.ones(1024, 256) + 1})
    assert outputs["a"].shape == (1024, 256)
    assert timeline[-1][1] == MIB and abs(max(level for _, level in timeline) - 2 * MIB) < 4096


def test_no_python_record_is_built_per_op(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("the profiler parsed every op; a loop of 300,000 would take a minute")

    monkeypatch.setattr(torch.autograd.profiler.profile, "_parse_kineto_results", refuse)
    x = torch.zeros(1000)
    _, timeline = memory_timeline(lambda: {"y": x + 1 + 1})
    # Two results of 4,000 bytes, and the scalars.
    assert 8000 <= max(level for _, level in timeline) < 8100
