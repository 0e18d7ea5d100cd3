"""Compare two traces: what got slower or faster, per op and shape, and a verdict.

Device time is grouped by the op that launched it, host time is used without a device, and kernels that no op
launched (CUDA graphs, GPU-only traces) have their own names. All times are per step.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from leanstep.diagnose.traces.timeline import Timeline, each
from leanstep.diagnose.traces.trace_file import OP, read_trace
from leanstep.units import ratio, seconds

THRESHOLD = 0.10
# Changes below this share of the longer step are ignored: launches vary by that much.
SMALL = 0.005
KINDS = ("new", "slower", "faster", "gone")
SHOWN = 10


@dataclass
class Table:
    """One trace: seconds and runs per step by op and shape, and the step itself."""

    path: str
    step_s: float = 0.0
    idle_s: float = 0.0
    num_steps: int = 0
    on_device: bool = False
    rows: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    @property
    def busy_s(self) -> float:
        return sum(row[0] for row in self.rows.values())


def read_table(path: str) -> Table:
    """Return the times of one trace by op and shape. Raise a one-line ValueError if it is not a trace."""
    timeline = Timeline(read_trace(path))
    table = Table(path, timeline.step_us / 1e6, 0.0, len(timeline.windows), timeline.has_device)
    rows: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    runs: dict[tuple[str, str], set[int]] = defaultdict(set)
    if timeline.has_device:
        for activity in each(timeline.active):
            call = timeline.call_of(activity)
            # Kernels launched before the trace began belong to none of its steps.
            if timeline.step_of_activity(activity) < 0 or (call < 0 and timeline.knows_launches):
                continue
            op = int(timeline.shown[call]) if call >= 0 else -1
            key = _key(timeline, op if op >= 0 else activity)
            rows[key][0] += float(timeline.end[activity] - timeline.start[activity])
            runs[key].add(op if op >= 0 else activity)
        table.idle_s = sum(timeline.idle()[0].values()) / 1e6 / table.num_steps
    else:
        for op in each(np.flatnonzero(timeline.kind == OP)):
            if timeline.shown[op] == op and timeline.step_at(float(timeline.start[op])) >= 0:
                key = _key(timeline, op)
                rows[key][0] += float(timeline.end[op] - timeline.start[op])
                runs[key].add(op)
    for key, row in rows.items():
        table.rows[key] = [row[0] / 1e6 / table.num_steps, len(runs[key]) / table.num_steps]
    if not table.rows:
        raise ValueError(f"{path} has no op and no kernel inside its steps: nothing to compare")
    return table


def _key(timeline: Timeline, index: int) -> tuple[str, str]:
    shape = timeline.trace.shapes.texts[timeline.trace.detail[index]] if timeline.kind[index] == OP else None
    if shape is None:
        return timeline.text(index), ""
    dims, types, _ = shape
    kinds = types if len(types) == len(dims) else ("",) * len(dims)
    tensors = [f"{_text(d)} {k}".strip() for d, k in zip(dims, kinds, strict=True) if d]
    return timeline.text(index), ", ".join(tensors)


def _text(dims: Any) -> str:
    return "[" + ", ".join(_text(d) if isinstance(d, tuple) else str(d) for d in dims) + "]"


@dataclass(frozen=True)
class Change:
    """One op with one set of shapes in two traces; seconds and runs are per step."""

    kind: str
    op: str
    shapes: str
    before_seconds: float
    after_seconds: float
    before_runs: float
    after_runs: float

    @property
    def difference(self) -> float:
        return self.after_seconds - self.before_seconds

    def __str__(self) -> str:
        op, shapes = (text if len(text) <= 60 else text[:59] + "…" for text in (self.op, self.shapes))
        runs = (
            f"{self.before_runs:g} → {self.after_runs:g} runs" if self.before_runs != self.after_runs else ""
        )
        times = f"{seconds(self.before_seconds)} → {seconds(self.after_seconds)}"
        return f"{self.kind:<7} {times:<22} {op} {shapes} {runs}".rstrip()


@dataclass
class Comparison:
    """Changes above the threshold, worst first."""

    before: Table
    after: Table
    threshold: float
    changes: list[Change]

    @property
    def step_ratio(self) -> float:
        return self.after.step_s / max(self.before.step_s, 1e-12)

    @property
    def is_worse(self) -> bool:
        """Whether, as in `diagnose diff`, an op is new or has grown, and the whole step is slower too."""
        grown = any(change.kind in ("new", "slower") for change in self.changes)
        more = self.after.busy_s > self.before.busy_s * (1 + self.threshold)
        return self.step_ratio > 1 + self.threshold or (grown and more)

    @property
    def verdict(self) -> str:
        step = self.step_ratio
        if step > 1 + self.threshold:
            words = f"slower: a step takes {ratio(step)} as long"
        elif step < 1 - self.threshold:
            words = f"faster: a step takes {ratio(step)} as long"
        else:
            words = f"about as fast: a step takes {ratio(step)} as long"
        counts = [(kind, sum(c.kind == kind for c in self.changes)) for kind in KINDS]
        listed = ", ".join(f"{count} {kind}" for kind, count in counts if count)
        return f"{words}; ops: {listed or f'none changed by more than {self.threshold:.0%}'}"

    def text(self, show_all: bool = False) -> str:
        where = "device" if self.after.on_device else "host"
        lines = [f"leanstep diagnose --trace {self.before.path} {self.after.path}"]
        for name, table in (("before", self.before), ("after", self.after)):
            idle = f", idle {seconds(table.idle_s)}" if table.on_device else ""
            steps = f"{table.num_steps} step{'s' * (table.num_steps != 1)}"
            busy = f"{where} busy {seconds(table.busy_s)}"
            lines.append(f"  {name:<6} {steps}, each {seconds(table.step_s)}, {busy}{idle}")
        lines.append("")
        shown = self.changes if show_all else self.changes[:SHOWN]
        lines += [f"  {change}" for change in shown]
        if len(shown) < len(self.changes):
            lines.append(f"  and {len(self.changes) - len(shown)} smaller ones (--all shows them)")
        return "\n".join([*lines, "" * bool(self.changes), self.verdict])

    def as_dict(self) -> dict[str, Any]:
        def step(table: Table) -> dict[str, Any]:
            return {
                "trace": table.path, "steps": table.num_steps, "step_seconds": table.step_s,
                "busy_seconds": table.busy_s, "idle_seconds": table.idle_s if table.on_device else None,
            }  # fmt: skip

        return {
            "threshold": self.threshold,
            "before": step(self.before),
            "after": step(self.after),
            "changes": [asdict(change) for change in self.changes],
            "worse": self.is_worse,
            "verdict": self.verdict,
        }


def compare(before: Table, after: Table, threshold: float = THRESHOLD) -> Comparison:
    """Return the ops whose time per step changed by more than `threshold` and 0.5 % of the longer step."""
    if before.on_device != after.on_device:
        with_device, without = (before, after) if before.on_device else (after, before)
        raise ValueError(
            f"{with_device.path} has device events, {without.path} has none: expected both or neither with "
            "device events"
        )
    floor = SMALL * max(before.step_s, after.step_s)
    changes = []
    for key in before.rows.keys() | after.rows.keys():
        old, new = before.rows.get(key, [0.0, 0.0]), after.rows.get(key, [0.0, 0.0])
        if abs(new[0] - old[0]) < floor:
            continue
        kind = _kind(old, new, threshold)
        if kind is not None:
            changes.append(Change(kind, *key, old[0], new[0], old[1], new[1]))
    changes.sort(key=lambda c: (-abs(c.difference), c.op, c.shapes))
    return Comparison(before, after, threshold, changes)


def _kind(old: list[float], new: list[float], threshold: float) -> str | None:
    if not old[1] or not new[1]:
        return "new" if new[1] else "gone"
    if new[0] > old[0] * (1 + threshold):
        return "slower"
    return "faster" if new[0] < old[0] * (1 - threshold) else None
