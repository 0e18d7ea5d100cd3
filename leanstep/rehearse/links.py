"""Machines (devices, their number and links) and the predicted seconds of a collective between devices.

A machine is a `Device` with the links of its node: `--machine dgx-h100` chooses both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from leanstep.rehearse.devices import DEVICES, Device
from leanstep.rehearse.events import Kernel


@dataclass(frozen=True)
class Machine:
    """One node, as sold.

    node: number of devices connected by NVLink, xGMI or PCIe. link: bytes/s from a device to the others of
    its node, one direction. nic: bytes/s from a device to other nodes, its share of the network cards.
    """

    key: str
    device: str
    node: int
    link: float
    nic: float
    source: str

    def as_device(self) -> Device:
        """Return the device with the links of this machine."""
        return replace(DEVICES[self.device], node=self.node, link=self.link, nic=self.nic)


_ALL = (
    Machine("dgx-1", "v100", 8, 150e9, 6.25e9, "DGX-1 data sheet: 6 NVLinks, 4 x 100 Gb/s"),
    Machine("dgx-a100", "a100", 8, 300e9, 25e9, "DGX A100 data sheet: 600 GB/s NVLink, 8 x 200 Gb/s"),
    Machine("dgx-a100-40", "a100-40", 8, 300e9, 25e9, "DGX A100 data sheet, 40 GB: as the 80 GB one"),
    Machine("dgx-h100", "h100", 8, 450e9, 50e9, "DGX H100 data sheet: 900 GB/s NVLink, 8 x 400 Gb/s"),
    Machine("hgx-h200", "h200", 8, 450e9, 50e9, "DGX H200 data sheet: 900 GB/s NVLink, 8 x 400 Gb/s"),
    Machine("hgx-b200", "b200", 8, 900e9, 50e9, "DGX B200 data sheet: 1,800 GB/s NVLink, 8 x 400 Gb/s"),
    Machine("hgx-b300", "b300", 8, 900e9, 100e9, "DGX B300 data sheet: 1,800 GB/s NVLink, 8 x 800 Gb/s"),
    Machine("gb200-nvl72", "gb200", 72, 900e9, 50e9, "GB200 NVL72 data sheet; 400 Gb/s per device"),
    Machine("gb300-nvl72", "gb300", 72, 900e9, 100e9, "GB300 NVL72 data sheet; 800 Gb/s per device"),
    Machine("grand-teton", "h100-96", 8, 450e9, 50e9, "torchtitan's benchmarks: NVLink, 400 Gb/s per device"),
    Machine("mi300x-8", "mi300x", 8, 448e9, 50e9, "MI300X platform data sheet: 7 x 64 GB/s; 8 x 400 Gb/s"),
    Machine("p3dn", "v100", 8, 150e9, 1.5625e9, "AWS p3dn.24xlarge: 100 Gb/s"),
    Machine("p4d", "a100-40", 8, 300e9, 6.25e9, "AWS p4d.24xlarge: 400 Gb/s"),
    Machine("p4de", "a100", 8, 300e9, 6.25e9, "AWS p4de.24xlarge: 400 Gb/s"),
    Machine("p5", "h100", 8, 450e9, 50e9, "AWS p5.48xlarge: 3,200 Gb/s"),
    Machine("p5en", "h200", 8, 450e9, 50e9, "AWS p5en.48xlarge: 3,200 Gb/s"),
    Machine("p6-b200", "b200", 8, 900e9, 50e9, "AWS p6-b200.48xlarge: 3,200 Gb/s"),
    Machine("g5", "a10g", 8, 12e9, 1.5625e9, "AWS g5.48xlarge: PCIe 4 through the host, 100 Gb/s"),
    Machine("g6", "l4", 8, 12e9, 1.5625e9, "AWS g6.48xlarge: PCIe 4 through the host, 100 Gb/s"),
    Machine("pcie-4090", "4090", 8, 12e9, 1.5625e9, "PCIe 4 through the host (no peer access); 100 Gb/s"),
    Machine("pcie-h100", "h100-pcie", 8, 50e9, 25e9, "PCIe 5 without NVLink bridges; 200 Gb/s per device"),
)
MACHINES: dict[str, Machine] = {machine.key: machine for machine in _ALL}


def machine_named(name: str) -> Machine:
    """Return the machine with this key; raise a ValueError that lists the keys otherwise."""
    key = name.strip().lower()
    if key not in MACHINES:
        raise ValueError(f"machine: expected one of {', '.join(MACHINES)}, got {name!r}")
    return MACHINES[key]


def device_of(device: str, machine: str | None) -> Device:
    """Return the device of a machine, or the device with this key and its default node."""
    return machine_named(machine).as_device() if machine else DEVICES[device]


# Achievable shares of the line rate. NVLink: "with the protocol overhead (~20%) NCCL can get 370 GB/s" of
# 450 (NVIDIA/nccl-tests issue 212); 231 of 300 on A100 (NVIDIA/nccl issue 527). Network: 46 to 48 GB/s of a
# 400 Gb/s card (NVIDIA/nccl-tests issue 290).
_LINK_SHARE, _NIC_SHARE = 0.8, 0.94
# An all-reduce summed by the switches of a node: 480 instead of 370 GB/s (issue 212), since Hopper.
_SWITCH_GAIN, _SWITCH_FROM = 1.3, (9, 0)


@dataclass(frozen=True)
class _Protocol:
    """An NCCL protocol (src/graph/tuning.cc): latencies in microseconds, and its share of the bandwidth."""

    base_us: float
    nvlink_us: float
    pcie_us: float
    network_us: float
    share: float


_PROTOCOLS = (
    _Protocol(3.6, 0.47, 1.0, 2.7, 0.25),
    _Protocol(10.0, 1.9, 2.5, 4.0, 0.92),
    _Protocol(8.4, 3.4, 5.7, 9.6, 1.0),
)
_PCIE_BELOW = 60e9


def seconds(kernel: Kernel, device: Device) -> float:
    """Return the time of a collective: start and steps of the best protocol, and bytes at the slowest link.

    Rings pass through all devices of a node and use all its network cards, so a group with one device per
    node has the bandwidth of one card, and a group of whole nodes has that of all cards of a node.
    """
    ranks, distance = kernel.sizes
    if ranks == 1:
        return 0.0
    here = min(ranks, max(1, device.node // distance))  # devices of the group in one node
    nodes = math.ceil(ranks / here)
    link, nic = _LINK_SHARE * device.link, _NIC_SHARE * device.nic
    if kernel.name in ("send", "receive"):
        sent, rate, steps, outside = 1.0, nic if nodes > 1 else link, 1, int(nodes > 1)
    elif kernel.name == "all_to_all":
        # Each device sends its own parts, all at once; parts for other nodes use its own card.
        away = (ranks - here) / ranks
        near = (ranks - 1) / ranks - away
        sent, rate, steps, outside = 1.0, 1 / max(away / nic, near / link), 1, int(nodes > 1)
    else:
        twice = 2 if kernel.name == "all_reduce" else 1
        sent, rate = twice * (ranks - 1) / ranks, min(link, nic * here) if nodes > 1 else link
        steps, outside = twice * (ranks - 1), twice * (nodes - 1)
        if twice == 2 and nodes == 1 and device.capability >= _SWITCH_FROM and device.link >= _PCIE_BELOW:
            rate *= _SWITCH_GAIN if device.vendor == "nvidia" else 1.0
    return min(
        1e-6 * (p.base_us + (steps - outside) * _step_us(p, device) + outside * p.network_us)
        + sent * kernel.nbytes / (p.share * rate)
        for p in _PROTOCOLS
    )


def _step_us(protocol: _Protocol, device: Device) -> float:
    return protocol.pcie_us if device.link < _PCIE_BELOW else protocol.nvlink_us
