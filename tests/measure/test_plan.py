"""The planner runs the real code on fake tensors; its peak is within 5 % of the measured one."""

from __future__ import annotations

import pytest
import torch

from leanstep.case import Workload, get_case, with_gradients
from leanstep.measure.memory import measure_peak
from leanstep.measure.plan import simulate_peak


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
