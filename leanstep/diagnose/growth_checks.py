"""Checks for the growth rules: work or memory that increases from early to late steps.

The checks count instead of timing wherever possible: buffers and graphs that outlive their step, and ops,
FLOPs and bytes per step. Python work appears in no count; for it the main thread's CPU time must at least
double.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from leanstep.diagnose.step_records import FORWARD, Hit, LineWork, StepRecord, Tally, Work, by_line
from leanstep.tape.lines import UNKNOWN_LINE, Line

# Anything of the last steps may still be alive: a variable holds its value until it is reassigned.
LAST_STEPS = 2
# Values rise from this many standard deviations of the Mann-Kendall statistic: once in 2,000 by chance.
TREND = 3.3
MAX_VALUES = 256
# For each half of the steps.
HALF_TREND = 2.0


def rises(values: Sequence[float], deviations: float = TREND) -> bool:
    """Return whether later values exceed earlier ones more often than by chance (Mann-Kendall test)."""
    # The test compares all pairs: for a long recording every k-th value is enough.
    values = values[:: max(1, len(values) // MAX_VALUES)]
    count = len(values)
    pairs = sum(
        (later > earlier) - (later < earlier) for i, earlier in enumerate(values) for later in values[i + 1 :]
    )
    deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    return deviation > 0 and (pairs - 1) / deviation > deviations


def thirds(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the medians of the first, the middle and the last third."""
    third = len(values) // 3
    parts = values[:third], values[third : len(values) - third], values[len(values) - third :]
    first, middle, last = (statistics.median(part) for part in parts)
    return first, middle, last


def growing_memory(steps: Sequence[StepRecord], limits: Mapping[str, float]) -> list[Hit]:
    """Return the lines whose buffers or graphs outlive nearly every step."""
    if len(steps) < limits["steps"]:
        return []
    settled = steps[:-LAST_STEPS]
    enough = limits["share"] * len(settled)
    hits = []
    for line, left in _steps_by_line(settled, "outlived").items():
        total = sum(entry.bytes for entry, _ in left)
        if len(left) < enough or total < limits["bytes"] * len(left):
            continue
        callers: Counter[Line] = sum((callers for _, callers in left), Counter())
        evidence = {"bytes_per_step": total // len(left), "bytes": total, "steps": len(left), "graphs": 0}
        hits.append(Hit(line, len(left), callers, FORWARD, evidence, Work(held_bytes=total)))
    for line, left in _steps_by_line(settled, "graphs_alive").items():
        if len(left) >= enough and not any(hit.line == line for hit in hits):
            callers = sum((callers for _, callers in left), Counter())
            evidence = {"bytes_per_step": 0, "bytes": 0, "steps": len(left), "graphs": len(left)}
            hits.append(Hit(line, len(left), callers, "backward", evidence))
    return hits


def _steps_by_line(steps: Sequence[StepRecord], table: str) -> dict[Line, list[tuple[Tally, Counter[Line]]]]:
    """Return what outlives the steps, by line: one entry per step that left something alive."""
    lines: dict[Line, list[tuple[Tally, Counter[Line]]]] = defaultdict(list)
    for step in steps:
        for line, entry in by_line(getattr(step, table), Tally).items():
            lines[line].append(entry)
    return lines


def growing_step(steps: Sequence[StepRecord], limits: Mapping[str, float]) -> list[Hit]:
    """Return a finding if later steps do more: ops, FLOPs or bytes, or CPU time with the same ops.

    One line represents all.

    A step with a rollout is compared with others that have one.
    """
    with_rollout = [step for step in steps if step.has_rollout]
    without = [step for step in steps if not step.has_rollout]
    for group in (with_rollout, without):
        if len(group) >= limits["steps"]:
            hit = _more_work(group, limits) or _more_time(group, limits)
            if hit is not None:
                return [hit]
    return []


_COUNTS: dict[str, Callable[[StepRecord], float]] = {
    "ops": lambda step: step.num_ops,
    "flops": lambda step: step.flops,
    "written_bytes": lambda step: step.written_bytes,
}


def _more_work(steps: Sequence[StepRecord], limits: Mapping[str, float]) -> Hit | None:
    series = {name: [count(step) for step in steps] for name, count in _COUNTS.items()}
    ends = {name: thirds(values) for name, values in series.items()}
    grows = [
        name
        for name, (first, _, last) in ends.items()
        if last > (1 + limits["share"]) * first and rises(series[name])
    ]
    if not grows:
        return None
    line, callers = _most_grown(steps)
    gain = {name: max(0.0, ends[name][2] - ends[name][0]) for name in ends}
    evidence = {
        "first": {name: int(ends[name][0]) for name in ends},
        "last": {name: int(ends[name][2]) for name in ends},
        "grows": grows,
        "steps": len(steps),
        "cpu_seconds": None,
    }
    work = Work(ops=gain["ops"], moved_bytes=2 * gain["written_bytes"], flops=gain["flops"])
    return Hit(line, len(steps), callers, FORWARD, evidence, work)


def _most_grown(steps: Sequence[StepRecord]) -> tuple[Line, Counter[Line]]:
    """Return the line whose work grew most from the first to the last of the steps that recorded lines."""
    known = [step.line_work for step in steps if step.line_work]
    few = max(1, len(known) // 3)
    gains: dict[Line, float] = defaultdict(float)
    callers: dict[Line, Counter[Line]] = defaultdict(Counter)
    for sign, part in ((-1, known[:few]), (1, known[-few:])):
        for table in part:
            for site, work in table.items():
                gains[site.line] += sign * _plain_seconds(work) / len(part)
                if site.caller is not None:
                    callers[site.line][site.caller] += work.ops
    gains.pop(UNKNOWN_LINE, None)
    line = max(gains, key=lambda line: gains[line], default=UNKNOWN_LINE)
    return line, callers[line]


def _plain_seconds(work: LineWork) -> float:
    """Return the rough time on a typical core, used only to compare lines."""
    return 1e-5 * work.ops + work.written_bytes / 5e9 + work.flops / 5e10


def _more_time(steps: Sequence[StepRecord], limits: Mapping[str, float]) -> Hit | None:
    """Return a hit if CPU time rises in both halves and doubles; a change in load affects only one half."""
    timed = [step for step in steps if step.cpu_seconds is not None and step.update_site is not None]
    if len(timed) < limits["steps"]:
        return None
    seconds = [step.cpu_seconds or 0.0 for step in timed]
    half, third = len(seconds) // 2, len(seconds) // 3
    first, _, last = thirds(seconds)
    if not (rises(seconds) and all(rises(part, HALF_TREND) for part in (seconds[:half], seconds[half:]))):
        return None
    if min(seconds[-third:]) < limits["time"] * first or last - first < limits["seconds"]:
        return None
    site = timed[-1].update_site
    assert site is not None
    callers: Counter[Line] = Counter() if site.caller is None else Counter({site.caller: 1})
    evidence = {
        "first": {}, "last": {}, "grows": [], "steps": len(timed), "cpu_seconds": [first, last],
    }  # fmt: skip
    return Hit(site.line, len(timed), callers, FORWARD, evidence, Work(seconds=last - first), "medium")
