"""Published figures of the devices that a script can be rehearsed on, each with its source.

All rates are dense (no sparsity). `sustained` is the share of the matrix units' peak that the best shape of a
long-running product reaches: power limits hold it below 1. It comes from the public table of "maximum
achievable matmul FLOPS" in stas00/ml-engineering (compute/accelerator/README.md, bf16). For a device that is
not in that table, the entry names another publication, or the similar device whose figure it uses.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

MIB = 2**20
GB = 10**9
TERA = 1e12
# Maximum shared memory per block in bytes: CUDA programming guide, table of compute capabilities; for AMD the
# LDS per workgroup.
SHARED_LIMITS = {
    "sm_70": 98_304,
    "sm_75": 65_536,
    "sm_80": 166_912,
    "sm_86": 101_376,
    "sm_87": 166_912,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_103": 232_448,
    "sm_120": 101_376,
    "sm_121": 101_376,
    "gfx942": 65_536,
    "gfx950": 163_840,
}


@dataclass(frozen=True)
class Device:
    """One accelerator.

    units: streaming multiprocessors or compute units; clock_hz: boost clock of the peak figures.
    memory_bytes: what the driver reports, less than the nominal size; the CUDA context takes context_bytes of
        it outside the allocator (0.3 to 1.4 GB, depending on driver and libraries; reported separately).
    hbm: bytes/s of device memory; l2_bytes: last-level cache.
    peak: dtype -> FLOP/s; "tf32" and "float8" in addition to the torch names.
    sustained: share of the half-precision peak that long products reach.
    workspace_bytes: cuBLAS workspace, allocated at the first product of a thread.
    pcie: bytes/s to the host. link: bytes/s to the other devices of a node, one direction; node: devices per
        node. nic: bytes/s to other nodes, one direction, per device (`links.MACHINES` has other values).
    has_rows: whether a published measurement of this device is in the open table, docs/published.md.
    """

    key: str
    name: str
    vendor: str
    capability: tuple[int, int]
    units: int
    clock_hz: float
    memory_bytes: int
    hbm: float
    l2_bytes: float
    peak: Mapping[str, float] = field(hash=False)
    sustained: float
    link: float
    source: str
    workspace_bytes: int = 8_519_680
    pcie: float = 24e9
    node: int = 8
    nic: float = 25e9
    context_bytes: int = 500 * MIB
    has_rows: bool = True

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s of products with this operand type; integer and unknown types count as float32."""
        return self.peak.get(dtype, self.peak["float32"])


def _peaks(
    half: float, tf32: float, single: float, double: float, float8: float = 0.0
) -> Mapping[str, float]:
    return MappingProxyType(
        {
            "bfloat16": half * TERA,
            "float16": half * TERA,
            "tf32": tf32 * TERA,
            "float32": single * TERA,
            "float64": double * TERA,
            "float8": (float8 or half) * TERA,
        }
    )


_ALL = (
    Device(
        key="v100",
        name="Tesla V100-SXM2-16GB",
        vendor="nvidia",
        capability=(7, 0),
        units=80,
        clock_hz=1.53e9,
        memory_bytes=16160 * MIB,
        hbm=0.9e12,
        l2_bytes=6e6,
        peak=_peaks(125, 15.7, 15.7, 7.8),
        sustained=0.664,
        link=150e9,
        pcie=12e9,
        source="V100 data sheet (SXM2: 125 TFLOP/s half, 900 GB/s); sustained: 83 of 125 (Markidis 2018)",
    ),
    Device(
        key="t4",
        name="Tesla T4",
        vendor="nvidia",
        capability=(7, 5),
        units=40,
        clock_hz=1.59e9,
        memory_bytes=15360 * MIB,
        hbm=0.32e12,
        l2_bytes=4e6,
        peak=_peaks(65, 8.1, 8.1, 0.25),
        sustained=0.7,
        link=12e9,
        pcie=12e9,
        source="T4 data sheet (65 TFLOP/s half, 320 GB/s); sustained: assumed, the board is held to 70 W",
    ),
    Device(
        key="a100-40",
        name="NVIDIA A100-SXM4-40GB",
        vendor="nvidia",
        capability=(8, 0),
        units=108,
        clock_hz=1.41e9,
        memory_bytes=40960 * MIB,
        hbm=1.555e12,
        l2_bytes=40e6,
        peak=_peaks(312, 156, 19.5, 19.5),
        sustained=0.869,
        link=300e9,
        source="A100 data sheet (40 GB: 1,555 GB/s; 312/156/19.5 TFLOP/s); sustained: 271.2 of 312",
    ),
    Device(
        key="a100",
        name="NVIDIA A100-SXM4-80GB",
        vendor="nvidia",
        capability=(8, 0),
        units=108,
        clock_hz=1.41e9,
        memory_bytes=81920 * MIB,
        hbm=2.039e12,
        l2_bytes=40e6,
        peak=_peaks(312, 156, 19.5, 19.5),
        sustained=0.869,
        link=300e9,
        source="A100 data sheet (SXM 80 GB: 2,039 GB/s; 312/156/19.5 TFLOP/s); sustained: 271.2 of 312",
    ),
    Device(
        key="a10g",
        name="NVIDIA A10G",
        vendor="nvidia",
        capability=(8, 6),
        units=80,
        clock_hz=1.71e9,
        memory_bytes=23028 * MIB,
        hbm=0.6e12,
        l2_bytes=6e6,
        peak=_peaks(70, 35, 31.5, 0.5),
        sustained=0.8,
        link=12e9,
        source="A10G data sheet (70 TFLOP/s half, 600 GB/s); sustained: assumed",
    ),
    Device(
        key="3090",
        name="NVIDIA GeForce RTX 3090",
        vendor="nvidia",
        capability=(8, 6),
        units=82,
        clock_hz=1.695e9,
        memory_bytes=24576 * MIB,
        hbm=0.936e12,
        l2_bytes=6e6,
        peak=_peaks(71, 35.6, 35.6, 0.56),
        sustained=0.95,
        link=12e9,
        source="GA102 whitepaper (71 TFLOP/s half with fp32 sums, 936 GB/s); sustained: that of the 4090",
    ),
    Device(
        key="a6000",
        name="NVIDIA RTX A6000",
        vendor="nvidia",
        capability=(8, 6),
        units=84,
        clock_hz=1.8e9,
        memory_bytes=49140 * MIB,
        hbm=0.768e12,
        l2_bytes=6e6,
        peak=_peaks(154.8, 77.4, 38.7, 0.6),
        sustained=0.869,
        link=56e9,
        source="RTX A6000 data sheet (154.8 TFLOP/s half, 768 GB/s); sustained: that of the A100",
    ),
    Device(
        key="l4",
        name="NVIDIA L4",
        vendor="nvidia",
        capability=(8, 9),
        units=58,
        clock_hz=2.04e9,
        memory_bytes=23034 * MIB,
        hbm=0.3e12,
        l2_bytes=48e6,
        peak=_peaks(121, 60, 30.3, 0.47, 242),
        sustained=0.7,
        link=12e9,
        source="L4 data sheet (121 TFLOP/s half, 300 GB/s); sustained: assumed, the board is held to 72 W",
    ),
    Device(
        key="l40s",
        name="NVIDIA L40S",
        vendor="nvidia",
        capability=(8, 9),
        units=142,
        clock_hz=2.52e9,
        memory_bytes=46068 * MIB,
        hbm=0.864e12,
        l2_bytes=96e6,
        peak=_peaks(362, 183, 91.6, 1.4, 733),
        sustained=0.7,
        link=24e9,
        has_rows=False,
        source="L40S data sheet (362 TFLOP/s half, 864 GB/s, 48 GB); sustained: assumed (350 W)",
    ),
    Device(
        key="4090",
        name="NVIDIA GeForce RTX 4090",
        vendor="nvidia",
        capability=(8, 9),
        units=128,
        clock_hz=2.52e9,
        memory_bytes=24564 * MIB,
        hbm=1.008e12,
        l2_bytes=72e6,
        peak=_peaks(165.2, 82.6, 82.6, 1.3, 330.3),
        sustained=0.95,
        link=24e9,
        source="Ada whitepaper (165.2 TFLOP/s half with fp32 sums, 1,008 GB/s); sustained: Liger's MLPs",
    ),
    Device(
        key="5080",
        name="NVIDIA GeForce RTX 5080",
        vendor="nvidia",
        capability=(12, 0),
        units=84,
        clock_hz=2.617e9,
        memory_bytes=16303 * MIB,
        hbm=0.96e12,
        l2_bytes=64e6,
        peak=_peaks(112.6, 56.3, 56.3, 0.88, 225.1),
        sustained=0.95,
        link=48e9,
        workspace_bytes=32 * MIB,
        pcie=50e9,
        has_rows=False,
        source="RTX Blackwell whitepaper (112.6 TFLOP/s half, 960 GB/s); sustained: the 4090's",
    ),
    Device(
        key="5090",
        name="NVIDIA GeForce RTX 5090",
        vendor="nvidia",
        capability=(12, 0),
        units=170,
        clock_hz=2.407e9,
        memory_bytes=32607 * MIB,
        hbm=1.792e12,
        l2_bytes=96e6,
        peak=_peaks(209.5, 104.8, 104.8, 1.64, 419),
        sustained=0.95,
        link=48e9,
        workspace_bytes=32 * MIB,
        pcie=50e9,
        has_rows=False,
        source="RTX Blackwell whitepaper (209.5 TFLOP/s half, 1,792 GB/s); sustained: the 4090's",
    ),
    Device(
        key="pro6000",
        name="NVIDIA RTX PRO 6000 Blackwell",
        vendor="nvidia",
        capability=(12, 0),
        units=188,
        clock_hz=2.617e9,
        memory_bytes=97887 * MIB,
        hbm=1.792e12,
        l2_bytes=128e6,
        peak=_peaks(503.8, 251.9, 126, 1.97, 1007.6),
        sustained=0.7,
        link=48e9,
        workspace_bytes=32 * MIB,
        pcie=50e9,
        has_rows=False,
        source="RTX PRO Blackwell whitepaper (503.8 TFLOP/s half, 1,792 GB/s); sustained: assumed",
    ),
    Device(
        key="h20",
        name="NVIDIA H20",
        vendor="nvidia",
        capability=(9, 0),
        units=78,
        clock_hz=1.98e9,
        memory_bytes=97871 * MIB,
        hbm=4.0e12,
        l2_bytes=60e6,
        peak=_peaks(148, 74, 44, 1, 296),
        sustained=0.869,
        link=450e9,
        workspace_bytes=32 * MIB,
        pcie=50e9,
        nic=50e9,
        source="H20 data sheet (148 TFLOP/s half, 4.0 TB/s, 96 GB); sustained: that of the A100",
    ),
    Device(
        key="h100",
        name="NVIDIA H100 80GB HBM3",
        vendor="nvidia",
        capability=(9, 0),
        units=132,
        clock_hz=1.83e9,
        memory_bytes=81559 * MIB,
        hbm=3.35e12,
        l2_bytes=50e6,
        peak=_peaks(989, 495, 67, 67, 1979),
        sustained=0.803,
        link=450e9,
        workspace_bytes=32 * MIB,
        pcie=50e9,
        nic=50e9,
        source="H100 data sheet (SXM: 3.35 TB/s; 989/495/67 TFLOP/s); sustained: 794.5 of 989",
    ),
    Device(
        key="h100-pcie",
        name="NVIDIA H100 PCIe",
        vendor="nvidia",
        capability=(9, 0),
        units=114,
        clock_hz=1.755e9,
        memory_bytes=81559 * MIB,
        hbm=2.039e12,
        l2_bytes=50e6,
        peak=_peaks(756, 378, 51, 26, 1513),
        sustained=0.803,
        link=50e9,
        workspace_bytes=32 * MIB,
        pcie=50e9,
        nic=50e9,
        source="H100 data sheet (PCIe: 2.0 TB/s; 756/378/51 TFLOP/s); sustained: that of the H100",
    ),
    Device(
        key="h100-96",
        name="NVIDIA H100 96GB HBM2e (500 W)",
        vendor="nvidia",
        capability=(9, 0),
        units=132,
        clock_hz=1.83e9,
        memory_bytes=97871 * MIB,
        hbm=2.4e12,
        l2_bytes=50e6,
        peak=_peaks(989, 495, 67, 67, 1979),
        sustained=0.718,
        link=450e9,
        workspace_bytes=32 * MIB,
        pcie=50e9,
        nic=50e9,
        # Power grows with the cube of the clock.
        source="torchtitan's benchmarks (2.4 TB/s, 500 W); sustained: the H100's * (500 / 700)^(1/3)",
    ),
    Device(
        key="gh200",
        name="NVIDIA GH200 480GB",
        vendor="nvidia",
        capability=(9, 0),
        units=132,
        clock_hz=1.83e9,
        memory_bytes=97871 * MIB,
        hbm=4.0e12,
        l2_bytes=50e6,
        peak=_peaks(989, 495, 67, 67, 1979),
        sustained=0.803,
        link=450e9,
        workspace_bytes=32 * MIB,
        pcie=450e9,
        nic=50e9,
        node=1,
        has_rows=False,
        source="GH200 data sheet (4 TB/s, 900 GB/s to the host, both ways); sustained: the H100's",
    ),
    Device(
        key="h200",
        name="NVIDIA H200",
        vendor="nvidia",
        capability=(9, 0),
        units=132,
        clock_hz=1.83e9,
        memory_bytes=143771 * MIB,
        hbm=4.8e12,
        l2_bytes=50e6,
        peak=_peaks(989, 495, 67, 67, 1979),
        sustained=0.803,
        link=450e9,
        workspace_bytes=32 * MIB,
        pcie=50e9,
        nic=50e9,
        source="H200 data sheet (4.8 TB/s, 141 GB, products as on the H100); sustained: that of the H100",
    ),
    Device(
        key="b200",
        name="NVIDIA B200",
        vendor="nvidia",
        capability=(10, 0),
        units=148,
        clock_hz=1.85e9,
        memory_bytes=183359 * MIB,
        hbm=8.0e12,
        l2_bytes=126e6,
        peak=_peaks(2250, 1125, 75, 37, 4500),
        sustained=0.72,
        link=900e9,
        workspace_bytes=32 * MIB,
        pcie=50e9,
        nic=50e9,
        # A burst reaches 1,745 of 2,250. The largest of 514 published products of training steps is 0.655 of
        # the peak (their median 0.485); the time model's best tile reaches 0.91 of `sustained`.
        source="DGX B200 data sheet / 8 (8 TB/s, 2,250 TFLOP/s half); sustained: 514 products of steps",
    ),
    Device(
        key="b300",
        name="NVIDIA B300",
        vendor="nvidia",
        capability=(10, 3),
        units=148,
        clock_hz=1.85e9,
        memory_bytes=275040 * MIB,
        hbm=8.0e12,
        l2_bytes=126e6,
        peak=_peaks(2250, 1125, 75, 1.3, 4500),
        sustained=0.72,
        link=900e9,
        workspace_bytes=32 * MIB,
        pcie=50e9,
        nic=50e9,
        source="DGX B300 data sheet / 8 (288 GB, 8 TB/s, 4,500 TFLOP/s fp8); sustained: that of the B200",
    ),
    Device(
        key="gb200",
        name="NVIDIA GB200",
        vendor="nvidia",
        capability=(10, 0),
        units=152,
        clock_hz=1.965e9,
        memory_bytes=189471 * MIB,
        hbm=8.0e12,
        l2_bytes=126e6,
        peak=_peaks(2500, 1250, 80, 40, 5000),
        sustained=0.72,
        link=900e9,
        workspace_bytes=32 * MIB,
        pcie=50e9,
        nic=50e9,
        source="GB200 NVL72 data sheet / 72 (186 GB, 8 TB/s, 2,500 TFLOP/s half); sustained: the B200's",
    ),
    Device(
        key="gb300",
        name="NVIDIA GB300",
        vendor="nvidia",
        capability=(10, 3),
        units=152,
        clock_hz=1.965e9,
        memory_bytes=284208 * MIB,
        hbm=8.0e12,
        l2_bytes=126e6,
        peak=_peaks(2500, 1250, 80, 1.4, 5000),
        sustained=0.72,
        link=900e9,
        workspace_bytes=32 * MIB,
        pcie=50e9,
        nic=50e9,
        source="GB300 NVL72 data sheet / 72 (279 GB, 8 TB/s, 2,500 TFLOP/s half); sustained: the B200's",
    ),
    Device(
        key="mi355x",
        name="AMD Instinct MI355X",
        vendor="amd",
        capability=(9, 5),
        units=256,
        clock_hz=2.4e9,
        memory_bytes=294896 * MIB,
        hbm=8.0e12,
        l2_bytes=256e6,
        peak=_peaks(2516, 157.3, 157.3, 78.6, 5033),
        sustained=0.514,
        link=537e9,
        workspace_bytes=32 * MIB,
        pcie=50e9,
        nic=50e9,
        has_rows=False,
        source="MI355X data sheet (8 TB/s, 288 GB, 2,516 TFLOP/s half); sustained: the MI300X's",
    ),
    Device(
        key="mi300x",
        name="AMD Instinct MI300X",
        vendor="amd",
        capability=(9, 4),
        units=304,
        clock_hz=2.1e9,
        memory_bytes=196592 * MIB,
        hbm=5.3e12,
        l2_bytes=256e6,
        peak=_peaks(1307, 654, 163, 163, 2615),
        sustained=0.514,
        link=448e9,
        workspace_bytes=32 * MIB,
        pcie=50e9,
        nic=50e9,
        source="MI300X data sheet (5.3 TB/s, 1,307 TFLOP/s half, 163 fp32); sustained: 668.4 of 1,300",
    ),
)
DEVICES: dict[str, Device] = {device.key: device for device in _ALL}
ALIASES = {
    "a100-80": "a100",
    "a100-80gb": "a100",
    "rtx4090": "4090",
    "a100-40gb": "a100-40",
    "rtx3090": "3090",
    "rtx5080": "5080",
    "rtx5090": "5090",
    "rtxpro6000": "pro6000",
}


def device_named(name: str) -> Device:
    """Return the device with this key or alias; raise a ValueError that lists the keys otherwise."""
    key = name.strip().lower()
    key = ALIASES.get(key, key)
    if key not in DEVICES:
        close = difflib.get_close_matches(key, DEVICES, n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"device: expected one of {', '.join(DEVICES)}, got {name!r}{meant}")
    return DEVICES[key]


def devices_named(names: str) -> list[Device]:
    """Parse `"h100,a100"` into devices, in that order, without duplicates."""
    chosen = list(dict.fromkeys(device_named(name) for name in names.split(",") if name.strip()))
    if not 1 <= len(chosen) <= 4:
        raise ValueError(f"device: expected 1 to 4 devices, got {names!r}")
    return chosen
