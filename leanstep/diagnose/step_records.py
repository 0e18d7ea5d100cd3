"""The records of diagnose: the counters of one training step, and the hits and findings of the rules.

Records hold counters by line, no tensors and no log. Rules read only these records, so a rule can be tested
with a hand-written record. A hit is the result of one rule for one step; a finding is its result for all
recorded steps.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from leanstep.tape.lines import Line, Site, short_path

FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER = "forward", "backward", "recompute", "optimizer"


@dataclass
class OpRecord:
    """All runs of one op on one line in one phase. `direct`: dispatched by the line, not by its backward.

    `parameters`: the number of distinct parameters that the step read between the op's first run and its
    last. It distinguishes a loop over layers from a loop over samples.
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
    """The number of events on a line, and the bytes they moved."""

    count: int = 0
    bytes: int = 0
    detail: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        self.count += other.count
        self.bytes += other.bytes
        self.detail.update(other.detail)


@dataclass
class HeadRecord:
    """Backward of the head: rows seen, rows of exactly zero gradient. `in_tiles`: no [N, V] is ever held."""

    rows: int = 0
    dead: int = 0
    inner: int = 0
    width: int = 0
    element_bytes: int = 4
    in_tiles: bool = False

    def add(self, other: HeadRecord) -> None:
        self.in_tiles |= other.in_tiles
        self.rows += other.rows
        self.dead += other.dead


@dataclass
class SavedRecord:
    """Tensors of one width that a line saved for the backward: new storages only.

    `held`, `held_bytes`, `held_rows`: the largest number held at once, between two runs of the backward.
    """

    count: int = 0
    bytes: int = 0
    held: int = 0
    held_bytes: int = 0
    held_rows: int = 0
    shapes: Counter[str] = field(default_factory=Counter)

    def add(self, other: SavedRecord) -> None:
        self.count += other.count
        self.bytes += other.bytes
        self.held = max(self.held, other.held)
        self.held_bytes = max(self.held_bytes, other.held_bytes)
        self.held_rows = max(self.held_rows, other.held_rows)
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


class LineWork(NamedTuple):
    """The work of one line's ops in a step, including those of its backward."""

    ops: int = 0
    flops: int = 0
    written_bytes: int = 0


@dataclass
class StepRecord:
    """One training step."""

    ops: dict[OpKey, OpRecord] = field(default_factory=dict)
    matmuls: dict[MatmulKey, int] = field(default_factory=dict)
    # FLOPs of all matmuls, including attention and convolutions, by phase and input dtypes.
    products: Counter[tuple[str, torch.dtype]] = field(default_factory=Counter)
    reads: dict[Site, Tally] = field(default_factory=dict)
    heads: dict[Site, HeadRecord] = field(default_factory=dict)
    zero_fills: dict[Site, Tally] = field(default_factory=dict)
    # Layout changes of parameters, gradients and optimizer state, and of everything else.
    state_copies: dict[Site, Tally] = field(default_factory=dict)
    other_copies: dict[Site, Tally] = field(default_factory=dict)
    duplicate_casts: dict[Site, Tally] = field(default_factory=dict)
    round_trips: dict[Site, Tally] = field(default_factory=dict)
    # By width: which one is the vocabulary is known only at the end of the step.
    saved: dict[tuple[Site, int], SavedRecord] = field(default_factory=dict)
    churn: dict[Site, Tally] = field(default_factory=dict)
    unused_grads: dict[Site, Tally] = field(default_factory=dict)
    # Habits: softmaxes over products of activations, float64 results, copies and indexing of weights,
    # retained graphs.
    attention: dict[Site, Tally] = field(default_factory=dict)
    doubles: dict[Site, Tally] = field(default_factory=dict)
    clones: dict[Site, Tally] = field(default_factory=dict)
    indexed: dict[Site, Tally] = field(default_factory=dict)
    retained: dict[Site, Tally] = field(default_factory=dict)
    # Only in traces: copies to the device that the host waits for, and gaps and pauses in which the device is
    # idle. For the last two, bytes are nanoseconds of idle time.
    blocking: dict[Site, Tally] = field(default_factory=dict)
    slow_launches: dict[Site, Tally] = field(default_factory=dict)
    pauses: dict[Site, Tally] = field(default_factory=dict)
    # How long the step of a trace took.
    trace_seconds: float = 0.0
    compiled: set[Line] = field(default_factory=set)
    # Whether a rollout was part of the step.
    has_rollout: bool = False
    # Calls of a generation that recomputes earlier positions; bytes are positions.
    again: dict[Site, Tally] = field(default_factory=dict)
    # Calls of a generation whose cache stayed empty.
    no_context: dict[Site, Tally] = field(default_factory=dict)
    # Vocabulary-wide tensors that were written without gradients, by width.
    unsaved: dict[tuple[Site, int], Tally] = field(default_factory=dict)
    head_width: int = 0
    head_inner: int = 0
    # Most bytes of tensors of the head's width that were alive at once, saved or not.
    peak_wide_bytes: int = 0
    # Backward of sites that depend on no trained parameter: matmul FLOPs, and bytes moved by other ops.
    idle_flops: int = 0
    idle_bytes: int = 0
    backward_runs: int = 0
    num_ops: int = 0
    written_bytes: int = 0
    saved_bytes: int = 0
    peak_saved_bytes: int = 0
    flops: int = 0
    # Alive at the end of the last step: buffers by the line that allocated them, graphs by the line of their
    # backward.
    outlived: dict[Site, Tally] = field(default_factory=dict)
    graphs_alive: dict[Site, Tally] = field(default_factory=dict)
    # CPU time of the main thread, and the line that ended the step with an update.
    cpu_seconds: float | None = None
    update_site: Site | None = None
    # For the first steps, whose counters are dropped; empty otherwise.
    early_work: dict[Site, LineWork] = field(default_factory=dict)
    # Filled after recording by `cost.measure_half_rates`: dtype -> (its GFLOP/s, fp32 GFLOP/s) on this CPU.
    half_rates: dict[torch.dtype, tuple[float, float]] = field(default_factory=dict)
    # The hits, stored instead of the counters once there are many steps.
    hits: Any = None

    def merge(self, later: StepRecord) -> None:
        """Merge the next part of the same step."""
        for name in _MERGED:
            mine, theirs = getattr(self, name), getattr(later, name)
            for key, value in theirs.items():
                if key in mine:
                    mine[key].add(value)
                else:
                    mine[key] = value
        for key, count in later.matmuls.items():
            self.matmuls[key] = self.matmuls.get(key, 0) + count
        self.products.update(later.products)
        self.compiled |= later.compiled
        if later.head_width > self.head_width:
            self.head_width, self.head_inner = later.head_width, later.head_inner
        self.peak_saved_bytes = max(self.peak_saved_bytes, later.peak_saved_bytes)
        self.peak_wide_bytes = max(self.peak_wide_bytes, later.peak_wide_bytes)
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(later, name))

    @property
    def line_work(self) -> dict[Site, LineWork]:
        """Return the work of each line; empty for a step in the middle of a long recording."""
        work: dict[Site, LineWork] = dict(self.early_work)
        for key, op in self.ops.items():
            ops, flops, written = work.get(key.site, LineWork())
            work[key.site] = LineWork(ops + op.count, flops + op.flops, written + op.written_bytes)
        return work

    def forget_counters(self, hits: Any, keep_work: bool = False) -> None:
        """Drop the counters and keep hits and totals; a thousand recorded steps must stay small.

        keep_work: also keep the work of each line.
        """
        self.hits = hits
        self.early_work = self.line_work if keep_work else {}
        for name in (*_MERGED, "matmuls"):
            getattr(self, name).clear()


_MERGED = (
    "ops", "reads", "heads", "zero_fills", "state_copies", "other_copies", "duplicate_casts", "round_trips",
    "saved", "churn", "unused_grads", "attention", "doubles", "clones", "indexed", "retained",
    "blocking",
    "slow_launches", "pauses", "again", "no_context", "unsaved",
)  # fmt: skip


_SUMMED = (
    "backward_runs", "num_ops", "written_bytes", "saved_bytes", "flops", "idle_flops", "idle_bytes",
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
    """Merge the sites of one line and count the callers."""
    joined: dict[Line, tuple[Any, Counter[Line]]] = {}
    for site, value in table.items():
        total, callers = joined.setdefault(site.line, (new(), Counter()))
        total.add(value)
        if site.caller is not None:
            callers[site.caller] += getattr(value, "count", getattr(value, "dead", 0))
    return joined


class Parameter:
    """A leaf that requires grad and was an input of a forward op, identified by its storage."""

    __slots__ = ("first_use", "storage", "tensor")

    def __init__(self, tensor: Tensor, first_use: Site) -> None:
        self.tensor, self.first_use = weakref.ref(tensor), first_use
        # While this weak reference exists, the storage's address is not reused.
        self.storage = StorageWeakRef(tensor.untyped_storage())


class RunRecord:
    """State that outlives a step: parameters, functions that update them, optimizers, and unseen work."""

    def __init__(self, limits: Limits | None = None) -> None:
        limits = limits or Limits()
        self.tiny_bytes = int(limits["op-storm"]["tiny_bytes"])
        self.small_bytes = int(limits["unbatched-optimizer"]["bytes"])
        self.churn_bytes = int(limits["alloc-churn"]["bytes"])
        self.layout_bytes = int(limits["transposed-copy"]["op_bytes"])
        self.fill_ratio = limits["zero-fill"]["ratio"]
        self.unsaved_rows = int(limits["no-grad-vocab"]["rows"])
        # By storage.
        self.parameters: dict[int, Parameter] = {}
        # Storages of parameters that some optimizer holds.
        self.held: set[int] = set()
        # Ids of the code of functions that wrote a parameter outside the backward.
        self.writers: set[int] = set()
        self.optimizers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self.notes: dict[tuple[str, str], str] = {}

    def note(self, kind: str, where: str, text: str) -> None:
        """A part of the step that a recording cannot see."""
        self.notes.setdefault((kind, where), text)


# The thresholds of every rule. `[tool.leanstep.thresholds]` in pyproject.toml sets them.
DEFAULTS: dict[str, dict[str, float]] = {
    "host-sync": {"reads": 1},
    "op-storm": {"repeats": 32, "ops": 100, "tiny_bytes": 256 * 1024},
    "dead-rows": {"rows": 16, "share": 0.10},
    "zero-fill": {"ops": 4, "ratio": 4, "bytes": 256 * 1024},
    "transposed-copy": {"op_bytes": 256 * 1024, "bytes": 1024 * 1024, "share": 0.05},
    "duplicate-cast": {"bytes": 64 * 1024},
    "dtype-round-trip": {"bytes": 64 * 1024},
    "full-vocab": {"bytes": 32 * 1024 * 1024, "rows": 64},
    "retained-chunks": {"chunks": 4, "bytes": 8 * 1024 * 1024, "rows": 64},
    "no-grad-vocab": {"bytes": 32 * 1024 * 1024, "rows": 64},
    "no-kv-cache": {"calls": 8},
    "no-context": {"calls": 2},
    "unbatched-optimizer": {"repeats": 16, "ops": 64, "bytes": 4 * 1024 * 1024, "flops": 4e9},
    "slow-dtype": {"rate": 0.5, "share": 0.01},
    "alloc-churn": {"buffers": 16, "bytes": 1024 * 1024},
    "unused-grad": {"leaves": 1},
    "attention-matrix": {"bytes": 4 * 1024 * 1024},
    "gelu-by-hand": {"ops": 5, "op_bytes": 64 * 1024, "bytes": 1024 * 1024},
    "float64": {"bytes": 256 * 1024},
    "weight-clone": {"bytes": 256 * 1024},
    "indexed-weight": {"bytes": 256 * 1024},
    "retain-graph": {"calls": 1},
    "growing-memory": {"steps": 8, "share": 0.75, "bytes": 4096},
    "growing-step": {"steps": 8, "share": 0.2, "time": 2, "seconds": 1e-3},
    "launch-bound": {"share": 0.10, "launches": 16},
    "blocking-copy": {"copies": 1},
    "step-gap": {"share": 0.05},
}
RULE_IDS = tuple(DEFAULTS)
# Rules that compare many steps, and the minimum number of steps.
GROWTH_RULES, GROWTH_STEPS = ("growing-memory", "growing-step"), 8
# Rules that need a trace of a GPU.
TRACE_RULES = ("launch-bound", "blocking-copy", "step-gap")


class Limits:
    """The thresholds of one run."""

    def __init__(self, changes: dict[str, dict[str, float]] | None = None) -> None:
        self._values = {rule: dict(values) for rule, values in DEFAULTS.items()}
        for rule, values in (changes or {}).items():
            if rule not in self._values:
                raise ValueError(f"threshold: unknown rule {rule!r}; expected one of {', '.join(RULE_IDS)}")
            for name, value in values.items():
                if name not in self._values[rule]:
                    known = ", ".join(self._values[rule])
                    raise ValueError(f"threshold: {rule} has no {name!r}; expected one of {known}")
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
                    raise ValueError(f"threshold: {rule}.{name}: expected a number >= 0, got {value!r}")
                self._values[rule][name] = value

    def __getitem__(self, rule: str) -> dict[str, float]:
        return self._values[rule]


@dataclass
class Work:
    """The parts of a cost, per step: tiny ops, ops of an optimizer's loop, bytes, FLOPs, host reads."""

    ops: float = 0
    loop_ops: float = 0
    moved_bytes: float = 0
    strided_bytes: float = 0
    flops: float = 0
    held_bytes: float = 0
    reads: float = 0
    # Set where it was measured directly.
    seconds: float | None = None


@dataclass
class Hit:
    line: Line
    count: int
    callers: Counter[Line] = field(default_factory=Counter)
    phase: str = "forward"
    evidence: dict[str, Any] = field(default_factory=dict)
    work: Work = field(default_factory=Work)
    confidence: str = "high"
    compiled: bool = False


@dataclass
class Finding:
    """A rule that fired on a line."""

    rule: str
    line: Line
    count: int
    counts: list[int]
    callers: Counter[Line]
    phase: str
    evidence: dict[str, Any]
    work: Work
    confidence: str
    compiled: bool
    what: str
    why: str
    fix: str
    short_fix: str
    leanstep: str | None
    amount: str
    in_loop: bool = False
    # Counted per iteration, not per step: only steps with a rollout show it.
    per_rollout: bool = False
    seconds: float | None = None
    seconds_range: tuple[float, float] | None = None
    bytes: int | None = None
    share: float | None = None
    basis: str = "calibrated"
    rank: int = 0
    baselined: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        """Identity that does not depend on line numbers: rule, file, code of the line."""
        return self.rule, short_path(self.line.file), self.line.code

    @property
    def id(self) -> str:
        return ":".join(self.key)

    def __str__(self) -> str:
        return f"{self.line.place}: {self.rule}: {self.amount} → {self.short_fix}"


class Findings(list[Finding]):
    """A list of findings that prints as one line each."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "no findings"
