"""The index of a trace: host events as a tree, kernels by their launches, steps, waits and idle gaps.

Times are microseconds as in the trace. A gap is a time in which no stream of the device ran anything. Each
gap has one cause, so that the costs of findings can be added up.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch

from leanstep.diagnose.step import NO_KERNEL
from leanstep.diagnose.traces.trace_file import (
    COPY,
    FRAME,
    NOTE,
    ON_DEVICE,
    OP,
    RUNTIME,
    Trace,
    optimizer_steps,
    profiler_steps,
)

BACKWARD_FLAG, OPTIMIZER_FLAG, DATA_FLAG = 1, 2, 4
_WAIT = re.compile(
    r"(cuda|hip)(Stream|Device|Event)Synchronize|cu(Stream|Ctx|Event)Synchronize"
    r"|(cuda|hip)Memcpy(2D|3D|DtoH|HtoD|WithStream)?$|cuMemcpy(DtoH|HtoD)"
)
_COPY_CALL = re.compile(r"(cuda|hip|cu)Memcpy")
_LAUNCH = re.compile(r"Launch")
_NODE = "autograd::engine::evaluate_function: "
_ACCUMULATE = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
_NO_CAUSE_US = 1.0
WORDS = {"wait": "host waits", "launch": "slow launches", "optimizer": "slow launches in the optimizer"}


@dataclass(frozen=True)
class OpFacts:
    """The meaning of a name in a trace.

    inner: look at the ops inside instead (a composite, a node). launches: whether it has a kernel.
    """

    inner: bool
    launches: bool = True


@cache
def op_facts(name: str) -> OpFacts:
    """Classify a name as a recording would: ops that torch decomposes before dispatch are not seen."""
    namespace, separator, short = name.partition("::")
    if not separator or namespace in ("autograd", "torch"):
        return OpFacts(True)
    packet = getattr(getattr(torch.ops, namespace, None), short, None) if namespace == "aten" else None
    if packet is None:
        return OpFacts(False)
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    # Some overloads are TorchScript's own and never dispatched.
    known = [o for o in overloads if torch._C._dispatch_has_kernel(o.name())]
    plain = [o for o in known if "out" not in o._overloadname] or known
    if not plain:
        return OpFacts(False)
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    composite = all(has(o.name(), "CompositeImplicitAutograd") for o in plain)
    return OpFacts(composite, not (plain[0].is_view or short in NO_KERNEL))


@dataclass
class Wait:
    """The host waits, from the first waiting call in an op to the last. `owner`: the op, or the call."""

    owner: int
    start: float
    end: float
    calls: list[str] = field(default_factory=list)
    to_device: bool = False
    copied_bytes: int = 0
    idle: float = 0.0


@dataclass
class Gap:
    """The device ran nothing from `start` to `end`; `launch` is the call that ended it (-1: not known)."""

    start: float
    end: float
    launch: int
    cause: str = ""
    wait: Wait | None = None
    data_us: float = 0.0

    @property
    def length(self) -> float:
        return self.end - self.start


def each(indices: np.ndarray) -> Iterator[int]:
    """Yield plain numbers one by one; a list of millions of them would be larger than their column."""
    for first in range(0, len(indices), 65_536):
        yield from indices[first : first + 65_536].tolist()


class Timeline:
    """The index of one trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.kind = np.frombuffer(trace.kind, np.int8)
        self.name = np.frombuffer(trace.name, np.int32)
        self.thread = np.frombuffer(trace.thread, np.int32)
        self.start = np.frombuffer(trace.start, np.float64)
        self.end = self.start + np.frombuffer(trace.duration, np.float64)
        self.link = np.frombuffer(trace.link, np.int64)
        self._build_tree()
        self._find_steps()
        self._find_device()
        self._find_waits()
        self._find_gaps()

    def text(self, index: int) -> str:
        return self.trace.names.texts[self.name[index]]

    # The tree

    def _build_tree(self) -> None:
        count = len(self.kind)
        self.parent = np.full(count, -1, np.int32)
        # The nearest op that a recording would see, the nearest Python frame, the nearest autograd node.
        self.shown, self.frame, self.node = (np.full(count, -1, np.int32) for _ in range(3))
        self.flags = np.zeros(count, np.int8)
        marks = np.array([text.startswith("ProfilerStep") for text in self.trace.names.texts], bool)
        host = np.flatnonzero(np.isin(self.kind, (OP, NOTE, FRAME, RUNTIME)) & ~marks[self.name])
        # Microseconds since 1970 in a double have a resolution of a quarter microsecond.
        slack = max(0.01, 4 * float(np.spacing(np.abs(self.start).max())))
        rank = np.array([2, 1, 0, 3], np.int8)[self.kind[host]]
        keys = (rank, -(self.end[host] - self.start[host]), self.start[host], self.thread[host])
        self.order = host[np.lexsort(keys)].astype(np.int32)
        texts = self.trace.names.texts
        facts = [_note_flags(text) for text in texts]
        stack: list[int] = []
        self._has_inner: set[int] = set()
        thread = -1
        start, end, kinds, names = self.start, self.end, self.kind, self.name
        parent, shown, frame, node, flags = self.parent, self.shown, self.frame, self.node, self.flags
        for index in each(self.order):
            if self.thread[index] != thread:
                self._close(stack, 0)
                thread = int(self.thread[index])
            # A mark that a `with` sets begins inside `__enter__` and outlives it: what ends first is left.
            # A mark that was open when the profiler stopped may end after everything.
            last = min(end[index], end[stack[0]]) if kinds[index] == NOTE and stack else end[index]
            until = max(last - slack, start[index])
            depth = len(stack)
            while depth and (
                end[stack[depth - 1]] < until or end[stack[depth - 1]] <= start[index] < end[index]
            ):
                depth -= 1
            if depth != len(stack):
                self._close(stack, depth)
            above = stack[-1] if stack else -1
            if above >= 0:
                parent[index] = above
                shown[index], frame[index], node[index] = shown[above], frame[above], node[above]
                flags[index] = flags[above]
            kind, name = kinds[index], names[index]
            flags[index] |= facts[name]
            if kind == FRAME:
                frame[index] = index
            elif kind == OP:
                text = texts[name]
                if text.startswith(_NODE):
                    node[index] = index
                    # Ops that a node runs belong to it, whatever op (a hook, a checkpoint) encloses it.
                    shown[index] = -1
                elif shown[index] < 0 and not op_facts(text).inner:
                    shown[index] = index
            if kind != RUNTIME:
                stack.append(index)
        self._close(stack, 0)

    def _close(self, stack: list[int], depth: int) -> None:
        """Close events; a composite op without inner ops counts as an op itself."""
        while len(stack) > depth:
            index = stack.pop()
            if self.kind[index] == OP and self.shown[index] == index and stack:
                self._has_inner.add(stack[-1])
            elif self.kind[index] == OP and self.shown[index] < 0 and "aten::" in self.text(index):
                if index not in self._has_inner:
                    self.shown[index] = index
                if stack:
                    self._has_inner.add(stack[-1])
            self._has_inner.discard(index)

    def ancestors(self, index: int) -> list[int]:
        """Return the event's enclosing events, innermost first."""
        outer = []
        above = int(self.parent[index])
        while above >= 0:
            outer.append(above)
            above = int(self.parent[above])
        return outer

    # Steps

    def _find_steps(self) -> None:
        """Find windows of complete steps: the profiler's marks, or between ends of optimizer steps."""
        notes = np.flatnonzero(self.kind == NOTE).tolist()
        marks = [(self.text(i), float(self.start[i]), float(self.end[i])) for i in notes]
        ops = np.sort(self.start[(self.kind == OP) | (self.kind == RUNTIME)])
        windows, self.boundary = profiler_steps(marks), "explicit"
        windows = [w for w in windows if np.searchsorted(ops, w[1]) - np.searchsorted(ops, w[0]) > 1]
        if not windows:
            windows = optimizer_steps(marks)
            self.boundary = "optimizer" if windows else "none"
        part = self.trace.part
        if part is not None:
            windows = [w for w in windows if part.start <= w[0] and w[1] <= part.end]
        if not windows:
            host = self.order if len(self.order) else np.arange(len(self.kind))
            windows = [(float(self.start[host].min()), float(self.end[host].max()))]
            if not len(self.order):
                self.boundary = "none"
        self.windows = [(float(a), float(b)) for a, b in windows]
        self._starts = [a for a, _ in self.windows]

    def step_at(self, time: float) -> int:
        """Return the number of the step at a host time, -1 outside all steps."""
        number = bisect_right(self._starts, time) - 1
        return number if number >= 0 and time <= self.windows[number][1] else -1

    @property
    def step_us(self) -> float:
        """The median step."""
        return float(np.median([b - a for a, b in self.windows]))

    # The device

    def _find_device(self) -> None:
        active = np.flatnonzero(np.isin(self.kind, ON_DEVICE))
        places = [place[0] if isinstance(place[0], int) else -1 for place in self.trace.threads.texts]
        device = np.array(places, np.int64)[self.thread[active]] if len(active) else active
        self.num_devices = len(set(device.tolist()))
        if self.num_devices > 1:
            busiest = max(
                set(device.tolist()),
                key=lambda d: float((self.end[active[device == d]] - self.start[active[device == d]]).sum()),
            )
            active = active[device == busiest]
        self.active = active[np.argsort(self.start[active], kind="stable")]
        calls = np.flatnonzero(self.kind == RUNTIME)
        # A call that launches several graph nodes has one correlation for all of them.
        self._call_of = dict(zip(self.link[calls].tolist(), calls.tolist(), strict=True))
        self._call_of.pop(-1, None)

    def call_of(self, activity: int) -> int:
        """Return the runtime call that launched a kernel or copy, -1 if unknown."""
        return self._call_of.get(int(self.link[activity]), -1)

    @property
    def has_device(self) -> bool:
        return len(self.active) > 0

    def step_of_activity(self, activity: int) -> int:
        call = self.call_of(activity)
        return self.step_at(float(self.start[call] if call >= 0 else self.start[activity]))

    # Waits

    def _find_waits(self) -> None:
        self.waits: list[Wait] = []
        if not self.has_device:
            return
        copies = {int(self.link[i]): int(i) for i in each(self.active) if self.kind[i] == COPY}
        last_launch = self._last_launch()
        by_owner: dict[int, Wait] = {}
        for call in each(self.order):
            if self.kind[call] != RUNTIME:
                continue
            owner = int(self.shown[call]) if self.shown[call] >= 0 else call
            copy = copies.get(int(self.link[call]), -1)
            direction = _direction(self.text(copy)) if copy >= 0 else ""
            if self._host_waits(call, copy, direction):
                # The profiler's own end also waits for the device; it is not part of the program.
                if owner != call or self.start[call] <= last_launch:
                    self._add_wait(by_owner, owner, call, copy, direction)
            elif direction == "to device" or (direction == "to host" and self.shown[call] in by_owner):
                if owner != call:
                    self._add_copy_before(by_owner, owner, call, copy)
        self.waits = sorted((w for w in by_owner.values() if w.calls), key=lambda w: w.end)

    def _last_launch(self) -> float:
        launches = self.start[[c for c in map(self.call_of, each(self.active)) if c >= 0]]
        return float(launches.max()) if len(launches) else float("inf")

    def _host_waits(self, call: int, copy: int, direction: str) -> bool:
        """Return whether a runtime call returns only when the device has finished."""
        name = self.text(call)
        outlasts_copy = copy >= 0 and bool(self.end[call] >= self.end[copy])
        if _WAIT.match(name):
            # CUDA returns early from a copy on the device, ROCm may wait for it.
            return direction != "on device" or outlasts_copy
        # An asynchronous copy from or to unpinned memory returns when it is complete.
        return direction in ("to host", "to device") and bool(_COPY_CALL.match(name)) and outlasts_copy

    def _add_wait(self, by_owner: dict[int, Wait], owner: int, call: int, copy: int, direction: str) -> None:
        start, end = float(self.start[call]), float(self.end[call])
        wait = by_owner.setdefault(owner, Wait(owner, start, end))
        wait.start, wait.end = min(wait.start, start), max(wait.end, end)
        wait.calls.append(self.text(call))
        if direction:
            wait.to_device |= direction == "to device"
            wait.copied_bytes += self.trace.bytes_of.get(copy, 0)

    def _add_copy_before(self, by_owner: dict[int, Wait], owner: int, call: int, copy: int) -> None:
        """Add the copy that a later call in the same op waits for."""
        wait = by_owner.setdefault(owner, Wait(owner, float(self.start[call]), float(self.end[call])))
        wait.to_device = True
        wait.copied_bytes += self.trace.bytes_of.get(copy, 0)

    # Gaps

    def _find_gaps(self) -> None:
        self.gaps: list[Gap] = []
        self.busy_us = 0.0
        if not self.has_device:
            return
        start, end = self.start[self.active], self.end[self.active]
        reached = np.maximum.accumulate(end)
        # Where everything before has ended when the next one starts.
        holes = np.flatnonzero(start[1:] > reached[:-1] + _NO_CAUSE_US)
        self.busy_us = float(reached[-1] - start[0] - (start[1:] - reached[:-1]).clip(0).sum())
        data = sorted(
            (float(self.start[i]), float(self.end[i]))
            for i in np.flatnonzero(self.kind == NOTE).tolist()
            if _note_flags(self.text(i)) & DATA_FLAG
        )
        ends = [wait.end for wait in self.waits]
        for hole in holes.tolist():
            gap = Gap(float(reached[hole]), float(start[hole + 1]), self.call_of(int(self.active[hole + 1])))
            self._explain(gap, ends, data)
            self.gaps.append(gap)

    def idle(self) -> tuple[dict[str, float], float]:
        """Return idle microseconds by cause, and the time from the steps' first launch to their last."""
        mine = [i for i in each(self.active) if self.step_of_activity(i) >= 0]
        if not mine:
            return {}, 1.0
        low, high = float(self.start[mine].min()), float(self.end[mine].max())
        idle_by_cause: dict[str, float] = defaultdict(float)
        for gap in self.gaps:
            if low <= gap.start and gap.end <= high:
                idle_by_cause["between steps"] += gap.data_us
                idle_by_cause[WORDS.get(gap.cause, gap.cause)] += gap.length - gap.data_us
        largest = sorted(idle_by_cause.items(), key=lambda item: -item[1])
        return {cause: us for cause, us in largest if us > 0}, max(high - low, 1e-9)

    def _explain(self, gap: Gap, wait_ends: list[float], data: list[tuple[float, float]]) -> None:
        if gap.launch < 0:
            gap.cause = "unknown"
            return
        launched = float(self.start[gap.launch])
        if float(self.end[gap.launch]) <= gap.start:
            # The work was in the queue: the device waited for another stream, or between two kernels.
            gap.cause = "queued"
            return
        until = min(launched, gap.end)
        for begin, finish in data[max(bisect_right(data, (gap.start, 0.0)) - 1, 0) :]:
            if begin > until:
                break
            gap.data_us += max(0.0, min(finish, until) - max(begin, gap.start))
        # A wait that was active when the device became idle; a later one waited for nothing.
        first, last = bisect_left(wait_ends, gap.start), bisect_right(wait_ends, launched)
        held = [w for w in self.waits[first:last] if w.start <= gap.start]
        gap.wait = max(held, key=lambda w: w.end) if held else None
        if gap.wait is not None:
            gap.cause = "wait"
            gap.wait.idle += gap.length - gap.data_us
        elif gap.data_us >= 0.5 * gap.length or self._between_steps(gap, until):
            gap.cause, gap.data_us = "between steps", gap.length
        elif self.flags[gap.launch] & OPTIMIZER_FLAG:
            gap.cause = "optimizer"
        else:
            gap.cause = "launch"

    def _between_steps(self, gap: Gap, until: float) -> bool:
        """Return whether most of the gap is outside all steps, or the host ran no op across a step's end."""
        if self.boundary != "explicit":
            return False
        before, behind = self.step_at(gap.start), self.step_at(until)
        if before == behind:
            return False
        # The ops of the next step that ran before the launch are work, not waiting.
        border = self.windows[behind][0] if behind >= 0 else until
        return max(0.0, border - gap.start) >= 0.5 * gap.length


@cache
def _note_flags(text: str) -> int:
    if text.startswith("Optimizer.step#") or (text.startswith("torch/optim/") and "zero_grad" not in text):
        return OPTIMIZER_FLAG
    if text.startswith(_NODE):
        return BACKWARD_FLAG
    # The loader's own mark, and the frame of a loader that fetches in this process.
    if text.startswith("enumerate(DataLoader)"):
        return DATA_FLAG
    return 0


def _direction(name: str) -> str:
    """Return the direction of a copy, from its CUDA or ROCm name."""
    lower = name.lower()
    if "dtoh" in lower or "devicetohost" in lower:
        return "to host"
    if "htod" in lower or "hosttodevice" in lower:
        return "to device"
    return "on device" if "dtod" in lower or "devicetodevice" in lower else "unknown"


def is_launch(name: str) -> bool:
    return _LAUNCH.search(name) is not None


def is_accumulate(name: str) -> bool:
    return name == _ACCUMULATE


def node_name(text: str) -> str:
    return text.removeprefix(_NODE)


def shape_of(trace: Trace, index: int) -> Any:
    """Return (dims, dtypes, strides) of an op's arguments, None if the trace has none."""
    return trace.shapes.texts[trace.detail[index]]
