"""Tables of traces: the operator of a kernel is found in current traces, HTA's and the first of Kineto."""

from __future__ import annotations

import csv
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


def test_a_convolutions_backward_is_one_row_in_the_order_of_todays_arguments(tmp_path):
    sizes = [[32, 64, 8, 8], [32, 128, 8, 8], [128, 64, 1, 1]]  # input, gradient, weight
    events = [operator(KINETO, "aten::cudnn_convolution_backward", 0, 50, None, sizes, ("float",) * 3)]
    events += launched(KINETO, 1, 1, 10, 100, 6)
    modern = operator(NEW, "aten::convolution_backward", 100, 50, 7, sizes[1::-1] + sizes[2:], ("float",) * 3)
    inner = operator(NEW, "aten::cudnn_convolution_backward_input", 110, 20, 8, sizes[:2])
    events += [modern, inner, *launched(NEW, 2, 2, 120, 200, 6)]
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": events}))
    (row,) = trace_kernels.extract(path)
    assert row["op"] == "aten::convolution_backward" and row["count"] == 2 and row["device"] == "unknown"
    assert json.loads(row["dims"]) == [sizes[1], sizes[0], sizes[2]]


def test_products_in_fp8_are_judged_and_copies_of_unknown_types_are_left_out(tmp_path):
    load_tool("trace_kernels")
    calibrate = load_tool("calibrate")
    fp8 = "c10::Float8_e4m3fn"
    table = [
        ("aten::_scaled_mm", [[4096, 4096], [4096, 8192], [], []], [fp8, fp8, "float", "float"], "gemm", 300),
        ("aten::copy_", [[64, 64], [64, 64], []], ["float", "c10::Float8_e8m0fnu", "Scalar"], "copy", 3),
    ]
    path = tmp_path / "h100__t.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, calibrate.COLUMNS)
        writer.writeheader()
        for op, dims, dtypes, kernel, us in table:
            cells = ("t", DEVICE["current"], op, json.dumps(dims), json.dumps(dtypes), "[]", kernel, 1)
            writer.writerow(dict(zip(calibrate.COLUMNS, (*cells, us, us, us, us), strict=True)))
    (row,) = calibrate.read([path])
    assert row.op == "_scaled_mm" and row.kernels[0].dtype == "float8"
    # 275 GFLOP at no more than the H100's 1,979 TFLOP/s in fp8.
    assert 139 < calibrate.predicted_us(row, calibrate.RATES["nvidia"]) < 400


@pytest.mark.parametrize(
    ("name", "key"),
    [("NVIDIA A100-PG509-200", "a100-40"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA GB200", "gb200"),
     ("NVIDIA B200", "b200"), ("Tesla V100-DGXS-32GB", "v100"), ("NVIDIA H100 PCIe", "h100-pcie")],
)  # fmt: skip
def test_devices_are_known_by_what_traces_call_them(name, key):
    assert load_tool("calibrate").device_of(name).key == key
    assert (TOOLS / "calibrate.py").exists()
