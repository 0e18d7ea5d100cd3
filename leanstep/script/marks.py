"""Names of the phases of an iteration, and where they begin. No torch here: a recording holds marks.

`leanstep.script.phases` finds them; docs/steps.md has the definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ROLLOUT, SCORING, UPDATE, OTHER = "rollout", "scoring", "update", "other"
PHASES = (ROLLOUT, SCORING, UPDATE, OTHER)
# The name of scoring in a script without rollouts: an evaluation, a teacher, a reference model.
NO_GRAD = "forwards without gradients"


@dataclass
class Mark:
    """A phase begins. `position`: what the owner's clock said, a time or a number of events."""

    position: Any
    phase: str


def spans(marks: Sequence[Mark], start: Any, end: Any) -> list[tuple[str, Any, Any]]:
    """The phases between two positions: (phase, from, to), in order, none of them empty."""
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
