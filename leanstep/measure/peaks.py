"""Peak memory of one call from the allocator's events, always separate from timing runs.

Process RSS is misleading: the allocator retains freed pages, and pages count only once they are written. The
profiler records every allocation and release with its time, and their running sum is exact. For other shapes
and devices see `leanstep.rehearse`.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Peak:
    """`peak_bytes` above the level before the call; `returned_bytes` of them are outputs of the call."""

    peak_bytes: int
    returned_bytes: int

    @property
    def extra_bytes(self) -> int:
        return max(0, self.peak_bytes - self.returned_bytes)


def measure_peak(
    step: Callable[[], dict[str, Tensor]],
    inputs: dict[str, Tensor],
    device: torch.device | str = "cpu",
    *,
    earlier: dict[str, Tensor] | None = None,
) -> Peak:
    """Run `step` twice and return the peak of the second call above the memory allocated before it.

    Outputs that already exist before the call do not count as returned: those that share storage with an
    input, and those that the first call returned too (an optimizer's weights).
    `earlier`: outputs of a previous call; `step` then runs only once.
    """
    if earlier is None:
        earlier = step()
    gc.collect()
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        outputs = step()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
    else:
        outputs, timeline = memory_timeline(step)
        peak = max((level for _, level in timeline), default=0)
    held = {t.untyped_storage()._cdata for t in (*inputs.values(), *earlier.values())}
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in outputs.values()}
    returned = sum(size for key, size in storages.items() if key not in held)
    return Peak(max(0, peak), returned)


def memory_timeline(
    step: Callable[[], dict[str, Tensor]],
) -> tuple[dict[str, Tensor], list[tuple[float, int]]]:
    """Run `step` on the CPU; return its outputs and (seconds, bytes above the start) at every event."""
    with recorded_allocations() as timeline:
        outputs = step()
    return outputs, timeline


@contextlib.contextmanager
def recorded_allocations() -> Iterator[list[tuple[float, int]]]:
    """Yield a list that on exit contains (seconds, bytes above the start) at every event of the block."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    enabled = gc.isenabled()
    gc.disable()
    timeline: list[tuple[float, int]] = []
    try:
        # Without shapes, stacks and acc_events torch builds no Python record per op. Those took three
        # quarters of the 50 s of a loop of 300,000 ops.
        with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
            yield timeline
    finally:
        if enabled:
            gc.enable()
    kineto: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    # Backward runs on its own thread and events are listed per thread, so sort by time before summing.
    events = sorted((e.start_ns(), e.nbytes()) for e in kineto.events() if e.name() == "[memory]")
    level = 0
    for start_ns, num_bytes in events:
        level += num_bytes
        timeline.append(((start_ns - events[0][0]) / 1e9, level))
