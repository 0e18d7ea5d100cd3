"""Kernels of a trace of torch's profiler, each with the operator that launched it: tables as in dev/traces.

Three forms are read. Current traces give a kernel the id of its operator. Older ones (HTA's) give it the id
of its launch, and the first ones of Kineto also name categories otherwise ("Operator", "Kernel", "Runtime").
There the launch is found by its correlation id; the operator is the innermost one with shapes around it.
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
CATEGORIES = {
    "Operator": "cpu_op",
    "Kernel": "kernel",
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
    "Runtime": "cuda_runtime",
}
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
# An operator whose parts are priced together, though the parts have shapes of their own.
WHOLE = "aten::convolution_backward"
# Its name before torch 1.11, with input and gradient the other way round.
OLD_BACKWARD = "aten::cudnn_convolution_backward"


def extract(path: Path) -> list[Event]:
    """The table of a trace: one row for each operator with its shapes, dtypes, strides and kernels.

    median_us, min_us, max_us: of the kernels' durations. queued_us: median of the durations with the gap
    before each kernel, where it is shorter than QUEUED_US: from the end of the kernel before it.
    """
    data = path.read_bytes()
    trace = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    launched = collections.defaultdict(list)
    operators: dict[int, Event] = {}
    events = [_renamed(event) for event in trace["traceEvents"]]
    owner_of = _owners(events)
    for kernel, gap in _with_gaps([e for e in events if e.get("cat") in ON_DEVICE]):
        operator = owner_of(kernel)
        if operator is not None:
            operators[id(operator)] = operator
            launched[id(operator)].append((kernel, gap))
    rows = collections.defaultdict(list)
    for number, kernels in launched.items():
        names = "+".join(kernel["name"][:70] for kernel, _ in kernels)
        times = sum(kernel["dur"] for kernel, _ in kernels), sum(gap for _, gap in kernels)
        rows[(*_signature(operators[number]), names)].append(times)
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


def _renamed(event: Event) -> Event:
    category = event.get("cat")
    return {**event, "cat": CATEGORIES[category]} if category in CATEGORIES else event


def _with_gaps(events: Sequence[Event]) -> Iterator[tuple[Event, float]]:
    """Events of the device in order, each with the short gap before it on its stream."""
    ends: dict[object, float] = {}
    for event in sorted(events, key=lambda e: e["ts"]):
        stream, end = event["args"].get("stream"), event["ts"] + event["dur"]
        gap = event["ts"] - ends.get(stream, -math.inf)
        ends[stream] = max(end, ends.get(stream, end))
        yield event, gap if 0 < gap < QUEUED_US else 0.0


def _owners(events: Sequence[Event]) -> Any:
    """A function from a kernel to its operator, or None."""
    operators = [e for e in events if e.get("cat") == "cpu_op" and "args" in e]
    by_id = {e["args"]["External id"]: e for e in operators if "External id" in e["args"]}
    launches = [e for e in events if e.get("cat") in LAUNCHES and "correlation" in e.get("args", ())]
    around = _enclosing([e for e in operators if _shapes(e)[0] is not None and "dur" in e], launches)

    def owner(kernel: Event) -> Event | None:
        correlation, number = kernel["args"].get("correlation"), kernel["args"].get("External id")
        if number != correlation and number in by_id:
            return by_id[number]
        return around.get(correlation)

    return owner


def _enclosing(operators: Sequence[Event], launches: Sequence[Event]) -> dict[int, Event]:
    """Correlation id of a launch -> the innermost operator around it on its thread."""
    by_thread: dict[str, list[tuple[float, float, Event]]] = collections.defaultdict(list)
    for event in operators:
        by_thread[str(event.get("tid"))].append((event["ts"], -event["dur"], event))
    for event in launches:
        by_thread[str(event.get("tid"))].append((event["ts"], 0.0, event))
    owners: dict[int, Event] = {}
    for timeline in by_thread.values():
        open_operators: list[Event] = []
        for start, _, event in sorted(timeline, key=lambda entry: entry[:2]):
            while open_operators and open_operators[-1]["ts"] + open_operators[-1]["dur"] < start:
                open_operators.pop()
            if event["cat"] == "cpu_op":
                open_operators.append(event)
            elif open_operators:
                whole = [e for e in open_operators if e["name"] == WHOLE]
                owners[event["args"]["correlation"]] = (whole or open_operators[-1:])[0]
    return owners


def _shapes(operator: Event) -> tuple[Any, Any, Any]:
    """Dims, dtypes and strides of the inputs; None where the trace has none."""
    by_name = {name.lower(): value for name, value in operator["args"].items()}
    dims, dtypes, strides = (by_name.get(f"input {name}") for name in ("dims", "type", "strides"))
    return dims, dtypes, strides


def _signature(operator: Event) -> tuple[str, str, str, str]:
    name, shapes = operator["name"], _shapes(operator)
    if name == OLD_BACKWARD:
        name = WHOLE
        shapes = tuple([s[1], s[0], *s[2:]] if s and len(s) > 1 else s for s in shapes)
    dims, dtypes, strides = shapes
    old = strides is None and dims is not None
    return name, json.dumps(dims), json.dumps(dtypes), json.dumps([] if old else strides)
