"""Streams and collectives side by side, with times computed by hand."""

from __future__ import annotations

import pytest

from leanstep.rehearse.devices import DEVICES
from leanstep.rehearse.events import GRAPH_REPLAY, Event, HostWait, Kernel, Launch, StreamMark, StreamWait
from leanstep.rehearse.streams import TAKEN, Streams
from leanstep.rehearse.time_model import Clock, HostCosts, seconds, time_steps

H100 = DEVICES["h100"]
COSTS = HostCosts(call_us=1, backward_us=1, view_us=1, launch_us=1, wait_us=1)
GATHER = Kernel("collective", 1e9, sizes=(8, 1), name="all_gather")
GATHER_S = seconds(GATHER, H100)


def test_a_stream_that_waits_for_a_mark_starts_after_it():
    streams = Streams()
    streams.run(1, 10.0, launched=0.0)
    streams.mark(7, stream=1)
    assert streams.wait(7, stream=0, launched=2.0) == 8.0  # idle from the host's 2 to the mark at 10
    assert streams.run(0, 5.0, launched=2.0) == 15.0


def test_streams_without_marks_run_side_by_side_and_share_the_units():
    streams = Streams()
    streams.run(0, 10.0, launched=0.0)
    assert streams.run(1, 4.0, launched=3.0) == 7.0  # runs at once, from 3 to 7
    assert streams.end(0) == 14.0  # and the other stream lost those 4


def test_the_start_of_a_kernel_needs_no_units():
    streams = Streams(start_s=1.0)
    streams.run(0, 10.0, launched=0.0)
    streams.run(1, 4.0, launched=3.0)
    assert streams.end(0) == 13.0


def test_copies_need_no_units():
    streams = Streams()
    streams.run(0, 10.0, launched=0.0)
    assert streams.run(1, 4.0, launched=3.0, on_units=False) == 7.0
    assert streams.end(0) == 10.0


def test_a_stream_that_was_idle_loses_nothing():
    streams = Streams()
    streams.run(0, 2.0, launched=0.0)
    streams.run(0, 2.0, launched=10.0)  # idle from 2 to 10
    streams.run(1, 4.0, launched=4.0)
    assert streams.end(0) == 12.0


@pytest.mark.parametrize("transfer_first", [True, False])
def test_kernels_beside_a_collective_lose_a_share_of_the_units(transfer_first):
    streams = Streams()

    def transfer() -> None:
        streams.transfer("group", 4.0, stream=1, launched=0.0, mark=1)

    def compute() -> None:
        streams.run(0, 10.0, launched=0.0)

    for work in (transfer, compute) if transfer_first else (compute, transfer):
        work()
    assert streams.end(0) == pytest.approx(10.0 + TAKEN * 4.0)


def test_collectives_of_a_group_follow_each_other_and_those_of_two_groups_do_not():
    streams = Streams()
    for mark, group in ((1, "a"), (2, "a"), (3, "b")):
        streams.transfer(group, 4.0, stream=0, launched=1.0, mark=mark)
    assert [streams.end_of(mark) for mark in (1, 2, 3)] == [5.0, 9.0, 5.0]


def played(*events: Event) -> Clock:
    clock = Clock(H100, costs=COSTS)
    for event in events:
        clock.play(event)
    return clock


def launch(kernel: Kernel, stream: int = 0, mark: int = 0, name: str = "op") -> Launch:
    return Launch(name, (kernel,), None, "forward", 0, stream=stream, mark=mark)


def of_length(s: float) -> Kernel:
    moved = Kernel("pointwise", 1e9)
    return moved._replace(nbytes=1e9 * s / seconds(moved, H100))


def test_a_prefetched_gather_is_hidden_and_one_that_is_needed_at_once_is_not():
    layer = of_length(2 * GATHER_S)
    layer_s = seconds(layer, H100)
    at_once = played(launch(GATHER, 1, mark=1), StreamWait(1, 0), launch(layer))
    assert at_once.exposed == pytest.approx(GATHER_S)
    assert at_once.device == pytest.approx(GATHER_S + layer_s, rel=1e-2)
    # FSDP2's forward: the next layer's gather is launched before this layer's kernels.
    prefetched = played(
        *(launch(GATHER, 1, mark=1), StreamWait(1, 0), launch(GATHER, 1, mark=2), launch(layer)),
        *(StreamWait(2, 0), launch(layer)),
    )
    assert prefetched.exposed == pytest.approx(GATHER_S)
    assert prefetched.device == pytest.approx(GATHER_S + 2 * layer_s + TAKEN * GATHER_S, rel=1e-2)


def test_a_sync_of_one_stream_does_not_wait_for_the_others():
    events = (launch(of_length(1e-3)), StreamMark(1, 0), launch(GATHER, 1, mark=2))
    mine = played(*events, HostWait("item", None, "forward", 0, mark=1))
    assert mine.host == pytest.approx(1e-3, rel=0.05)
    every = played(*events, HostWait("synchronize", None, "forward", 0))
    assert every.host == pytest.approx(GATHER_S, rel=0.05)


def test_a_collective_inside_a_captured_graph_is_waited_for():
    replayed = played(launch(GATHER, name=GRAPH_REPLAY), launch(of_length(1e-3)))
    assert replayed.device == pytest.approx(GATHER_S + 1e-3, rel=1e-2)


def test_a_step_that_waits_for_its_links_says_so():
    step = [launch(GATHER, 0, mark=1), StreamWait(1, 0), launch(of_length(0.5 * GATHER_S))]
    timing = time_steps(step * 2, [3, 6], H100, COSTS)[-1]
    assert timing.bound_by == "link"
    assert timing.exposed_s == pytest.approx(GATHER_S, rel=1e-2)
