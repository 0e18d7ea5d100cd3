"""Graphs and memory that outlive their use, and work that increases from early to late steps.

The rules count instead of timing wherever possible: buffers and graphs that outlive their step, and ops,
FLOPs and bytes per step. Python work appears in no count; for it the main thread's CPU time must at least
double.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from leanstep.diagnose.findings import Finding, Hit, Rule, Work, callers_of, plural
from leanstep.diagnose.step import Amount, Left, Step, grouped
from leanstep.tape.events import BACKWARD, BACKWARD_CALL, FORWARD
from leanstep.tape.lines import UNKNOWN_LINE, Line
from leanstep.units import about, size

# The fewest steps that are compared.
GROWTH_STEPS = 8
# Anything of the last steps may still be alive: a variable holds its value until it is reassigned.
LAST_STEPS = 2
# Values rise from this many standard deviations of the Mann-Kendall statistic: once in 2,000 by chance.
TREND = 3.3
MAX_VALUES = 256
# For each half of the steps.
HALF_TREND = 2.0


def retain_graph(step: Step, limits: Mapping[str, float]) -> Iterator[Hit]:
    """Find backward(retain_graph=True): saved tensors stay alive, and their graph is traversed again."""
    calls = [
        event
        for event in step.of_kind(BACKWARD_CALL)
        # A second derivative needs the graph.
        if dict(event.named).get("retain_graph") and not dict(event.named).get("create_graph")
    ]
    for line, events in grouped(calls, lambda event: event.site).items():
        if len(events) >= limits["calls"]:
            runs = step.backward_runs
            needless = runs <= len(calls)
            evidence = {"calls": len(events), "backward_runs": runs, "needless": needless}
            work = Work(held_bytes=step.peak_saved_bytes)
            confidence = "high" if needless else "medium"
            callers = callers_of(event.site for event in events)
            yield Hit(line, len(events), callers, BACKWARD, evidence, work, confidence)


RETAIN_GRAPH = Rule(
    "retain-graph",
    retain_graph,
    limits={"calls": 1},
    fires_when="`backward(retain_graph=True)` without `create_graph`",
    what=lambda f: (
        "backward(retain_graph=True) without a later backward in the step: all saved tensors stay "
        "alive until the loss is freed."
        if f.evidence["needless"]
        else "backward(retain_graph=True): the shared part of the graph is kept and traversed again."
    ),
    amount=lambda f: plural(f.count, "call"),
    why="Saved tensors outlive the backward, and each further backward repeats the shared part.",
    fix="Remove retain_graph. With several losses, add them and call backward once.",
    short_fix="remove it; add losses, one backward",
    edit="retain",
)


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


def growing_memory(steps: Sequence[Step], limits: Mapping[str, float]) -> Iterator[Hit]:
    """Find lines whose buffers or graphs outlive nearly every step."""
    if len(steps) < limits["steps"]:
        return
    settled = steps[:-LAST_STEPS]
    enough = limits["share"] * len(settled)
    named = set()
    for line, left in _left(settled, buffers=True).items():
        total = sum(entry.num_bytes for entries in left for entry in entries)
        if len(left) < enough or total < limits["bytes"] * len(left):
            continue
        named.add(line)
        callers = callers_of(entry.site for entries in left for entry in entries)
        evidence = {"bytes_per_step": total // len(left), "bytes": total, "steps": len(left), "graphs": 0}
        yield Hit(line, len(left), callers, FORWARD, evidence, Work(held_bytes=total))
    for line, left in _left(settled, buffers=False).items():
        if len(left) >= enough and line not in named:
            callers = callers_of(entry.site for entries in left for entry in entries)
            evidence = {"bytes_per_step": 0, "bytes": 0, "steps": len(left), "graphs": len(left)}
            yield Hit(line, len(left), callers, BACKWARD, evidence)


def _left(steps: Sequence[Step], *, buffers: bool) -> dict[Line, list[list[Left]]]:
    """Return what outlives the steps, by line: one entry per step that left something alive."""
    lines: dict[Line, list[list[Left]]] = defaultdict(list)
    for step in steps:
        alive = [e for e in step.left if bool(e.num_bytes) == buffers and e.number in step.tape.alive]
        for line, entries in grouped(alive, lambda entry: entry.site).items():
            lines[line].append(entries)
    return lines


def _grown_memory(f: Finding) -> str:
    e = f.evidence
    if e["graphs"]:
        return (
            f"The graphs of {e['graphs']:,} earlier steps are still alive: a stored loss holds the graph "
            "that computed it."
        )
    return (
        f"Tensors that this line allocated in {e['steps']:,} earlier steps are still alive: "
        f"{size(e['bytes_per_step'])} per step, {size(e['bytes'])} so far."
    )


GROWING_MEMORY = Rule(
    "growing-memory",
    growing_memory,
    limits={"steps": GROWTH_STEPS, "share": 0.75, "bytes": 4096},
    fires_when=(
        "with `--steps 8` or more: tensors (≥ 4,096 bytes per step) that a line allocated in ≥ 75 "
        "% of the steps, or the graphs of their losses, are still alive at the end"
    ),
    what=_grown_memory,
    amount=lambda f: (
        f"{f.evidence['graphs']:,} graphs"
        if f.evidence["graphs"]
        else f"{size(f.evidence['bytes_per_step'])} per step"
    ),
    why="Memory use grows with every step until it runs out.",
    fix="Store numbers: loss.item(), or loss.detach() where the host must not wait; no_grad() for losses "
    "that are only logged. Clear a cache or limit its size, and store a copy of a small slice "
    "(x[0].clone()): a view holds the whole tensor.",
    short_fix="loss.detach(); limit cache sizes",
    needs="steps",
)


def growing_step(steps: Sequence[Step], limits: Mapping[str, float]) -> Iterator[Hit]:
    """Find later steps that do more: ops, FLOPs or bytes, or CPU time with the same ops.

    One line represents all. A step with a rollout is compared with others that have one.
    """
    with_rollout = [step for step in steps if step.has_rollout]
    without = [step for step in steps if not step.has_rollout]
    for group in (with_rollout, without):
        if len(group) >= limits["steps"]:
            hit = _more_work(group, limits) or _more_time(group, limits)
            if hit is not None:
                yield hit
                return


_COUNTS: dict[str, Callable[[Step], float]] = {
    "ops": lambda step: step.num_ops,
    "flops": lambda step: step.flops,
    "written_bytes": lambda step: step.written_bytes,
}


def _more_work(steps: Sequence[Step], limits: Mapping[str, float]) -> Hit | None:
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


def _most_grown(steps: Sequence[Step]) -> tuple[Line, Counter[Line]]:
    """Return the line whose work grew most from the first to the last of the steps that kept lines."""
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


def _plain_seconds(work: Amount) -> float:
    """Return the rough time on a typical core, used only to compare lines."""
    return 1e-5 * work.ops + work.written_bytes / 5e9 + work.flops / 5e10


def _more_time(steps: Sequence[Step], limits: Mapping[str, float]) -> Hit | None:
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
    evidence = {
        "first": {}, "last": {}, "grows": [], "steps": len(timed), "cpu_seconds": [first, last],
    }  # fmt: skip
    work = Work(seconds=last - first)
    return Hit(site.line, len(timed), callers_of([site]), FORWARD, evidence, work, "medium")


def _grown_step(f: Finding) -> str:
    e = f.evidence
    if e["cpu_seconds"] is not None:
        first, last = e["cpu_seconds"]
        return (
            f"From the first third of {e['steps']} steps to the last, the CPU time per step grows from "
            f"{about(first)} to {about(last)}, with the same ops: the growth is in Python code."
        )
    shown = {
        "ops": "{:,} ops".format,
        "flops": lambda flops: f"{flops / 1e9:,.3g} GFLOP",
        "written_bytes": lambda num_bytes: f"{size(num_bytes)} written",
    }
    grown = ", ".join(f"{shown[n](e['first'][n])} → {shown[n](e['last'][n])}" for n in e["grows"])
    return (
        f"From the first third of {e['steps']} steps to the last, each step does more: {grown}. "
        "This line grows most."
    )


GROWING_STEP = Rule(
    "growing-step",
    growing_step,
    limits={"steps": GROWTH_STEPS, "share": 0.2, "time": 2, "seconds": 1e-3},
    fires_when=(
        "with `--steps 8` or more: ops, FLOPs or written bytes rise by ≥ 20 % from the first "
        "third of the steps to the last; or, at the same ops, CPU time doubles"
    ),
    what=_grown_step,
    amount=lambda f: f"grows over {f.evidence['steps']} steps",
    why="Each step takes longer than the previous one, without limit.",
    fix="Look for state that a step inherits from the previous one: a running sum of losses whose "
    "backward traverses all earlier graphs (add loss.detach()), or a list or tensor that each step "
    "extends and iterates over. Where sequences or batches grow on purpose, add "
    "# leanstep: ignore[growing-step].",
    short_fix="carry less state between steps",
    needs="steps",
)
