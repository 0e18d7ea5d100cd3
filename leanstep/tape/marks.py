"""Names and starts of the phases of an iteration. Recordings contain them, so torch is not imported.

`leanstep.tape.phases` finds them; docs/concepts.md has the definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ROLLOUT, SCORING, UPDATE, OTHER = "rollout", "scoring", "update", "other"
PHASES = (ROLLOUT, SCORING, UPDATE, OTHER)
# The name of scoring in a script without rollouts: evaluation, a teacher, a reference model.
NO_GRAD = "forwards without gradients"


@dataclass
class Mark:
    """The start of a phase. `position`: the owner's clock, a time or a number of events."""

    position: Any
    phase: str


def spans(marks: Sequence[Mark], start: Any, end: Any) -> list[tuple[str, Any, Any]]:
    """Return the non-empty phases between two positions as (phase, from, to), in order."""
    pieces: list[tuple[str, Any, Any]] = []
    phase, at = OTHER, start
    for mark in marks:
        if mark.position >= end:
            break
        if mark.position > at:
            pieces.append((phase, at, mark.position))
            at = mark.position
        phase = mark.phase
    if at < end:
        pieces.append((phase, at, end))
    return pieces
