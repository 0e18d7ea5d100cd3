"""The phases of a rehearsed iteration: time, launches, FLOPs and memory of rollout, scoring and update.

`leanstep.tape.phases` finds where phases begin; `Recording.phases` stores the marks as event indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leanstep.rehearse.devices import Device
from leanstep.rehearse.events import Alloc, Event, Free, Recording, Step
from leanstep.rehearse.time_model import HostCosts, Timing, time_steps
from leanstep.rehearse.what_if import fused
from leanstep.tape.marks import NO_GRAD, OTHER, PHASES, ROLLOUT, SCORING, spans

Span = tuple[str, int, int]


@dataclass
class PhaseTiming:
    """One phase of an iteration; `peak_bytes`: its maximum of live bytes."""

    phase: str
    seconds: float = 0.0
    device_s: float = 0.0
    host_s: float = 0.0
    kernels: int = 0
    calls: int = 0
    waits: int = 0
    flops: int = 0
    peak_bytes: int = 0

    def add(self, timing: Timing, peak_bytes: int) -> None:
        self.seconds += timing.step_s
        self.device_s += timing.device_s
        self.host_s += timing.host_s
        self.kernels += timing.kernels
        self.calls += timing.calls
        self.waits += timing.waits
        self.flops += timing.flops.all
        self.peak_bytes = max(self.peak_bytes, peak_bytes)


@dataclass
class Iteration:
    """A rollout and the steps that follow it, or one step of a script without rollouts.

    whole: the next rollout was recorded, or it has as many steps as the previous iteration.
    """

    steps: list[Step]
    whole: bool
    phases: list[PhaseTiming]

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)


def has_rollout(recording: Recording, step: Step) -> bool:
    """Whether the step contains a rollout; a rollout in a separate engine leaves no events."""
    begun = any(
        mark.phase == ROLLOUT and step.first <= mark.position < step.last for mark in recording.phases
    )
    return begun or any(phase == ROLLOUT for phase, _, _ in spans(recording.phases, step.first, step.last))


def last_iteration(recording: Recording, device: Device) -> Iteration | None:
    """Return the last whole iteration, or the unfinished one; None for a script that only makes updates."""
    steps, whole = _steps(recording)
    if not steps:
        return None
    pieces = [piece for step in steps for piece in _pieces(recording, step)]
    if not any(phase in (ROLLOUT, SCORING) for phase, _, _ in pieces):
        return None
    return Iteration(steps, whole, _timed(recording, device, steps[0], pieces))


def _steps(recording: Recording) -> tuple[list[Step], bool]:
    starts = [i for i, step in enumerate(recording.steps) if has_rollout(recording, step)]
    if not starts:
        return recording.steps[-1:], True
    last = recording.steps[starts[-1] :]
    if len(starts) == 1:
        return last, False
    before = recording.steps[starts[-2] : starts[-1]]
    # The first iteration includes what the program generates before training: prefer a later one.
    return (last, True) if len(last) >= len(before) else (before, True)


def _pieces(recording: Recording, step: Step) -> list[Span]:
    """Return the phases of a step, without the set-up before the first phase of the first step."""
    pieces = spans(recording.phases, step.first, step.last)
    return pieces[1:] if step.number == 0 and pieces and pieces[0][0] == OTHER else pieces


def _timed(recording: Recording, device: Device, first: Step, pieces: Sequence[Span]) -> list[PhaseTiming]:
    """Time the pieces, after playing the previous step to fill the queue."""
    before = [step for step in recording.steps if step.number == first.number - 1]
    played: list[Event] = []
    for step in before:
        played += _events(recording, step.first, step.last)
    ends = [len(played)] if played else []
    for _, start, stop in pieces:
        played += _events(recording, start, stop)
        ends.append(len(played))
    timings = time_steps(played, ends, device, HostCosts.of(recording.request.host_us))[-len(pieces) :]
    peaks = _peaks(recording.events, pieces)
    by_phase = {phase: PhaseTiming(phase) for phase in PHASES}
    for (phase, _, _), timing, peak in zip(pieces, timings, peaks, strict=True):
        by_phase[phase].add(timing, peak)
    if not recording.iterations:
        by_phase[SCORING].phase = NO_GRAD
    return [entry for entry in by_phase.values() if entry.calls]


def _events(recording: Recording, start: int, stop: int) -> Sequence[Event]:
    events = recording.events[start:stop]
    return fused(events, recording.regions) if recording.regions else events


def _peaks(events: Sequence[Event], pieces: Sequence[Span]) -> list[int]:
    """Return the maximum of live bytes in each piece."""
    sizes: dict[int, int] = {}
    live, at, peaks = 0, 0, []
    for _, start, stop in pieces:
        peak = 0
        while at < stop:
            event = events[at]
            if isinstance(event, Alloc):
                sizes[event.storage] = event.nbytes
                live += event.nbytes
            elif isinstance(event, Free):
                live -= sizes.pop(event.storage, 0)
            if at >= start:
                peak = max(peak, live)
            at += 1
        peaks.append(peak)
    return peaks
