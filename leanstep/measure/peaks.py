"""Peak memory of one call: measured here, or simulated for shapes that are not at hand.

Measured: from the allocator's own events, never mixed into a timing run. Process RSS misleads, because the
allocator keeps freed pages and the first touch decides; the profiler records every allocation and release
with its time, and their running sum is exact.

Simulated: the code runs under `FakeTensorMode`, every op for its shapes only. A dispatch mode keeps a list of
live storages: an entry is made when an op returns a storage not seen before and removed when the last
reference is gone. Scratch space inside a single kernel is not seen.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from leanstep.case import Step, Workload


@dataclass(frozen=True)
class Peak:
    """`peak_bytes` above the level at the call; `returned_bytes` of it is what the call hands back."""

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
    """Run `step` twice and return the peak of the second call above the memory that was there before it.

    Outputs that were there already cost the call nothing and are not counted as returned: those that share
    storage with an input, and those that the first call handed out too (an optimizer's own weights).
    `earlier`: what a call made a moment ago returned; then `step` runs once.
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
    """A list that holds (seconds, bytes above the start) at every event of the block, once it is left."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    enabled = gc.isenabled()
    gc.disable()
    timeline: list[tuple[float, int]] = []
    try:
        # Without shapes, stacks and acc_events: torch then builds no Python record per op, which took three
        # quarters of the 50 s that a loop of 300,000 ops needed.
        with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
            yield timeline
    finally:
        if enabled:
            gc.enable()
    kineto: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    # Backward runs on its own thread: the event list is per thread, so sort by time before summing.
    events = sorted((e.start_ns(), e.nbytes()) for e in kineto.events() if e.name() == "[memory]")
    level = 0
    for start_ns, num_bytes in events:
        level += num_bytes
        timeline.append(((start_ns - events[0][0]) / 1e9, level))


@dataclass
class _Book:
    live_bytes: int = 0
    peak_bytes: int = 0
    largest_bytes: int = 0
    largest_shape: tuple[int, ...] = ()
    known: set[int] = field(default_factory=set)

    def enter(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        # StorageImpl outlives its Python wrapper and wrappers come and go: key by the C++ object.
        key = storage._cdata
        if key in self.known:
            return
        size = storage.nbytes()
        self.known.add(key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if size > self.largest_bytes:
            self.largest_bytes, self.largest_shape = size, tuple(tensor.shape)
        weakref.finalize(storage, self._leave, key, size)

    def _leave(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live_bytes -= size


class _Bookkeeper(TorchDispatchMode):
    def __init__(self, book: _Book) -> None:
        super().__init__()
        self.book = book

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.add.Tensor and not kwargs and _merges_gradients(*args):
            return _stolen(*args)
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self.book.enter(value)
        return result


# References to a tensor inside a dispatch mode when nobody but the engine's buffer holds it (torch 2.13).
_UNSHARED = 4


def _merges_gradients(first: Any, second: Any) -> bool:
    """Whether this is the autograd engine summing two gradients of one tensor.

    The engine adds in place when it alone holds one of them, but never under a dispatch mode; without this
    correction a simulation would count one buffer too many wherever a tensor is used twice.
    """
    return bool(
        torch._C._current_autograd_node() is not None
        and isinstance(first, Tensor)
        and isinstance(second, Tensor)
        and first.shape == second.shape
        and first.dtype == second.dtype
        and min(_use_count(first), _use_count(second)) <= _UNSHARED
    )


def _stolen(first: Any, second: Any) -> Tensor:
    return first.add_(second) if _use_count(first) <= _UNSHARED else second.add_(first)


def _use_count(tensor: Any) -> int:
    """References in C++; without the (private) count a tensor passes for shared."""
    count = getattr(tensor, "_use_count", None)
    return count() if count else _UNSHARED + 1


@dataclass(frozen=True)
class SimulatedPeak:
    """`input_bytes` stand before the call, `peak_bytes` come on top; then the largest single buffer."""

    input_bytes: int
    peak_bytes: int
    returned_bytes: int
    largest_bytes: int
    largest_shape: tuple[int, ...]

    @property
    def extra_bytes(self) -> int:
        return max(0, self.peak_bytes - self.returned_bytes)


def simulate_peak(build: Callable[[Workload], Step], make: Callable[[], Workload]) -> SimulatedPeak:
    """The peak of one call of `build(make())()`, without allocating anything.

    `make` is called under the fake mode: it may create tensors of any size with ordinary torch calls
    (`torch.empty`, `torch.randn`, ...). The step must not look at values.
    """
    gc.collect()
    with FakeTensorMode(allow_non_fake_inputs=True):
        workload = make()
        step = build(workload)
        book = _Book()
        # Inputs are in the book beforehand, so that a view of one is not taken for a new buffer.
        book.known.update(t.untyped_storage()._cdata for t in workload.tensors.values())
        held = set(book.known)
        with _Bookkeeper(book):
            outputs = step()
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in outputs.values()}
        returned = sum(size for key, size in storages.items() if key not in held)
        return SimulatedPeak(
            input_bytes=workload.num_bytes,
            peak_bytes=book.peak_bytes,
            returned_bytes=returned,
            largest_bytes=book.largest_bytes,
            largest_shape=book.largest_shape,
        )
