"""The schedule against the values of the record's own code (golden vectors)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from leanstep.recipes.schedules import Schedule, Stage

GOLDEN = json.loads((Path(__file__).parents[1] / "vectors/speedrun/schedules.json").read_text())


def test_record_74_follows_the_golden_vector_at_every_step():
    schedule = Schedule.record_74()
    assert schedule.scheduled == GOLDEN["scheduled"] and schedule.num_steps == GOLDEN["total"]
    assert [list(b) for b in schedule.boundaries] == GOLDEN["boundaries"]
    assert schedule.untie_step == GOLDEN["split_step"] and schedule.final_window == GOLDEN["ws_post_ext"]
    for row in GOLDEN["rows"]:
        here = schedule.at(row["step"])
        assert here.lr_mul == pytest.approx(row["lr_mul"], rel=1e-12), row
        assert here.momentum == pytest.approx(row["muon_momentum"], rel=1e-12), row
        assert here.stage_fraction == pytest.approx(row["stage_fraction"], rel=1e-12), row
        assert (here.tokens, here.max_seq_len) == (row["batch_tokens"], row["max_seq_len"])
        assert list(here.windows) == row["window_blocks"] and here.adam_step == row["adam_step"]
        # Upstream keeps these weights in single precision.
        assert here.mtp_weights == pytest.approx(row["mtp"], abs=1e-7), row


def test_another_length_keeps_the_shape():
    short = Schedule.record_74().of_length(149)
    assert (short.num_steps, short.extension, short.momentum_warmup, short.momentum_cooldown) == (
        149,
        4,
        30,
        5,
    )
    assert short.lr_mul(0) == 1.0 and short.lr_mul(148) == pytest.approx(0.15)
    assert short.momentum(149) == pytest.approx(0.85)
    assert [s.windows for s in short.stages] == [s.windows for s in Schedule.record_74().stages]
    assert short.untie_step % 2 == 1


@pytest.mark.parametrize("steps", [4, 5, 7, 100])
def test_every_step_of_a_short_run_has_a_stage_and_a_finite_rate(steps):
    schedule = Schedule.record_74().of_length(steps)
    assert schedule.num_steps == steps
    assert {schedule.at(i).stage for i in range(steps)} == {0, 1, 2, 3}
    assert all(0 < schedule.at(i).lr_mul <= 1.73 for i in range(steps))


def test_mistakes_are_named():
    stage = Stage(16, 16, (1, 1))
    with pytest.raises(ValueError, match="stages: expected at least one"):
        Schedule(stages=(stage,), scheduled=3, extension=0)
    with pytest.raises(ValueError, match="scheduled: expected at least one step"):
        Schedule(stages=(stage, stage), scheduled=0, extension=1)
    with pytest.raises(ValueError, match="steps: expected at least one step per stage"):
        Schedule.record_74().of_length(3)
    with pytest.raises(ValueError, match="mtp_end"):
        Stage(16, 16, (1, 1), 1.0, (1.0, 0.5), (1.0,))
    with pytest.raises(ValueError, match="step: expected 0 or more, got -1"):
        Schedule.record_74().at(-1)
