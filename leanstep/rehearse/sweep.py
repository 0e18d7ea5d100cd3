"""Every implementation of a case at several values of one parameter: peak memory, time, and what fits.

`run_sweep` rehearses each implementation at each value. Where the values are `FIT`, it searches for the
largest value that fits each device instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from leanstep.case import Case, Implementation
from leanstep.rehearse import what_if
from leanstep.rehearse.answers.fake_device import RehearsalError
from leanstep.rehearse.cuda_allocator import live_at, replay
from leanstep.rehearse.devices import Device
from leanstep.rehearse.events import Recording, Request

Data = dict[str, Any]
Rehearse = Callable[[Request], Recording]
# Instead of values: search for the largest one that fits.
FIT = "fit"
# The search ends when a value that does not fit is within 1/200, or at LARGEST.
PRECISION, LARGEST = 200, 1 << 26


@dataclass(frozen=True)
class Sweep:
    """What to rehearse.

    request: the case, with the fixed settings.
    values: of the parameter `key`, or `FIT`.
    devices: devices to report on; the code runs on the first one.
    reserve_bytes: bytes that the rest of the program (model, optimizer) already uses.
    """

    case: Case
    request: Request
    key: str
    values: tuple[Any, ...] | str
    implementations: tuple[Implementation, ...]
    devices: tuple[Device, ...]
    reserve_bytes: int = 0

    def request_for(self, implementation: Implementation, value: Any) -> Request:
        settings = {**self.request.settings, self.key: value}
        return replace(self.request, settings=settings, implementation=implementation.name)

    def room(self, device: Device) -> int:
        """Return the bytes of a device that the case may use."""
        return max(0, device.memory_bytes - device.context_bytes - self.reserve_bytes)

    def start(self) -> int:
        """Return the start value of the search: the one that the case has without a sweep."""
        settings = dict(self.request.settings)
        settings.pop("dtype", None)
        size = str(settings.pop("size", self.case.default_size))
        return max(1, self.case.params(size, settings)[self.key])


def run_sweep(sweep: Sweep, rehearse: Rehearse, report: Callable[[str, float], None]) -> list[Data]:
    """Return one row per implementation, with one cell per value (or, with FIT, per device).

    rehearse: `stage.rehearse`. report: called with what comes next and the share that is done.
    """
    rows = []
    for number, implementation in enumerate(sweep.implementations):
        report(implementation.name, number / len(sweep.implementations))
        rows.append(
            {
                "impl": implementation.name,
                "kind": implementation.kind,
                "note": implementation.note,
                "cells": _cells(sweep, implementation, rehearse),
            }
        )
    for column in zip(*(row["cells"] for row in rows), strict=True):
        _drop_unpriced_times([row["kind"] for row in rows], column)
    return rows


def _drop_unpriced_times(kinds: list[str], cells: Sequence[Data]) -> None:
    """Drop the time of rows whose products mostly run inside a kernel that a rehearsal cannot inspect.

    Our own implementations do no unneeded products: a peer with less than half of their FLOPs hides some.
    """
    own = [_work(cell) for kind, cell in zip(kinds, cells, strict=True) if kind != "peer"]
    needed = min((work for work in own if work is not None), default=0.0)
    for cell in cells:
        work = _work(cell)
        if work is not None and 2 * work < needed:
            for there in cell["devices"].values():
                there.update(step_ms=None, bound_by=None)


def _work(cell: Data) -> float | None:
    """Return the FLOPs per unit of the swept value: searches end at different values."""
    if cell["why"] is not None or cell["flops"] is None:
        return None
    value = cell["value"]
    return cell["flops"] / value if isinstance(value, int | float) and value > 0 else float(cell["flops"])


def _cells(sweep: Sweep, implementation: Implementation, rehearse: Rehearse) -> list[Data]:
    def cell(value: Any) -> Data:
        return _cell(sweep, implementation, value, rehearse)

    # A missing package is missing at every value: do not start a rehearsal.
    missing = replace(implementation, unavailable=None).missing({}, "cuda")
    if sweep.values == FIT:
        if missing is not None:
            return [{"device": device.key, "value": None, "why": missing} for device in sweep.devices]
        return _fit_cells(sweep, cell)
    if missing is not None:
        return [{"value": value, "why": missing} for value in sweep.values]
    return [cell(value) for value in sweep.values]


def _cell(sweep: Sweep, implementation: Implementation, value: Any, rehearse: Rehearse) -> Data:
    """Return the figures of one rehearsal, or `why` there are none."""
    try:
        recording = rehearse(sweep.request_for(implementation, value))
    except RehearsalError as error:
        about_this_row = f"{sweep.case.name}, {implementation.name}: "
        if not str(error).startswith(about_this_row):
            raise
        return {"value": value, "why": str(error).removeprefix(about_this_row)}
    if recording.ended != "steps":
        reason = recording.refused.reason if recording.refused is not None else "a step is missing"
        return {"value": value, "why": reason}
    return {"value": value, "why": None, **_figures(sweep, recording)}


def _figures(sweep: Sweep, recording: Recording) -> Data:
    events, storages = recording.events, recording.storages
    peak = replay(events, storages)
    live = [storages[number] for number in live_at(events, peak.index)]
    categories: dict[str, int] = {}
    for storage in live:
        categories[storage.category] = categories.get(storage.category, 0) + storage.nbytes
    timing = what_if.last_step(recording, sweep.devices[0])
    return {
        "peak_bytes": peak.allocated,
        "reserved_bytes": peak.reserved,
        "largest_buffer_bytes": max((s.nbytes for s in live if s.category != "library"), default=0),
        "categories": dict(sorted(categories.items(), key=lambda item: -item[1])),
        "flops": timing.flops.model if timing is not None else None,
        "devices": {
            device.key: _on_device(sweep, recording, device, peak.reserved) for device in sweep.devices
        },
    }


def _on_device(sweep: Sweep, recording: Recording, device: Device, reserved: int) -> Data:
    """Return whether it fits, and the step time if it does."""
    room = sweep.room(device)
    # An allocator that runs out of memory first frees its cache: the case may fit with less.
    fits = reserved <= room or replay(recording.events, recording.storages, room).failed is None
    timing = what_if.last_step(recording, device) if fits else None
    return {
        "fits": fits,
        "step_ms": timing.step_s * 1e3 if timing is not None else None,
        "bound_by": timing.bound_by if timing is not None else None,
    }


def _fit_cells(sweep: Sweep, cell: Callable[[int], Data]) -> list[Data]:
    """Return, for each device, the cell of the largest value that fits; value 0 if 1 does not fit."""
    known: dict[int, Data] = {}

    def cell_of(value: int) -> Data:
        if value not in known:
            known[value] = cell(value)
        return known[value]

    cells = []
    for device in sweep.devices:

        def probe(value: int, device: Device = device) -> tuple[bool, int]:
            got = cell_of(value)
            if got["why"] is not None:
                raise _Stopped(got)
            fits, needed = got["devices"][device.key]["fits"], got["reserved_bytes"]
            # If it fits only because the allocator freed its cache, use the bytes of live tensors.
            return fits, got["peak_bytes"] if fits and needed > sweep.room(device) else needed

        try:
            largest = largest_fitting(probe, sweep.room(device), sweep.start())
            nothing = {"value": 0, "why": f"not even {sweep.key} = 1 fits"}
            cells.append({"device": device.key, **(cell_of(largest) if largest else nothing)})
        except _Stopped as stopped:
            cells.append({"device": device.key, **stopped.cell})
    return cells


class _Stopped(Exception):
    """A rehearsal in the search was refused."""

    def __init__(self, cell: Data):
        super().__init__(cell["why"])
        self.cell = cell


def largest_fitting(probe: Callable[[int], tuple[bool, int]], room: int, start: int) -> int:
    """Return the largest value that fits, to within 1/PRECISION; 0 if 1 does not fit.

    probe: value -> (whether it fits, bytes that it needs), also called for the value returned. Large values
    take long to rehearse, and memory grows roughly linearly. So the line through the last two probes gives
    the next value, and a value just above the bound where that line allows no larger one: reserved memory
    grows in segments, so the line may be too steep. Every fourth probe bisects.
    """
    low, high = 0, 0  # the largest value that fits, the smallest that does not (0: none yet)
    points: list[tuple[int, int]] = []
    value = start
    while True:
        fits, needed = probe(value)
        points.append((value, needed))
        low, high = (value, high) if fits else (low, value)
        closest = low + max(1, low / PRECISION)
        limit = _limit_on_line(points, room)
        if low >= LARGEST or 0 < high <= closest:
            return low
        if fits and len(points) > 1 and 0 < limit < closest:
            value = int(closest)
        else:
            value = _next_value(limit, low, high, bisect=len(points) % 4 == 0)


def _limit_on_line(points: list[tuple[int, int]], room: int) -> float:
    """Return the value at which a line through the last two probes reaches `room`; 0 if there is none."""
    (before, bytes_before), (value, needed) = points[-2:] if len(points) > 1 else [(0, 0), *points]
    slope = (needed - bytes_before) / (value - before)
    return value + (room - needed) / slope if slope > 0 else 0.0


def _next_value(limit: float, low: int, high: int, bisect: bool) -> int:
    """Return a value just below the limit of the line; else the midpoint, or eight times the lower bound."""
    guess = int(limit * (1 - 0.5 / PRECISION))
    if low < guess < (high or min(64 * low, LARGEST)) and not (high and bisect):
        return guess
    return (low + high) // 2 if high else min(8 * low, LARGEST)
