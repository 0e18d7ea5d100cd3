"""Predicted seconds of a kernel on a device, and the clock that replays host and device.

The slowest of several limits determines a kernel's time: bytes at a share of the memory bandwidth, elements
at the rate at which a unit computes addresses, a chain of dependent loads, tiles of a product on the matrix
units. `dev/calibrate.py` fits the constants of each vendor (`RATES`) on public traces of H100 and MI300X;
the intervals (`WIDTHS`) come from blind rows. For other devices only the data sheet figures
differ.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from leanstep.flops import StepFlops
from leanstep.rehearse import links
from leanstep.rehearse.devices import DEVICES, Device
from leanstep.rehearse.events import (
    GRAPH_REPLAY,
    Event,
    Extrapolated,
    HostWait,
    Kernel,
    Launch,
    StreamMark,
    StreamWait,
)
from leanstep.rehearse.streams import Streams


@dataclass(frozen=True)
class Rates:
    """The fitted constants of a vendor's devices and libraries.

    start_us: shortest kernel (longer before Ada: `_start_us`). stream: share of the memory bandwidth that a
    long vectorised pass reaches. issue: addresses of elements computed per clock and unit. wait_us: one
    iteration of a loop that waits for its load. product: share of the sustained matrix rate that a large
    tile's inner loop reaches; ramp: half-size (elements) of a tile; product_start_us: start of a product;
    single: share of the fp32 peak.
    conv, attention: shares of the sustained rate.
    """

    start_us: float
    stream: float
    issue: float
    wait_us: float
    product: float
    ramp: float
    product_start_us: float
    single: float
    conv: float
    attention: float


# From `dev/calibrate.py --fit`: AMD's on all tables; NVIDIA's on the first six, frozen because published
# steps were predicted with them. Exceptions: NVIDIA's `stream` (passes in Liger's public table for A100, H100
# and B200 reach 0.80 to 0.85 of the memory bandwidth); NVIDIA's `conv`, from published steps of ResNet-50 and
# airbench94 on A100 and V100; `single` (fp32 without matrix units), an assumption.
RATES: Mapping[str, Rates] = MappingProxyType(
    {
        "nvidia": Rates(
            start_us=1.62,
            stream=0.83,
            issue=1.75,
            wait_us=0.838,
            product=1.08,
            ramp=12.1,
            product_start_us=5.35,
            single=0.8,
            conv=0.7,
            attention=0.634,
        ),
        "amd": Rates(
            start_us=4.26,
            stream=0.76,
            issue=1.45,
            wait_us=0.728,
            product=0.983,
            ramp=12.0,
            product_start_us=5.93,
            single=0.8,
            conv=0.19,
            attention=0.409,
        ),
    }
)
# Factor around a prediction that contains 80% of the published figures of its class: where at least three
# blind rows of the open table have this class on these devices, the 80% quantile of their first predictions
# (a test computes it again from results/published), else 1.3, or the factor of a class without blind rows.
# No constant of the model was set from a blind row.
# host: additional uncertainty of a step bound by host or syncs.
WIDTHS: Mapping[str, float] = MappingProxyType(
    {
        "eager": 1.3,
        "compiled": 1.3,
        "convolutions": 1.3,
        "kernels": 1.3,
        "short kernels": 1.45,
        "amd": 1.3,
        "host": 1.9,
    }
)
# Devices with the same chip share their rows.
CHIPS = (("a100", "a100-40"), ("h100", "h100-96", "h200"))
BLIND_WIDTHS: Mapping[tuple[str, str], float] = MappingProxyType(
    {
        (device, kind): width
        for chip, kind, width in (
            (CHIPS[0], "eager", 1.16),  # 13 rows
            (CHIPS[0], "compiled", 1.48),  # 3 rows
            (CHIPS[1], "eager", 1.35),  # 4 rows
            (CHIPS[1], "compiled", 1.15),  # 17 rows
        )
        for device in chip
    }
)
# A step counts as convolutions if they take more than this share of it; a kernel below this time is short.
_MOSTLY, _SHORT_S = 0.2, 1e-3

# Tile sizes (rows, columns) that libraries choose from for a product.
TILES = (
    (256, 128),
    (128, 256),
    (128, 128),
    (128, 64),
    (64, 128),
    (64, 64),
    (32, 64),
    (64, 32),
    (16, 64),
    (64, 16),
)
SPLITS = (1, 2, 4, 8, 16, 32)
# Softmax rows of up to this many bytes stay in the registers or the shared memory of their block.
_KEPT_ROW_BYTES = 96 * 1024
# Longer rows have one block each, two blocks per unit; shorter ones share a warp's registers.
_WARP_ROW = 1024
# Elements per iteration of a block's loop.
_STEP = {"norm": 2048, "batch_norm": 512}
# A loss that one warp sums: rows per iteration, and its dependent loads (the target, then its logit; both
# partly hidden).
_WARP, _WARP_LOADS = 32, 1.33
# Kernels on earlier generations take longer to start: 3 to 4 us in public traces of A100 and V100.
_LATE_START_BEFORE, _LATE_START = (8, 9), 2.0
# From this generation on, torch's attention kernels use the matrix instructions of the previous one.
# Kernels written for Hopper use its own: FlashAttention 3's authors (arXiv 2407.08608, H100, head size 128,
# sequences of 512 to 16k) measure 1.5 to 1.8 times the rate of version 2 forward, 1.5 to 1.75 backward.
_OLD_INSTRUCTIONS_FROM, _OLD_INSTRUCTIONS = (9, 0), 0.62
# Rate of attention backward relative to forward, as its authors report it for long sequences.
_BACKWARD_SHARE = 0.76
_BLENDING = 3.0  # two limits of one kernel overlap imperfectly: the norm that joins them


def seconds(kernel: Kernel, device: Device, rates: Rates | None = None) -> float:
    """Return the predicted seconds of all launches of `kernel` on `device`."""
    rates = rates or RATES[device.vendor]
    kind = kernel.kind
    if kind in ("gemm", "conv") and len(kernel.sizes) == 4:
        return _product(kernel, device, rates)
    if kind.startswith("attention"):
        return _attention(kernel, device, rates)
    if kind in ("h2d", "d2h"):
        return 2e-6 + kernel.nbytes / device.pcie
    if kind == "collective":
        return links.seconds(kernel, device)
    if kind == "one_warp":
        waits = _WARP_LOADS * math.ceil(kernel.sizes[0] / _WARP)
        return (_start_us(device, rates) + waits * rates.wait_us) * 1e-6
    moved, rows_s = kernel.nbytes, 0.0
    if kind == "softmax" and len(kernel.sizes) == 2 and kernel.sizes[1] > _WARP_ROW:
        moved, rows_s = _long_softmax(kernel, device, rates)
    limits = [moved / (device.hbm * rates.stream), rows_s]
    # Dependent loads: an index before its value, parts of a sum before the sum.
    chained = {"reduce": 3, "norm": 2, "softmax": 2, "batch_norm": 1}.get(kind, 0)
    if kernel.elements:
        limits.append(kernel.elements / (rates.issue * device.units * device.clock_hz))
        chained = 1
    if kind in _STEP and len(kernel.sizes) == 2:
        blocks, length = kernel.sizes
        steps = math.ceil(length / _STEP[kind]) * math.ceil(blocks / (4 * device.units))
        limits.append(max(0, steps - chained) * rates.wait_us * 1e-6)
    fixed = kernel.launches * _start_us(device, rates) + chained * rates.wait_us
    return fixed * 1e-6 + _joined(limits)


def _start_us(device: Device, rates: Rates) -> float:
    late = device.vendor == "nvidia" and device.capability < _LATE_START_BEFORE
    return rates.start_us * (_LATE_START if late else 1.0)


def _joined(limits: Iterable[float]) -> float:
    return sum(t**_BLENDING for t in limits) ** (1 / _BLENDING)


def _long_softmax(kernel: Kernel, device: Device, rates: Rates) -> tuple[float, float]:
    """Return the bytes of a softmax with one block per row, and the seconds that its units spend on rows."""
    rows, length = kernel.sizes
    row_bytes = kernel.nbytes / (2 * max(1, rows))
    # Maximum, sum and result are computed in turn.
    seconds = max(0, rows / (2 * device.units) - 1) * 3 * rates.wait_us * 1e-6
    if kernel.alignment < 16:  # element by element, half of a row's passes from registers
        seconds += 1.5 * rows * length / (rates.issue * device.units * device.clock_hz)
    elif row_bytes <= _KEPT_ROW_BYTES:
        return kernel.nbytes, seconds
    # A row too long for its block is read again for sum and result; part of it is in the cache.
    resident = 2 * min(rows, device.units) * row_bytes
    hit = min(1.0, 0.8 * device.l2_bytes / max(1.0, resident))
    return kernel.nbytes * (1 + 0.5 * 2 * ((1 - hit) + 0.4 * hit)), seconds


def _product(kernel: Kernel, device: Device, rates: Rates) -> float:
    """Return the time of the best tile and split of k: waves of tiles at the tile's share of the rate."""
    batch, m, n, k = kernel.sizes
    on_matrix_units = kernel.dtype not in ("float32", "float64")
    share = rates.product * device.sustained if on_matrix_units else rates.single
    if kernel.kind == "conv" and on_matrix_units:
        share *= rates.conv
    unit = device.flops(kernel.dtype) / device.units * share
    # A unit needs (rows + columns) loads per iteration: a slower unit needs smaller tiles.
    ramp = rates.ramp * min(1.0, _appetite(device, kernel.dtype) / _APPETITE[device.vendor]) ** 0.5
    best = math.inf
    for rows, columns in TILES:
        tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
        half = rows * columns / (rows + columns)
        speed = unit * half / (half + ramp)
        for split in SPLITS:
            if split > 1 and (tiles * split > 2 * device.units or k / split < 256):
                break
            waves = tiles * split / device.units
            # Long queues of tiles balance out; short ones wait for the last tile.
            waves = max(1.0, math.ceil(waves) if waves <= 4 else waves + 0.5)
            inner = math.ceil(max(k, 1) / split / 32) * 32
            time = waves * 2.0 * rows * columns * inner / speed
            if split > 1:
                time += 1e-6 + 8 * batch * m * n * min(split, 4) / (2 * device.hbm)
            best = min(best, time)
    limits = [best, kernel.nbytes / (device.hbm * rates.stream)]
    if on_matrix_units and kernel.alignment < 16:
        limits.append(_pieces(kernel) / (2 * rates.issue * device.units * device.clock_hz))
    return kernel.launches * rates.product_start_us * 1e-6 + _joined(limits)


def _pieces(kernel: Kernel) -> float:
    """Return the time of loads and stores of a product with unaligned rows: no wider than the alignment.

    The units that compute addresses load a tile's operands in pieces, two per slot: within a row an address
    is advanced, not computed.
    """
    batch, m, n, k = kernel.sizes
    tile = 128  # what libraries have for them
    elements = k * (m * math.ceil(n / tile) + n * math.ceil(m / tile)) + m * n
    return batch * elements * element_bytes(kernel.dtype) / kernel.alignment


def element_bytes(dtype: str) -> int:
    """Of an operand that a product reads."""
    return {"float8": 1, "tf32": 4, "float32": 4, "float64": 8}.get(dtype, 2)


def _appetite(device: Device, dtype: str) -> float:
    """Return the operand bytes that a unit's multipliers need per clock."""
    return device.flops(dtype) * element_bytes(dtype) / (device.units * device.clock_hz)


# Of the devices on which `ramp` was fitted.
_APPETITE = {
    "nvidia": _appetite(DEVICES["h100"], "bfloat16"),
    "amd": _appetite(DEVICES["mi300x"], "bfloat16"),
}


def _attention(kernel: Kernel, device: Device, rates: Rates) -> float:
    rows, t, s, d = kernel.sizes
    backward = kernel.kind.startswith("attention_bwd")
    share = rates.attention * device.sustained * (_BACKWARD_SHARE if backward else 1.0)
    if kernel.kind.endswith("_efficient"):
        share *= 0.6
    hopper = kernel.kind.endswith("_hopper") and device.capability[0] == 9
    if device.vendor == "nvidia" and device.capability >= _OLD_INSTRUCTIONS_FROM and not hopper:
        share *= _OLD_INSTRUCTIONS
    share *= min(1.0, d / 128) ** 0.35
    # Work is split into blocks of 128 x 128 scores; a causal mask halves it, down to blocks on the diagonal.
    products = 5 if backward else 2
    full = products * 2.0 * rows * t * s * d
    density = kernel.flops / full if full else 1.0
    q_blocks, k_blocks = math.ceil(t / 128), math.ceil(s / 128)
    # and every block of queries is loaded, scaled and stored around its loop: as long as two of its steps.
    blocks = q_blocks * k_blocks * density + (2.5 if density < 1 else 2.0) * q_blocks
    work = products * 2.0 * rows * blocks * 128 * 128 * d
    groups = rows * q_blocks
    filled = groups / (math.ceil(groups / device.units) * device.units) if groups < 4 * device.units else 1.0
    compute = work / (device.flops(kernel.dtype) * share * max(filled, 0.05))
    memory = kernel.nbytes / (device.hbm * rates.stream)
    return (_start_us(device, rates) + 3 * rates.wait_us) * 1e-6 + _joined((compute, memory))


@dataclass(frozen=True)
class HostCosts:
    """Microseconds of the host thread: an assumption, not a measurement of the user's machine.

    call: a call from Python that launches a kernel; backward: the same from autograd's C++ loop; view: a call
    that launches nothing; launch: each further kernel of a call; wait: the cost of a sync besides the wait.
    """

    call_us: float = 10.0
    backward_us: float = 5.0
    view_us: float = 2.0
    launch_us: float = 2.0
    wait_us: float = 12.0

    @classmethod
    def of(cls, call_us: float | None) -> HostCosts:
        """Return the default, scaled to another cost per launching call."""
        default = cls()
        if call_us is None:
            return default
        scale = call_us / default.call_us
        return cls(call_us, default.backward_us * scale, default.view_us * scale, 2.0 * scale, 12.0 * scale)


class Clock:
    """Host and device clocks, in seconds: the host runs ahead until a sync.

    A kernel starts when the host has launched it and its stream has finished what came before (`Streams`).
    The launch queue holds 1,022 entries; a full queue blocks the host. exposed: seconds in which the default
    stream is idle and waits for another stream or a collective.
    """

    QUEUE = 1022

    def __init__(self, device: Device, host_us: float | None = None, costs: HostCosts | None = None):
        self.target, self.costs = device, costs or HostCosts.of(host_us)
        self.rates = RATES[device.vendor]
        self.streams = Streams(_start_us(device, self.rates) * 1e-6)
        self.host = self.busy = self.waited = self.idle = self.exposed = 0.0
        self.kernels = self.calls = self.waits = 0
        self.classes: dict[str, float] = {}
        self._queue: deque[float] = deque()
        self._known: dict[Kernel, float] = {}
        # Where each kernel ran, for a timeline: (kind, name, stream, start, end).
        self.trace: list[tuple[str, str, int, float, float]] | None = None

    @property
    def device(self) -> float:
        return self.streams.end_of_all()

    def stream_end(self, stream: int) -> float:
        return self.streams.end(stream)

    def price(self, kernel: Kernel) -> float:
        known = self._known.get(kernel)
        if known is None:
            known = self._known[kernel] = seconds(kernel, self.target, self.rates)
        return known

    def play(self, event: Event) -> None:
        if isinstance(event, Launch):
            self._launch(event)
        elif isinstance(event, Extrapolated):
            self._model_call(event)
        elif isinstance(event, HostWait):
            self._join(self.streams.end_of(event.mark) if event.mark else self.device)
            self.waits += event.counts
        elif isinstance(event, StreamMark):
            self.streams.mark(event.mark, event.stream)
        elif isinstance(event, StreamWait):
            idle = self.streams.wait(event.mark, event.stream, self.host)
            self.exposed += idle if event.stream == 0 else 0.0

    def _join(self, end: float) -> None:
        """Block the host until this time."""
        self.waited += max(0.0, end - self.host)
        self.host = max(self.host, end) + self.costs.wait_us * 1e-6
        while self._queue and self._queue[0] <= end:
            self._queue.popleft()

    def _launch(self, event: Launch) -> None:
        costs, stream = self.costs, event.stream
        first = costs.backward_us if event.phase == "backward" else costs.call_us
        self.host += 1e-6 * (first if event.kernels else costs.view_us)
        self.calls += 1
        further = False
        for kernel in event.kernels:
            time = self.price(kernel)
            self.classes[kernel.kind] = self.classes.get(kernel.kind, 0.0) + time
            if kernel.kind == "collective":
                self._transfer(event, kernel, time)
                continue
            self.busy += time
            self.kernels += kernel.launches
            each, on_units = time / kernel.launches, kernel.kind not in ("h2d", "d2h")
            for _ in range(kernel.launches):
                if further:
                    self.host += costs.launch_us * 1e-6
                further = event.name != GRAPH_REPLAY
                if stream == 0:
                    self.idle += max(0.0, self.host - self.streams.end())
                end = self.streams.run(stream, each, self.host, on_units=on_units)
                if self.trace is not None:
                    self.trace.append((kernel.kind, kernel.name, stream, end - each, end))
                self._queue.append(end)
                if len(self._queue) > self.QUEUE:
                    self.host = max(self.host, self._queue.popleft())

    def _transfer(self, event: Launch, kernel: Kernel, time: float) -> None:
        """Use both directions of a link at once: sends and receives do not wait for each other."""
        link = (kernel.name if kernel.name in ("send", "receive") else "", kernel.sizes)
        self.streams.transfer(link, time, event.stream, self.host, event.mark)
        if self.trace is not None:
            end = self.streams.end_of(event.mark)
            self.trace.append((kernel.kind, kernel.name, event.stream, end - time, end))
        if not event.mark:  # inside a CUDA graph: the kernels that follow read the result
            self.exposed += self.streams.wait(0, event.stream, self.host)

    def _model_call(self, event: Extrapolated) -> None:
        """Play many launches in a row: they end with the later of the host's calls and the device's work."""
        costs, busy = self.costs, 0.0
        for _, kernel, times in event.parts:
            time = times * self.price(kernel)
            self.classes[kernel.kind] = self.classes.get(kernel.kind, 0.0) + time
            busy += time
        further = event.launches - event.calls
        spent = event.calls * costs.call_us + event.views * costs.view_us + further * costs.launch_us
        began = max(self.streams.end(), self.host)
        self.host += spent * 1e-6
        end = self.streams.run(0, max(busy, self.host - began), began)
        if self.trace is not None:
            self.trace.append(("model call", "", 0, began, end))
        # If the device is far behind, this call's launches fill the queue.
        ahead = busy * min(1.0, self.QUEUE / max(1, event.launches))
        self.host = max(self.host, end - ahead)
        self._queue.clear()
        self.busy += busy
        self.kernels += event.launches
        self.calls += event.calls + event.views

    @property
    def now(self) -> float:
        """Return the later of the two clocks."""
        return max(self.host, self.device)


@dataclass
class Timing:
    """One step. step_s: from the end of the previous step to the end of this one, on the later clock.

    device_s: kernels alone, host_s: calls alone (an infinitely fast device), link_s: collectives alone,
    exposed_s: time that the default stream waits for collectives and for other streams.
    classes: device seconds by kind of kernel; interval_s: expected to contain 80% of steps.
    flops: FLOPs of the step by part; the model's are the numerator of MFU (`leanstep.flops`).
    """

    step_s: float
    device_s: float
    host_s: float
    link_s: float
    exposed_s: float
    kernels: int
    calls: int
    waits: int
    flops: StepFlops = field(default_factory=StepFlops)
    classes: dict[str, float] = field(default_factory=dict)
    interval_s: tuple[float, float] = (0.0, 0.0)
    bound_by: str = "device"
    is_compiled: bool = False

    def mfu(self, device: Device) -> float:
        """Return the model's FLOPs as a share of the device's peak, each at the peak of its operand type."""
        return self.flops.seconds_at(device.flops) / self.step_s if self.step_s > 0 else 0.0


def _by_part(timing: Timing) -> tuple[Mapping[str, int], ...]:
    flops = timing.flops
    return flops.forward, flops.backward, flops.recomputed, flops.optimizer


_ADDED = ("step_s", "device_s", "host_s", "link_s", "exposed_s", "kernels", "calls", "waits")


def time_steps(
    events: Iterable[Event], ends: Iterable[int], device: Device, costs: HostCosts | None = None
) -> list[Timing]:
    """Replay `events`, split them at the indices `ends` (ascending) and return one Timing per step.

    The first Timing includes all events before its end; a caller that needs a steady step uses the last.
    """
    clock, alone = Clock(device, costs=costs), Clock(device, costs=costs)
    alone._known = _Nothing()
    timings: list[Timing] = []
    stops = deque(ends)
    before, host_before = (0.0, 0.0, 0.0, 0.0, 0, 0, 0), 0.0
    classes_before: dict[str, float] = {}
    products: Counter[tuple[str, str]] = Counter()
    is_compiled = False
    for index, event in enumerate(events):
        clock.play(event)
        alone.play(event)
        is_compiled |= isinstance(event, Launch) and event.region > 0
        if isinstance(event, Launch | Extrapolated):
            for product in event.products:
                products[product.part, product.dtype] += product.flops
        while stops and index + 1 >= stops[0]:  # two ends at one event: an empty step
            stops.popleft()
            link = clock.classes.get("collective", 0.0)
            after = (clock.now, clock.busy, link, clock.exposed, clock.kernels, clock.calls, clock.waits)
            step = [b - a for a, b in zip(before, after, strict=True)]
            classes = {k: v - classes_before.get(k, 0.0) for k, v in clock.classes.items()}
            timing = Timing(
                step_s=step[0],
                device_s=step[1],
                host_s=alone.host - host_before,
                link_s=step[2],
                exposed_s=step[3],
                kernels=int(step[4]),
                calls=int(step[5]),
                waits=int(step[6]),
                flops=StepFlops.of(products),
                classes={k: v for k, v in classes.items() if v > 0},
                is_compiled=is_compiled,
            )
            is_compiled = False
            timings.append(_judged(timing, device))
            before, host_before, classes_before = after, alone.host, dict(clock.classes)
            products.clear()
    return timings


def joined(timings: Sequence[Timing], device: Device) -> Timing:
    """Add up the parts of one step."""
    if len(timings) == 1:
        return timings[0]
    whole = Timing(0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0)
    for part in timings:
        for name in _ADDED:
            setattr(whole, name, getattr(whole, name) + getattr(part, name))
        whole.flops = StepFlops(
            *(
                {**a, **{k: a.get(k, 0) + n for k, n in b.items()}}
                for a, b in zip(_by_part(whole), _by_part(part), strict=True)
            )
        )
        for kind, time in part.classes.items():
            whole.classes[kind] = whole.classes.get(kind, 0.0) + time
        whole.is_compiled |= part.is_compiled
    return _judged(whole, device)


class _Nothing(dict[Kernel, float]):
    """Kernel times of a device that takes no time."""

    def get(self, key: Kernel, default: object = None) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 0.0


def _judged(timing: Timing, device: Device) -> Timing:
    """Set which clock bounds the step, and its interval."""
    limits = {"device": timing.device_s, "host": timing.host_s, "link": timing.link_s}
    timing.bound_by = max(limits, key=lambda name: limits[name])
    if timing.step_s > 1.15 * max(limits.values()):
        waits_for_link = timing.exposed_s > 0.5 * (timing.step_s - max(limits.values()))
        timing.bound_by = "link" if waits_for_link else "syncs" if timing.waits else timing.bound_by
    kind = _class_of(timing, device)
    spread = math.log(BLIND_WIDTHS.get((device.key, kind), WIDTHS[kind]))
    if timing.bound_by in ("host", "syncs"):
        spread = math.hypot(spread, math.log(WIDTHS["host"]))
    factor = math.exp(spread)
    timing.interval_s = (timing.step_s / factor, timing.step_s * factor)
    return timing


def _class_of(timing: Timing, device: Device) -> str:
    """Return the class of published figures that a step belongs to: a key of `WIDTHS`."""
    busy = max(timing.device_s, 1e-12)
    if device.vendor == "amd":
        return "amd"
    if timing.step_s < _SHORT_S:
        return "short kernels"
    if timing.classes.get("conv", 0.0) > _MOSTLY * busy:
        return "convolutions"
    if timing.is_compiled:
        return "compiled"
    return "eager" if timing.classes.get("gemm", 0.0) > _MOSTLY * busy else "kernels"
