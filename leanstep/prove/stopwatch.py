"""Time two scripts in turn: one step of the first, one step of the second, and so on.

Each script runs in its own process and waits for its turn at the end of every step, so both see the same
noise and never run at the same time. Memory, host syncs and ops are counted afterwards, in steps that are not
timed.
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
from leanstep.measure.peaks import recorded_allocations
from leanstep.prove.script_jobs import Job, free_port, module_path, rank_environment, seeded
from leanstep.tape.children import (
    Child,
    ended_afterwards,
    how_it_ended,
    log_to,
    raise_lost_signal,
    start,
    temporary_folder,
)
from leanstep.tape.run import Stop, run_script
from leanstep.tape.steps import StepListener, StepMarker
from leanstep.tape.syncs import count_host_reads

MIN_ROUNDS, MAX_ROUNDS = 3, 40
# After this many times the budget, the caller's `min_rounds` is enough.
PATIENCE = 4
# Timed steps that are dropped; the step before them, with imports and first allocations, is not timed at all.
WARMUP = 1


@dataclass
class SideRow:
    """Figures of one script: seconds per step, peak above the level between steps, host syncs and ops.

    `steps`: number of steps that ran while it was timed. `iterations`: their rollouts, 0 if there were none.
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
    """The result of `bench before.py after.py`. Ratios are None if the proof failed."""

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
        # No ratio for a script that makes a different update; its figures are still reported.
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
    fork: bool = False,
    report: Callable[[str, float], None] | None = None,
) -> PairBench:
    """Measure both scripts. Raise BadInput for a script that ends before it can be measured.

    min_rounds: steps that a script must make; MIN_ROUNDS are timed if it makes that many.
    """
    say = report or (lambda what, share: None)
    result = PairBench(SideRow(before.label), SideRow(after.label))
    rows = [result.before, result.after]
    jobs = [before, after]
    with temporary_folder() as folder:
        say("time", 0.0)
        with contextlib.ExitStack() as stack:
            pipes = [stack.enter_context(_started(job, folder, fork, "time")) for job in jobs]
            samples = _interleaved(pipes, jobs, rows, (budget_s, min_rounds), say)
            counts = [_counted_now(pipes[side], job, 0.8 + 0.1 * side, say) for side, job in enumerate(jobs)]
        for row, values in zip(rows, samples, strict=True):
            ordered, last = sorted(values), len(values) - 1
            row.median_s = statistics.median(ordered)
            row.p20_s, row.p80_s = ordered[round(0.2 * last)], ordered[round(0.8 * last)]
            row.samples = len(ordered)
            if row.iterations:
                result.notes.append(f"{row.script}: {units.steps(row.steps, row.iterations)}")
        for side, job in enumerate(jobs):
            # A script that has ended is run again.
            counted = counts[side] or _counted(job, folder, fork)
            if counted is None:
                result.notes.append(f"{job.label} ended before its memory and host syncs were counted")
                continue
            row = rows[side]
            row.peak_bytes, row.host_syncs, row.ops, row.timeline = counted
    return result


# In the parent process.


@contextlib.contextmanager
def _started(job: Job, folder: Path, fork: bool, kind: str) -> Iterator[tuple[Connection, Child]]:
    log = folder / f"{kind}-{time.monotonic_ns()}.log"
    children: list[Child] = []
    # A pipe, not a named socket: the path of the folder for temporary files may be too long for a socket.
    ours, theirs = Pipe()
    with ours, ended_afterwards(children):
        port = free_port() if job.ranks else 0
        with theirs:
            end = theirs.fileno()
            child = start(_measured_child, (job, end, log, kind, port), fork=fork, descriptors=[end])
        children.append(child)
        # Rank 0 is measured; the others wait for it in their collectives.
        for rank in range(1, job.ranks or 1):
            children.append(start(_other_rank, (job, rank, port, str(folder)), fork=fork))
        yield ours, child


def _receive(pipe: Connection, child: Child) -> Any:
    """Return the next message; raise EOFError if the script ended, even if children keep the pipe open."""
    while not pipe.poll(0.2):
        raise_lost_signal()
        if child.poll() is not None and not pipe.poll(0):
            raise EOFError
    return pipe.recv()


def _interleaved(
    pipes: list[tuple[Connection, Child]],
    jobs: list[Job],
    rows: list[SideRow],
    limits: tuple[float, int],
    say: Callable[[str, float], None],
) -> list[list[float]]:
    """Return the seconds of each job's steps; `rows` count the steps."""
    budget_s, min_rounds = limits
    samples: list[list[float]] = [[] for _ in jobs]
    for side, job in enumerate(jobs):
        for _ in range(WARMUP):
            _turn(pipes[side], job, rows[side], 0, min_rounds)
    started = time.monotonic()
    order = list(range(len(jobs)))
    for number in range(MAX_ROUNDS):
        for side in order:
            elapsed = _turn(pipes[side], jobs[side], rows[side], number, min_rounds)
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
    process: tuple[Connection, Child], job: Job, row: SideRow, rounds: int, min_rounds: int
) -> float | None:
    """Let one script make one step; return its seconds, or None if it ended after enough rounds."""
    pipe, child = process
    kind, value = "end", None
    try:
        pipe.send("go")
        kind, value, row.steps, row.iterations = _receive(pipe, child)
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
    process: tuple[Connection, Child], job: Job, share: float, say: Callable[[str, float], None]
) -> Counted | None:
    """Count the next two steps of a script that was timed and still runs; None if it has ended."""
    say(f"memory and host syncs of {Path(job.script).name}", share)
    pipe, child = process
    try:
        pipe.send("count")
        kind, value, _, _ = _receive(pipe, child)
    except (EOFError, OSError):
        return None
    return value if kind == "counted" else None


def _counted(job: Job, folder: Path, fork: bool) -> Counted | None:
    with _started(job, folder, fork, "count") as (pipe, child):
        try:
            kind, value, _, _ = _receive(pipe, child)
        except (EOFError, OSError):
            return None
        return value if kind == "counted" else None


# In the child process.


def _other_rank(job: Job, rank: int, port: int, folder: str) -> None:
    with log_to(Path(folder) / f"{port}-{rank}.log"):
        os.environ.update(rank_environment(rank, job.ranks or 1, port))
        with seeded(job.seed), module_path(job.path):
            run_script(job.program, job.argv, contextlib.nullcontext())
    os._exit(0)


def _measured_child(job: Job, descriptor: int, log: Path, kind: str, port: int) -> None:
    if job.ranks:
        os.environ.update(rank_environment(0, job.ranks, port))
    # The log is in the parent's folder: a child that is killed leaves no file behind.
    with log_to(log):
        with Connection(descriptor) as pipe:
            watched = _Gate(pipe, counts_at_once=kind == "count")
            with seeded(job.seed), module_path(job.path):
                outcome = run_script(job.program, job.argv, watched)
            with contextlib.suppress(OSError):
                watched.send(
                    "end", outcome.exception or (f"exit code {outcome.code}" if outcome.code else None)
                )
    os._exit(0)


class _Measured(StepListener):
    """Calls `boundary` at the end of every step."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.marker = StepMarker(self)
        self._is_over = False

    def __enter__(self) -> None:
        self.marker.__enter__()

    def __exit__(self, *details: Any) -> None:
        self.marker.__exit__(*details)
        self._is_over = True
        self.marker.finish()

    def step_ends(self, late: bool) -> None:
        # The interval after a late end is not a whole step.
        if not late and not self._is_over:
            self.boundary()

    def send(self, kind: str, value: Any) -> None:
        self.pipe.send((kind, value, self.marker.steps, self.marker.iterations))

    def boundary(self) -> None:
        raise NotImplementedError


class _Gate(_Measured):
    """Waits for its turn at every step and sends the duration of the last one, until it is told to count."""

    def __init__(self, pipe: Connection, counts_at_once: bool = False) -> None:
        super().__init__(pipe)
        self._since: float | None = None
        self._inspection = _Inspection() if counts_at_once else None

    def boundary(self) -> None:
        if self._inspection is None:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            if self._since is not None:
                self.send("step", time.perf_counter() - self._since)
            if self.pipe.recv() == "count":
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
    """Records the allocator in the next step and counts ops and host syncs in the one after it."""

    def __init__(self) -> None:
        self._number = 0
        self._within = contextlib.ExitStack()
        self._timeline: list[tuple[float, int]] = []
        self._ops, self._reads = _CountOps(), None

    def boundary(self) -> Counted | None:
        """Handle the end of a step; return the counts after the last one."""
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
            # The compiler refuses to run under a dispatch mode.
            self._within.enter_context(torch.compiler.set_stance("force_eager"))
            self._within.enter_context(self._ops)
            self._reads = self._within.enter_context(count_host_reads())
        elif self._number == 3:
            assert self._reads is not None
            peak = max((level for _, level in self._timeline), default=0)
            return peak, self._reads.total, self._ops.ops, self._timeline
        return None
