"""Time implementations side by side: interleaved round by round in one process, medians with p20 and p80.

Why this way: on a shared machine the clock drifts by tens of percent within a minute. Running A to the end
and then B measures the neighbour; running A B C, B C A, C A B ... exposes all rows to the same noise, and a
ratio of medians from one run stays meaningful. Where rounds are dear, rows far slower than the others sit
out some of them, spread over the run: the others have medians of several samples all the same. The garbage
collector is off, because one collection costs more than a small step. The first call (imports, compilation,
caches) is timed apart. A row that takes too long is given up (`time_box`), so that it does not hold up the
others.

On a GPU the clock is the device's: two CUDA events around one call. Before each call its L2 cache is
overwritten, because in a training step a kernel's inputs come from memory, and the device has gone idle, so
that launches that the host cannot issue fast enough count. Calls before the first sample bring clocks and
allocator into the state of a long run.
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
# Where three rounds of all rows are too long, rows this much faster than the slowest run in so many rounds.
QUICK, QUICK_ROUNDS = 3.0, 5
# On a GPU: calls before the first sample, at least so many and for at least so long (the clocks rise late).
WARM_CALLS, WARM_S = 3, 0.3
# Twice the cache, at least this: 0 would not reach memory on a device that does not tell its cache's size.
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
    """A `time_box` is over. Not an Exception: code that falls back on errors must not go on instead."""


@contextlib.contextmanager
def time_box(seconds: float) -> Iterator[None]:
    """Give up the block after `seconds`: TimeUp is raised inside it, at the next Python instruction.

        try:
            with time_box(40):
                step()
        except TimeUp:
            ...

    A single op in C++ is not interrupted. Off the main thread, and where there are no interval timers
    (Windows), the block runs to its end and TimeUp is raised then.
    """
    started = time.monotonic()
    can_interrupt = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    previous: Any = None

    def ring(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - started < seconds:
            # The command line uses the same timer to repeat a Ctrl-C that a destructor swallowed.
            if callable(previous):
                previous(number, frame)
        elif not _is_importing(frame):
            raise TimeUp

    if can_interrupt:
        previous = signal.signal(signal.SIGALRM, ring)
        # Again and again after that: an import goes first, and Python drops what a destructor raises.
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
    """Whether a module is being imported: half of one would be found by everybody else."""
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
    on_round: Callable[[int, int], None] | None = None,
) -> dict[str, Timing]:
    """Time each step against the others.

    Args:
        steps: callables by name.
        budget_s: about how long the rounds may take together.
        box_s: a call that takes longer is given up, and its step is missing in the result. The rounds keep
            to it as well: there are fewer than `min_rounds` when those would take longer.
        min_rounds, max_rounds: every step runs in every round, so a step of 3 s runs at least 3 times. With
            fewer rounds than that, steps that take a third of the slowest or less run in 5.
        first_calls: seconds of first calls that were made already.
        on_round: called with (rounds done, rounds planned), for a progress bar.
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
                # A second call is free of one-off costs, unless the step is so slow that a repeat hurts.
                slow = first[name] > budget_s / 4
                estimate[name] = first[name] if slow else clock.warm(lambda: _timed(step, 1, clock, box_s))  # noqa: B023
        slowest = max(estimate.values(), default=0.0)
        # Fast rows get several samples per round, up to a tenth of what the slowest row takes.
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
            # Reference cycles of the steps must not pile up over the rounds; between rounds nobody is timed.
            gc.collect()
            if on_round:
                on_round(index + 1, rounds)
    finally:
        if was_enabled:
            gc.enable()
    return {name: _summary(values, first[name]) for name, values in samples.items() if values}


def _turns(estimate: Mapping[str, float], rounds: int, min_rounds: int, box_s: float) -> dict[str, set[int]]:
    """The rounds in which each step runs: all of them, or, where those are few, more for the quick."""
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
    """What one call returns, and its seconds."""
    kept: list[Result] = []
    seconds = HostClock(device)(lambda: kept.append(step()))
    return kept[0], seconds


class HostClock:
    """Seconds of a call by the host's clock, until the device has done its work."""

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
        """One more call is enough on a CPU; its seconds."""
        return timed()


class EventClock(HostClock):
    """Seconds of a call between two CUDA events, from an idle device with a cold L2 cache."""

    min_sample_s = 0.0  # one call a sample: a second one would find the cache warm

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
    """Events on a GPU, the host's clock elsewhere."""
    return EventClock(device) if torch.device(device).type == "cuda" else HostClock(device)


def current_device(device: torch.device | str) -> contextlib.AbstractContextManager[Any]:
    """Make a CUDA device the current one: events, Triton launches and streams then belong to it."""
    device = torch.device(device)
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _timed(step: Callable[[], object], calls: int, clock: HostClock, box_s: float) -> float:
    def run() -> None:
        for _ in range(calls):
            # The result is dropped here, inside the clock, as a training step would drop it.
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
    """The head of every JSON object; on a GPU with `accelerator`, what one must know of it."""
    head = {
        "leanstep": leanstep.__version__,
        "torch": torch.__version__,
        "device": device_name(str(device)),
        "threads": torch.get_num_threads(),
    }
    if os.environ.get("OMP_WAIT_POLICY"):
        head["omp_wait_policy"] = os.environ["OMP_WAIT_POLICY"]
    return {**head, "accelerator": accelerator(device)} if torch.device(device).type == "cuda" else head


def accelerator(device: torch.device | str) -> dict[str, Any]:
    """Name, generation, size and software of a CUDA (or ROCm) device, and how it was timed."""
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
    """`cpu (AMD EPYC, 2 cores)` or the GPU's own name."""
    if device.startswith("cuda"):
        return f"{device} ({torch.cuda.get_device_name(device)})"
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text())
        if found:
            model = found.group(1).strip()
    return f"cpu ({model})"
