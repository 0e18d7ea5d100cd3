"""The caching allocator replayed by hand: segments, splits, merges, a full device; owners and timelines."""

from __future__ import annotations

import random

import pytest

from leanstep.rehearse.cuda_allocator import MIB, CachingAllocator, Settings, memory_of, replay
from leanstep.rehearse.events import Alloc, Event, Free, Recording, Request, Step, Storage
from leanstep.tape.lines import Line


def log(*entries: tuple[int, int]) -> tuple[list[Event], dict[int, Storage]]:
    """(storage, bytes) allocates, (storage, 0) frees."""
    events: list[Event] = []
    storages: dict[int, Storage] = {}
    for number, nbytes in entries:
        if nbytes:
            storages[number] = Storage(number, nbytes, (nbytes,), "uint8", None, "forward", 0)
            events.append(Alloc(number, nbytes, None, "forward", 0))
        else:
            events.append(Free(number, 0))
    return events, storages


@pytest.mark.parametrize(
    ("nbytes", "reserved"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (33 * MIB + 512, 34 * MIB),
    ],
)
def test_one_allocation_reserves_its_segment(nbytes: int, reserved: int):
    got = replay(*log((1, nbytes)))
    assert (got.allocated, got.reserved) == (nbytes, reserved)


def test_small_tensors_share_a_segment_and_large_ones_do_not():
    assert replay(*log(*[(i, 512 * 1024) for i in range(4)])).reserved == 2 * MIB
    assert replay(*log(*[(i, 512 * 1024) for i in range(5)])).reserved == 4 * MIB
    assert replay(*log((1, 16 * MIB), (2, 16 * MIB))).reserved == 32 * MIB


def test_a_freed_block_is_taken_again_best_fit_first():
    entries = [(1, 64 * MIB), (2, 32 * MIB), (1, 0), (2, 0), (3, 30 * MIB)]
    assert replay(*log(*entries)).reserved == 96 * MIB
    # 30 went into the 32: 64 is still whole.
    assert replay(*log(*entries, (4, 64 * MIB))).reserved == 96 * MIB


def test_neighbours_merge_when_freed():
    halves = [(1, 100 * MIB), (1, 0), (2, 50 * MIB), (3, 50 * MIB), (2, 0), (3, 0), (4, 100 * MIB)]
    assert replay(*log(*halves)).reserved == 100 * MIB


def test_a_full_device_gives_back_empty_segments_before_it_fails():
    entries = [(1, 60 * MIB), (1, 0), (2, 80 * MIB)]
    assert replay(*log(*entries), capacity=100 * MIB).failed is None
    assert replay(*log((1, 60 * MIB), (2, 80 * MIB)), capacity=100 * MIB).failed == 1


def test_a_threshold_gives_back_empty_segments_before_the_device_is_full():
    entries = log((1, 40 * MIB), (1, 0), (2, 60 * MIB))
    collects = Settings.read("garbage_collection_threshold:0.5")
    reserved = [replay(*entries, 100 * MIB, None, s).reserved for s in (collects, Settings())]
    assert reserved == [60 * MIB, 100 * MIB]


def test_a_request_may_fill_the_device():
    assert replay(*log((1, 60 * MIB)), capacity=60 * MIB).failed is None


def test_expandable_segments_return_pages_between_blocks():
    allocator = CachingAllocator(140 * MIB, Settings(expandable=True))
    for number in range(3):
        assert allocator.allocate(number, 40 * MIB)
    allocator.release(1, 40 * MIB)
    # The pages are mapped again behind the last block; the addresses between the others stay unused.
    assert allocator.allocate(3, 60 * MIB) and allocator.reserved == 140 * MIB
    assert allocator.place_of(3)[2] == 120 * MIB
    # With more memory they are mapped there.
    allocator.capacity = 180 * MIB
    assert allocator.allocate(4, 40 * MIB) and allocator.reserved == 180 * MIB
    assert allocator.place_of(4)[2] == 40 * MIB


def test_expandable_segments_return_pages_at_their_end():
    allocator = CachingAllocator(80 * MIB, Settings(expandable=True))
    assert allocator.allocate(0, 40 * MIB) and allocator.allocate(1, 40 * MIB)
    allocator.release(1, 40 * MIB)
    # A small tensor has a segment of its own, for which the device is full.
    assert allocator.allocate(2, 512) and allocator.reserved == 42 * MIB
    assert allocator.allocate(3, 20 * MIB) and allocator.reserved == 62 * MIB
    assert allocator.place_of(3)[2] == 40 * MIB


def test_settings_with_colons_in_their_values_are_read():
    text = "roundup_power2_divisions:[256:1,512:2,>:8],max_split_size_mb:64"
    assert Settings.read(text).max_split == 64 * MIB


@pytest.mark.parametrize(
    ("text", "version", "cycle_100"),
    [
        ("max_split_size_mb:128,expandable_segments:True", "2.12.0", 14060),
        ("max_split_size_mb:128,expandable_segments:True", "2.9.1", 500),
        ("max_split_size_mb:128", "2.12.0", 500),
        ("expandable_segments:True", "2.12.0", 500),
        ("", "2.12.0", 500),
    ],
)
def test_the_reserved_memory_of_pytorch_issue_123548(text: str, version: str, cycle_100: int):
    """Its published figures: exact where both settings are used, "under 500 MiB" elsewhere."""
    allocator = CachingAllocator(settings=Settings.read(text, version))
    assert allocator.allocate(-1, 64 * MIB)
    reserved = {}
    for cycle in range(101):
        for key, size in ((1, 91 * MIB), (2, 91 * MIB // 2), (10 + cycle, 2 * MIB)):
            assert allocator.allocate(key, size)
        for key, size in ((1, 91 * MIB), (2, 91 * MIB // 2)):
            allocator.release(key, size)
        if cycle % 20 == 0:
            reserved[cycle] = allocator.reserved // MIB
    if cycle_100 == 14060:
        assert reserved == {0: 220, 20: 2980, 40: 5760, 60: 8520, 80: 11300, 100: 14060}
    assert reserved[100] <= cycle_100


def test_a_block_above_the_split_limit_is_taken_by_requests_that_reach_it():
    settings = Settings.read("max_split_size_mb:20", "2.9.0")
    events, storages = log((0, 30 * MIB), (0, 0), (1, 20 * MIB))
    assert replay(events, storages, settings=settings).reserved == 30 * MIB
    events, storages = log((0, 30 * MIB), (0, 0), (1, 18 * MIB))
    assert replay(events, storages, settings=settings).reserved == 48 * MIB


def test_any_order_of_frees_ends_with_whole_segments():
    draw = random.Random(0)
    allocator, held, live = CachingAllocator(), {}, 0
    for number in range(2000):
        if held and draw.random() < 0.5:
            key = draw.choice(list(held))
            live -= held[key]
            allocator.release(key, held.pop(key))
        else:
            size = 512 * draw.randint(1, 80_000)
            held[number] = size
            live += size
            assert allocator.allocate(number, size)
        assert allocator.live == live <= allocator.reserved
    for key, size in held.items():
        allocator.release(key, size)
    assert all(len(blocks) == 1 for blocks in allocator._segments.values())
    assert sum(size for pool in allocator._free.values() for size, _, _ in pool) == allocator.reserved


def recording() -> Recording:
    """Weights, then in each of two steps logits of a wide vocabulary that live through the step."""
    made = Recording(Request("train.py"), "2.13")
    weight, head = Line("train.py", 3, "main"), Line("train.py", 9, "main")

    def born(number: int, nbytes: int, shape: tuple[int, ...], line: Line, category: str, step: int) -> None:
        made.storages[number] = Storage(number, nbytes, shape, "float32", line, "forward", step, category)
        made.events.append(Alloc(number, nbytes, line, "forward", step))

    born(0, 64 * MIB, (4096, 4096), weight, "parameter", 0)
    for step in range(2):
        first = len(made.events) if step else 0
        born(1 + step, 256 * MIB, (1024, 65536), head, "activation", step)
        made.events.append(Free(1 + step, step))
        made.steps.append(Step(step, first, len(made.events)))
    made.peak_bytes = 320 * MIB
    made.ended = "steps"
    return made


def test_owners_of_the_peak_are_the_lines_that_brought_it():
    memory = memory_of(recording(), 80 * 1024 * MIB, 500 * MIB)
    assert memory.allocated == 320 * MIB and memory.fits and memory.step == 0
    assert [(o.line, o.nbytes) for o in memory.owners] == [
        ("train.py:9 main", 256 * MIB),
        ("train.py:3 main", 64 * MIB),
    ]
    assert memory.categories == {"activation": 256 * MIB, "parameter": 64 * MIB}


def test_the_peak_without_the_widest_activation_is_what_is_left():
    assert memory_of(recording(), 80 * 1024 * MIB, 0).without == {65536: 64 * MIB}


def test_the_timeline_of_the_last_step_holds_its_peak():
    timeline = memory_of(recording(), 80 * 1024 * MIB, 0).timeline
    assert max(sum(by.values()) for _, by in timeline) == 320 * MIB


def test_a_step_that_does_not_fit_names_the_line_that_found_no_room():
    memory = memory_of(recording(), 300 * MIB, 50 * MIB)
    assert not memory.fits and memory.failed_line == "train.py:9 main"
    assert memory.needed == 370 * MIB
