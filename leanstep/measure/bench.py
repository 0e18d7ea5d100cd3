"""Measure a case: parity first, then time (interleaved), then memory and host reads in runs of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from leanstep.case import Case, Implementation, Outputs, Params, Workload
from leanstep.measure import parity
from leanstep.measure.environment import environment
from leanstep.measure.memory import measure_peak
from leanstep.measure.syncs import host_syncs
from leanstep.measure.timing import interleave

Progress = Callable[[str, float], None]


@dataclass
class BenchRow:
    """One row of the contract in docs/measuring.md; a figure that does not exist is None."""

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

    def to_json(self) -> dict[str, Any]:
        rows = [dict(vars(row)) for row in self.rows]
        return {**self.environment, "case": self.case, "size": self.size, "rows": rows}


def run_bench(
    case: Case,
    size: str,
    *,
    overrides: Params | None = None,
    only: tuple[str, ...] | None = None,
    device: torch.device | str = "cpu",
    budget_s: float = 20.0,
    progress: Progress | None = None,
) -> BenchResult:
    """Measure `case` at `size`; the reference always runs, because every ratio is against it in this run."""
    report = progress or (lambda what, share: None)
    params = case.params(size, overrides or {})
    chosen = [i for i in case.implementations if only is None or i.name in only or i.kind == "reference"]
    result = BenchResult(case.name, _size_label(size, overrides), environment(device))
    rows = {i.name: BenchRow(i.name, i.kind, available=True, note=i.note) for i in chosen}
    result.rows = list(rows.values())

    runnable: list[Implementation] = []
    for implementation in chosen:
        reason = implementation.missing(params)
        if reason is None:
            runnable.append(implementation)
        else:
            rows[implementation.name].available = False
            rows[implementation.name].note = reason
    reference_available = case.reference in runnable

    report("parity with fp64", 0.0)
    for implementation in runnable:
        if implementation.kind == "fast":
            # Proving sizes first: odd shapes find what a round bench size hides.
            for proving_size in case.prove_sizes:
                if implementation.missing(case.params(proving_size)) is None:
                    found = parity.check(case, implementation, case.bench_dtype, proving_size, device=device)
                    result.failed += [row for row in found if not row.ok]

    workload = case.workload(params, case.bench_dtype, device)
    _errors_at_size(case, workload, size, runnable, rows, result, device)

    report("time", 0.2)
    steps = {i.name: i.build(workload) for i in runnable}
    timings = interleave(
        steps,
        budget_s=budget_s,
        device=device,
        on_round=lambda done, planned: report("time", 0.2 + 0.6 * done / planned),
    )
    report("memory and host reads", 0.8)
    for implementation in runnable:
        row, timing = rows[implementation.name], timings[implementation.name]
        row.median_s = timing.median_s * implementation.time_scale
        row.p20_s = timing.p20_s * implementation.time_scale
        row.p80_s = timing.p80_s * implementation.time_scale
        # A first call far above the median is compilation or a cache being filled; it is reported apart.
        if timing.first_call_s > 3 * timing.median_s and timing.first_call_s - timing.median_s > 0.5:
            row.note = _join(row.note, f"first call {timing.first_call_s:.1f} s")
        peak = measure_peak(steps[implementation.name], workload.tensors, device)
        row.peak_bytes = workload.num_bytes + peak.peak_bytes
        row.extra_bytes = peak.extra_bytes
        row.host_syncs = host_syncs(steps[implementation.name])

    if reference_available:
        _ratios(rows, rows[case.reference.name], {row.impl for row in result.failed})
    if case.annotate:
        for name, note in case.annotate({name: vars(row) for name, row in rows.items()}).items():
            rows[name].note = _join(rows[name].note, note)
    report("done", 1.0)
    return result


def _errors_at_size(
    case: Case,
    workload: Workload,
    size: str,
    runnable: list[Implementation],
    rows: dict[str, BenchRow],
    result: BenchResult,
    device: torch.device | str,
) -> None:
    """Fill `max_error` against fp64, at `case.truth_size` where the measured size would take minutes."""
    at = size
    if case.truth_size is not None and case.truth_size != size:
        at = case.truth_size
        workload = case.workload(case.params(at), case.bench_dtype, device)
    if not any(i is case.reference for i in runnable):
        return
    truth = parity.truth_of(case, workload)
    plain = parity.plain_of(case, workload)
    for implementation in runnable:
        if at != size and implementation.missing(case.params(at)):
            continue
        candidate: Outputs = implementation.build(workload)()
        found = parity.compare(case, implementation, case.bench_dtype, at, truth, plain, candidate)
        if found:
            rows[implementation.name].max_error = max(row.error for row in found)
        if implementation.kind == "fast":
            result.failed += [row for row in found if not row.ok]


def _ratios(rows: dict[str, BenchRow], reference: BenchRow, failed: set[str]) -> None:
    for row in rows.values():
        if row.impl in failed:
            # A wrong answer has no speed: the figures stay, the comparison does not.
            row.note = _join("parity FAILED: no ratio", row.note)
            continue
        if row.median_s and reference.median_s:
            row.time_ratio = reference.median_s / row.median_s
        if row.peak_bytes and reference.peak_bytes:
            row.memory_ratio = reference.peak_bytes / row.peak_bytes


def _size_label(size: str, overrides: Params | None) -> str:
    if not overrides:
        return size
    return size + "".join(f", {key}={value}" for key, value in overrides.items())


def _join(*notes: str) -> str:
    return "; ".join(note for note in notes if note)
