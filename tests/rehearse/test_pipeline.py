"""Pipeline parallel: the stages of one rank, with the shapes that its neighbours send."""

from __future__ import annotations

import pytest
from rehearse.rehearsed import SCRIPTS, Rehearsed, run_script

from leanstep.rehearse.answers.fake_device import RehearsalError
from leanstep.rehearse.events import Launch, Request
from leanstep.rehearse.stage import rehearse

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


def test_a_rank_that_does_not_exist():
    with pytest.raises(RehearsalError, match="rank: expected 0 to 2, got 3"):
        rehearse(Request(str(SCRIPTS / "stages.py"), ranks=3, rank=3))
