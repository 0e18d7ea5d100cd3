"""Whole trainer steps with Qwen's vocabulary: what leanstep's head leaves of the stock trainer's peak."""

from __future__ import annotations

import pytest
import torch

from leanstep.measure.peaks import measure_peak

# TRL and its dependencies warn about their own deprecations; ours stay errors elsewhere.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", ["grpo-step", "sft-step"])
def test_a_quarter_of_completion_tokens_takes_a_third_of_the_extra_memory(name, available_case):
    case = available_case(name)
    overrides = {"batch": 2, "tokens": 64, "width": 64, "layers": 1}
    params = case.params("cpu", overrides)
    assert params["vocab"] == 151936 and params["response_frac"] == 0.25
    workload = case.workload(params, torch.float32, "cpu")
    extra = {}
    for implementation in case.implementations:
        if implementation.name in (case.reference.name, "leanstep"):
            step = implementation.build(workload)
            step()
            extra[implementation.name] = measure_peak(step, workload.tensors).extra_bytes
    assert 3 * extra["leanstep"] <= extra[case.reference.name], extra
