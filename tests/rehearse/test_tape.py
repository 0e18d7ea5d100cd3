"""Lines, storages, launches and host waits of small programs."""

from __future__ import annotations

import pytest

from leanstep.rehearse.events import Alloc, Free, HostWait, Launch

LARGE = 8 * 2**20


def last_step(rehearsed):
    step = rehearsed.recording.steps[-1]
    return rehearsed.recording.events[step.first : step.last]


def test_three_steps_were_seen(lines):
    assert lines.recording.ended == "steps"
    assert [s.number for s in lines.recording.steps] == [0, 1, 2]


@pytest.mark.parametrize(
    ("mark", "phase", "count"),
    [
        ("first", "forward", 1),
        ("second", "forward", 1),
        ("recomputed", "forward", 1),
        ("kept", "forward", 1),
        ("recomputed", "backward", 2),  # computed again, and its gradient
        ("kept", "backward", 2),  # the cosine, and its product
        ("second", "backward", 2),  # two factors; their sum is formed in one of them
        ("first", "backward", 1),
    ],
)
def test_every_large_storage_belongs_to_its_line(lines, mark, phase, count):
    born = [e for e in last_step(lines) if isinstance(e, Alloc) and e.nbytes == LARGE]
    assert len([e for e in born if lines.is_at(e.line, mark) and e.phase == phase]) == count


def test_storages_are_what_they_are_for(lines):
    storages = lines.recording.storages.values()
    large = {(s.category, s.line.number) for s in storages if s.nbytes == LARGE and s.step == 0}
    marks = lines.marks()
    assert ("parameter", marks["weight"]) in large
    assert ("gradient", marks["first"]) in large
    assert ("optimizer state", marks["update"]) in large
    assert {("activation", marks["first"]), ("activation", marks["second"])} <= large
    assert ("activation", marks["recomputed"]) not in large


def test_host_waits_have_their_lines(lines):
    waits = [e for e in last_step(lines) if isinstance(e, HostWait)]
    assert [e.kind for e in waits] == ["item", "synchronize"]
    assert lines.is_at(waits[0].line, "read")
    assert lines.is_at(waits[1].line, "synchronize")


def test_replaying_births_and_deaths_gives_the_peak(lines):
    live, now, top = {}, 0, 0
    for event in lines.recording.events:
        if isinstance(event, Alloc):
            live[event.storage] = event.nbytes
            now += event.nbytes
        elif isinstance(event, Free):
            now -= live.pop(event.storage)
        top = max(top, now)
    assert top == lines.recording.peak_bytes


def test_nothing_was_written_beside_the_script(lines):
    assert [p.name for p in lines.script.parent.iterdir()] == ["lines.py"]
    assert any("torch.save" in note for note in lines.recording.notes)


@pytest.mark.parametrize(
    ("mark", "launches"),
    [
        # 741 chunks of 65,536 elements, 320 to a launch, and 131 tensors, 60 to a launch: 3 for a pass.
        ("fused", 3 + 3),  # the step counters, the update
        ("foreach", 8 * 3),
        ("per tensor", 8 * 131),
    ],
)
def test_launches_of_an_update(values, mark, launches):
    calls = [e for e in values.recording.events if isinstance(e, Launch) and values.is_at(e.line, mark)]
    assert sum(k.launches for e in calls for k in e.kernels) == launches
    assert {e.phase for e in calls} == {"optimizer"}
