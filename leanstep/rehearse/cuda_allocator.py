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
from leanstep.tape.lines import Line

MIB = 2**20
SMALL_BYTES, LARGE_BYTES = MIB, 10 * MIB
SMALL_SEGMENT, LARGE_SEGMENT, ROUND_LARGE = 2 * MIB, 20 * MIB, 2 * MIB
# Returns another size for a storage; 0: it is not allocated.
Resize = Callable[[Storage], int]


class Settings(NamedTuple):
    """What PYTORCH_ALLOC_CONF sets. max_split: bytes; collect_at: share of the capacity, 0 never collects.

    splits_expandable: whether `max_split` also limits blocks of expandable segments (torch 2.12 and later,
    pytorch issue 123548).
    """

    expandable: bool = False
    max_split: float = float("inf")
    collect_at: float = 0.0
    splits_expandable: bool = False

    @classmethod
    def read(cls, text: str, torch_version: str = "") -> Settings:
        """Parse the text of the variable; unknown options are ignored."""
        entries = dict(part.split(":", 1) for part in text.replace(" ", "").split(",") if ":" in part)
        version = tuple(int(part) for part in torch_version.split(".")[:2] if part.isdigit())
        split = entries.get("max_split_size_mb")
        return cls(
            expandable=entries.get("expandable_segments", "").lower() in ("true", "1"),
            max_split=float(split) * MIB if split else float("inf"),
            collect_at=float(entries.get("garbage_collection_threshold", 0.0)),
            splits_expandable=version >= (2, 12),
        )


ADVISED = (
    ("PYTORCH_ALLOC_CONF=expandable_segments:True", Settings(expandable=True)),
    ("PYTORCH_ALLOC_CONF=max_split_size_mb:128", Settings(max_split=128.0 * MIB)),
)
Pool = tuple[bool, int]  # whether its blocks are small, stream
_FREE, _USED, _UNMAPPED = 0, 1, 2


class CachingAllocator:
    """Blocks in segments; `reserved` is what the driver sees, `live` what tensors hold.

    Each stream has its own pools. An expandable segment is one range of addresses per pool: memory is mapped
    at its end when no free block fits, so that `reserved` follows the high-water mark.
    """

    def __init__(self, capacity: int | None = None, settings: Settings | None = None):
        self.capacity, self.settings = capacity, settings or Settings()
        self.reserved = self.live = self.peak_reserved = 0
        self._free: dict[Pool, list[tuple[int, int, int]]] = {}  # size, segment, start
        self._holes: dict[Pool, list[tuple[int, int, int]]] = {}  # returned to the driver, addresses remain
        self._held: dict[int, tuple[Pool, int, int]] = {}
        # segment -> start -> [size, start of the block before or -1, state]
        self._segments: dict[int, dict[int, list[int]]] = {}
        self._expandable: dict[Pool, int] = {}  # -> segment
        self._ends: dict[int, int] = {}  # expandable segment -> mapped end
        self._number = 0

    def allocate(self, key: int, size: int, stream: int = 0) -> bool:
        """Allocate a block; return False if it does not fit into the capacity."""
        small = size <= SMALL_BYTES
        pool = (small, stream)
        free = self._free.setdefault(pool, [])
        at = bisect.bisect_left(free, (size, -1, -1))
        if at < len(free) and self._may_take(free[at][0], size):
            block, segment, start = free.pop(at)
        else:
            mapped = self._map(pool, size) if self.settings.expandable else self._new_segment(pool, size)
            if mapped is None:
                return False
            block, segment, start = mapped
        blocks = self._segments[segment]
        rest = block - size
        if self._splits(small, size, rest):
            before = blocks[start][1]
            blocks[start] = [size, before, _USED]
            blocks[start + size] = [rest, start, _FREE]
            after = blocks.get(start + block)
            if after is not None:
                after[1] = start + size
            bisect.insort(free, (rest, segment, start + size))
        else:
            blocks[start][2] = _USED
        self.live += size
        self._held[key] = (pool, segment, start)
        return True

    def place_of(self, key: int) -> tuple[Pool, int, int]:
        """Return pool, segment and start of a block that is held."""
        return self._held[key]

    def _may_take(self, block: int, size: int) -> bool:
        """Whether the largest-split rule lets a request take a free block."""
        most = self.settings.max_split
        if self.settings.expandable and not self.settings.splits_expandable:
            return True
        return block < most if size < most else block < size + LARGE_SEGMENT or most == float("inf")

    def _splits(self, small: bool, size: int, rest: int) -> bool:
        if small or self.settings.expandable:
            return rest >= 512
        return rest > SMALL_BYTES and size < self.settings.max_split

    def _room(self, size: int) -> bool:
        """Whether the driver has this much; segments without a tensor are returned to it first."""
        if self.capacity is None:
            return True
        limit = self.settings.collect_at * self.capacity
        if self.reserved + size > self.capacity or (limit and self.reserved + size > limit):
            self.give_back()
        return self.reserved + size <= self.capacity

    def _grow(self, size: int) -> None:
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _new_segment(self, pool: Pool, size: int) -> tuple[int, int, int] | None:
        block = SMALL_SEGMENT if pool[0] else LARGE_SEGMENT if size < LARGE_BYTES else _up(size, ROUND_LARGE)
        if not self._room(block):
            return None
        self._grow(block)
        self._number += 1
        self._segments[self._number] = {0: [block, -1, _FREE]}
        return block, self._number, 0

    def _map(self, pool: Pool, size: int) -> tuple[int, int, int] | None:
        """Map memory of an expandable segment: a hole that fits, else what its last block lacks."""
        page = SMALL_SEGMENT if pool[0] else LARGE_SEGMENT
        holes = self._holes.setdefault(pool, [])
        at = bisect.bisect_left(holes, (size, -1, -1))
        if at < len(holes):
            block, segment, start = holes[at]
            if not self._room(block // page * page):
                return None
            _remove(holes, (block, segment, start))
            self._grow(block // page * page)
            return block, segment, start
        if pool not in self._expandable:
            self._number += 1
            self._expandable[pool] = self._number
            self._segments[self._number], self._ends[self._number] = {}, 0
        segment = self._expandable[pool]
        blocks = self._segments[segment]
        last, tail, more = self._tail(segment, size, page)
        if self.capacity is not None and self.reserved + more > self.capacity:
            self.give_back()  # this may change the last block
            last, tail, more = self._tail(segment, size, page)
            if self.reserved + more > self.capacity:
                return None
        end = self._ends[segment]
        self._grow(more)
        self._ends[segment] = end + more
        if tail:
            _remove(self._free[pool], (tail, segment, last))
            blocks[last][0] = tail + more
            return tail + more, segment, last
        blocks[end] = [more, last, _FREE]
        return more, segment, end

    def _tail(self, segment: int, size: int, page: int) -> tuple[int, int, int]:
        """Return start and free bytes of an expandable segment's last block, and the bytes that it lacks."""
        blocks = self._segments[segment]
        last = max(blocks, default=-1)
        tail = blocks[last][0] if last >= 0 and blocks[last][2] == _FREE else 0
        return last, tail, _up(max(0, size - tail), page)

    def release(self, key: int, size: int) -> None:
        where = self._held.pop(key, None)
        if where is None:
            return
        self.live -= size
        pool, segment, start = where
        blocks, free = self._segments[segment], self._free[pool]
        size, before, _ = blocks[start]
        after = blocks.get(start + size)
        if after is not None and after[2] == _FREE:
            _remove(free, (after[0], segment, start + size))
            del blocks[start + size]
            size += after[0]
        if before >= 0 and blocks[before][2] == _FREE:
            _remove(free, (blocks[before][0], segment, before))
            del blocks[start]
            start, size, before = before, size + blocks[before][0], blocks[before][1]
        blocks[start] = [size, before, _FREE]
        after = blocks.get(start + size)
        if after is not None:
            after[1] = start
        bisect.insort(free, (size, segment, start))

    def give_back(self) -> None:
        """Return segments without a tensor, and whole free pages of expandable ones, to the driver."""
        for pool, free in self._free.items():
            page = SMALL_SEGMENT if pool[0] else LARGE_SEGMENT
            still_used = []
            for size, segment, start in free:
                blocks = self._segments[segment]
                if segment in self._ends:
                    pages = size // page * page
                    if not pages:
                        still_used.append((size, segment, start))
                        continue
                    self.reserved -= pages
                    if start + size == self._ends[segment]:
                        self._ends[segment] -= pages
                        if size > pages:
                            blocks[start][0] = size - pages
                            still_used.append((size - pages, segment, start))
                        else:
                            del blocks[start]
                    else:
                        blocks[start][2] = _UNMAPPED
                        bisect.insort(self._holes.setdefault(pool, []), (size, segment, start))
                elif len(blocks) == 1:
                    self.reserved -= size
                    del self._segments[segment]
                else:
                    still_used.append((size, segment, start))
            free[:] = sorted(still_used)


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
    settings: Settings | None = None,
) -> Replay:
    """Replay allocations and frees through the allocator, with the sizes that `resize` returns."""
    allocator = CachingAllocator(capacity, settings)
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
            if not allocator.allocate(event.storage, size, event.stream):
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
    advice: the setting with which it fits, if fragmentation alone keeps it from fitting.
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
    advice: str = ""

    @property
    def needed(self) -> int:
        return self.reserved + self.context


def memory_of(recording: Recording, capacity: int, context: int, points: int = 240) -> Memory:
    """Return peaks, owners and timeline on a device with `capacity` bytes, `context` of them in use."""
    events, storages = recording.events, recording.storages
    settings = Settings.read(recording.allocator, recording.torch)
    free = replay(events, storages, settings=settings)
    held = replay(events, storages, capacity - context, settings=settings)
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
    if not memory.fits and free.allocated + context <= capacity:
        # Fragmentation decides: name the first other setting with which it fits.
        for text, other in ADVISED:
            tried = other._replace(splits_expandable=settings.splits_expandable)
            if replay(events, storages, capacity - context, settings=tried).failed is None:
                memory.advice = f"{text} makes it fit"
                break
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
