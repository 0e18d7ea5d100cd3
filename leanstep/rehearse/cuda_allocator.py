"""Memory of a recording: live bytes, bytes that the caching allocator reserves, and the owners of the peak.

The replay follows the rules of PyTorch's CUDA caching allocator (c10/cuda/CUDACachingAllocator.cpp): sizes
round up to 512 bytes; blocks up to 1 MiB come from segments of 2 MiB, up to 10 MiB from segments of 20 MiB,
larger ones from their own segment, rounded up to 2 MiB; the best fit is taken and split when 512 bytes (small
pool) or more than 1 MiB (large pool) remain; freed neighbours merge; when the device is full, empty segments
are returned to the driver before the allocation fails.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from leanstep.rehearse.events import Alloc, Event, Free, Recording, Storage
from leanstep.script.lines import Line

MIB = 2**20
SMALL_BYTES, LARGE_BYTES = MIB, 10 * MIB
SMALL_SEGMENT, LARGE_SEGMENT, ROUND_LARGE = 2 * MIB, 20 * MIB, 2 * MIB
# Returns another size for a storage; 0: it is not allocated.
Resize = Callable[[Storage], int]


class CachingAllocator:
    """Blocks in segments; `reserved` is what the driver sees, `live` what tensors hold."""

    def __init__(self, capacity: int | None = None):
        self.capacity = capacity
        self.reserved = self.live = self.peak_reserved = 0
        self._free: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}  # size, segment, start
        self._held: dict[int, tuple[bool, int, int]] = {}
        # segment -> start -> [size, start of the block before or -1, used]
        self._segments: dict[int, dict[int, list[int]]] = {}
        self._number = 0

    def allocate(self, key: int, size: int) -> bool:
        """Allocate a block; return False if it does not fit into the capacity."""
        small = size <= SMALL_BYTES
        pool = self._free[small]
        at = bisect.bisect_left(pool, (size, -1, -1))
        if at < len(pool):
            block, segment, start = pool.pop(at)
        else:
            block = (
                SMALL_SEGMENT if small else LARGE_SEGMENT if size < LARGE_BYTES else _up(size, ROUND_LARGE)
            )
            if self.capacity is not None and self.reserved + block > self.capacity:
                self.give_back()
                if self.reserved + block > self.capacity:
                    return False
            self.reserved += block
            self.peak_reserved = max(self.peak_reserved, self.reserved)
            self._number += 1
            segment, start = self._number, 0
            self._segments[segment] = {0: [block, -1, 0]}
        blocks = self._segments[segment]
        rest = block - size
        if rest >= 512 if small else rest > SMALL_BYTES:
            before = blocks[start][1]
            blocks[start] = [size, before, 1]
            blocks[start + size] = [rest, start, 0]
            after = blocks.get(start + block)
            if after is not None:
                after[1] = start + size
            bisect.insort(pool, (rest, segment, start + size))
        else:
            blocks[start][2] = 1
        self.live += size
        self._held[key] = (small, segment, start)
        return True

    def release(self, key: int, size: int) -> None:
        where = self._held.pop(key, None)
        if where is None:
            return
        self.live -= size
        small, segment, start = where
        blocks, pool = self._segments[segment], self._free[small]
        size, before, _ = blocks[start]
        after = blocks.get(start + size)
        if after is not None and not after[2]:
            _remove(pool, (after[0], segment, start + size))
            del blocks[start + size]
            size += after[0]
        if before >= 0 and not blocks[before][2]:
            _remove(pool, (blocks[before][0], segment, before))
            del blocks[start]
            start, size, before = before, size + blocks[before][0], blocks[before][1]
        blocks[start] = [size, before, 0]
        after = blocks.get(start + size)
        if after is not None:
            after[1] = start
        bisect.insort(pool, (size, segment, start))

    def give_back(self) -> None:
        """Return segments without a tensor to the driver."""
        for pool in self._free.values():
            still_used = []
            for size, segment, start in pool:
                if len(self._segments[segment]) == 1:
                    self.reserved -= size
                    del self._segments[segment]
                else:
                    still_used.append((size, segment, start))
            pool[:] = still_used


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _remove(pool: list[tuple[int, int, int]], entry: tuple[int, int, int]) -> None:
    at = bisect.bisect_left(pool, entry)
    assert pool[at] == entry
    del pool[at]


class Replay(NamedTuple):
    """allocated, reserved: peaks in bytes; index: event of the peak; failed: event that ran out of memory."""

    allocated: int
    reserved: int
    index: int
    failed: int | None


def replay(
    events: Iterable[Event],
    storages: dict[int, Storage],
    capacity: int | None = None,
    resize: Resize | None = None,
) -> Replay:
    """Replay allocations and frees through the allocator, with the sizes that `resize` returns."""
    allocator = CachingAllocator(capacity)
    sizes: dict[int, int] = {}
    peak, at = 0, 0
    for index, event in enumerate(events):
        if isinstance(event, Alloc):
            size = event.nbytes
            if resize is not None:
                size = _up(resize(storages[event.storage]), 512)
            if size <= 0:
                continue
            sizes[event.storage] = size
            if not allocator.allocate(event.storage, size):
                return Replay(max(peak, allocator.live + size), allocator.peak_reserved, index, index)
            if allocator.live > peak:
                peak, at = allocator.live, index
        elif isinstance(event, Free) and event.storage in sizes:
            allocator.release(event.storage, sizes.pop(event.storage))
    return Replay(peak, allocator.peak_reserved, at, None)


class Owner(NamedTuple):
    """Bytes of the peak that one line allocated."""

    line: str
    when: str
    category: str
    nbytes: int
    storages: int
    largest: str


@dataclass
class Memory:
    """Memory of a recording on one device, in bytes.

    allocated: peak of live tensors. reserved: by the caching allocator. context: in addition, outside torch.
    owners: of the peak, largest first. categories: bytes of the peak by category.
    timeline: of the last step, (event, bytes by category); wide: last dimension -> bytes of activations that
        have it (from 8,192 on: full-vocabulary logits), and the peak without them.
    """

    allocated: int
    reserved: int
    context: int
    capacity: int
    step: int
    line: str
    fits: bool
    failed_line: str | None
    owners: list[Owner] = field(default_factory=list)
    categories: dict[str, int] = field(default_factory=dict)
    timeline: list[tuple[int, dict[str, int]]] = field(default_factory=list)
    without: dict[int, int] = field(default_factory=dict)

    @property
    def needed(self) -> int:
        return self.reserved + self.context


def memory_of(recording: Recording, capacity: int, context: int, points: int = 240) -> Memory:
    """Return peaks, owners and timeline on a device with `capacity` bytes, `context` of them in use."""
    events, storages = recording.events, recording.storages
    free = replay(events, storages)
    held = replay(events, storages, capacity - context)
    at = events[free.index] if events else None
    line = str(getattr(at, "line", None) or "?")
    failed = str(getattr(events[held.failed], "line", None) or "?") if held.failed is not None else None
    live = live_at(events, free.index)
    memory = Memory(
        allocated=free.allocated,
        reserved=free.reserved if held.failed is not None else held.reserved,
        context=context,
        capacity=capacity,
        step=getattr(at, "step", 0),
        line=line,
        fits=held.failed is None,
        failed_line=failed,
        owners=_owners([storages[number] for number in live]),
        timeline=_timeline(recording, points),
    )
    counted: Counter[str] = Counter()
    for number in live:
        counted[storages[number].category] += storages[number].nbytes
    memory.categories = dict(counted.most_common())
    memory.without = _without_widest(recording, live, free.allocated)
    return memory


def live_at(events: Sequence[Event], index: int) -> list[int]:
    live: dict[int, None] = {}
    for event in events[: index + 1]:
        if isinstance(event, Alloc):
            live[event.storage] = None
        elif isinstance(event, Free):
            live.pop(event.storage, None)
    return list(live)


def place(line: Line | None) -> str:
    return str(line) if line is not None else "?"


def _owners(live: Sequence[Storage]) -> list[Owner]:
    groups: dict[tuple[str, str, str], list[Storage]] = {}
    for storage in live:
        when = "library" if storage.category == "library" else storage.phase
        groups.setdefault((place(storage.line), when, storage.category), []).append(storage)
    owners = []
    for (line, when, category), members in groups.items():
        biggest = max(members, key=lambda s: s.nbytes)
        shape = f"{list(biggest.shape)} {biggest.dtype}"
        owners.append(Owner(line, when, category, sum(s.nbytes for s in members), len(members), shape))
    return sorted(owners, key=lambda owner: -owner.nbytes)


def _timeline(recording: Recording, points: int) -> list[tuple[int, dict[str, int]]]:
    """Return live bytes by category in the last step: about `points` samples at most, including its peak."""
    events, storages = recording.events, recording.storages
    if not events:
        return []
    step = recording.steps[-1] if recording.steps else None
    first, last = (step.first, step.last) if step else (0, len(events))
    every = max(1, (last - first) // points)
    live: Counter[str] = Counter()
    now, best, samples = 0, (-1, -1, {}), []
    for index, event in enumerate(events[:last]):
        if isinstance(event, Alloc):
            live[storages[event.storage].category] += event.nbytes
            now += event.nbytes
        elif isinstance(event, Free):
            live[storages[event.storage].category] -= storages[event.storage].nbytes
            now -= storages[event.storage].nbytes
        if index < first:
            continue
        if now > best[0]:
            best = (now, index - first, {k: v for k, v in live.items() if v > 0})
        if (index - first) % every == 0:
            samples.append((index - first, {k: v for k, v in live.items() if v > 0}))
    samples.append(best[1:])
    return sorted(samples, key=lambda sample: sample[0])


def _without_widest(recording: Recording, live: Sequence[int], peak: int) -> dict[int, int]:
    """Return the peak without activations of the widest last dimension (full-vocabulary logits)."""
    widths: Counter[int] = Counter()
    for number in live:
        storage = recording.storages[number]
        if _is_wide(storage) and storage.nbytes > 0.02 * peak:
            widths[storage.shape[-1]] += storage.nbytes
    peaks = {}
    for width, _ in widths.most_common(1):

        def resize(storage: Storage, width: int = width) -> int:
            drop = _is_wide(storage) and storage.shape[-1] == width and storage.nbytes > 0.01 * peak
            return 0 if drop else storage.nbytes

        peaks[width] = replay(recording.events, recording.storages, resize=resize).allocated
    return peaks


def _is_wide(storage: Storage) -> bool:
    return (
        len(storage.shape) >= 2
        and storage.shape[-1] >= 8192
        and storage.category in ("activation", "temporary")
    )
