"""Time implementations interleaved, round by round in one process; medians with p20 and p80.

On a shared machine timings drift by tens of percent within a minute. Running A to the end and then B measures
other users' load; running A B C, B C A, C A B ... exposes all rows to the same noise, and a ratio of medians
from one run stays meaningful. If rounds are expensive, rows far slower than the others skip some of them,
spread over the run, so that the others still have medians of several samples. The garbage collector is off,
because one collection costs more than a small step. The first call (imports, compilation, caches) is timed
separately. A row that takes too long is abandoned (`time_box`), so that it does not delay the others.

On a GPU two CUDA events around one call measure device time. Before each call the L2 cache is overwritten,
because in a training step a kernel's inputs come from memory, and the device is idle, so that launches that
the host cannot issue fast enough count. Warm-up calls bring clocks and allocator to the state of a long run.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import platform
import re
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch

import leanstep

# A sample shorter than this is dominated by the clock call and by jitter; several calls share one sample.
MIN_SAMPLE_S = 1e-3
MAX_SAMPLES_PER_ROUND = 16
# If three rounds of all rows take too long, rows this many times faster than the slowest run in more rounds.
QUICK, QUICK_ROUNDS = 3.0, 5
# On a GPU: minimum number and duration of the calls before the first sample (the clocks rise slowly).
WARM_CALLS, WARM_S = 3, 0.3
# Flush twice the cache size, at least this much: a device may report no cache size.
MIN_FLUSH_BYTES = 64 * 2**20
Result = TypeVar("Result")


@dataclass(frozen=True)
class Timing:
    median_s: float
    p20_s: float
    p80_s: float
    samples: int
    first_call_s: float


class TimeUp(BaseException):
    """A `time_box` has expired. Not an Exception: code that falls back on errors must not catch it."""


@contextlib.contextmanager
def time_box(seconds: float) -> Iterator[None]:
    """Abort the block after `seconds`: TimeUp is raised inside it, at the next Python instruction.

        try:
            with time_box(40):
                step()
        except TimeUp:
            ...

    A single op in C++ is not interrupted. Outside the main thread, and without interval timers (Windows), the
    block runs to its end and TimeUp is raised then.
    """
    started = time.monotonic()
    can_interrupt = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    previous: Any = None

    def ring(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - started >= seconds and not _is_importing(frame):
            raise TimeUp

    if can_interrupt:
        previous = signal.signal(signal.SIGALRM, ring)
        # Repeat afterwards: imports are not interrupted, and Python drops exceptions raised in a destructor.
        signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)
    try:
        yield
    finally:
        if can_interrupt:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
    if time.monotonic() - started >= seconds:
        raise TimeUp


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a module is being imported: an interrupted import would leave it half initialized."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def interleave(
    steps: Mapping[str, Callable[[], object]],
    *,
    budget_s: float = 20.0,
    box_s: float = math.inf,
    min_rounds: int = 3,
    max_rounds: int = 30,
    device: torch.device | str = "cpu",
    first_calls: Mapping[str, float] | None = None,
) -> dict[str, Timing]:
    """Time the steps, interleaved.

    Args:
        steps: callables by name.
        budget_s: approximate total duration of the rounds.
        box_s: a call that takes longer is aborted, and its step is missing in the result. It also limits the
            rounds: there are fewer than `min_rounds` if those would take longer.
        min_rounds, max_rounds: every step runs in every round, so a step of 3 s runs at least 3 times. With
            fewer rounds than that, steps that take at most a third of the slowest run in 5.
        first_calls: seconds of first calls that were already made.
    """
    clock = clock_of(device)
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        first, estimate = dict(first_calls or {}), {}
        for name, step in steps.items():
            with contextlib.suppress(TimeUp):
                if name not in first:
                    first[name] = _timed(step, 1, clock, box_s)
                # A second call has no one-off costs; skip it if the step is too slow to repeat.
                slow = first[name] > budget_s / 4
                estimate[name] = first[name] if slow else clock.warm(lambda: _timed(step, 1, clock, box_s))  # noqa: B023
        slowest = max(estimate.values(), default=0.0)
        # Fast rows get several samples per round, up to a tenth of the time of the slowest row.
        share = max(0.02, slowest / 10)
        calls = {name: max(1, math.ceil(clock.min_sample_s / max(s, 1e-9))) for name, s in estimate.items()}
        repeats = {
            name: min(MAX_SAMPLES_PER_ROUND, max(1, int(share / max(s * calls[name], 1e-9))))
            for name, s in estimate.items()
        }
        round_s = max(sum(s * calls[name] * repeats[name] for name, s in estimate.items()), 1e-9)
        least = max(1, int(min(min_rounds, box_s / round_s)))
        rounds = max(least, min(max_rounds, int(budget_s / round_s)))
        samples: dict[str, list[float]] = {name: [] for name in estimate}
        order, turns = list(estimate), _turns(estimate, rounds, min_rounds, box_s)
        rounds = max(map(len, turns.values()), default=0)
        for index in range(rounds):
            for name in tuple(order):
                try:
                    for _ in range(repeats[name] if index in turns[name] else 0):
                        samples[name].append(_timed(steps[name], calls[name], clock, box_s))
                except TimeUp:
                    order.remove(name)
            order = order[1:] + order[:1]
            # Collect the steps' reference cycles between rounds, where nothing is timed.
            gc.collect()
    finally:
        if was_enabled:
            gc.enable()
    return {name: _summary(values, first[name]) for name, values in samples.items() if values}


def _turns(estimate: Mapping[str, float], rounds: int, min_rounds: int, box_s: float) -> dict[str, set[int]]:
    """Return the rounds in which each step runs: all rounds; if there are few, more for the fast steps."""
    slowest = max(estimate.values(), default=0.0)
    quick = {name: s for name, s in estimate.items() if QUICK * s <= slowest}
    total = rounds
    if quick and rounds < min_rounds:
        total = max(rounds, int(min(QUICK_ROUNDS, box_s / max(sum(quick.values()), 1e-9))))
    slow = [name for name in estimate if name not in quick]
    spread = {
        name: {(number + turn * total // rounds) % total for turn in range(rounds)}
        for number, name in enumerate(slow)
    }
    return {name: spread.get(name, set(range(total))) for name in estimate}


def timed_call(step: Callable[[], Result], device: torch.device | str = "cpu") -> tuple[Result, float]:
    """Return the result of one call and its seconds."""
    results: list[Result] = []
    seconds = HostClock(device)(lambda: results.append(step()))
    return results[0], seconds


class HostClock:
    """Measures the seconds of a call with the host's clock, until the device has finished."""

    # A sample shorter than this is repeated: jitter and the clock itself would dominate it.
    min_sample_s = MIN_SAMPLE_S

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)

    def __call__(self, run: Callable[[], object]) -> float:
        self.wait()
        start = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - start

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def warm(self, timed: Callable[[], float]) -> float:
        """Call once, which is enough on a CPU; return the seconds."""
        return timed()


class EventClock(HostClock):
    """Measures the seconds of a call between two CUDA events, on an idle device with a cold L2 cache."""

    min_sample_s = 0.0  # one call per sample: a second call would have a warm cache

    def __init__(self, device: torch.device | str) -> None:
        super().__init__(device)
        cache = getattr(torch.cuda.get_device_properties(self.device), "L2_cache_size", 0)
        self._flushed = torch.empty(
            max(2 * cache, MIN_FLUSH_BYTES) // 4, dtype=torch.int32, device=self.device
        )
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def __call__(self, run: Callable[[], object]) -> float:
        stream, (start, end) = torch.cuda.current_stream(self.device), self._events
        self._flushed.zero_()
        self.wait()
        start.record(stream)
        run()
        end.record(stream)
        self.wait()
        return start.elapsed_time(end) / 1e3

    def warm(self, timed: Callable[[], float]) -> float:
        seconds, calls, begun = 0.0, 0, time.perf_counter()
        while calls < WARM_CALLS or time.perf_counter() - begun < WARM_S:
            seconds, calls = timed(), calls + 1
        return seconds


def clock_of(device: torch.device | str) -> HostClock:
    """Return an event clock for a GPU, the host's clock for other devices."""
    return EventClock(device) if torch.device(device).type == "cuda" else HostClock(device)


def current_device(device: torch.device | str) -> contextlib.AbstractContextManager[Any]:
    """Make a CUDA device current, so that events, Triton launches and streams use it."""
    device = torch.device(device)
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _timed(step: Callable[[], object], calls: int, clock: HostClock, box_s: float) -> float:
    def run() -> None:
        for _ in range(calls):
            # The result is freed here, inside the timed region, as in a training step.
            step()

    with time_box(box_s) if box_s < math.inf else contextlib.nullcontext():
        return clock(run) / calls


def _summary(values: list[float], first_call_s: float) -> Timing:
    ordered = sorted(values)
    last = len(ordered) - 1
    return Timing(
        median_s=statistics.median(ordered),
        p20_s=ordered[round(0.2 * last)],
        p80_s=ordered[round(0.8 * last)],
        samples=len(ordered),
        first_call_s=first_call_s,
    )


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return the header of every JSON result; on a GPU `accelerator` describes the device.

    schema: raised when a key is renamed or removed.
    """
    head = {
        "schema": 1,
        "leanstep": leanstep.__version__,
        "torch": torch.__version__,
        "device": device_name(str(device)),
        "threads": torch.get_num_threads(),
    }
    if os.environ.get("OMP_WAIT_POLICY"):
        head["omp_wait_policy"] = os.environ["OMP_WAIT_POLICY"]
    return {**head, "accelerator": accelerator(device)} if torch.device(device).type == "cuda" else head


def accelerator(device: torch.device | str) -> dict[str, Any]:
    """Describe a CUDA or ROCm device: name, generation, size, software, and how it is timed."""
    properties: Any = torch.cuda.get_device_properties(torch.device(device))
    return {
        "name": properties.name,
        # ROCm names the architecture; CUDA has major and minor.
        "capability": getattr(properties, "gcnArchName", "") or f"sm_{properties.major}{properties.minor}",
        "units": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": getattr(properties, "L2_cache_size", 0),
        "runtime": f"rocm {torch.version.hip}" if torch.version.hip else f"cuda {torch.version.cuda}",
        "clock": "events, idle device, L2 flushed",
    }


@functools.cache
def device_name(device: str) -> str:
    """Return the device's name, such as `cpu (AMD EPYC, 2 cores)`."""
    if device.startswith("cuda"):
        return f"{device} ({torch.cuda.get_device_name(device)})"
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        match = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text())
        if match:
            model = match.group(1).strip()
    return f"cpu ({model})"
