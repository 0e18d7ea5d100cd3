"""Collectives beside their products, with times computed by hand."""

from __future__ import annotations

import pytest

from leanstep.rehearse.async_products import overlapped
from leanstep.rehearse.devices import DEVICES
from leanstep.rehearse.events import Event, Kernel, Launch, Region, StreamWait
from leanstep.rehearse.streams import TAKEN
from leanstep.rehearse.time_model import Clock, HostCosts, seconds

H100 = DEVICES["h100"]
PRODUCT = Kernel("gemm", 0.0, 0.0, "bfloat16", (1, 16384, 16384, 8192))
GATHER = Kernel("collective", 1e9, sizes=(8, 1), name="all_gather")
BETWEEN = Kernel("pointwise", 1e6)
SCATTER = GATHER._replace(name="reduce_scatter")
REGIONS = {1: Region(1, "block", None, 1, pipelined=True), 2: Region(2, "plain", None, 1)}


def launch(kernel: Kernel, mark: int = 0, region: int = 1) -> Launch:
    return Launch(kernel.name or "mm", (kernel,), None, "forward", 0, region=region, mark=mark)


def block(region: int = 1) -> list[Event]:
    return [
        *(launch(GATHER, 1, region), StreamWait(1, 0), launch(PRODUCT, region=region)),
        launch(BETWEEN, region=region),
        *(launch(PRODUCT, region=region), launch(SCATTER, 2, region), StreamWait(2, 0)),
    ]


def length(events: list[Event]) -> float:
    clock = Clock(H100, costs=HostCosts(0, 0, 0, 0, 0))
    for event in events:
        clock.play(event)
    return clock.device


def test_a_gather_and_a_scatter_run_beside_the_products_next_to_them():
    product, transfer = seconds(PRODUCT, H100), seconds(GATHER, H100)
    kernels = 2 * product + seconds(BETWEEN, H100)
    assert transfer < product
    assert length(block()) == pytest.approx(kernels + 2 * transfer)
    # Both are hidden; each takes its share of the units.
    assert length(overlapped(block(), REGIONS)) == pytest.approx(kernels + 2 * TAKEN * transfer)


def test_a_sum_of_products_is_sent_after_the_last():
    events: list[Event] = [launch(PRODUCT), launch(PRODUCT), launch(SCATTER, 2), StreamWait(2, 0)]
    assert overlapped(events, REGIONS) == events


def test_other_regions_stay_as_they_are():
    assert overlapped(block(2), REGIONS) == block(2)


def test_a_wait_that_no_product_takes_along_is_kept():
    events = [launch(GATHER, 1), StreamWait(1, 0)]
    assert overlapped(events, REGIONS) == events
