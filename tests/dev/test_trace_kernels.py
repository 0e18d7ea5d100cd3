"""Tables of traces: the operator of a kernel is found in current traces, HTA's and the first of Kineto."""

from __future__ import annotations

import gzip
import json

import pytest
from tool_loader import TOOLS, load_tool

trace_kernels = load_tool("trace_kernels")
NEW = {"op": "cpu_op", "kernel": "kernel", "launch": "cuda_runtime", "dims": "Input Dims"}
KINETO = {"op": "Operator", "kernel": "Kernel", "launch": "Runtime", "dims": "Input dims"}
DEVICE = {
    "current": "NVIDIA H100 80GB HBM3",
    "hta": "NVIDIA A100-SXM4-80GB",
    "kineto": "Tesla V100-DGXS-32GB",
}
SHAPES = [[8, 16], [16, 32]]


def operator(words, name, start, duration, number=None, dims=SHAPES, dtypes=("float", "float"), tid=1):
    args = {words["dims"]: dims, "Input type": list(dtypes)}
    if number is not None:
        args |= {"External id": number, "Input Strides": []}
    return {
        "ph": "X", "cat": words["op"], "name": name, "ts": start, "dur": duration, "tid": tid, "args": args
    }  # fmt: skip


def launched(words, correlation, number, at, start, duration, tid=1):
    """A launch at `at` and its kernel, which runs at `start`; `number`: the External id of both."""
    ids = {"External id": number, "correlation": correlation}
    launch = {"cat": words["launch"], "name": "cudaLaunchKernel", "ts": at, "dur": 2, "tid": tid, "args": ids}
    kernel = {
        "cat": words["kernel"],
        "name": "gemm",
        "ts": start,
        "dur": duration,
        "args": {**ids, "stream": 7},
    }
    return [{"ph": "X", **launch}, {"ph": "X", **kernel}]


def trace(form: str) -> dict:
    """A product inside `linear`, a negation on another thread that covers the same time, and a copy."""
    words = KINETO if form == "kineto" else NEW
    ids = [41, 42, 43, 44] if form != "kineto" else [None] * 4
    events = [
        operator(words, "aten::linear", 0, 100, ids[0]),
        operator(words, "aten::addmm", 10, 50, ids[1]),
        operator(words, "aten::neg", 5, 80, ids[2], [[64]], ["float"], tid=2),
        operator(words, "aten::copy_", 200, 10, ids[3], [[4, 4], [4, 4], []], ["float", "float", "Scalar"]),
    ]
    # In older traces a kernel has its launch's id, which may also be the id of an unrelated operator.
    for correlation, number, at, start, tid in (
        (43, 42, 20, 300, 1),
        (41, 43, 30, 310, 2),
        (9, 44, 205, 320, 1),
    ):
        events += launched(
            words, correlation, number if form == "current" else correlation, at, start, 4, tid
        )
    return {"deviceProperties": [{"name": DEVICE[form]}], "traceEvents": events}


@pytest.mark.parametrize("form", ["current", "hta", "kineto"])
@pytest.mark.parametrize("packed", [True, False])
def test_kernels_get_the_operator_that_launched_them(tmp_path, form, packed):
    path = tmp_path / ("t.json.gz" if packed else "t.json")
    text = json.dumps(trace(form)).encode()
    path.write_bytes(gzip.compress(text) if packed else text)
    rows = {row["op"]: row for row in trace_kernels.extract(path)}
    assert set(rows) == {"aten::addmm", "aten::neg", "aten::copy_"}
    assert json.loads(rows["aten::addmm"]["dims"]) == SHAPES and rows["aten::addmm"]["strides"] == "[]"
    assert {(row["trace"], row["device"], row["median_us"]) for row in rows.values()} == {
        ("t", DEVICE[form], 4)
    }


@pytest.mark.parametrize(
    ("name", "key"),
    [("NVIDIA A100-PG509-200", "a100-40"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA GB200", "gb200"),
     ("NVIDIA B200", "b200"), ("Tesla V100-DGXS-32GB", "v100"), ("NVIDIA H100 PCIe", "h100-pcie")],
)  # fmt: skip
def test_devices_are_known_by_what_traces_call_them(name, key):
    assert load_tool("calibrate").device_of(name).key == key
    assert (TOOLS / "calibrate.py").exists()
