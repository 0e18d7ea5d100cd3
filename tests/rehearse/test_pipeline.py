"""Pipeline parallel: the stages of one rank, with the shapes that its neighbours send."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from rehearse.rehearsed import SCRIPTS, Rehearsed, run_script

from leanstep.rehearse.answers.fake_device import RehearsalError
from leanstep.rehearse.devices import DEVICES
from leanstep.rehearse.events import Event, Launch, Request, Stall
from leanstep.rehearse.stage import rehearse
from leanstep.rehearse.what_if import last_step

RANKS, MICROBATCHES, ROWS = 3, 4, 8


def stage_of(rank: int) -> Rehearsed:
    rehearsed = run_script(SCRIPTS / "stages.py", ranks=RANKS, rank=rank)
    assert rehearsed.recording.refused is None, rehearsed.recording.refused
    return rehearsed


@pytest.mark.parametrize("rank", range(RANKS))
def test_every_stage_computes_its_own_microbatches(rank):
    recording = stage_of(rank).recording
    last = [e for e in recording.events if isinstance(e, Launch) and e.step == 2]
    inner, width = 64 * (rank + 1), 64 * (rank + 2)
    products = [k.sizes for e in last for k in e.kernels if k.kind == "gemm" and e.phase == "forward"]
    assert products == [(1, ROWS, width, inner)] * MICROBATCHES
    # Activations to the next stage and their gradients back, of each micro-batch.
    neighbours = (rank > 0) + (rank < RANKS - 1)
    sent = [e for e in last if any(k.kind == "collective" for k in e.kernels)]
    assert len(sent) == 2 * MICROBATCHES * neighbours
    (note,) = [note for note in recording.notes if note.startswith("pipeline")]
    assert f"stage {rank} of {RANKS}" in note
    assert "adds 50% to the step" in note  # (3 - 1) / 4
    step = recording.steps[-1]
    (stall,) = [e for e in recording.events[step.first : step.last] if isinstance(e, Stall)]
    assert stall.share == pytest.approx(0.5)


def test_two_stages_per_rank_wait_half_as_long():
    got = run_script(SCRIPTS / "interleaved.py", ranks=2, device="h100", steps=4)
    recording = got.recording
    assert recording.refused is None, recording.refused
    stall = [e for e in recording.events if isinstance(e, Stall)][-1]
    # A rank waits for one forward and backward of a stage; it works on two stages of four micro-batches.
    assert stall.share == pytest.approx(1 / 8, rel=0.02)
    timing, busy = (
        last_step(recording, DEVICES["h100"]),
        last_step(recording, DEVICES["h100"], _without_stalls),
    )
    assert timing is not None and busy is not None
    assert timing.step_s == pytest.approx(busy.step_s * 1.125, rel=0.01)


def _without_stalls(events: Sequence[Event]) -> list[Event]:
    return [e for e in events if not isinstance(e, Stall)]


def test_a_rank_that_does_not_exist():
    with pytest.raises(RehearsalError, match="rank: expected 0 to 2, got 3"):
        rehearse(Request(str(SCRIPTS / "stages.py"), ranks=3, rank=3))
