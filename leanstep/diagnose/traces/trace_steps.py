"""The records of a trace's steps: the same counters as in a recording, so the same rules apply.

Information that a trace does not have stays empty: storages (casts, shared saved tensors), values (dead
rows), the leaf of a gradient. In addition to the counters there are the microseconds of every line.
"""

from __future__ import annotations

import re
from collections import defaultdict

import numpy as np

from leanstep.diagnose.step_records import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    RECOMPUTE,
    Limits,
    MatmulKey,
    OpKey,
    OpRecord,
    SavedRecord,
    StepRecord,
    tally,
)
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
from leanstep.diagnose.traces.trace_file import DTYPES, FRAME, OP, Tensors, different_order
from leanstep.diagnose.traces.trace_lines import Places
from leanstep.flops import MATMULS, matmul_sizes
from leanstep.tape.lines import UNKNOWN, Line, Site
from leanstep.tape.syncs import ALWAYS_READ, SOMETIMES_READ

# `one_hot` checks the range of its classes on a CPU only.
_ONE_READ = ("<built-in method tensor of type", "<built-in method one_hot", "<built-in function one_hot")
# Without shapes an op counts as tiny when it took no longer than this.
TINY_US, TINY_KERNEL_US = 30.0, 10.0
_READ_CALL = re.compile(r"^<built-in method (tolist|cpu|numpy|__array__) of (?:Tensor|Parameter)>$")
_PRINTED = re.compile(r"^torch/_tensor\.py\(\d+\): (__repr__|__format__)$")
# Ops whose result autograd saves.
_KEPT_RESULTS = frozenset("_log_softmax _softmax exp tanh sigmoid sqrt rsqrt reciprocal".split())
# Ops that read a row of logits over its columns: they identify a wide matmul as the head.
_OVER_COLUMNS = frozenset(
    "_log_softmax _softmax logsumexp gather nll_loss_forward cross_entropy_loss argmax max topk".split()
)
_COPIES = ("clone", "copy_", "_to_copy")
_ADDS = ("add", "add_", "sub", "sub_")


class StepBuilder:
    """One `StepRecord` per step of a trace, and the time each line kept the device (or the host) busy."""

    def __init__(self, timeline: Timeline, places: Places, limits: Limits) -> None:
        self.timeline, self.places = timeline, places
        self.tiny_bytes = limits["op-storm"]["tiny_bytes"]
        self.small_bytes = limits["unbatched-optimizer"]["bytes"]
        self.layout_bytes = limits["transposed-copy"]["op_bytes"]
        count = len(timeline.windows)
        self.steps = [StepRecord() for _ in range(count)]
        # (kind of use, line) -> microseconds on the device, or on the host if there is none.
        self.busy: list[dict[tuple[str, Line], float]] = [defaultdict(float) for _ in range(count)]
        nodes = timeline.node == np.arange(len(timeline.node))
        self._nodes = np.sort(timeline.start[nodes])
        self.has_shapes = len(timeline.trace.shapes.texts) > 1
        self._tensors: dict[int, Tensors] = {}
        self._device_us = self._device_times()
        self._runs: list[dict[OpKey, list[float]]] = [{} for _ in range(count)]
        self._wide: list[list[tuple[Site, str, Tensors, int, str]]] = [[] for _ in range(count)]
        self._products: list[list[tuple[int, int, int]]] = [[] for _ in range(count)]
        self._columns: list[set[tuple[int, int]]] = [set() for _ in range(count)]
        modules = [n for n, text in enumerate(timeline.trace.names.texts) if text.startswith("nn.Module: ")]
        self._module_frames = timeline.order[np.isin(timeline.name[timeline.order], modules)]
        self._module_frames = self._module_frames[np.argsort(timeline.start[self._module_frames])]
        self._walk()
        for number, step in enumerate(self.steps):
            self._count_parameters(number, step)
            self._keep_wide(number, step)

    def _device_times(self) -> dict[int, float]:
        """Return the microseconds on the device by launching op."""
        line = self.timeline
        device_us: dict[int, float] = defaultdict(float)
        for activity in each(line.active):
            call = line.call_of(activity)
            if call >= 0:
                device_us[int(line.shown[call])] += float(line.end[activity] - line.start[activity])
        return device_us

    def phase_of(self, index: int, direct: bool = True) -> str:
        flags = int(self.timeline.flags[index])
        if flags & OPTIMIZER_FLAG:
            return OPTIMIZER
        if flags & BACKWARD_FLAG:
            return (
                RECOMPUTE
                if direct and self.timeline.kind[index] == OP and self._is_forward(index)
                else BACKWARD
            )
        return FORWARD

    def _is_forward(self, index: int) -> bool:
        """Return whether a checkpoint recomputes: a forward op inside a backward node has its own number."""
        return int(self.timeline.link[index]) >= 0

    def tensors(self, index: int) -> Tensors | None:
        number = self.timeline.trace.detail[index]
        if not number:
            return None
        if number not in self._tensors:
            self._tensors[number] = Tensors(shape_of(self.timeline.trace, index))
        return self._tensors[number]

    def cost_us(self, op: int) -> float:
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
            if line.kind[index] != OP:
                continue
            text = line.text(index)
            if is_accumulate(text):
                number = line.step_at(float(line.start[index]))
                if number >= 0:
                    self.steps[number].backward_runs = 1
            if line.shown[index] != index:
                continue
            number = line.step_at(float(line.start[index]))
            if number < 0:
                continue
            facts = op_facts(text)
            site, direct = self.places.site(index)
            phase = self.phase_of(index, direct)
            name = text.rpartition("::")[2]
            if not line.has_device and phase != OPTIMIZER:
                kind = self._read_kind(text, index, phase, inner_reads)
                if kind and not self._is_counted_call(index):
                    self._count_read(number, site, kind, phase, "of the data")
            if facts.info is not None and not facts.info.counted:
                continue
            if line.has_device and index not in self._device_us:
                # It launched nothing: a host tensor.
                continue
            self._count_op(number, index, name, site, phase, direct)
            self._look_at_layout(number, index, name, site, phase, direct, inner_copies)
        self._count_waits()

    def _inner(self) -> tuple[set[int], dict[int, int]]:
        """Handle ops in which the host reads a value, and the copy inside a clone or cast."""
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

    def _read_kind(self, text: str, index: int, phase: str, inner_reads: set[int]) -> str | None:
        kind = ALWAYS_READ.get(text)
        if text == "aten::where" and index in inner_reads:
            kind = "nonzero"
        if kind is None and text in SOMETIMES_READ and index in inner_reads and phase in (FORWARD, RECOMPUTE):
            kind = "repeat_interleave" if "repeat" in text else "boolean index"
        return kind

    def _count_read(self, number: int, site: Site, kind: str, phase: str, of: str) -> None:
        reads = self.steps[number].reads
        tally(reads, site, 0, 1, kind)
        reads[site].detail[f"phase {phase}"] += 1
        reads[site].detail[of] += 1

    def _look_at_call(self, index: int) -> None:
        """Count reads from Python frames: on a CPU `tolist`, `cpu`, `numpy` and a print dispatch no op."""
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
            kind = {"__array__": "numpy", "__repr__": "print", "__format__": "print"}.get(read[1], read[1])
            self._count_read(number, site, kind, FORWARD, "of the data")

    def _is_counted_call(self, index: int) -> bool:
        """Return whether the read is one of several inside a call that is one read on a device."""
        frame = int(self.timeline.frame[index])
        if frame < 0 or not self.timeline.text(frame).startswith(_ONE_READ):
            return False
        seen, self._last_call = self._last_call == frame, frame
        return seen

    _copied, _last_call = 0, -1

    def _has_read_inside(self, frame: int) -> bool:
        line = self.timeline
        return any(ALWAYS_READ.get(line.text(child)) for child in self.places.below(frame))

    # Ops

    def _count_op(self, number: int, index: int, name: str, site: Site, phase: str, direct: bool) -> None:
        step = self.steps[number]
        key = OpKey(site, name, phase, direct)
        record = step.ops.get(key)
        if record is None:
            record = step.ops[key] = OpRecord()
            self._runs[number][key] = [float(self.timeline.start[index])] * 2
        self._runs[number][key][1] = float(self.timeline.start[index])
        tensors = self.tensors(index)
        largest = max(tensors.bytes, default=0) if tensors else 0
        if tensors is None:
            limit = TINY_KERNEL_US if self.timeline.has_device else TINY_US
            tiny = small = self.cost_us(index) <= limit
        else:
            tiny, small = largest <= self.tiny_bytes, largest <= self.small_bytes
        record.count += 1
        record.tiny += tiny
        record.small += small
        record.max_bytes = max(record.max_bytes, largest)
        record.total_bytes += sum(tensors.bytes) if tensors else 0
        step.num_ops += 1
        written = largest
        if tensors and name in MATMULS:
            written = self._count_product(number, name, tensors, site, phase, direct, record)
        record.written_bytes += written
        step.written_bytes += written
        self.busy[number]["op", site.line] += self.cost_us(index)
        if tensors and tensors.dims and phase in (FORWARD, RECOMPUTE) and len(tensors.dims[0]) > 1:
            rows = int(np.prod(tensors.dims[0][:-1], dtype=np.int64))
            if name in _OVER_COLUMNS:
                self._columns[number].add((rows, tensors.dims[0][-1]))
            if name not in MATMULS:
                self._wide[number].append((site, name, tensors, index, phase))

    def _count_product(
        self, number: int, name: str, tensors: Tensors, site: Site, phase: str, direct: bool, record: OpRecord
    ) -> int:
        first, second = MATMULS[name]
        dims = tensors.dims
        if name in ("addmm", "addmm_", "baddbmm", "_addmm_activation") and len(dims) < 3:
            return 0
        if len(dims) <= max(first, second) or len(dims[first]) < 2 or not dims[second]:
            return 0
        a, b = dims[first], dims[second]
        sizes = matmul_sizes(name, a, b)
        strides = tensors.strides[second]
        column_major = name == "linear" or (len(strides) > 1 and strides[-1] != 1 and strides[-2] == 1)
        dtype = DTYPES[tensors.types[first]]
        batch, rows, inner, columns = sizes
        key = MatmulKey(site, phase, direct, dtype, (batch, rows, inner, columns, column_major))
        step = self.steps[number]
        step.matmuls[key] = step.matmuls.get(key, 0) + 1
        record.flops += sizes.flops
        step.flops += sizes.flops
        if batch == 1 and phase in (FORWARD, RECOMPUTE):
            self._products[number].append((rows, inner, columns))
        return batch * rows * columns * dtype.itemsize

    def _look_at_layout(
        self, number: int, index: int, name: str, site: Site, phase: str, direct: bool, copies: dict[int, int]
    ) -> None:
        if not direct or phase == BACKWARD or name not in (*_COPIES, *_ADDS):
            return
        # A clone or cast names its source only; the copy inside names both sides.
        tensors = self.tensors(copies[index] if name != "copy_" and index in copies else index)
        if tensors is None or len(tensors.dims) < 2 or tensors.dims[0] != tensors.dims[1]:
            return
        if tensors.bytes[0] < self.layout_bytes:
            return
        if different_order(tensors.dims[0], tensors.strides[0], tensors.strides[1]):
            step = self.steps[number]
            table = step.state_copies if phase == OPTIMIZER else step.other_copies
            tally(table, site, tensors.bytes[0], 1, name)
            self.busy[number]["layout", site.line] += self.cost_us(index)

    # Known at the end of the step

    def _count_parameters(self, number: int, step: StepRecord) -> None:
        """Count parameters read between the first and the last run of each op: a loop over layers reads new
        ones.

        The node that runs right before a parameter's gradient is stored is the one that read the parameter.
        Without a backward every matmul is assumed to read its own weight.
        """
        line = self.timeline
        times: list[float] = []
        low, high = line.windows[number]
        nodes = np.flatnonzero((line.kind == OP) & (line.node == np.arange(len(line.node))))
        nodes = nodes[(line.start[nodes] >= low) & (line.start[nodes] <= high)]
        nodes = nodes[np.lexsort((line.start[nodes], line.thread[nodes]))]
        reader = -1
        for node in nodes.tolist():
            if not is_accumulate(line.text(node)):
                reader = self.places.forward_op(node)
            elif reader >= 0:
                times.append(float(line.start[reader]))
        if not len(nodes):
            times = [
                float(line.start[i])
                for i in np.flatnonzero(
                    (line.kind == OP) & (line.start >= low) & (line.start <= high)
                ).tolist()
                if line.shown[i] == i and line.text(i).rpartition("::")[2] in (*MATMULS, "convolution")
            ]
        ordered = np.sort(np.array(times))
        frames = self._module_frames[(line.start[self._module_frames] >= low)]
        frames = frames[line.start[frames] <= high]
        for key, (first, last) in self._runs[number].items():
            # An op begins a little before the parts of it that read the weight.
            slack = 0.02 * (last - first)
            read = np.searchsorted(ordered, last + slack, "right") - np.searchsorted(ordered, first - slack)
            if step.ops[key].count > 1 and len(frames):
                # A parameter that is read twice appears at only one of its reads; modules have numbers.
                begin, finish = np.searchsorted(line.start[frames], [first - slack, last + slack])
                read = max(read, len(set(line.name[frames[begin:finish]].tolist())))
            step.ops[key].parameters = int(read)

    def _keep_wide(self, number: int, step: StepRecord) -> None:
        """Record the head width and, per line, the [*, V] results that are saved (no backward: all)."""
        heads = [
            (columns, inner)
            for rows, inner, columns in self._products[number]
            if columns >= 2 * inner and (rows, columns) in self._columns[number]
        ]
        if not heads:
            return
        step.head_width, step.head_inner = max(heads)
        width = step.head_width
        again = {site for site, *_, phase in self._wide[number] if phase == RECOMPUTE}
        alive: dict[tuple[Site, int], list[int]] = defaultdict(lambda: [0, 0, 0])
        for site, name, tensors, index, phase in self._wide[number]:
            dims = tensors.dims[0]
            whole = tensors.types[0] in ("long int", "int", "bool") or name in ("gather", "argmax")
            if dims[-1] != width or whole:
                continue
            self.busy[number]["wide", site.line] += self.cost_us(index)
            # Tensors that a checkpoint recomputes were not saved the first time.
            if (step.backward_runs and name not in _KEPT_RESULTS) or (phase == FORWARD and site in again):
                continue
            record = step.saved.setdefault((site, width), SavedRecord())
            record.count += 1
            record.bytes += tensors.bytes[0]
            record.shapes[f"{list(dims)} {str(DTYPES[tensors.types[0]]).removeprefix('torch.')}"] += 1
            # Between two backwards all of a line's tensors are alive at once.
            run = int(np.searchsorted(self._nodes, self.timeline.start[index]))
            together = alive[site, run]
            rows = int(np.prod(dims[:-1], dtype=np.int64))
            together[:] = [together[0] + 1, together[1] + tensors.bytes[0], together[2] + rows]
            if together[0] > record.held:
                record.held, record.held_bytes, record.held_rows = together
        step.peak_saved_bytes = step.peak_wide_bytes = sum(record.bytes for record in step.saved.values())

    # Waits

    def _count_waits(self) -> None:
        for wait in self.timeline.waits:
            number = self.timeline.step_at(wait.start)
            if number < 0:
                continue
            site, direct = self.places.site(wait.owner)
            phase = self.phase_of(wait.owner, direct)
            phase = BACKWARD if phase == RECOMPUTE else phase
            if wait.to_device:
                tally(self.steps[number].blocking, site, wait.copied_bytes, 1, wait.calls[-1])
                self.busy[number]["blocking", site.line] += wait.idle
            else:
                self._count_read(number, site, self.wait_kind(wait), phase, "of the model")
                self.busy[number]["wait", site.line] += wait.idle
                self.busy[number]["held", site.line] += wait.end - wait.start

    def wait_kind(self, wait: Wait) -> str:
        text = self.timeline.text(wait.owner)
        if self.timeline.kind[wait.owner] != OP:
            return text
        return ALWAYS_READ.get(text, "boolean index" if "index" in text else text.rpartition("::")[2])
