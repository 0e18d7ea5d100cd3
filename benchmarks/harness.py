"""The interleaved measurement behind every script of this folder.

A script describes its workload as a `Benchmark`: the plain code, leanstep, other libraries and the limit,
each a `Row` with a `build` function. `build` takes a `Workload` and returns a `step`, a callable without
arguments that runs the computation once (forward and backward) and returns named tensors. One-time setup
belongs in `build`; only `step` is timed.

    python -m benchmarks.logprob_linear --size cpu --impl leanstep,plain --json out.json

A row gets a ratio only if its outputs and gradients keep the fp64 rule in the same run:

    error(candidate, truth) <= k * error(plain, truth) + floor
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text
from torch import Tensor

from leanstep import units
from leanstep.files import finite
from leanstep.measure.busy import busy_processes
from leanstep.measure.parity import FACTOR, FLOOR, dtype_name, relative_error, same_bits
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
from leanstep.tape.syncs import call_counting_reads

Kind = Literal["reference", "fast", "peer", "limit"]
Outputs = dict[str, Tensor]
Step = Callable[[], Outputs]
Params = Mapping[str, Any]
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# For rows that run only if they are named: torch.compile takes minutes for a model.
SLOW_BOX_S = 900.0
# A call may take this many budgets, or this many seconds if the budget is small. A row that takes longer is
# abandoned, so that it does not delay the others.
TIME_BOX = 2.0
MIN_BOX_S = 20.0
# Medians are of at least this many rounds, if those take no longer than the time box.
MIN_ROUNDS = 5


@dataclass(frozen=True)
class Workload:
    """Inputs of one call: tensors by name, and constants that are not tensors.

    A tensor called `upstream:NAME` is the incoming gradient of output NAME.
    """

    tensors: dict[str, Tensor]
    constants: dict[str, Any] = field(default_factory=dict)

    def cast(self, dtype: torch.dtype) -> Workload:
        """Return the same workload with every floating-point tensor in `dtype`; widening is exact."""
        cast = {name: t.to(dtype) if t.is_floating_point() else t for name, t in self.tensors.items()}
        return Workload(cast, self.constants)

    @property
    def num_bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self.tensors.values())


@dataclass(frozen=True)
class Row:
    """One row of a benchmark.

    Args:
        name: short and unique: `plain`, `leanstep`, `trl-chunked`, `limit`.
        kind: reference | fast | peer | limit.
        build: Workload -> step. A limit's step may return no tensors; then nothing is compared.
        requires: modules that must be importable; otherwise the row is `available: false`.
        devices: device types it runs on; on others the row is `available: false`.
        unavailable: params -> the reason why this row cannot run at this size, or None.
        time_scale: the step does 1/time_scale of the workload (for a peer that would take hours);
            the reported time is multiplied by it, and `note` must say so.
        dtypes: the dtypes that the tests check; None = those of the benchmark.
        on_request: why this row runs only if it is named (`--impl`).
        note: one line for the table.
    """

    name: str
    kind: Kind
    build: Callable[[Workload], Step]
    requires: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    unavailable: Callable[[Params], str | None] | None = None
    time_scale: float = 1.0
    dtypes: tuple[torch.dtype, ...] | None = None
    on_request: str = ""
    note: str = ""

    def missing(
        self, params: Params, device: torch.device | str = "cpu", *, named: bool = False
    ) -> str | None:
        """Return why this implementation does not run here, or None if it does; named: the user named it."""
        if self.on_request and not named:
            return f"{self.on_request}; runs if it is named"
        kind = torch.device(device).type
        if kind not in self.devices:
            return f"runs on {' and '.join(self.devices)} only, not on {kind}"
        for module in self.requires:
            try:
                is_installed = importlib.util.find_spec(module) is not None
            except (ImportError, ValueError):
                is_installed = False
            if not is_installed:
                return f"{module} is not installed"
        return self.unavailable(params) if self.unavailable else None


@dataclass(frozen=True)
class Benchmark:
    """One workload with its rows.

    Args:
        name: as in the result files.
        summary: one sentence.
        make: (params, dtype, device, generator) -> Workload. All randomness from `generator`, on the CPU.
        rows: the first is the reference.
        sizes: named parameter sets; `tiny` always exists. Others: `seed`, `cpu`, `gpu`, `large`, `odd`.
        prove_sizes: the sizes that the tests check.
        dtypes: the dtypes that the tests check by default.
        bench_dtype: the default dtype.
        error_baseline: the plain computation whose error is the baseline; None = the reference in the dtype
            under test. (Polar: the plain bf16 iteration.)
        truth: build for the fp64 reference if the reference is third-party code that cannot run in fp64;
            None = the reference.
        floor: absolute term of the bound, relative to the largest |truth| of the tensor.
        annotate: rows by name -> additional notes by name, called when all rows are measured.
        default_size: the default size on a CPU; on a GPU `gpu`, if it exists.
        truth_size: the size that is compared with fp64; None = the measured size. For workloads whose
            fp64 reference would take minutes.
    """

    name: str
    summary: str
    make: Callable[[Params, torch.dtype, torch.device, torch.Generator], Workload]
    rows: tuple[Row, ...]
    sizes: Mapping[str, Params]
    prove_sizes: tuple[str, ...] = ("tiny",)
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    bench_dtype: torch.dtype = torch.float32
    error_baseline: Callable[[Workload], Step] | None = None
    truth: Callable[[Workload], Step] | None = None
    floor: float | None = None
    annotate: Callable[[dict[str, dict[str, Any]]], dict[str, str]] | None = None
    default_size: str = "cpu"
    truth_size: str | None = None

    def __post_init__(self) -> None:
        names = [i.name for i in self.rows]
        assert self.rows and self.rows[0].kind == "reference", self.name
        assert len(set(names)) == len(names), f"{self.name}: implementation names repeat: {names}"
        assert "tiny" in self.sizes and set(self.prove_sizes) <= set(self.sizes), self.name
        assert self.default_size in self.sizes, f"{self.name}: no size {self.default_size!r}"

    @property
    def reference(self) -> Row:
        return self.rows[0]

    def truth_of(self, workload: Workload) -> Outputs:
        return (self.truth or self.reference.build)(workload.cast(torch.float64))()

    def plain_of(self, workload: Workload) -> Outputs:
        """Return the outputs of the plain code in this dtype, whose error is the baseline."""
        return (self.error_baseline or self.reference.build)(workload)()

    def row(self, name: str) -> Row:
        for candidate in self.rows:
            if candidate.name == name:
                return candidate
        known = ", ".join(i.name for i in self.rows)
        raise ValueError(f"impl: {self.name} has no {name!r}; it has {known}")

    def size_on(self, device: torch.device | str) -> str:
        """Return the default size on this device."""
        return "gpu" if torch.device(device).type == "cuda" and "gpu" in self.sizes else self.default_size

    def dtype_on(self, device: torch.device | str) -> torch.dtype:
        """Return the default dtype: bf16 on a GPU if the tests check the case in bf16."""
        on_gpu = torch.device(device).type == "cuda"
        return torch.bfloat16 if on_gpu and torch.bfloat16 in self.dtypes else self.bench_dtype

    def params(self, size: str, overrides: Params = MappingProxyType({})) -> dict[str, Any]:
        """Return the parameters of a named size, with some replaced (`--set`)."""
        if size not in self.sizes:
            raise ValueError(f"size: {self.name} has no {size!r}; it has {', '.join(self.sizes)}")
        params = dict(self.sizes[size])
        for key, value in overrides.items():
            if key not in params:
                raise ValueError(f"set: {self.name} has no parameter {key!r}; it has {', '.join(params)}")
            params[key] = value
        return params

    def workload(
        self, params: Params, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
    ) -> Workload:
        return self.make(params, dtype, torch.device(device), torch.Generator().manual_seed(seed))


def limit_of(rows: Mapping[str, Mapping[str, Any]], impl: str) -> Mapping[str, Any] | None:
    """Return the limit of a row: the one named after it (limit-x for leanstep-x), else the first."""
    limits = [name for name, row in rows.items() if row["kind"] == "limit" and row["median_s"]]
    own = min(limits, key=lambda name: name != impl.replace("leanstep", "limit"), default=None)
    return None if own is None else rows[own]


def with_gradients(
    function: Callable[[dict[str, Tensor], dict[str, Any]], Outputs], wrt: tuple[str, ...]
) -> Callable[[Workload], Step]:
    """Turn a forward function into a `build` whose step runs forward and backward and returns gradients.

    `function(tensors, constants)` receives new leaves (no copy) for the names in `wrt`; the step returns the
    outputs and `grad:NAME`. The incoming gradient of every output that requires grad is `upstream:NAME` of
    the workload, or ones.
    """

    def build(workload: Workload) -> Step:
        def step() -> Outputs:
            leaves = {name: workload.tensors[name].detach().requires_grad_() for name in wrt}
            outputs = function({**workload.tensors, **leaves}, workload.constants)
            roots = [(name, t) for name, t in outputs.items() if t.requires_grad]
            upstream = [
                workload.tensors[key].to(t.dtype)
                if (key := f"upstream:{name}") in workload.tensors
                else torch.ones_like(t)
                for name, t in roots
            ]
            grads = torch.autograd.grad(
                [t for _, t in roots], list(leaves.values()), upstream, allow_unused=True
            )
            result = {name: t.detach() for name, t in outputs.items()}
            for name, leaf, grad in zip(leaves, leaves.values(), grads, strict=True):
                result[f"grad:{name}"] = torch.zeros_like(leaf) if grad is None else grad
            return result

        return step

    return build


@dataclass(frozen=True)
class Check:
    """One comparison with fp64; `tensor` is `size/name`."""

    impl: str
    dtype: str
    tensor: str
    error: float
    reference_error: float
    bound: float

    @property
    def ok(self) -> bool:
        # A NaN error compares false with everything: `not (error > bound)` would accept it.
        return bool(self.error <= self.bound)


def compare(
    benchmark: Benchmark,
    row: Row,
    dtype: torch.dtype,
    label: str,
    truth: Outputs,
    plain: Outputs,
    candidate: Outputs,
) -> list[Check]:
    """Compare every tensor with fp64; a fast path must return all of the reference, a peer need not."""
    checks = []
    for name, expected in truth.items():
        if name not in candidate:
            if row.kind == "fast":
                missing = f"{label}/{name} (missing)"
                checks.append(Check(row.name, dtype_name(dtype), missing, float("inf"), 0.0, 0.0))
            continue
        error = relative_error(candidate[name], expected)
        reference_error = relative_error(plain[name], expected) if name in plain else 0.0
        floor = benchmark.floor if benchmark.floor is not None else FLOOR[dtype]
        bound = FACTOR[dtype] * reference_error + floor if expected.is_floating_point() else 0.0
        checks.append(Check(row.name, dtype_name(dtype), f"{label}/{name}", error, reference_error, bound))
    return checks


def check(
    benchmark: Benchmark,
    row: Row,
    dtype: torch.dtype,
    size: str,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> list[Check]:
    """Check one row at one size: distance from fp64, repeatability, unchanged inputs."""
    workload = benchmark.workload(benchmark.params(size), dtype, device, seed)
    before = {name: t.clone() for name, t in workload.tensors.items()}
    truth, plain = benchmark.truth_of(workload), benchmark.plain_of(workload)
    candidate = row.build(workload)()
    again = row.build(workload)()
    unchanged = all(same_bits(t, before[name]) for name, t in workload.tensors.items())
    repeats = all(same_bits(candidate[name], again[name]) for name in candidate)
    return [
        *compare(benchmark, row, dtype, size, truth, plain, candidate),
        *(
            Check(row.name, dtype_name(dtype), f"{size}/{what}", float(not ok), 0.0, 0.0)
            for what, ok in (("inputs unchanged", unchanged), ("bitwise repeatable", repeats))
        ),
    ]


class _Results:
    """The JSON rows of one run; a row that fails or takes too long says why in its note."""

    def __init__(self, rows: list[Row], box_s: float) -> None:
        figures = dict.fromkeys(
            (
                "median_s",
                "p20_s",
                "p80_s",
                "samples",
                "time_ratio",
                "peak_bytes",
                "extra_bytes",
                "memory_ratio",
            )
        )
        self.by_name: dict[str, dict[str, Any]] = {
            row.name: {
                "impl": row.name,
                "kind": row.kind,
                "available": True,
                **figures,
                "host_syncs": None,
                "error": None,
                "note": row.note,
            }
            for row in rows
        }
        self.box_s = box_s
        self.failed: list[Check] = []
        self.gone: set[str] = set()  # rows that failed while they were timed

    def attempt(self, name: str, function: Callable[[], Any], what: str = "given up") -> Any:
        """Return `function()`, or None and a note: out of time or memory, or another library failed."""
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
        if self.by_name[name]["kind"] != "peer":
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
                if said not in self.by_name[name]["note"]:
                    self.note(name, f"{said}: given up", first=True)
            raise TimeUp

        return run

    def note(self, name: str, text: str, *, first: bool = False) -> None:
        row = self.by_name[name]
        row["note"] = "; ".join(
            part for part in ((text, row["note"]) if first else (row["note"], text)) if part
        )


def measure(
    benchmark: Benchmark,
    size: str | None = None,
    *,
    overrides: Params = MappingProxyType({}),
    only: tuple[str, ...] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    budget_s: float = 20.0,
    beside: int = 0,
) -> tuple[dict[str, Any], list[Check]]:
    """Measure the rows; return the JSON object and the checks that failed.

    The reference always runs: every ratio refers to it in the same run.

    Args:
        size: None: `benchmark.size_on(device)`; overrides: parameters that differ from the size's.
        dtype: of the workload; None: `benchmark.dtype_on(device)`. The result names it on a GPU, or if set.
        beside: number of other processes that compute while the rows are timed.
    """
    with current_device(device):
        size = size or benchmark.size_on(device)
        params = benchmark.params(size, overrides)
        head = environment(device)
        if dtype is not None or torch.device(device).type == "cuda":
            head["dtype"] = dtype_name(dtype or benchmark.dtype_on(device))
        dtype = dtype or benchmark.dtype_on(device)
        if beside:
            head["beside"] = beside
        chosen = [
            row for row in benchmark.rows if only is None or row.name in only or row.kind == "reference"
        ]
        results = _Results(chosen, max(TIME_BOX * budget_s, MIN_BOX_S))
        if only is not None and any(row.on_request for row in chosen):
            results.box_s = max(results.box_s, SLOW_BOX_S)
        runnable = []
        for row in chosen:
            reason = row.missing(params, device, named=only is not None)
            if reason is None:
                runnable.append(row)
            else:
                results.by_name[row.name] |= {"available": False, "note": reason}

        # Run both once, so that torch's imports do not count in a row's time.
        call_counting_reads(dict)
        measure_peak(dict, {}, device)

        # Odd shapes reveal errors that round sizes hide.
        for row in runnable:
            for small in benchmark.prove_sizes if row.kind == "fast" else ():
                if row.missing(benchmark.params(small), device, named=True) is None:
                    checks = check(benchmark, row, dtype, small, device=device)
                    results.failed += [c for c in checks if not c.ok]

        workload = benchmark.workload(params, dtype, device)
        steps, first_calls = _first_calls(benchmark, runnable, results, workload, size, dtype, device)
        with busy_processes(beside):
            timings = interleave(
                {name: results.guarded(name, step) for name, step in steps.items()},
                budget_s=budget_s,
                box_s=results.box_s,
                min_rounds=MIN_ROUNDS,
                device=device,
                first_calls=first_calls,
            )
        for row in runnable:
            if row.name in timings:
                _fill(results, row, timings[row.name], steps[row.name], workload, device)
            elif row.name in steps and row.name not in results.gone:
                results.note(row.name, f"> {results.box_s:.3g} s: given up", first=True)

    _add_ratios(results, results.by_name[benchmark.reference.name])
    if benchmark.annotate:
        for name, note in benchmark.annotate(results.by_name).items():
            results.note(name, note)
    label = size + "".join(f", {key}={value}" for key, value in overrides.items())
    return {
        **head,
        "case": benchmark.name,
        "size": label,
        "budget_s": budget_s,
        "rows": list(results.by_name.values()),
    }, results.failed


def _first_calls(
    benchmark: Benchmark,
    runnable: list[Row],
    results: _Results,
    workload: Workload,
    size: str,
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[dict[str, Step], dict[str, float]]:
    """Build and call every row once: its errors against fp64, and the seconds of the first call.

    With a `truth_size` the comparison uses that size, and the timing makes the first calls.
    """
    elsewhere = benchmark.truth_size is not None and benchmark.truth_size != size
    compared = workload
    if elsewhere:
        assert benchmark.truth_size is not None
        size = benchmark.truth_size
        compared = benchmark.workload(benchmark.params(size), dtype, device)
    truth = plain = None
    if benchmark.reference in runnable:
        name = benchmark.reference.name
        truth = results.attempt(name, lambda: benchmark.truth_of(compared), "no fp64 reference")
        if truth is not None:
            plain = results.attempt(name, lambda: benchmark.plain_of(compared), "no baseline error")

    steps: dict[str, Step] = {}
    seconds: dict[str, float] = {}
    for row in runnable:
        step = results.attempt(row.name, functools.partial(row.build, workload))
        if step is None:
            continue
        if not elsewhere:
            called = results.attempt(row.name, functools.partial(timed_call, step, device))
            if called is None:
                continue
            outputs, seconds[row.name] = called
        elif truth is None or row.missing(benchmark.params(size), device, named=True) is not None:
            outputs = None
        else:
            build = functools.partial(row.build, compared)
            outputs = results.attempt(row.name, lambda build=build: build()(), "not compared with fp64")
        steps[row.name] = step
        if truth is not None and plain is not None and outputs is not None:
            checks = compare(benchmark, row, dtype, size, truth, plain, outputs)
            if checks:
                results.by_name[row.name]["error"] = max(c.error for c in checks)
            if row.kind == "fast":
                results.failed += [c for c in checks if not c.ok]
    return steps, seconds


def _fill(
    results: _Results, row: Row, timing: Timing, step: Step, workload: Workload, device: torch.device | str
) -> None:
    """Fill in time, peak memory and host reads of one row."""
    figures = results.by_name[row.name]
    figures["median_s"] = timing.median_s * row.time_scale
    figures["p20_s"] = timing.p20_s * row.time_scale
    figures["p80_s"] = timing.p80_s * row.time_scale
    figures["samples"] = timing.samples
    # A first call far above the median compiles or fills a cache; it is reported separately.
    if timing.first_call_s > 3 * timing.median_s and timing.first_call_s - timing.median_s > 0.5:
        results.note(row.name, f"first call {timing.first_call_s:.1f} s")
    counted = results.attempt(
        row.name, lambda: call_counting_reads(step), "host reads and memory not measured"
    )
    if counted is None:
        return
    outputs, figures["host_syncs"] = counted
    peak = results.attempt(
        row.name,
        lambda: measure_peak(step, workload.tensors, device, earlier=outputs),
        "memory not measured",
    )
    if peak is not None:
        figures["peak_bytes"] = workload.num_bytes + peak.peak_bytes
        figures["extra_bytes"] = peak.extra_bytes


def _add_ratios(results: _Results, reference: dict[str, Any]) -> None:
    failed = {c.impl for c in results.failed}
    for name, row in results.by_name.items():
        if name in failed:
            # No ratio for a wrong result; its figures are still reported.
            results.note(name, "parity FAILED: no ratio", first=True)
            continue
        if row["median_s"] and reference["median_s"]:
            row["time_ratio"] = reference["median_s"] / row["median_s"]
        if row["peak_bytes"] and reference["peak_bytes"]:
            row["memory_ratio"] = reference["peak_bytes"] / row["peak_bytes"]


def run_steps(
    benchmark: Benchmark,
    size: str | None,
    name: str,
    count: int,
    device: str,
    dtype: torch.dtype | None,
    overrides: Params = MappingProxyType({}),
) -> None:
    """Run one row `count` times without a clock, for `leanstep rehearse -m benchmarks.NAME -- --steps 3`."""
    row = benchmark.row(name)
    params = benchmark.params(size or benchmark.size_on(device), overrides)
    reason = row.missing(params, device, named=True)
    if reason is not None:
        raise SystemExit(f"{name}: {reason}")
    step = row.build(benchmark.workload(params, dtype or benchmark.dtype_on(device), device))
    # An update without parameters: it marks the end of a step for the recorder.
    marker = torch.optim.SGD([torch.zeros((), device=device, requires_grad=True)], lr=0.0)
    for _ in range(count):
        step()
        marker.param_groups[0]["params"][0].grad = torch.zeros((), device=device)
        marker.step()


def main(benchmark: Benchmark, arguments: list[str] | None = None) -> None:
    """Run the command line of one script; exit code 1 if a fast path breaks the fp64 rule."""
    parser = argparse.ArgumentParser(description=benchmark.summary)
    parser.add_argument("--size", choices=list(benchmark.sizes), help="default: the device's own")
    parser.add_argument("--impl", help="only these rows, separated by commas; the reference always runs")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another parameter")
    parser.add_argument("--device", default="cpu", help="cpu or cuda[:N]")
    parser.add_argument("--dtype", choices=list(DTYPES))
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of timing")
    parser.add_argument("--beside", type=int, default=0, help="other processes that compute meanwhile")
    parser.add_argument("--steps", type=int, help="run one row this often without a clock, and stop")
    parser.add_argument("--json", metavar="FILE", help="- for standard output")
    options = parser.parse_args(arguments)
    names = tuple(options.impl.split(",")) if options.impl else None
    dtype = DTYPES[options.dtype] if options.dtype else None
    try:
        for name in names or ():
            benchmark.row(name)
        overrides = {key: _number(value) for key, _, value in (pair.partition("=") for pair in options.set)}
        benchmark.params(options.size or benchmark.size_on(options.device), overrides)
    except ValueError as error:
        parser.error(f"--{error}")
    if options.steps is not None:
        if names is None or len(names) != 1:
            parser.error("--steps: expected one row with --impl")
        run_steps(benchmark, options.size, names[0], options.steps, options.device, dtype, overrides)
        return
    result, failed = measure(
        benchmark,
        options.size,
        overrides=overrides,
        only=names,
        device=options.device,
        dtype=dtype,
        budget_s=options.budget,
        beside=options.beside,
    )
    screen = Console(stderr=options.json == "-", highlight=False)
    screen.print(table(result))
    if options.json:
        text = json.dumps(finite(result), indent=1) + "\n"
        if options.json == "-":
            sys.stdout.write(text)
        else:
            Path(options.json).write_text(text, encoding="utf-8")
    if failed:
        print(
            f"parity failed for {len(failed)} tensors, first {failed[0].impl} {failed[0].tensor}",
            file=sys.stderr,
        )
        sys.exit(1)


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def table(result: dict[str, Any]) -> Group:
    machine = f"torch {result['torch']} · {result['device']}, {result['threads']} threads"
    if result.get("omp_wait_policy"):
        machine += f" (OMP_WAIT_POLICY={result['omp_wait_policy']})"
    title = f"{result['case']} · {result['size']} · {machine}"
    if result.get("beside"):
        title += f" · beside {result['beside']} busy process{'es' * (result['beside'] > 1)}"
    rows = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("implementation", "kind"):
        rows.add_column(name)
    for name in ("median", "p20–p80", "faster", "extra memory", "peak", "less", "host reads", "error"):
        rows.add_column(name, justify="right")
    notes = []
    for row in result["rows"]:
        if not row["available"]:
            rows.add_row(row["impl"], row["kind"], "absent", style="dim")
        else:
            given_up = row["median_s"] is None
            spread = "" if given_up else f"{units.seconds(row['p20_s'])}–{units.seconds(row['p80_s'])}"
            rows.add_row(
                row["impl"],
                row["kind"],
                time_text(row),
                spread,
                units.ratio(row["time_ratio"]),
                units.size(row["extra_bytes"]),
                units.size(row["peak_bytes"]),
                units.ratio(row["memory_ratio"]),
                "-" if row["host_syncs"] is None else str(row["host_syncs"]),
                units.small(row["error"]),
                style="bold" if row["kind"] == "fast" else None,
            )
        if row["note"]:
            notes.append(Text(f"  {row['impl']}: {row['note']}", style="dim"))
    return Group(Text(title, style="bold"), rows, *notes, Text())


def time_text(row: dict[str, Any]) -> str:
    """Return the median of a row, or `> 40 s` for one that was aborted."""
    limit, colon, _ = row["note"].partition(":")
    given_up = row["median_s"] is None and colon and limit.startswith("> ")
    return limit if given_up else units.seconds(row["median_s"])
