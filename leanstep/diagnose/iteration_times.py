"""Times of the phases of an iteration, and the ops, FLOPs and bytes in each.

The times come from an unrecorded iteration, the amounts from the recorded steps. Both are split at the marks
of `leanstep.tape.phases`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from leanstep.diagnose.step import Step
from leanstep.tape.marks import NO_GRAD, PHASES, ROLLOUT, SCORING, UPDATE, Mark, spans


class Position(NamedTuple):
    """The start of a phase: the time, and the number of events recorded until then.

    waited: how long the main thread has waited for a core, which `time` excludes.
    """

    time: float
    event: int = 0
    waited: float = 0.0


@dataclass
class PhaseTotal:
    """One phase of an iteration.

    `seconds`: in the timed iteration, None if there is none. The rest is recorded.
    """

    phase: str
    seconds: float | None = None
    ops: int = 0
    flops: int = 0
    written_bytes: int = 0


@dataclass
class Stretch:
    """The span from the end of one step to the end of another: `steps` updates."""

    start: Position
    end: Position
    steps: int = 0


@dataclass
class RecordedStep:
    """Where a step was recorded, and whether a rollout is part of it.

    amounts: by phase its ops, FLOPs and written bytes: see `amounts`.
    """

    start: Position
    end: Position
    has_rollout: bool
    amounts: dict[str, tuple[int, int, int]] = field(default_factory=dict)


class IterationClock:
    """Times one iteration of a script with rollouts: a rollout and its updates, from the end of a step.

    The end of an earlier iteration is not part of it: the span restarts with the first rollout. It is
    complete when the next rollout begins.
    """

    def __init__(self) -> None:
        self.stretch: Stretch | None = None
        self.has_rollout = self.running = False

    def start(self, now: Position) -> None:
        """Record the end of a step."""
        self.stretch, self.running, self.has_rollout = Stretch(now, now), True, False

    def rollout_begins(self) -> bool:
        """Record a mark and return whether the previous iteration is complete."""
        if not self.running or self.stretch is None:
            return False
        if self.has_rollout and self.stretch.steps:
            self.running = False
            return True
        if self.stretch.steps:
            self.start(self.stretch.end)
        self.has_rollout = True
        return False

    def step_ends(self, now: Position) -> None:
        if self.running and self.stretch is not None:
            self.stretch.end = now
            self.stretch.steps += 1

    @property
    def iteration(self) -> Stretch | None:
        """A rollout and at least one step, else None; the script may end before the iteration does."""
        return self.stretch if self.stretch is not None and self.stretch.steps and self.has_rollout else None


def amounts(marks: Sequence[Mark], recorded: RecordedStep, step: Step) -> dict[str, tuple[int, int, int]]:
    """Return ops, FLOPs and written bytes of each phase of a step."""
    by_phase: dict[str, tuple[int, int, int]] = {}
    for phase, first, last in spans(marks, recorded.start, recorded.end):
        ops, flops, written = step.amount(first.event, last.event)
        before = by_phase.get(phase, (0, 0, 0))
        by_phase[phase] = (before[0] + ops, before[1] + flops, before[2] + written)
    return by_phase


def totals(
    marks: Sequence[Mark],
    timed: Stretch | None,
    recorded: Sequence[RecordedStep],
    rollouts: bool,
) -> list[PhaseTotal]:
    """Return the phases of an iteration without empty ones; nothing if the script has no rollouts.

    timed: the span whose seconds count; its updates are those of one iteration.
    rollouts: whether the script has any. Without rollouts, an iteration is one step.
    """
    by_phase = {phase: PhaseTotal(phase) for phase in PHASES}
    if timed is not None:
        for phase, first, last in spans(marks, timed.start, timed.end):
            by_phase[phase].seconds = (by_phase[phase].seconds or 0.0) + max(0.0, last.time - first.time)
    for step in recorded:
        for phase, (ops, flops, written) in step.amounts.items():
            entry = by_phase[phase]
            entry.ops += ops
            entry.flops += flops
            entry.written_bytes += written
    # A recording may end between the updates of an iteration, so the number of updates may differ.
    iterations = sum(step.has_rollout for step in recorded) if rollouts else len(recorded)
    updates = timed.steps if timed is not None else len(recorded) / max(1, iterations)
    for phase, entry in by_phase.items():
        share = updates / max(1, len(recorded)) if phase == UPDATE else 1 / max(1, iterations)
        entry.ops, entry.flops = round(share * entry.ops), round(share * entry.flops)
        entry.written_bytes = round(share * entry.written_bytes)
    present = [entry for entry in by_phase.values() if entry.seconds or entry.ops]
    if not any(entry.phase in (ROLLOUT, SCORING) for entry in present):
        return []
    if not rollouts:
        by_phase[SCORING].phase = NO_GRAD
    return present


def as_dict(entry: PhaseTotal) -> dict[str, Any]:
    return {
        "phase": entry.phase,
        "seconds": entry.seconds,
        "ops": entry.ops,
        "flops": entry.flops,
        "written_bytes": entry.written_bytes,
    }
