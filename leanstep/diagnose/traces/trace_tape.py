"""A trace as a tape: the events that a recording would have, as far as a trace tells them.

A trace has no storages, versions and values, so rules that need them find nothing. What it knows besides is
time: how long every op took, how long the device was idle, and for which copies the host waited.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from leanstep.diagnose.traces.timeline import (
    BACKWARD_FLAG,
    OPTIMIZER_FLAG,
    Timeline,
    Wait,
    each,
    is_accumulate,
    op_facts,
    shape_of,
)
from leanstep.diagnose.traces.trace_file import DTYPES, FRAME, OP, Tensors
from leanstep.diagnose.traces.trace_lines import Places
from leanstep.flops import MATMULS, matmul_sizes
from leanstep.tape import events
from leanstep.tape.events import (
    BACKWARD,
    COPY,
    FORWARD,
    NO_STORAGE,
    OPTIMIZER,
    READ,
    RECOMPUTE,
    REQUIRES_GRAD,
    SAVE,
    TRAINED_LEAF,
    UPDATE,
    VIEW,
    Event,
    Layout,
    StepSpan,
    Tape,
    TensorInfo,
)
from leanstep.tape.lines import UNKNOWN, Line, Site
from leanstep.tape.syncs import ALWAYS_READ, SOMETIMES_READ

# `one_hot` checks the range of its classes on a CPU only.
_ONE_READ = ("<built-in method tensor of type", "<built-in method one_hot", "<built-in function one_hot")
_READ_CALL = re.compile(r"^<built-in method (tolist|cpu|numpy|__array__) of (?:Tensor|Parameter)>$")
_PRINTED = re.compile(r"^torch/_tensor\.py\(\d+\): (__repr__|__format__)$")
_CALLED = {"__array__": "numpy", "__repr__": "print", "__format__": "print"}
# Ops whose result autograd saves.
_KEPT_RESULTS = frozenset("_log_softmax _softmax exp tanh sigmoid sqrt rsqrt reciprocal".split())
_COPIES = ("clone", "_to_copy")
_LAYOUT_OPS = ("copy_", "add", "add_", "sub", "sub_")
_SCALAR = Layout((), (), torch.float32, "cpu", 4)
_OF_THE_MODEL = TensorInfo(NO_STORAGE, 0, -1, REQUIRES_GRAD, _SCALAR)
_OF_DATA = TensorInfo(NO_STORAGE, 0, -1, 0, _SCALAR)
# What an optimizer's copies and adds work on: parameters, gradients or state.
_STATE = 1


class TraceTape:
    """The steps of a trace as events, and the time that each line kept the device (or the host) busy."""

    def __init__(self, timeline: Timeline, places: Places) -> None:
        self.timeline, self.places = timeline, places
        self.has_shapes = len(timeline.trace.shapes.texts) > 1
        # (start, event) of each step.
        self._steps: list[list[tuple[float, Event]]] = [[] for _ in timeline.windows]
        # (kind of use, line) -> microseconds on the device, or on the host if there is none.
        self.busy: list[dict[tuple[str, Line], float]] = [defaultdict(float) for _ in timeline.windows]
        # (line, width) -> microseconds of ops on tensors of this width.
        self.wide: list[dict[tuple[Line, int], float]] = [defaultdict(float) for _ in timeline.windows]
        self._tensors: dict[int, Tensors] = {}
        self._numbers = _STATE
        self._device_us = self._device_times()
        self._layouts: dict[tuple[object, ...], Layout] = {}
        self._copied, self._last_call = 0, -1
        self._saved: list[list[tuple[float, Site, str, str, TensorInfo]]] = [[] for _ in timeline.windows]
        self._walk()
        for number in range(len(self._steps)):
            self._add_weights(number)
            self._add_saved(number)

    def tape(self) -> Tape:
        """Return the events so far as a tape with one span for each step."""
        tape = Tape(has_storages=False)
        for step, (low, high) in zip(self._steps, self.timeline.windows, strict=True):
            first = tape.count
            tape.events += [event for _, event in sorted(step, key=lambda entry: entry[0])]
            tape.steps.append(StepSpan(first, tape.count, seconds=(high - low) / 1e6))
        return tape

    def add(self, number: int, start: float, event: Event) -> None:
        self._steps[number].append((start, event))

    def phase_of(self, index: int, direct: bool = True) -> str:
        flags = int(self.timeline.flags[index])
        if flags & OPTIMIZER_FLAG:
            return OPTIMIZER
        if not flags & BACKWARD_FLAG:
            return FORWARD
        # A forward op inside a backward node has its own number: a checkpoint recomputes.
        is_forward = self.timeline.kind[index] == OP and int(self.timeline.link[index]) >= 0
        return RECOMPUTE if direct and is_forward else BACKWARD

    def _device_times(self) -> dict[int, float]:
        """Return the microseconds on the device by launching op."""
        line = self.timeline
        device_us: dict[int, float] = defaultdict(float)
        for activity in each(line.active):
            call = line.call_of(activity)
            if call >= 0:
                device_us[int(line.shown[call])] += float(line.end[activity] - line.start[activity])
        return device_us

    def _cost_us(self, op: int) -> float:
        if self.timeline.has_device:
            return self._device_us.get(op, 0.0)
        return float(self.timeline.end[op] - self.timeline.start[op])

    # One walk over all ops

    def _walk(self) -> None:
        line = self.timeline
        inner_reads, inner_copies = self._inner()
        for index in each(line.order):
            if line.kind[index] == FRAME:
                if not line.has_device:
                    self._look_at_call(index)
                continue
            if line.kind[index] != OP or line.shown[index] != index:
                continue
            number = line.step_at(float(line.start[index]))
            if number < 0:
                continue
            text = line.text(index)
            site, direct = self.places.site(index)
            phase = self.phase_of(index, direct)
            if not line.has_device and phase != OPTIMIZER:
                kind = self._read_kind(text, index, phase, inner_reads)
                if kind and not self._is_counted_call(index):
                    self._read(number, index, site, kind, phase, _OF_DATA)
            # Without device time it launched nothing: a host tensor.
            if op_facts(text).launches and (not line.has_device or index in self._device_us):
                self._op(number, index, inner_copies.get(index, -1), site, phase, direct)
        for number, _ in enumerate(self._steps):
            self.add(number, -math.inf, Event(UPDATE, "", UNKNOWN, OPTIMIZER, outs=(_STATE,)))
        self._add_waits()

    def _inner(self) -> tuple[set[int], dict[int, int]]:
        """Return ops in which the host reads a value, and the copy inside a clone or cast."""
        line = self.timeline
        reads: set[int] = set()
        copies: dict[int, int] = {}
        wanted = {
            number
            for number, text in enumerate(line.trace.names.texts)
            if text in ("aten::nonzero", "aten::_local_scalar_dense", "aten::copy_")
        }
        names = np.array(sorted(wanted), np.int32)
        for index in np.flatnonzero((line.kind == OP) & np.isin(line.name, names)).tolist():
            owner = int(line.shown[index])
            if owner < 0 or owner == index:
                continue
            if line.text(index) == "aten::copy_":
                copies.setdefault(owner, index)
            else:
                reads.add(owner)
        return reads, copies

    # Ops

    def _op(self, number: int, index: int, copy: int, site: Site, phase: str, direct: bool) -> None:
        name = self.timeline.text(index).removeprefix("aten::")
        tensors = self._arguments(index)
        if name in _COPIES and copy >= 0:
            # A clone or cast names its source only; the copy inside names both sides.
            inner = self._arguments(copy)
            if len(inner) > 1 and inner[0].shape == inner[1].shape and inner[0].dtype == inner[1].dtype:
                name, tensors = "copy_", inner
        cost = self._cost_us(index)
        if phase == OPTIMIZER and name in _LAYOUT_OPS:
            tensors = [tensor._replace(storage=_STATE) for tensor in tensors]
        outs = self._output(name, tensors)
        took = round(1e3 * cost)
        event = Event(
            events.OP, name, site, phase, direct, tuple(tensors), outs=outs, start_ns=0, took_ns=took
        )  # fmt: skip
        start = float(self.timeline.start[index])
        self.add(number, start, event)
        self.busy[number]["op", site.line] += cost
        if name in _LAYOUT_OPS:
            self.busy[number]["layout", site.line] += cost
        if tensors and tensors[0].ndim > 1 and phase in (FORWARD, RECOMPUTE) and name not in MATMULS:
            self.wide[number][site.line, tensors[0].shape[-1]] += cost
            if tensors[0].dtype.is_floating_point and name not in ("gather", "argmax"):
                self._saved[number].append((start, site, name, phase, tensors[0]))

    def _arguments(self, index: int) -> list[TensorInfo]:
        detail = self.timeline.trace.detail[index]
        if not detail:
            return []
        tensors = self._tensors.get(detail)
        if tensors is None:
            tensors = self._tensors[detail] = Tensors(shape_of(self.timeline.trace, index))
        return [
            TensorInfo(NO_STORAGE, 0, -1, 0, self._layout(tuple(dims), tuple(strides), DTYPES[kind]))
            for dims, strides, kind in zip(tensors.dims, tensors.strides, tensors.types, strict=True)
        ]

    def _layout(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Layout:
        key = (shape, stride, dtype)
        layout = self._layouts.get(key)
        if layout is None:
            if len(stride) != len(shape):
                stride = tuple(math.prod(shape[position + 1 :]) for position in range(len(shape)))
            device = "cuda" if self.timeline.has_device else "cpu"
            layout = Layout(shape, stride, dtype, device, math.prod(shape) * dtype.itemsize)
            self._layouts[key] = layout
        return layout

    def _output(self, name: str, tensors: Sequence[TensorInfo]) -> tuple[TensorInfo, ...]:
        """Return the product of a matmul; of another op its largest argument, which is about as large."""
        if not tensors:
            return ()
        if name in MATMULS:
            first, second = MATMULS[name]
            if len(tensors) > max(first, second) and tensors[first].ndim > 1 and tensors[second].ndim:
                a, b = tensors[first], tensors[second]
                batch, rows, _, columns = matmul_sizes(name, a.shape, b.shape)
                shape = (batch, rows, columns) if batch > 1 else (rows, columns)
                return (a._replace(layout=self._layout(shape, (), a.dtype)),)
        return (max(tensors, key=lambda tensor: tensor.num_bytes),)

    def _new_storage(self) -> int:
        self._numbers += 1
        return self._numbers

    # Known at the end of the step

    def _add_weights(self, number: int) -> None:
        """Add a view of a weight where one is read: a loop over layers reads new ones.

        The node that runs right before a parameter's gradient is stored is the one that read the parameter.
        Without a backward every matmul is assumed to read its own weight. A parameter that is read twice
        appears at only one of its reads; modules have numbers.
        """
        line = self.timeline
        low, high = line.windows[number]
        inside = (line.start >= low) & (line.start <= high)
        nodes = np.flatnonzero((line.kind == OP) & (line.node == np.arange(len(line.node))) & inside)
        nodes = nodes[np.lexsort((line.start[nodes], line.thread[nodes]))]
        reads: list[tuple[float, int]] = []
        reader = -1
        for node in nodes.tolist():
            if not is_accumulate(line.text(node)):
                reader = self.places.forward_op(node)
            elif reader >= 0:
                reads.append((float(line.start[reader]), self._new_storage()))
        if not len(nodes):
            for index in np.flatnonzero((line.kind == OP) & inside).tolist():
                if line.shown[index] == index and line.text(index).rpartition("::")[2] in MATMULS:
                    reads.append((float(line.start[index]), self._new_storage()))
        names = [n for n, text in enumerate(line.trace.names.texts) if text.startswith("nn.Module: ")]
        frames = np.flatnonzero(np.isin(line.name, names) & inside).tolist()
        if len({line.name[frame] for frame in frames}) > len(reads):
            storages: dict[int, int] = defaultdict(self._new_storage)
            reads = [(float(line.start[frame]), storages[int(line.name[frame])]) for frame in frames]
        for start, storage in reads:
            weight = TensorInfo(storage, 0, -1, TRAINED_LEAF, _SCALAR)
            self.add(number, start, Event(VIEW, "", UNKNOWN, FORWARD, True, (weight,), outs=(weight,)))

    def _add_saved(self, number: int) -> None:
        """Add what autograd saves of the inputs of ops over columns; without a backward, all of it."""
        line = self.timeline
        inputs = self._saved[number]
        has_backward = any(event.phase == BACKWARD for _, event in self._steps[number])
        again = {site for _, site, _, phase, _ in inputs if phase == RECOMPUTE}
        for start, site, name, phase, tensor in inputs:
            # Tensors that a checkpoint recomputes were not saved the first time.
            if (has_backward and name not in _KEPT_RESULTS) or (phase == FORWARD and site in again):
                continue
            saved = tensor._replace(storage=self._new_storage())
            self.add(number, start, Event(SAVE, "", site, FORWARD, True, (saved,)))
        assert line is self.timeline

    # Reads and waits

    def _read_kind(self, text: str, index: int, phase: str, inner_reads: set[int]) -> str | None:
        kind = ALWAYS_READ.get(text)
        if text == "aten::where" and index in inner_reads:
            kind = "nonzero"
        if kind is None and text in SOMETIMES_READ and index in inner_reads and phase in (FORWARD, RECOMPUTE):
            kind = "repeat_interleave" if "repeat" in text else "boolean index"
        return kind

    def _read(
        self,
        number: int,
        index: int,
        site: Site,
        kind: str,
        phase: str,
        target: TensorInfo,
        idle_us: float = 0.0,
    ) -> None:
        took = round(1e3 * idle_us)
        event = Event(READ, kind, site, phase, True, (target,), read=kind, took_ns=took)
        self.add(number, float(self.timeline.start[index]), event)

    def _look_at_call(self, index: int) -> None:
        """Add reads from Python frames: on a CPU `tolist`, `cpu`, `numpy` and a print dispatch no op."""
        line = self.timeline
        text = line.text(index)
        read = _READ_CALL.match(text) or _PRINTED.match(text)
        if read is None:
            return
        number = line.step_at(float(line.start[index]))
        address = line.trace.detail[index]
        above = line.ancestors(index)
        outer = any(_READ_CALL.match(line.text(i)) or _PRINTED.match(line.text(i)) for i in above)
        known = read[1] != "cpu" and address and address == self._copied
        if read[1] == "cpu":
            self._copied = address
        if number < 0 or outer or known or self._has_read_inside(index):
            return
        site, _ = self.places.site(index)
        if site is not UNKNOWN and not line.flags[index] & OPTIMIZER_FLAG:
            self._read(number, index, site, _CALLED.get(read[1], read[1]), FORWARD, _OF_DATA)

    def _is_counted_call(self, index: int) -> bool:
        """Return whether the read is one of several inside a call that is one read on a device."""
        frame = int(self.timeline.frame[index])
        if frame < 0 or not self.timeline.text(frame).startswith(_ONE_READ):
            return False
        seen, self._last_call = self._last_call == frame, frame
        return seen

    def _has_read_inside(self, frame: int) -> bool:
        line = self.timeline
        return any(ALWAYS_READ.get(line.text(child)) for child in self.places.below(frame))

    def _add_waits(self) -> None:
        for wait in self.timeline.waits:
            number = self.timeline.step_at(wait.start)
            if number < 0:
                continue
            site, direct = self.places.site(wait.owner)
            phase = self.phase_of(wait.owner, direct)
            phase = BACKWARD if phase == RECOMPUTE else phase
            if wait.to_device:
                took = round(1e3 * wait.idle)
                event = Event(COPY, wait.calls[-1], site, phase, value=wait.copied_bytes, took_ns=took)
                self.add(number, wait.start, event)
            else:
                kind = self._wait_kind(wait)
                self._read(number, wait.owner, site, kind, phase, _OF_THE_MODEL, wait.idle)
                self.busy[number]["wait", site.line] += wait.idle
                self.busy[number]["held", site.line] += wait.end - wait.start

    def _wait_kind(self, wait: Wait) -> str:
        text = self.timeline.text(wait.owner)
        if self.timeline.kind[wait.owner] != OP:
            return text
        return ALWAYS_READ.get(text, "boolean index" if "index" in text else text.rpartition("::")[2])
