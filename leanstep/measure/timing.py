"""Time implementations side by side: interleaved round by round in one process, medians with p20 and p80.

Why this way: on a shared machine the clock drifts by tens of percent within a minute. Running A to the end
and then B measures the neighbour; running A B C, B C A, C A B ... lets every row meet the same weather, and a
ratio of medians from one run stays meaningful. The garbage collector is off, because one collection costs
more than a small step. The first call (imports, compilation, caches) is timed apart.
"""

from __future__ import annotations

import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

# A sample shorter than this is dominated by the clock call and by jitter; several calls share one sample.
MIN_SAMPLE_S = 1e-3
MAX_SAMPLES_PER_ROUND = 16


@dataclass(frozen=True)
class Timing:
    median_s: float
    p20_s: float
    p80_s: float
    samples: int
    first_call_s: float


def interleave(
    steps: Mapping[str, Callable[[], object]],
    *,
    budget_s: float = 20.0,
    min_rounds: int = 3,
    max_rounds: int = 30,
    device: torch.device | str = "cpu",
    on_round: Callable[[int, int], None] | None = None,
) -> dict[str, Timing]:
    """Time each step against the others.

    Args:
        steps: callables by name.
        budget_s: about how long the rounds may take together.
        min_rounds, max_rounds: every step runs in every round, so a step of 3 s runs at least 3 times.
        on_round: called with (rounds done, rounds planned), for a progress bar.
    """
    device = torch.device(device)
    synchronize = functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else _no_wait
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        first, estimate = {}, {}
        for name, step in steps.items():
            first[name] = _timed(step, 1, synchronize)
            # The second call is free of one-off costs unless the step is so slow that a repeat hurts.
            estimate[name] = first[name] if first[name] > budget_s / 4 else _timed(step, 1, synchronize)
        slowest = max(estimate.values(), default=0.0)
        # Fast rows get several samples per round, up to a tenth of what the slowest row takes.
        share = max(0.02, slowest / 10)
        calls = {name: max(1, math.ceil(MIN_SAMPLE_S / max(s, 1e-9))) for name, s in estimate.items()}
        repeats = {
            name: min(MAX_SAMPLES_PER_ROUND, max(1, int(share / max(s * calls[name], 1e-9))))
            for name, s in estimate.items()
        }
        round_s = sum(s * calls[name] * repeats[name] for name, s in estimate.items())
        rounds = max(min_rounds, min(max_rounds, int(budget_s / max(round_s, 1e-9))))
        samples: dict[str, list[float]] = {name: [] for name in steps}
        order = list(steps)
        for index in range(rounds):
            for name in order:
                for _ in range(repeats[name]):
                    samples[name].append(_timed(steps[name], calls[name], synchronize))
            order = order[1:] + order[:1]
            # Reference cycles of the steps must not pile up over the rounds; between rounds nobody is timed.
            gc.collect()
            if on_round:
                on_round(index + 1, rounds)
    finally:
        if was_enabled:
            gc.enable()
    return {name: _summary(values, first[name]) for name, values in samples.items()}


def _no_wait() -> None:
    return None


def _timed(step: Callable[[], object], calls: int, synchronize: Callable[[], None]) -> float:
    synchronize()
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
