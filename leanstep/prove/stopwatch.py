"""Two scripts measured side by side: a step of one, a step of the other, and so on.

Each script runs in a process of its own and waits at the end of every step until it is its turn, so that both
are exposed to the same noise and never run at the same time. Memory, host reads and ops are counted
afterwards, in steps that nobody times.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from leanstep import units
from leanstep.files import BadInput
from leanstep.measure.busy import busy_processes
from leanstep.measure.peaks import recorded_allocations
from leanstep.prove.script_jobs import Job, free_port, module_path, rank_environment, seeded
from leanstep.script.children import Child, ended_afterwards, how_it_ended, log_to, start, temporary_folder
from leanstep.script.run import Stop, run_script
from leanstep.script.steps import StepListener, StepMarker
from leanstep.script.syncs import count_host_reads

MIN_ROUNDS, MAX_ROUNDS = 3, 40
# After so many budgets fewer rounds are enough, where the caller says so.
PATIENCE = 4
# Timed steps that are dropped; the one before them, with imports and first allocations, is not timed at all.
WARMUP = 1


@dataclass
class SideRow:
    """One script: seconds per step, its peak above the level between steps, and what it launches.

    `steps`: all that ran while it was timed. `iterations`: rollouts behind them, 0 where none was seen.
    """

    script: str
    median_s: float | None = None
    p20_s: float | None = None
    p80_s: float | None = None
    samples: int = 0
    steps: int = 0
    iterations: int = 0
    peak_bytes: int | None = None
    host_syncs: int | None = None
    ops: int | None = None
    timeline: list[tuple[float, int]] = field(default_factory=list, repr=False)


@dataclass
class PairBench:
    """The result of `bench before.py after.py`. Ratios are None where the proof failed."""

    before: SideRow
    after: SideRow
    proven: bool | None = None
    verdict: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def time_ratio(self) -> float | None:
        return self._ratio(self.before.median_s, self.after.median_s)

    @property
    def memory_ratio(self) -> float | None:
        return self._ratio(self.before.peak_bytes, self.after.peak_bytes)

    def _ratio(self, before: float | None, after: float | None) -> float | None:
        # A wrong answer has no speed: the figures stay, the comparison does not.
        return before / after if before and after and self.proven is not False else None

    def to_json(self) -> dict[str, Any]:
        rows = [
            {k: v for k, v in asdict(row).items() if k != "timeline"} for row in (self.before, self.after)
        ]
        return {
            "before": self.before.script,
            "after": self.after.script,
            "proven": self.proven,
            "verdict": self.verdict,
            "time_ratio": self.time_ratio,
            "memory_ratio": self.memory_ratio,
            "notes": self.notes,
            "rows": rows,
        }


def bench_scripts(
    before: Job,
    after: Job,
    *,
    budget_s: float = 20.0,
    min_rounds: int = MIN_ROUNDS,
    beside: int = 0,
    fork: bool = False,
    report: Callable[[str, float], None] | None = None,
) -> PairBench:
    """Measure both. Raises BadInput, in one line, for a script that ends before it could be measured.

    min_rounds: steps that a script must make; MIN_ROUNDS are timed where it makes as many.
    beside: how many other processes compute while the scripts are timed.
    """
    say = report or (lambda what, share: None)
    result = PairBench(SideRow(before.label), SideRow(after.label))
    rows = [result.before, result.after]
    jobs = [before, after]
    with temporary_folder() as folder:
        say("time", 0.0)
        with contextlib.ExitStack() as stack:
            lines = [stack.enter_context(_talking(job, folder, fork, "time")) for job in jobs]
            with busy_processes(beside):
                samples = _interleaved(lines, jobs, rows, (budget_s, min_rounds), say)
            counts = [_counted_now(lines[side], job, 0.8 + 0.1 * side, say) for side, job in enumerate(jobs)]
        if beside:
            result.notes.append(f"timed beside {beside} busy process{'es' * (beside > 1)}")
        for row, values in zip(rows, samples, strict=True):
            ordered, last = sorted(values), len(values) - 1
            row.median_s = statistics.median(ordered)
            row.p20_s, row.p80_s = ordered[round(0.2 * last)], ordered[round(0.8 * last)]
            row.samples = len(ordered)
            if row.iterations:
                result.notes.append(f"{row.script}: {units.steps(row.steps, row.iterations)}")
        for side, job in enumerate(jobs):
            # A script that ended meanwhile is run once more.
            counted = counts[side] or _counted(job, folder, fork)
            if counted is None:
                result.notes.append(f"{job.label} ended before its memory and host reads were counted")
                continue
            row = rows[side]
            row.peak_bytes, row.host_syncs, row.ops, row.timeline = counted
    return result


# The parent's side.


@contextlib.contextmanager
def _talking(job: Job, folder: Path, fork: bool, kind: str) -> Iterator[tuple[Connection, Child]]:
    log = folder / f"{kind}-{time.monotonic_ns()}.log"
    children: list[Child] = []
    # A pipe, not a socket with a name: the folder for temporary files may have a long path.
    ours, theirs = Pipe()
    with ours, ended_afterwards(children):
        port = free_port() if job.ranks else 0
        with theirs:
            line = theirs.fileno()
            child = start(_measured_child, (job, line, log, kind, port), fork=fork, descriptors=[line])
        children.append(child)
        # Rank 0 is measured; the others wait for it in their collectives.
        for rank in range(1, job.ranks or 1):
            children.append(start(_other_rank, (job, rank, port, str(folder)), fork=fork))
        yield ours, child


def _receive(line: Connection, child: Child) -> Any:
    """The next message. A script that ended sends none, though what it started may hold the pipe open."""
    while not line.poll(0.2):
        if child.poll() is not None and not line.poll(0):
            raise EOFError
    return line.recv()


def _interleaved(
    lines: list[tuple[Connection, Child]],
    jobs: list[Job],
    rows: list[SideRow],
    limits: tuple[float, int],
    say: Callable[[str, float], None],
) -> list[list[float]]:
    """Seconds of each job's steps; `rows` count the steps."""
    budget_s, min_rounds = limits
    samples: list[list[float]] = [[] for _ in jobs]
    for side, job in enumerate(jobs):
        for _ in range(WARMUP):
            _turn(lines[side], job, rows[side], 0, min_rounds)
    started = time.monotonic()
    order = list(range(len(jobs)))
    for number in range(MAX_ROUNDS):
        for side in order:
            elapsed = _turn(lines[side], jobs[side], rows[side], number, min_rounds)
            if elapsed is None:
                return samples
            samples[side].append(elapsed)
        order.reverse()
        spent = time.monotonic() - started
        say("time", min(0.8, 0.8 * spent / budget_s))
        enough = MIN_ROUNDS if spent < PATIENCE * budget_s else min_rounds
        if spent > budget_s and number + 1 >= enough:
            break
    return samples


def _turn(
    talk: tuple[Connection, Child], job: Job, row: SideRow, rounds: int, min_rounds: int
) -> float | None:
    """Let one script make one step; its seconds, or None when it has ended and enough was seen."""
    line, child = talk
    kind, value = "end", None
    try:
        line.send("go")
        kind, value, row.steps, row.iterations = _receive(line, child)
        why = f"ended with {value}" if value else "ended"
    except (EOFError, OSError):
        child.kill()
        why = how_it_ended(child.code)
    if kind == "step":
        return value
    if rounds >= min_rounds and why == "ended":
        return None
    raise BadInput(
        f"bench: {job.label} {why} after {rounds} measured steps; "
        f"expected at least {WARMUP + min_rounds + 1} updates from it"
    )


Counted = tuple[int, int, int, list[tuple[float, int]]]


def _counted_now(
    talk: tuple[Connection, Child], job: Job, share: float, say: Callable[[str, float], None]
) -> Counted | None:
    """Count the next two steps of a script that was timed and still runs; None if it has ended."""
    say(f"memory and host reads of {Path(job.script).name}", share)
    line, child = talk
    try:
        line.send("count")
        kind, value, _, _ = _receive(line, child)
    except (EOFError, OSError):
        return None
    return value if kind == "counted" else None


def _counted(job: Job, folder: Path, fork: bool) -> Counted | None:
    with _talking(job, folder, fork, "count") as (line, child):
        try:
            kind, value, _, _ = _receive(line, child)
        except (EOFError, OSError):
            return None
        return value if kind == "counted" else None


# The child's side.


def _other_rank(job: Job, rank: int, port: int, folder: str) -> None:
    with log_to(Path(folder) / f"{port}-{rank}.log"):
        os.environ.update(rank_environment(rank, job.ranks or 1, port))
        with seeded(job.seed), module_path(job.path):
            run_script(job.program, job.argv, contextlib.nullcontext())
    os._exit(0)


def _measured_child(job: Job, descriptor: int, log: Path, kind: str, port: int) -> None:
    if job.ranks:
        os.environ.update(rank_environment(0, job.ranks, port))
    # The log lies in the parent's folder: a child that is stopped in the middle leaves nothing behind.
    with log_to(log):
        with Connection(descriptor) as line:
            watched = _Gate(line, counts_at_once=kind == "count")
            with seeded(job.seed), module_path(job.path):
                outcome = run_script(job.program, job.argv, watched)
            with contextlib.suppress(OSError):
                watched.send(
                    "end", outcome.exception or (f"exit code {outcome.code}" if outcome.code else None)
                )
    os._exit(0)


class _Measured(StepListener):
    """Calls `boundary` at the end of every step."""

    def __init__(self, line: Connection) -> None:
        self.line = line
        self.marker = StepMarker(self)
        self._is_over = False

    def __enter__(self) -> None:
        self.marker.__enter__()

    def __exit__(self, *details: Any) -> None:
        self.marker.__exit__(*details)
        self._is_over = True
        self.marker.finish()

    def step_ends(self, late: bool) -> None:
        # What a late end is followed by is not a whole step.
        if not late and not self._is_over:
            self.boundary()

    def send(self, kind: str, value: Any) -> None:
        self.line.send((kind, value, self.marker.steps, self.marker.iterations))

    def boundary(self) -> None:
        raise NotImplementedError


class _Gate(_Measured):
    """Waits for its turn at every step and says how long the last one took, until it is told to count."""

    def __init__(self, line: Connection, counts_at_once: bool = False) -> None:
        super().__init__(line)
        self._since: float | None = None
        self._inspection = _Inspection() if counts_at_once else None

    def boundary(self) -> None:
        if self._inspection is None:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            if self._since is not None:
                self.send("step", time.perf_counter() - self._since)
            if self.line.recv() == "count":
                self._inspection = _Inspection()
            self._since = time.perf_counter()
        if self._inspection is not None:
            counted = self._inspection.boundary()
            if counted is not None:
                self.send("counted", counted)
                raise Stop


class _CountOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += not func.is_view
        return func(*args, **(kwargs or {}))


class _Inspection:
    """The next step under the allocator's record, the one after it under counters."""

    def __init__(self) -> None:
        self._number = 0
        self._within = contextlib.ExitStack()
        self._timeline: list[tuple[float, int]] = []
        self._ops, self._reads = _CountOps(), None

    def boundary(self) -> Counted | None:
        """A step has ended; what was counted, when it was the last of them."""
        self._within.close()
        self._number += 1
        if self._number == 1:
            if torch.cuda.is_initialized():
                torch.cuda.reset_peak_memory_stats()
                self._level = torch.cuda.memory_allocated()
            else:
                self._timeline = self._within.enter_context(recorded_allocations())
        elif self._number == 2:
            if torch.cuda.is_initialized():
                self._timeline = [(0.0, torch.cuda.max_memory_allocated() - self._level)]
            # The compiler refuses to work under a dispatch mode.
            self._within.enter_context(torch.compiler.set_stance("force_eager"))
            self._within.enter_context(self._ops)
            self._reads = self._within.enter_context(count_host_reads())
        elif self._number == 3:
            assert self._reads is not None
            peak = max((level for _, level in self._timeline), default=0)
            return peak, self._reads.total, self._ops.ops, self._timeline
        return None
