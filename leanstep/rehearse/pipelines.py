"""How long the ranks of a pipeline wait for each other, computed from each rank's schedule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Work(NamedTuple):
    """One entry of a rank's schedule.

    kind: "F" (forward), "B" (whole backward), "I" (gradients of inputs) or "W" (gradients of weights).
    """

    stage: int
    kind: str
    microbatch: int


def waiting_share(orders: Mapping[int, Sequence[Work]], rank: int, costs: Mapping[str, float]) -> float:
    """Return the seconds that a rank waits per second of work, until all ranks have finished.

    Stages are equal: `costs` gives the seconds of each kind of work. A forward needs the forward of the
    previous stage, a backward that of the next stage; sends take no time.
    """
    last = max(work.stage for order in orders.values() for work in order)
    ends: dict[Work, float] = {}
    clocks, positions = dict.fromkeys(orders, 0.0), dict.fromkeys(orders, 0)
    moved = True
    while moved:
        moved = False
        for number, order in orders.items():
            while positions[number] < len(order):
                work = order[positions[number]]
                before = [ends.get(needed) for needed in _needs(work, last, ends)]
                if None in before:
                    break
                start = max([clocks[number], *(end for end in before if end is not None)])
                clocks[number] = ends[work] = start + costs[work.kind]
                positions[number] += 1
                moved = True
    if any(positions[number] < len(order) for number, order in orders.items()):
        return 0.0  # a schedule that cannot be executed
    works = sum(costs[work.kind] for work in orders[rank])
    return (max(clocks.values()) - works) / works if works else 0.0


def _needs(work: Work, last: int, ends: Mapping[Work, float]) -> Iterable[Work]:
    """Return the work that must end first."""
    stage, kind, microbatch = work
    if kind == "F":
        return [Work(stage - 1, "F", microbatch)] if stage else []
    if kind == "W":
        return [Work(stage, "I", microbatch)]
    own = Work(stage, "F", microbatch)
    if stage == last:
        return [own]
    above = [Work(stage + 1, kind, microbatch) for kind in ("I", "B")]
    return [own, next((piece for piece in above if piece in ends), above[-1])]
