"""What programs overlap: FSDP2's prefetch, DDP's buckets, tensor parallel, streams of their own."""

from __future__ import annotations

import pytest
from rehearse.rehearsed import SCRIPTS, Rehearsed, run_script

from leanstep.rehearse.events import Kernel, Launch
from leanstep.rehearse.links import device_of
from leanstep.rehearse.streams import TAKEN
from leanstep.rehearse.time_model import Timing, seconds
from leanstep.rehearse.what_if import update_step

DGX = device_of("h100", "dgx-h100")
LAYERS = 4
BLOCK_BYTES = 2 * 2 * 4096 * 4096


def rehearsed(kind: str) -> Rehearsed:
    got = run_script(SCRIPTS / "overlap.py", kind, machine="dgx-h100", device="h100", ranks=8, steps=2)
    assert got.recording.refused is None, got.recording.refused
    return got


def timed(got: Rehearsed) -> Timing:
    timing = update_step(got.recording, DGX)
    assert timing is not None
    return timing


def collectives(got: Rehearsed) -> list[Launch]:
    """Of the last step."""
    step = got.recording.steps[-1]
    events = got.recording.events[step.first : step.last]
    return [e for e in events if isinstance(e, Launch) and e.kernels and e.kernels[0].kind == "collective"]


def of_block(name: str) -> float:
    return seconds(Kernel("collective", BLOCK_BYTES, sizes=(8, 1), name=name), DGX)


def test_fsdp_waits_for_the_first_gather_and_the_last_scatter_only():
    got = rehearsed("fsdp")
    names = [e.kernels[0].name for e in collectives(got)]
    assert names.count("all_gather") == 2 * LAYERS
    assert names.count("reduce_scatter") == LAYERS
    timing = timed(got)
    assert timing.link_s == pytest.approx(
        2 * LAYERS * of_block("all_gather") + LAYERS * of_block("reduce_scatter")
    )
    hidden = timing.link_s - of_block("all_gather") - of_block("reduce_scatter")
    assert timing.exposed_s == pytest.approx(timing.link_s - hidden, rel=0.1)
    # All kernels, the two that are waited for, and what the hidden ones take from the kernels beside them.
    assert timing.step_s == pytest.approx(timing.device_s + timing.exposed_s + TAKEN * hidden, rel=0.02)


def test_ddp_hides_all_buckets_but_the_last():
    got = rehearsed("ddp")
    reduced = collectives(got)
    assert sum(e.kernels[0].nbytes for e in reduced) == LAYERS * BLOCK_BYTES
    assert len(reduced) == 2 * LAYERS  # one matrix is larger than a bucket
    timing = timed(got)
    last = seconds(reduced[-1].kernels[0], DGX)
    assert timing.exposed_s == pytest.approx(last, rel=0.1)
    expected = timing.device_s + last + TAKEN * (timing.link_s - last)
    assert timing.step_s == pytest.approx(expected, rel=0.02)


def test_tensor_parallel_waits_for_every_sum():
    got = rehearsed("tensor")
    # One sum for each block in forward, and one for its input's gradient, but the first block has no input.
    assert [e.kernels[0].name for e in collectives(got)] == ["all_reduce"] * (2 * LAYERS - 1)
    timing = timed(got)
    assert timing.exposed_s == pytest.approx(timing.link_s)
    assert timing.step_s == pytest.approx(timing.device_s + timing.link_s, rel=0.01)
    assert timing.bound_by == "link"


def test_a_future_of_a_collective_holds_the_stream_that_waits_for_it():
    timing = timed(rehearsed("futures"))
    matrix = Kernel("collective", BLOCK_BYTES // 2, sizes=(8, 1), name="all_reduce")
    assert timing.link_s == pytest.approx(2 * LAYERS * seconds(matrix, DGX))
    # The stream waits for each result in turn and scales it while the next one is on its way.
    assert timing.exposed_s == pytest.approx(timing.link_s, rel=0.25)
    assert timing.step_s > timing.device_s + timing.exposed_s
    assert timing.waits == 0


def test_a_side_stream_runs_beside_the_default_one_and_is_joined():
    got = rehearsed("streams")
    beside = [
        e for e in got.recording.events if isinstance(e, Launch) and e.kernels and got.is_at(e.line, "beside")
    ]
    assert {e.stream for e in beside} == {1}
    timing = timed(got)
    # Units are shared: nothing is gained, and nothing is lost but the starts of kernels.
    assert timing.step_s == pytest.approx(timing.device_s, rel=0.01)
