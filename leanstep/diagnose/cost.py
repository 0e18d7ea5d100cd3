"""Measure this machine's rates, once per process, and estimate what each finding costs.

A cost is the time that a line takes now, not the time that a replacement would take: `leanstep bench`
measures that.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from leanstep.diagnose.findings import Finding, Work
from leanstep.diagnose.step import HALF, Step
from leanstep.diagnose.step_clock import own_seconds

# A read on a GPU drains the queue: the latency of a synchronisation plus the gap until new work arrives.
SYNC_SECONDS = (10e-6, 50e-6)
# The assumed step on a GPU to which reads are compared: one launch per op, matmuls at a tenth of a recent
# card's peak and memory traffic at half of its bandwidth.
GPU_OP_SECONDS, GPU_FLOPS_PER_S, GPU_BYTES_PER_S = 5e-6, 100e12, 1.5e12
# Below this share of the step a finding is folded into "smaller ones".
SMALL_SHARE = 0.005


# Ops that torch's AdamW dispatches per parameter without foreach or fused.
ADAMW_OPS = 9


@dataclass(frozen=True)
class Calibration:
    """Rates of this machine: seconds per tiny op, bytes/s (contiguous and strided), FLOP/s.

    `loop_op_s`: seconds per op of an optimizer that loops over its parameters, including Python overhead.
    """

    op_s: float
    loop_op_s: float
    bytes_per_s: float
    strided_bytes_per_s: float
    flops_per_s: float


# Measured on an otherwise idle core. The cost of an op includes its Python and autograd overhead.
PLAIN_CORE, PLAIN_STEP_OP_S = Calibration(2e-6, 3e-6, 10e9, 2e9, 50e9), 30e-6


def _median_seconds(function: Callable[[], object], repeats: int, rounds: int = 5) -> float:
    times = []
    for _ in range(rounds):
        start = own_seconds()
        for _ in range(repeats):
            function()
        times.append(max(own_seconds() - start, 1e-9) / repeats)
    return statistics.median(times)


@cache
def calibrate() -> Calibration:
    """Measure the rates on the host (well under half a second), with no torch modes active."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        tiny, wide, square = torch.zeros(16), torch.zeros(1024, 1024), torch.zeros(384, 384)
        target = torch.zeros(1024, 1024)
        op_s = _median_seconds(lambda: tiny + tiny, 200)
        copy_s = _median_seconds(lambda: target.copy_(wide), 4)
        strided_s = _median_seconds(lambda: target.copy_(wide.t()), 2)
        matmul_s = _median_seconds(lambda: square @ square, 4)
        loop_op_s = max(op_s, _seconds_per_loop_op())
    moved = 2 * wide.nbytes
    return Calibration(op_s, loop_op_s, moved / copy_s, moved / strided_s, 2 * 384**3 / matmul_s)


def _seconds_per_loop_op() -> float:
    """Return the seconds per op of AdamW over tiny parameters one by one, compared with one fused call."""
    seconds = []
    for fused in (False, True):
        weights = [torch.zeros(8, requires_grad=True) for _ in range(16)]
        for weight in weights:
            weight.grad = torch.zeros(8)
        optimizer = torch.optim.AdamW(weights, foreach=False, fused=fused)
        optimizer.step()
        seconds.append(_median_seconds(optimizer.step, 1))
    return (seconds[0] - seconds[1]) / (16 * ADAMW_OPS)


@cache
def warm_up_torch() -> None:
    """Run one optimizer step, so that torch imports its compiler before the user's step is timed."""
    weight = torch.zeros(1, requires_grad=True)
    weight.sum().backward()
    torch.optim.SGD([weight], lr=0.0).step()


def measure_half_rates(steps: Sequence[Step], budget_s: float = 0.5) -> None:
    """Time the two largest half-precision matmuls of a step against float32: the tape's `half_rates`.

    Run it with no torch modes active. The faster shape counts: a dtype is slow only if all shapes are slow.
    """
    seen: dict[torch.dtype, dict[tuple[int, int, int, int, bool], int]] = {}
    for op in steps[0].ops if steps else ():
        if op.matmul is not None and op.factors[0].dtype in HALF:
            seen.setdefault(op.factors[0].dtype, {})[op.matmul_shape] = op.flops
    deadline = time.perf_counter() + budget_s
    for dtype, shapes in seen.items():
        rates = []
        for shape in sorted(shapes, key=lambda s: -shapes[s])[:2]:
            if rates and time.perf_counter() > deadline:
                break
            rates.append(_rates(shape, dtype))
        best = max(rates, key=lambda pair: pair[0] / pair[1])
        steps[0].tape.half_rates[dtype] = best


def _rates(shape: tuple[int, int, int, int, bool], dtype: torch.dtype) -> tuple[float, float]:
    """Return GFLOP/s of one shape in `dtype` and in float32, each the best of several interleaved runs."""
    batch, rows, inner, columns, column_major = shape
    # A slice of the rows is enough to measure a rate, and limits the time that a slow dtype takes.
    rows = max(1, min(rows, int(2e8 // max(2 * batch * inner * columns, 1)) or 1))
    pairs = []
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for kind in (dtype, torch.float32):
            a = torch.randn(batch, rows, inner).to(kind)
            b = (
                torch.randn(batch, columns, inner).to(kind).mT
                if column_major
                else torch.randn(batch, inner, columns).to(kind)
            )
            pairs.append((a, b) if batch > 1 else (a[0], b[0]))
        best = [float("inf"), float("inf")]
        for round_number in range(12):
            for i, (a, b) in enumerate(pairs):
                start = time.perf_counter()
                torch.matmul(a, b)
                elapsed = time.perf_counter() - start
                # The first rounds pack weights and build kernels.
                if round_number > 1 or elapsed > 0.05:
                    best[i] = min(best[i], elapsed)
            if round_number > 2 and best[0] > 0.02:
                break
    flops = 2 * batch * rows * inner * columns / 1e9
    return flops / best[0], flops / best[1]


def price(
    findings: Sequence[Finding],
    steps: Sequence[Step],
    step_seconds: float | None,
    calibration: Calibration,
    iteration_seconds: float | None = None,
    rollout_seconds: float | None = None,
) -> list[Finding]:
    """Fill in the cost of each finding per step and sort: most expensive first, compiled regions last.

    iteration_seconds: the time to which findings that occur once per rollout are compared; None: the step's.
    rollout_seconds: how long a rollout takes, if it was timed.
    """
    on_gpu = gpu_step_seconds(steps)
    for finding in findings:
        work = finding.work
        if work.rollout_share and rollout_seconds is not None:
            work.seconds = work.rollout_share * rollout_seconds
        seconds = _seconds(work, calibration)
        finding.basis = "calibrated"
        if work.seconds is not None:
            seconds, finding.basis = work.seconds, "measured"
        if work.reads:
            low, high = SYNC_SECONDS
            finding.seconds_range = (work.reads * low, work.reads * high)
            seconds, finding.basis = work.reads * (low + high) / 2, "assumed"
            # A read waits only on a GPU: it is not part of the step time on this machine.
            finding.seconds, finding.share = None, seconds / (seconds + on_gpu)
            continue
        finding.seconds = seconds
        held = work.held_bytes or work.moved_bytes or work.strided_bytes
        finding.bytes = int(held) or None
        if work.held_bytes and not seconds:
            finding.seconds, finding.basis = None, "measured"
        whole = (finding.per_rollout and iteration_seconds) or step_seconds
        time_share = min(1.0, seconds / whole) if whole else 0.0
        memory_share = _memory_share(work, steps)
        known = whole or (memory_share and work.held_bytes)
        finding.share = max(time_share, memory_share) if known else None
    ranked = sorted(findings, key=lambda f: (f.compiled, -(f.share or 0.0), -(f.seconds or 0.0), -f.count))
    for number, finding in enumerate(ranked, 1):
        finding.rank = number
    return ranked


def _memory_share(work: Work, steps: Sequence[Step]) -> float:
    """Return the share of the largest amount saved for the backward at once."""
    peak_saved = max((max(step.peak_saved_bytes, step.peak_wide_bytes) for step in steps), default=0)
    return work.held_bytes / peak_saved if peak_saved else 0.0


def _seconds(work: Work, calibration: Calibration) -> float:
    return (
        work.ops * calibration.op_s
        + work.loop_ops * calibration.loop_op_s
        + work.moved_bytes / calibration.bytes_per_s
        + work.strided_bytes / calibration.strided_bytes_per_s
        + work.flops / calibration.flops_per_s
    )


def worth_a_line(findings: Sequence[Finding], steps: Sequence[Step]) -> list[Finding]:
    """Drop small findings, judged by the rates of a typical core so that machine load makes no difference."""
    core, whole = PLAIN_CORE, 0.0
    if steps:
        whole = statistics.median(
            step.num_ops * PLAIN_STEP_OP_S
            + 3 * step.written_bytes / core.bytes_per_s
            + step.flops / core.flops_per_s
            for step in steps
        )

    def is_worth_it(finding: Finding) -> bool:
        work = finding.work
        if work.reads or work.seconds is not None or not whole:
            return not is_small(finding)
        return max(_seconds(work, core) / whole, _memory_share(work, steps)) >= SMALL_SHARE

    return [finding for finding in findings if is_worth_it(finding)]


def gpu_step_seconds(steps: Sequence[Step]) -> float:
    """Return the assumed (not predicted) time of the recorded work on a GPU, the median over the steps."""
    return (
        statistics.median(
            max(
                step.num_ops * GPU_OP_SECONDS,
                step.flops / GPU_FLOPS_PER_S + 3 * step.written_bytes / GPU_BYTES_PER_S,
            )
            for step in steps
        )
        if steps
        else 0.0
    )


def is_small(finding: Finding) -> bool:
    """Return whether the terminal folds the finding away. A finding whose share is unknown is shown.

    Reads in a loop are never small where their wait on a GPU is assumed.
    """
    assumed = finding.in_loop and finding.basis == "assumed"
    return finding.share is not None and finding.share < SMALL_SHARE and not assumed
