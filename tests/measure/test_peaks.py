"""Measured peaks are exact; simulated ones run the real code on fake tensors, within 5 % of the measured."""

from __future__ import annotations

import pytest
import torch

from leanstep.case import Workload, get_case, with_gradients
from leanstep.measure.peaks import measure_peak, memory_timeline, simulate_peak

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


def within_5_percent(build, make) -> None:
    planned = simulate_peak(build, make)
    workload = make()
    step = build(workload)
    step()  # one-off caches are not the step's peak
    measured = measure_peak(step, workload.tensors)
    assert planned.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.05)
    assert planned.returned_bytes == measured.returned_bytes


def naive(tensors, constants):
    logits = tensors["hidden"] @ tensors["weight"].T
    logp = torch.log_softmax(logits, -1)
    entropy = -(logp.exp() * logp).sum(-1)
    return {"logp": logp.gather(1, tensors["tokens"][:, None]).squeeze(1), "entropy": entropy}


def make_naive() -> Workload:
    return Workload(
        {
            "hidden": torch.randn(512, 64),
            "weight": torch.randn(4096, 64),
            "tokens": torch.randint(0, 4096, (512,)),
        }
    )


def test_a_tensor_used_twice_is_planned_like_the_engine_adds_its_gradients():
    within_5_percent(with_gradients(naive, ("hidden", "weight")), make_naive)


@pytest.mark.parametrize("impl", ["reference", "leanstep"])
def test_the_fused_head_is_planned_as_measured(impl):
    case = get_case("logprob-linear")
    params = {**case.params("tiny")}
    for key, value in (("tokens", 512), ("hidden", 128), ("vocab", 4096)):
        assert key in params, params
        params[key] = value
    within_5_percent(case.implementation(impl).build, lambda: case.workload(params, torch.float32))


def test_nothing_is_allocated_for_a_58_gib_buffer():
    def step_of(workload):
        return lambda: {"logits": workload.tensors["x"] @ workload.tensors["w"].T}

    planned = simulate_peak(
        step_of, lambda: Workload({"x": torch.empty(205280, 8), "w": torch.empty(76032, 8)})
    )
    assert planned.peak_bytes == 205280 * 76032 * 4 == planned.largest_bytes
    assert planned.largest_shape == (205280, 76032)
    assert planned.extra_bytes == 0
