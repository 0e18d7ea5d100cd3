"""`python -m benchmarks.NAME --device cuda`, from the command line to its JSON, on a simulated device.

Times are those of the rehearsal's clock and values are assumed: what is shown is that the GPU's control flow
runs (events, flushes, warm-up, memory, peers' kernels) and what it writes.
"""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
from rehearse.rehearsed import SCRIPTS, run_script

from leanstep.rehearse.events import Launch


@pytest.fixture(scope="module")
def benched(tmp_path_factory):
    pytest.importorskip("triton", reason="Triton is not installed")
    folder = tmp_path_factory.mktemp("bench_cuda")
    ran = run_script(
        SCRIPTS / "bench_cuda.py", str(folder), capture=folder, steps=10**6, device="h100", host_us=10.0
    )
    assert ran.recording.refused is None, ran.recording.refused
    return ran, {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def rows_of(result):
    return {row["impl"]: row for row in result["rows"]}


def test_the_object_names_the_device_and_the_dtype(benched):
    result = benched[1]["logprob_linear"]
    assert result["device"] == "cuda:0 (NVIDIA H100 80GB HBM3)" and result["dtype"] == "bf16"
    assert result["accelerator"]["capability"] == "sm_90" and result["accelerator"]["l2_bytes"] == 50_000_000
    assert {"leanstep", "torch", "threads", "case", "size", "rows"} <= set(result)


def test_every_row_that_ran_has_a_time_a_peak_and_its_host_reads(benched):
    for name in ("logprob_linear", "transpose_add"):
        for row in benched[1][name]["rows"]:
            if row["impl"] in ("reference", "leanstep", "limit"):
                assert 0 < row["p20_s"] <= row["median_s"] <= row["p80_s"] < 1, row
                assert row["peak_bytes"] > 0 and row["host_syncs"] == 0, row


def test_the_clock_is_the_devices(benched):
    """Three bare products of the tiny size: a launch each and no more, whatever this machine takes."""
    limit = rows_of(benched[1]["logprob_linear"])["limit"]
    assert 20e-6 < limit["median_s"] < 60e-6


def test_the_cache_is_flushed_before_every_sample(benched):
    # Twice the cache of 50 MB, written by one kernel.
    fills = [
        event
        for event in benched[0].recording.events
        if isinstance(event, Launch) and sum(kernel.nbytes for kernel in event.kernels) == 100_000_000
    ]
    assert len(fills) > 12 and {event.name for event in fills} == {"zero_"}


def test_a_gpu_runs_the_peers_own_kernels(benched):
    for peer in ("cut_cross_entropy", "verl"):
        if importlib.util.find_spec(peer) is None:
            pytest.skip(f"{peer} is not installed")
    rows = rows_of(benched[1]["logprob_linear"])
    assert rows["verl-triton"]["note"].startswith("needs hidden divisible by 128")
    assert not rows["verl-triton"]["available"] and rows["cut-cross-entropy"]["available"]
    launched = [e for e in benched[0].recording.events if isinstance(e, Launch)]
    assert "cut-cross-entropy" in {kernel.name for event in launched for kernel in event.kernels}


@pytest.mark.parametrize("name", ["logprob_linear", "muon_step", "lens_loss"])
def test_the_default_size_and_dtype_of_a_gpu(name):
    benchmark = importlib.import_module(f"benchmarks.{name}").BENCHMARK
    assert (benchmark.size_on("cuda"), benchmark.dtype_on("cuda")) == ("gpu", torch.bfloat16)
