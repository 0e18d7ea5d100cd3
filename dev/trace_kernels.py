"""Kernels of a trace of torch's profiler, each with the operator that launched it: tables as in dev/traces.

A trace gives a kernel the id of its operator; kernels of traces that do not are left out.
"""

from __future__ import annotations

import collections
import gzip
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]

COLUMNS = (
    *("trace", "device", "op", "dims", "dtypes", "strides", "kernels"),
    *("count", "median_us", "min_us", "max_us", "queued_us"),
)
# A kernel that starts later than this after the one before it found an idle device.
QUEUED_US = 5.0
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def extract(path: Path) -> list[Event]:
    """The table of a trace: one row for each operator with its shapes, dtypes, strides and kernels.

    median_us, min_us, max_us: of the kernels' durations. queued_us: median of the durations with the gap
    before each kernel, where it is shorter than QUEUED_US: from the end of the kernel before it.
    """
    data = path.read_bytes()
    trace = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    launched = collections.defaultdict(list)
    events = trace["traceEvents"]
    operators = {e["args"].get("External id"): e for e in events if e.get("cat") == "cpu_op" and "args" in e}
    on_device = [e for e in events if e.get("cat") in ON_DEVICE]
    # Older traces give a kernel the id of its launch: equal numbers of operators mean nothing.
    old = all(e["args"].get("External id") == e["args"].get("correlation") for e in on_device)
    for kernel, gap in _with_gaps([] if old else on_device):
        number = kernel["args"].get("External id")
        if number is not None and number in operators:
            launched[number].append((kernel, gap))
    rows = collections.defaultdict(list)
    for number, kernels in launched.items():
        names = "+".join(kernel["name"][:70] for kernel, _ in kernels)
        times = sum(kernel["dur"] for kernel, _ in kernels), sum(gap for _, gap in kernels)
        rows[(*_signature(operators[number]), names)].append(times)
    if not rows:
        raise ValueError(f"{path}: expected kernels with the id of their operator, got none; older torch?")
    device = (trace.get("deviceProperties") or [{}])[0].get("name", "unknown")
    stem = path.name.removesuffix(".gz").removesuffix(".json")
    table = [
        dict(zip(COLUMNS, (stem, device, *key, *_statistics(times)), strict=True))
        for key, times in rows.items()
    ]
    return sorted(table, key=lambda row: -row["count"] * row["median_us"])


def _statistics(times: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    durations = [round(duration, 3) for duration, _ in times]
    queued = round(statistics.median(duration + gap for duration, gap in times), 4)
    return len(times), round(statistics.median(durations), 4), min(durations), max(durations), queued


def _with_gaps(events: Sequence[Event]) -> Iterator[tuple[Event, float]]:
    """Events of the device in order, each with the short gap before it on its stream."""
    ends: dict[object, float] = {}
    for event in sorted(events, key=lambda e: e["ts"]):
        stream, end = event["args"].get("stream"), event["ts"] + event["dur"]
        gap = event["ts"] - ends.get(stream, -math.inf)
        ends[stream] = max(end, ends.get(stream, end))
        yield event, gap if 0 < gap < QUEUED_US else 0.0


def _signature(operator: Event) -> tuple[str, str, str, str]:
    dims, dtypes, strides = (operator["args"].get(f"Input {name}") for name in ("Dims", "type", "Strides"))
    old = strides is None and dims is not None
    return operator["name"], json.dumps(dims), json.dumps(dtypes), json.dumps([] if old else strides)
