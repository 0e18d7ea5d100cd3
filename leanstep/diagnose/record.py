"""What one training step left behind: counters by line, never tensors, never a log.

Rules read these records and nothing else, so a rule can be tested with a record made by hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from leanstep.diagnose.source import Line, Site

FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER = "forward", "backward", "recompute", "optimizer"


@dataclass
class OpRecord:
    """All runs of one op on one line in one phase. `direct`: dispatched by the line, not by its backward.

    `parameters`: how many distinct ones the step read between the op's first run and its last; it tells
    a loop
    over layers from a loop over samples.
    """

    count: int = 0
    tiny: int = 0
    small: int = 0
    max_bytes: int = 0
    total_bytes: int = 0
    written_bytes: int = 0
    flops: int = 0
    parameters: int = 0

    def add(self, other: OpRecord) -> None:
        self.count += other.count
        self.tiny += other.tiny
        self.small += other.small
        self.max_bytes = max(self.max_bytes, other.max_bytes)
        self.total_bytes += other.total_bytes
        self.written_bytes += other.written_bytes
        self.flops += other.flops
        self.parameters = max(self.parameters, other.parameters)


@dataclass
class Tally:
    """How often something happened on a line, and the bytes it moved."""

    count: int = 0
    bytes: int = 0
    detail: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        self.count += other.count
        self.bytes += other.bytes
        self.detail.update(other.detail)


@dataclass
class HeadRecord:
    """Backward of the widest matmul with a parameter: rows seen, rows of exactly zero gradient."""

    rows: int = 0
    dead: int = 0
    inner: int = 0
    width: int = 0
    element_bytes: int = 4

    def add(self, other: HeadRecord) -> None:
        self.rows += other.rows
        self.dead += other.dead


@dataclass
class SavedRecord:
    """Tensors of one width that a line saved for the backward: new storages only.

    `kept`, `kept_bytes`, `kept_rows`: the largest number held at once, between two runs of the backward.
    """

    count: int = 0
    bytes: int = 0
    kept: int = 0
    kept_bytes: int = 0
    kept_rows: int = 0
    shapes: Counter[str] = field(default_factory=Counter)

    def add(self, other: SavedRecord) -> None:
        self.count += other.count
        self.bytes += other.bytes
        self.kept = max(self.kept, other.kept)
        self.kept_bytes = max(self.kept_bytes, other.kept_bytes)
        self.kept_rows = max(self.kept_rows, other.kept_rows)
        self.shapes.update(other.shapes)


@dataclass(frozen=True)
class OpKey:
    site: Site
    op: str
    phase: str
    direct: bool = True


@dataclass(frozen=True)
class MatmulKey:
    site: Site
    phase: str
    direct: bool
    dtype: torch.dtype
    shape: tuple[int, int, int, int, bool]


@dataclass
class StepRecord:
    """One training step."""

    ops: dict[OpKey, OpRecord] = field(default_factory=dict)
    matmuls: dict[MatmulKey, int] = field(default_factory=dict)
    reads: dict[Site, Tally] = field(default_factory=dict)
    heads: dict[Site, HeadRecord] = field(default_factory=dict)
    zero_fills: dict[Site, Tally] = field(default_factory=dict)
    # Layout changes of parameters, gradients and optimizer state, and of everything else.
    state_copies: dict[Site, Tally] = field(default_factory=dict)
    other_copies: dict[Site, Tally] = field(default_factory=dict)
    duplicate_casts: dict[Site, Tally] = field(default_factory=dict)
    round_trips: dict[Site, Tally] = field(default_factory=dict)
    # By width: which one is the vocabulary is known only when the step is over.
    saved: dict[tuple[Site, int], SavedRecord] = field(default_factory=dict)
    churn: dict[Site, Tally] = field(default_factory=dict)
    unused_grads: dict[Site, Tally] = field(default_factory=dict)
    compiled: set[Line] = field(default_factory=set)
    head_width: int = 0
    head_inner: int = 0
    backward_runs: int = 0
    num_ops: int = 0
    written_bytes: int = 0
    saved_bytes: int = 0
    peak_saved_bytes: int = 0
    flops: int = 0
    # Filled after recording by `cost.measure_half_rates`: dtype -> (its GFLOP/s, fp32 GFLOP/s) on this CPU.
    half_rates: dict[torch.dtype, tuple[float, float]] = field(default_factory=dict)
    # What the rules said, kept in place of the counters once there are many steps.
    hits: Any = None

    def merge(self, later: StepRecord) -> None:
        """Join the following part of the same step."""
        for name in _MERGED:
            mine, theirs = getattr(self, name), getattr(later, name)
            for key, value in theirs.items():
                if key in mine:
                    mine[key].add(value)
                else:
                    mine[key] = value
        for key, count in later.matmuls.items():
            self.matmuls[key] = self.matmuls.get(key, 0) + count
        self.compiled |= later.compiled
        if later.head_width > self.head_width:
            self.head_width, self.head_inner = later.head_width, later.head_inner
        self.peak_saved_bytes = max(self.peak_saved_bytes, later.peak_saved_bytes)
        for name in ("backward_runs", "num_ops", "written_bytes", "saved_bytes", "flops"):
            setattr(self, name, getattr(self, name) + getattr(later, name))

    def forget_counters(self, hits: Any) -> None:
        """Keep what the rules said and the totals; a thousand recorded steps must stay small."""
        self.hits = hits
        for name in (*_MERGED, "matmuls"):
            getattr(self, name).clear()


_MERGED = (
    "ops", "reads", "heads", "zero_fills", "state_copies", "other_copies", "duplicate_casts", "round_trips",
    "saved", "churn", "unused_grads",
)  # fmt: skip


def tally(table: dict[Site, Tally], site: Site, num_bytes: int = 0, count: int = 1, detail: str = "") -> None:
    entry = table.get(site)
    if entry is None:
        entry = table[site] = Tally()
    entry.count += count
    entry.bytes += num_bytes
    if detail:
        entry.detail[detail] += count


def by_line(table: dict[Site, Any], new: Callable[[], Any]) -> dict[Line, tuple[Any, Counter[Line]]]:
    """Join the sites of one line; the callers are counted."""
    joined: dict[Line, tuple[Any, Counter[Line]]] = {}
    for site, value in table.items():
        total, callers = joined.setdefault(site.line, (new(), Counter()))
        total.add(value)
        if site.caller is not None:
            callers[site.caller] += getattr(value, "count", getattr(value, "dead", 0))
    return joined
