"""Measure a case: parity first, then time (interleaved), then memory and host reads in separate runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from leanstep.case import Case, Implementation, Outputs, Params, Step, Workload
from leanstep.measure import parity
from leanstep.measure.busy import busy_processes
from leanstep.measure.peaks import measure_peak
from leanstep.measure.timing import (
    TimeUp,
    Timing,
    current_device,
    environment,
    interleave,
    time_box,
    timed_call,
)
from leanstep.script.syncs import call_counting_reads

Progress = Callable[[str, float], None]
# A call may take this many budgets, or this many seconds if the budget is small. A row that takes longer is
# abandoned, so that it does not delay the others.
TIME_BOX = 2.0
MIN_BOX_S = 20.0


@dataclass
class BenchRow:
    """One row of the JSON format in docs/measuring.md; missing figures are None."""

    impl: str
    kind: str
    available: bool
    median_s: float | None = None
    p20_s: float | None = None
    p80_s: float | None = None
    time_ratio: float | None = None
    peak_bytes: int | None = None
    extra_bytes: int | None = None
    memory_ratio: float | None = None
    host_syncs: int | None = None
    max_error: float | None = None
    note: str = ""


@dataclass
class BenchResult:
    case: str
    size: str
    environment: dict[str, Any]
    rows: list[BenchRow] = field(default_factory=list)
    failed: list[parity.ParityRow] = field(default_factory=list)
    input_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        rows = [dict(vars(row)) for row in self.rows]
        return {**self.environment, "case": self.case, "size": self.size, "rows": rows}


class _Rows:
    """The rows of one run, including those abandoned because they exceed the time box."""

    def __init__(self, implementations: list[Implementation], box_s: float) -> None:
        self.by_name = {
            i.name: BenchRow(i.name, i.kind, available=True, note=i.note) for i in implementations
        }
        self.box_s = box_s
        self.gone: set[str] = set()  # rows that failed while they were timed

    def without_missing(
        self,
        implementations: list[Implementation],
        params: Params,
        device: torch.device | str,
        *,
        named: bool,
    ) -> list[Implementation]:
        """Return the implementations that can run here; the rows of the others say why they cannot."""
        runnable = []
        for implementation in implementations:
            reason = implementation.missing(params, device, named=named)
            if reason is None:
                runnable.append(implementation)
            else:
                row = self.by_name[implementation.name]
                row.available, row.note = False, reason
        return runnable

    def attempt(self, name: str, function: Callable[[], Any], what: str = "given up") -> Any:
        """Return `function()`, or None and a note in the row: out of time or memory, or a peer failed."""
        try:
            with time_box(self.box_s):
                return function()
        except TimeUp:
            self.note(name, f"> {self.box_s:.3g} s: {what}", first=True)
        except Exception as problem:
            self.note(name, f"{self.excuse(name, problem)}: {what}", first=True)
        return None

    def excuse(self, name: str, problem: Exception) -> str:
        """Describe a problem that is not leanstep's fault; re-raise any other exception."""
        if isinstance(problem, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
            return "out of memory"
        # A third-party kernel on an unsupported device must not stop the other rows.
        if self.by_name[name].kind != "peer":
            raise problem
        said = next(iter(str(problem).strip().splitlines()), "")
        return f"{type(problem).__name__}: {said[:120]}"

    def guarded(self, name: str, step: Step) -> Step:
        """Wrap the step for timing: a failure becomes a note and TimeUp, which abandons the row."""

        def run() -> Outputs:
            try:
                return step()
            except Exception as problem:
                self.gone.add(name)
                said = self.excuse(name, problem)
                if said not in self.by_name[name].note:
                    self.note(name, f"{said}: given up", first=True)
            raise TimeUp

        return run

    def note(self, name: str, text: str, *, first: bool = False) -> None:
        row = self.by_name[name]
        row.note = "; ".join(part for part in ((text, row.note) if first else (row.note, text)) if part)


def _on_its_device(function: Callable[..., BenchResult]) -> Callable[..., BenchResult]:
    @functools.wraps(function)
    def run(*args: Any, device: torch.device | str = "cpu", **options: Any) -> BenchResult:
        with current_device(device):
            return function(*args, device=device, **options)

    return run


@_on_its_device
def run_bench(
    case: Case,
    size: str,
    *,
    overrides: Params | None = None,
    only: tuple[str, ...] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    budget_s: float = 20.0,
    beside: int = 0,
    progress: Progress | None = None,
) -> BenchResult:
    """Measure `case` at `size`; the reference always runs, because every ratio refers to it in the same run.

    A row whose call takes longer than `TIME_BOX` budgets has no figures and a note "> 40 s".

    Args:
        dtype: dtype of the workload; None: `case.dtype_on(device)`. The result names it on a GPU, or if set.
        beside: number of other processes that compute while the rows are timed.
    """
    report = progress or (lambda what, share: None)
    params = case.params(size, overrides or {})
    chosen = [i for i in case.implementations if only is None or i.name in only or i.kind == "reference"]
    head = environment(device)
    if dtype is not None or torch.device(device).type == "cuda":
        head["dtype"] = parity.dtype_name(dtype or case.dtype_on(device))
    dtype = dtype or case.dtype_on(device)
    if beside:
        head["beside"] = beside
    rows = _Rows(chosen, max(TIME_BOX * budget_s, MIN_BOX_S))
    if only is not None and any(i.on_request for i in chosen):
        rows.box_s = max(rows.box_s, parity.SLOW_BOX_S)
    result = BenchResult(case.name, _size_label(size, overrides), head, list(rows.by_name.values()))
    runnable = rows.without_missing(chosen, params, device, named=only is not None)
    bench = _Bench(case, size, dtype, device, runnable, rows, result.failed)

    # Run both once, so that torch's imports do not count in a row's time.
    call_counting_reads(dict)
    measure_peak(dict, {}, device)

    report("parity with fp64", 0.0)
    _check_proving_sizes(bench)
    workload = case.workload(params, dtype, device)
    result.input_bytes = workload.num_bytes
    steps, first_calls = _first_calls(bench, workload)

    report("time", 0.2)
    with busy_processes(beside):
        timings = interleave(
            {name: rows.guarded(name, step) for name, step in steps.items()},
            budget_s=budget_s,
            box_s=rows.box_s,
            device=device,
            first_calls=first_calls,
            on_round=lambda done, planned: report("time", 0.2 + 0.6 * done / planned),
        )
    report("memory and host reads", 0.8)
    for implementation in runnable:
        name = implementation.name
        if name in timings:
            _fill(rows, implementation, timings[name], steps[name], workload, device)
        elif name in steps and name not in rows.gone:
            rows.note(name, f"> {rows.box_s:.3g} s: given up", first=True)

    _ratios(rows, rows.by_name[case.reference.name], {row.impl for row in result.failed})
    if case.annotate:
        notes = case.annotate({name: vars(row) for name, row in rows.by_name.items()})
        for name, note in notes.items():
            rows.note(name, note)
    report("done", 1.0)
    return result


@dataclass
class _Bench:
    """What to measure and where; the steps of `run_bench` read it and fill `rows` and `failed`."""

    case: Case
    size: str
    dtype: torch.dtype
    device: torch.device | str
    runnable: list[Implementation]
    rows: _Rows
    failed: list[parity.ParityRow]


def _check_proving_sizes(bench: _Bench) -> None:
    """Check the fast paths at the sizes for `prove`: odd shapes reveal errors that round sizes hide."""
    for implementation in bench.runnable:
        if implementation.kind != "fast":
            continue
        for size in bench.case.prove_sizes:
            if implementation.missing(bench.case.params(size), bench.device, named=True) is not None:
                continue
            checks = parity.check_in_time(
                bench.case, implementation, bench.dtype, size, box_s=bench.rows.box_s, device=bench.device
            )
            bench.failed += [row for row in checks if not row.ok]


class _Comparison:
    """Compares outputs with fp64, at `case.truth_size` if the measured size would take minutes."""

    def __init__(self, bench: _Bench, workload: Workload) -> None:
        case, rows = bench.case, bench.rows
        self.bench, self.workload, self.size = bench, workload, bench.size
        self.at_truth_size = case.truth_size is not None and case.truth_size != bench.size
        if case.truth_size is not None and self.at_truth_size:
            self.size = case.truth_size
            self.workload = case.workload(case.params(self.size), bench.dtype, bench.device)
        reference = case.reference
        self.truth: Outputs | None = None
        self.plain: Outputs | None = None
        if reference in bench.runnable:
            truth = functools.partial(parity.truth_of, case, self.workload)
            self.truth = rows.attempt(reference.name, truth, "no fp64 reference")
        if self.truth is not None and (self.at_truth_size or case.error_baseline):
            plain = functools.partial(parity.plain_of, case, self.workload)
            self.plain = rows.attempt(reference.name, plain, "no baseline error")

    def call(self, implementation: Implementation) -> tuple[Step, Outputs, float]:
        """Build the step and call it once; return the step, its outputs and its seconds."""
        step = implementation.build(self.workload)
        outputs, seconds = timed_call(step, self.bench.device)
        return step, outputs, seconds

    def outputs_at_truth_size(self, implementation: Implementation) -> Outputs | None:
        bench = self.bench
        missing = implementation.missing(bench.case.params(self.size), bench.device, named=True)
        if self.truth is None or missing is not None:
            return None
        call = functools.partial(self.call, implementation)
        called = bench.rows.attempt(implementation.name, call, "not compared with fp64")
        return called[1] if called else None

    def compare(self, implementation: Implementation, outputs: Outputs | None) -> None:
        """Fill in the error of a row; a fast path with too large an error has failed."""
        bench = self.bench
        if self.plain is None and not self.at_truth_size and implementation is bench.case.reference:
            # In the measured dtype the reference itself is the baseline of the error.
            self.plain = outputs
        if self.truth is None or self.plain is None or outputs is None:
            return
        errors = parity.compare(
            bench.case, implementation, bench.dtype, self.size, self.truth, self.plain, outputs
        )
        if errors:
            bench.rows.by_name[implementation.name].max_error = max(row.error for row in errors)
        if implementation.kind == "fast":
            bench.failed += [row for row in errors if not row.ok]


def _first_calls(bench: _Bench, workload: Workload) -> tuple[dict[str, Step], dict[str, float]]:
    """Build and call every row once: record its errors against fp64 and the seconds of the first call.

    If the comparison uses another size, the timing makes the first calls.
    """
    comparison = _Comparison(bench, workload)
    steps: dict[str, Step] = {}
    seconds: dict[str, float] = {}
    for implementation in bench.runnable:
        name = implementation.name
        if comparison.at_truth_size:
            step = bench.rows.attempt(name, functools.partial(implementation.build, workload))
            if step is None:
                continue
            steps[name] = step
            outputs = comparison.outputs_at_truth_size(implementation)
        else:
            called = bench.rows.attempt(name, functools.partial(comparison.call, implementation))
            if called is None:
                continue
            steps[name], outputs, seconds[name] = called
        comparison.compare(implementation, outputs)
    return steps, seconds


def _fill(
    rows: _Rows,
    implementation: Implementation,
    timing: Timing,
    step: Step,
    workload: Workload,
    device: torch.device | str,
) -> None:
    """Fill in time, peak memory and host reads of one row."""
    row = rows.by_name[implementation.name]
    row.median_s = timing.median_s * implementation.time_scale
    row.p20_s = timing.p20_s * implementation.time_scale
    row.p80_s = timing.p80_s * implementation.time_scale
    # A first call far above the median compiles or fills a cache; it is reported separately.
    if timing.first_call_s > 3 * timing.median_s and timing.first_call_s - timing.median_s > 0.5:
        rows.note(row.impl, f"first call {timing.first_call_s:.1f} s")
    counted = rows.attempt(row.impl, lambda: call_counting_reads(step), "host reads and memory not measured")
    if counted is None:
        return
    outputs, row.host_syncs = counted
    peak = rows.attempt(
        row.impl,
        lambda: measure_peak(step, workload.tensors, device, earlier=outputs),
        "memory not measured",
    )
    if peak is not None:
        row.peak_bytes = workload.num_bytes + peak.peak_bytes
        row.extra_bytes = peak.extra_bytes


def _ratios(rows: _Rows, reference: BenchRow, failed: set[str]) -> None:
    for row in rows.by_name.values():
        if row.impl in failed:
            # No ratio for a wrong result; its figures are still reported.
            rows.note(row.impl, "parity FAILED: no ratio", first=True)
            continue
        if row.median_s and reference.median_s:
            row.time_ratio = reference.median_s / row.median_s
        if row.peak_bytes and reference.peak_bytes:
            row.memory_ratio = reference.peak_bytes / row.peak_bytes


def _size_label(size: str, overrides: Params | None) -> str:
    if not overrides:
        return size
    return size + "".join(f", {key}={value}" for key, value in overrides.items())
