"""Machines, and collectives between their devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from leanstep.rehearse.devices import DEVICES
from leanstep.rehearse.events import Kernel
from leanstep.rehearse.links import MACHINES, device_of, machine_named, seconds

DGX = machine_named("dgx-h100").as_device()


def bus_rate(name: str, ranks: int, distance: int = 1, nbytes: float = 4e9, device=DGX) -> float:
    """GB/s as nccl-tests counts them: bytes that one rank must send, by the time."""
    kernel = Kernel("collective", nbytes, sizes=(ranks, distance), name=name)
    share = (2 if name == "all_reduce" else 1) * (ranks - 1) / ranks
    return share * nbytes / seconds(kernel, device) / 1e9


# (machine, collective, ranks, distance, measured GB/s): NVIDIA/nccl-tests issues 212 and 290, nccl issue 527.
MEASURED = [
    ("dgx-h100", "all_gather", 8, 1, 370),
    ("dgx-h100", "all_reduce", 8, 1, 480),
    ("dgx-a100", "all_reduce", 8, 1, 231),
    ("dgx-h100", "all_gather", 128, 1, 8 * 47),
    ("dgx-h100", "all_gather", 16, 8, 47),
]


@pytest.mark.parametrize(("machine", "name", "ranks", "distance", "measured"), MEASURED)
def test_long_collectives_reach_measured_rates(machine, name, ranks, distance, measured):
    rate = bus_rate(name, ranks, distance, device=machine_named(machine).as_device())
    assert 0.85 < rate / measured < 1.15


def test_short_collectives_take_their_latency():
    short = Kernel("collective", 8.0, sizes=(8, 1), name="all_reduce")
    # 3.6 us and 14 steps of 0.47 us
    assert seconds(short, DGX) == pytest.approx(10.2e-6, rel=0.01)
    far = short._replace(sizes=(16, 1))  # 28 steps on NVLink, two between the nodes
    assert seconds(far, DGX) == pytest.approx((3.6 + 28 * 0.47 + 2 * 2.7) * 1e-6, rel=0.01)
    assert seconds(short._replace(sizes=(1, 1)), DGX) == 0


def test_an_exchange_between_nodes_is_bound_by_the_card_of_each_device():
    exchange = Kernel("collective", 16e9, sizes=(16, 1), name="all_to_all")
    # Half of 16 GB leaves the node over 47 GB/s; the other half takes less time on NVLink.
    assert seconds(exchange, DGX) == pytest.approx(8 / 47, rel=0.01)
    assert seconds(exchange._replace(sizes=(8, 1)), DGX) == pytest.approx(14 / 360, rel=0.01)


def test_neighbours_send_over_nvlink_in_a_node_and_over_the_card_between_nodes():
    near = Kernel("collective", 1e9, sizes=(2, 1), name="send")
    assert seconds(near, DGX) == pytest.approx(1 / 360, rel=0.01)
    assert seconds(near._replace(sizes=(2, 8)), DGX) == pytest.approx(1 / 47, rel=0.01)


def test_every_machine_has_a_device_and_a_source():
    for machine in MACHINES.values():
        device = machine.as_device()
        assert device == replace(
            DEVICES[machine.device], node=machine.node, link=machine.link, nic=machine.nic
        )
        assert machine.source and machine.nic < machine.link
    assert machine_named("GB200-NVL72").node == 72
    assert device_of("a100", None) is DEVICES["a100"]
    assert device_of("a100", "p4de").nic == 6.25e9
    with pytest.raises(ValueError, match=r"machine: expected one of dgx-1, .*, got 'dgx-h1000'"):
        machine_named("dgx-h1000")
