"""Whole trainer steps with Qwen's vocabulary: what leanstep's head leaves of the stock trainer's peak."""

from __future__ import annotations

import importlib

import pytest
import torch

from leanstep.measure.peaks import measure_peak

# TRL and its dependencies warn about their own deprecations; ours stay errors elsewhere.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", ["grpo_step", "sft_step"])
def test_a_quarter_of_completion_tokens_takes_a_third_of_the_extra_memory(name):
    benchmark = importlib.import_module(f"benchmarks.{name}").BENCHMARK
    missing = benchmark.reference.missing(benchmark.params("tiny"))
    if missing is not None:
        pytest.skip(missing)
    params = benchmark.params("cpu", {"batch": 2, "tokens": 64, "width": 64, "layers": 1})
    assert params["vocab"] == 151936 and params["response_frac"] == 0.25
    workload = benchmark.workload(params, torch.float32, "cpu")
    extra = {}
    for row in (benchmark.reference, benchmark.row("leanstep")):
        step = row.build(workload)
        step()
        extra[row.kind] = measure_peak(step, workload.tensors).extra_bytes
    assert 3 * extra["fast"] <= extra["reference"], extra
