"""Tables of traces: a kernel gets the operator whose id it has, and its gap to the kernel before it."""

from __future__ import annotations

import gzip
import json

import pytest
from tool_loader import load_tool

SHAPES = [[8, 16], [16, 32]]


def operator(name: str, number: int, dims: list, dtypes: list) -> dict:
    args = {"External id": number, "Input Dims": dims, "Input type": dtypes, "Input Strides": []}
    return {"cat": "cpu_op", "name": name, "ts": 0, "dur": 50, "args": args}


def kernel(number: int, start: float) -> dict:
    args = {"External id": number, "stream": 7}
    return {"cat": "kernel", "name": "gemm", "ts": start, "dur": 4, "args": args}


def test_kernels_get_the_operator_that_launched_them(tmp_path):
    events = [
        operator("aten::addmm", 42, SHAPES, ["float", "float"]),
        operator("aten::neg", 43, [[64]], ["float"]),
        *(kernel(42, 300), kernel(43, 306), kernel(42, 400), kernel(99, 500)),
    ]
    trace = {"deviceProperties": [{"name": "NVIDIA H100 80GB HBM3"}], "traceEvents": events}
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    product, negation = load_tool("trace_kernels").extract(path)
    assert (product["trace"], product["device"]) == ("t", "NVIDIA H100 80GB HBM3")
    assert (product["op"], json.loads(product["dims"]), product["strides"]) == ("aten::addmm", SHAPES, "[]")
    # Both launches of an operator are one row; the negation's kernel began 2 us after the one before it.
    assert (product["kernels"], product["median_us"]) == ("gemm+gemm", 8)
    assert (negation["median_us"], negation["queued_us"]) == (4, 6)


def test_a_trace_of_launch_ids_is_refused(tmp_path):
    launched = kernel(42, 300)
    launched["args"]["correlation"] = 42
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"traceEvents": [operator("aten::addmm", 42, SHAPES, ["float"]), launched]}))
    with pytest.raises(ValueError, match="id of their operator"):
        load_tool("trace_kernels").extract(path)


@pytest.mark.parametrize(
    ("name", "key"),
    [("NVIDIA A100-PG509-200", "a100-40"), ("NVIDIA GB200", "gb200"), ("NVIDIA H100 PCIe", "h100-pcie")],
)
def test_devices_are_known_by_what_traces_call_them(name, key):
    assert load_tool("calibrate").device_of(name).key == key
