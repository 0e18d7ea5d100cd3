"""A rehearsal for other viewers: Chrome's trace format (Perfetto), and torch's memory snapshots.

https://ui.perfetto.dev  opens the timeline; https://pytorch.org/memory_viz  opens the snapshot.
"""

from __future__ import annotations

from typing import Any

from leanstep.rehearse.cuda_allocator import (
    LARGE_SEGMENT,
    SMALL_SEGMENT,
    CachingAllocator,
    Memory,
    Pool,
    Settings,
)
from leanstep.rehearse.devices import Device
from leanstep.rehearse.events import Alloc, Extrapolated, Free, HostWait, Launch, Recording, Step
from leanstep.rehearse.time_model import Clock, HostCosts
from leanstep.rehearse.what_if import step_events
from leanstep.tape.lines import Line

Data = dict[str, Any]
_HOST, _DEVICE = 1, 0  # process numbers of a trace: torch's profiler has the device at its own number
_LINKS = 1_000  # number of the first row of collectives, after the streams


def chrome_trace(recording: Recording, device: Device, step: Step) -> Data:
    """Return the predicted step as a Chrome trace, with the keys that torch's profiler writes.

    The step before it fills the queue and is not in the trace.
    """
    clock = Clock(device, costs=HostCosts.of(recording.request.host_us))
    for before in recording.steps:
        if before.number == step.number - 1:
            for event in step_events(recording, before):
                clock.play(event)
    began = clock.now
    rows: list[Data] = []

    def add(category: str, name: str, process: int, row: int, start: float, end: float, **more: Any) -> None:
        start = max(start, began)
        rows.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": process,
                "tid": row,
                "ts": round((start - began) * 1e6, 3),
                "dur": round(max(0.0, end - start) * 1e6, 3),
                "args": more,
            }
        )

    for number, event in enumerate(step_events(recording, step)):
        host, clock.trace = clock.host, []
        clock.play(event)
        if isinstance(event, Launch | Extrapolated | HostWait):
            name = event.kind if isinstance(event, HostWait) else getattr(event, "name", "model call")
            category = "cuda_runtime" if isinstance(event, HostWait) else "cpu_op"
            where = {"line": str(event.line), "phase": event.phase, "correlation": number}
            add(category, name, _HOST, 1, host, clock.host, **where)
            for kind, kernel, stream, start, end in clock.trace:
                what = {"h2d": "gpu_memcpy", "d2h": "gpu_memcpy"}.get(kind, "kernel")
                row = stream if kind != "collective" else _LINKS
                label = f"{name} ({kernel or kind})"
                add(what, label, _DEVICE, row, start, end, device=0, stream=row, **where)
    names = ((_HOST, "host (predicted)"), (_DEVICE, f"{device.name} (predicted)"))
    rows += [{"ph": "M", "name": "process_name", "pid": n, "tid": 0, "args": {"name": t}} for n, t in names]
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": device.name, "totalGlobalMem": device.memory_bytes}],
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": recording.request.ranks},
        "predicted": True,
        "step_ms": (clock.now - began) * 1e3,
        "displayTimeUnit": "ms",
        "traceEvents": rows,
    }


class _Addresses(CachingAllocator):
    """The allocator with addresses: notes what it asks of the driver."""

    def __init__(self, capacity: int | None, settings: Settings) -> None:
        super().__init__(capacity, settings)
        self.actions: list[Data] = []
        self.streams: dict[int, int] = {}
        self.grown = 0  # bytes that the last request took from the driver

    def base(self, segment: int) -> int:
        return 0x7000_0000_0000 + segment * (1 << 40)  # more addresses than any device has memory

    def _note(self, action: str, segment: int, start: int, size: int) -> None:
        place = {"addr": self.base(segment) + start, "size": size, "stream": self.streams[segment]}
        self.actions.append({"action": action, **place, "frames": []})

    def _new_segment(self, pool: Pool, size: int) -> tuple[int, int, int] | None:
        block = super()._new_segment(pool, size)
        if block is not None:
            self.streams[block[1]] = pool[1]
            self._note("segment_alloc", block[1], 0, block[0])
        return block

    def _map(self, pool: Pool, size: int) -> tuple[int, int, int] | None:
        holes = set(self._holes.get(pool, ()))
        block = super()._map(pool, size)
        if block is not None:
            segment = block[1]
            self.streams[segment] = pool[1]
            start = block[2] if block in holes else self._ends[segment] - self.grown
            self._note("segment_map", segment, start, self.grown)
        return block

    def _grow(self, size: int) -> None:
        super()._grow(size)
        self.grown = size

    def give_back(self) -> None:
        free = {
            (segment, start): (size, SMALL_SEGMENT if is_small else LARGE_SEGMENT)
            for (is_small, _), blocks in self._free.items()
            for size, segment, start in blocks
        }
        super().give_back()
        left = {(segment, start): size for pool in self._free.values() for size, segment, start in pool}
        for (segment, start), (size, page) in free.items():
            gone = size - left.get((segment, start), 0)
            if gone and segment in self._ends:  # whole pages
                self._note("segment_unmap", segment, start + size - gone, gone // page * page)
            elif gone:
                self._note("segment_free", segment, 0, size)

    def segments(self) -> list[Data]:
        states = ("inactive", "active_allocated", "inactive")
        result = []
        for segment, blocks in self._segments.items():
            entries = [
                {
                    "address": self.base(segment) + start,
                    "size": size,
                    "requested_size": size,
                    "state": states[state],
                    "frames": [],
                }
                for start, (size, _, state) in sorted(blocks.items())
                if state != 2
            ]
            used = sum(entry["size"] for entry in entries if entry["state"] == "active_allocated")
            result.append(
                {
                    "device": 0,
                    "address": self.base(segment),
                    "total_size": sum(entry["size"] for entry in entries),
                    "allocated_size": used,
                    "active_size": used,
                    "requested_size": used,
                    "stream": self.streams[segment],
                    "segment_type": "large" if sum(e["size"] for e in entries) > 2 * 2**20 else "small",
                    "segment_pool_id": (0, 0),
                    "is_expandable": segment in self._ends,
                    "frames": [],
                    "blocks": entries,
                }
            )
        return result


def memory_snapshot(recording: Recording, memory: Memory) -> Data:
    """Return all allocations of a recording as `torch.cuda.memory._snapshot` would, for pickling.

    Without a capacity if the program does not fit, as in the verdict.
    """
    settings = Settings.read(recording.allocator, recording.torch)
    allocator = _Addresses(memory.capacity - memory.context if memory.fits else None, settings)
    actions = allocator.actions
    alive: dict[int, Data] = {}
    for index, event in enumerate(recording.events):
        if isinstance(event, Alloc):
            allocator.allocate(event.storage, event.nbytes, event.stream)
            _, segment, start = allocator.place_of(event.storage)
            entry = {
                "action": "alloc",
                "addr": allocator.base(segment) + start,
                "size": event.nbytes,
                "stream": event.stream,
                "frames": _frames(event.line, recording.storages[event.storage].category),
                "time_us": index,
            }
            alive[event.storage] = entry
            actions.append(entry)
        elif isinstance(event, Free) and event.storage in alive:
            entry = alive.pop(event.storage)
            allocator.release(event.storage, entry["size"])
            actions += [{**entry, "action": kind} for kind in ("free_requested", "free_completed")]
    return {
        "segments": allocator.segments(),
        "device_traces": [actions],
        "allocator_settings": {"PYTORCH_ALLOC_CONF": recording.allocator},
        "external_annotations": [],
        "predicted": True,
    }


def _frames(line: Line | None, category: str) -> list[Data]:
    frames = [] if line is None else [{"filename": line.file, "line": line.number, "name": line.function}]
    return [*frames, {"filename": category, "line": 0, "name": "predicted"}]
