"""Time implementations side by side: interleaved round by round in one process, medians with p20 and p80.

Why this way: on a shared machine the clock drifts by tens of percent within a minute. Running A to the end
and then B measures the neighbour; running A B C, B C A, C A B ... exposes all rows to the same noise, and a
ratio of medians from one run stays meaningful. The garbage collector is off, because one collection costs
more than a small step. The first call (imports, compilation, caches) is timed apart. A row that takes too
long is given up (`time_box`), so that it does not hold up the others.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
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
        min_rounds, max_rounds: every step runs in every round, so a step of 3 s runs at least 3 times.
        first_calls: seconds of first calls that were made already.
        on_round: called with (rounds done, rounds planned), for a progress bar.
    """
    synchronize = synchronizer(device)
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        first, estimate = dict(first_calls or {}), {}
        for name, step in steps.items():
            with contextlib.suppress(TimeUp):
                if name not in first:
                    first[name] = _timed(step, 1, synchronize, box_s)
                # A second call is free of one-off costs, unless the step is so slow that a repeat hurts.
                slow = first[name] > budget_s / 4
                estimate[name] = first[name] if slow else _timed(step, 1, synchronize, box_s)
        slowest = max(estimate.values(), default=0.0)
        # Fast rows get several samples per round, up to a tenth of what the slowest row takes.
        share = max(0.02, slowest / 10)
        calls = {name: max(1, math.ceil(MIN_SAMPLE_S / max(s, 1e-9))) for name, s in estimate.items()}
        repeats = {
            name: min(MAX_SAMPLES_PER_ROUND, max(1, int(share / max(s * calls[name], 1e-9))))
            for name, s in estimate.items()
        }
        round_s = max(sum(s * calls[name] * repeats[name] for name, s in estimate.items()), 1e-9)
        least = max(1, int(min(min_rounds, box_s / round_s)))
        rounds = max(least, min(max_rounds, int(budget_s / round_s)))
        samples: dict[str, list[float]] = {name: [] for name in estimate}
        order = list(estimate)
        for index in range(rounds):
            for name in tuple(order):
                try:
                    for _ in range(repeats[name]):
                        samples[name].append(_timed(steps[name], calls[name], synchronize, box_s))
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


def timed_call(step: Callable[[], Result], device: torch.device | str = "cpu") -> tuple[Result, float]:
    """What one call returns, and its seconds."""
    synchronize = synchronizer(device)
    synchronize()
    start = time.perf_counter()
    result = step()
    synchronize()
    return result, time.perf_counter() - start


def synchronizer(device: torch.device | str) -> Callable[[], None]:
    """Waits until `device` has done its work; does nothing on a CPU."""
    device = torch.device(device)
    return functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else _no_wait


def _no_wait() -> None:
    return None


def _timed(step: Callable[[], object], calls: int, synchronize: Callable[[], None], box_s: float) -> float:
    synchronize()
    with time_box(box_s) if box_s < math.inf else contextlib.nullcontext():
        start = time.perf_counter()
        for _ in range(calls):
            # The result is dropped here, inside the clock, as a training step would drop it.
            step()
        synchronize()
        return (time.perf_counter() - start) / calls


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
    """The head of every JSON object."""
    return {
        "leanstep": leanstep.__version__,
        "torch": torch.__version__,
        "device": device_name(str(device)),
        "threads": torch.get_num_threads(),
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
