"""The effect of one change: replays of a recording without syncs, fused or resized, and reruns with a change.

A replay keeps the recording and changes the events that are played; it is cheap. A rerun changes the program
(`CHANGES`) and simulates it again: another head, another optimizer, checkpointed blocks, a smaller batch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from leanstep.rehearse.async_products import overlapped
from leanstep.rehearse.cuda_allocator import Replay, place, replay
from leanstep.rehearse.devices import Device
from leanstep.rehearse.events import (
    Alloc,
    Event,
    Extrapolated,
    Free,
    HostWait,
    Kernel,
    Launch,
    Recording,
    Region,
    Request,
    Stall,
    Step,
    Storage,
    StreamMark,
    StreamWait,
)
from leanstep.rehearse.time_model import Clock, HostCosts, Timing, element_bytes, time_steps

# Kernels that a compiler merges into their neighbours.
_MERGED = frozenset(
    ("pointwise", "strided", "broadcast", "cast", "fill", "reduce", "softmax", "norm", "gather")
)
# Calls that a compiler includes in its fused kernels, whatever kernel torch itself uses for them.
_MERGED_CALLS = frozenset(("select_scatter", "slice_scatter", "cat", "constant_pad_nd"))
Transform = Callable[[Sequence[Event]], Sequence[Event]]


def last_step(
    recording: Recording,
    device: Device,
    transform: Transform | None = None,
    costs: HostCosts | None = None,
    compiled: bool = True,
) -> Timing | None:
    """Return the last step's time on `device`, after the previous step filled the queue; None without steps.

    transform: changes the events of a step before they are played. compiled: regions that torch.compile
    captured are fused; False plays their calls one by one.
    """
    played, ends = _last_steps(recording, transform, compiled)
    if not played:
        return None
    return time_steps(played, ends, device, costs or HostCosts.of(recording.request.host_us))[-1]


def last_step_seconds(recording: Recording, device: Device, transform: Transform) -> float | None:
    """Return only `last_step(...).step_s`, at low cost: a long iteration is replayed once per change."""
    played, ends = _last_steps(recording, transform)
    if not played:
        return None
    clock = Clock(device, costs=HostCosts.of(recording.request.host_us))
    began_at = ends[0] if len(ends) > 1 else 0
    for event in played[:began_at]:
        clock.play(event)
    began = clock.now
    for event in played[began_at:]:
        clock.play(event)
    return clock.now - began


def _last_steps(
    recording: Recording, transform: Transform | None, compiled: bool = True
) -> tuple[list[Event], list[int]]:
    """Return the events of the last two steps that take time, and where each step ends."""
    played: list[Event] = []
    ends = []
    for step in recording.steps[-2:]:
        part = step_events(recording, step, compiled)
        part = transform(part) if transform is not None else part
        played += [event for event in part if not isinstance(event, Alloc | Free)]
        ends.append(len(played))
    return played, ends


def step_events(recording: Recording, step: Step, compiled: bool = True) -> Sequence[Event]:
    """Return the events of a step to play: captured regions fused, or all calls one by one."""
    events = recording.events[step.first : step.last]
    return fused(events, recording.regions) if compiled and recording.regions else events


def without_waits(line: str | None = None) -> Transform:
    """Drop host waits: those of one line, or all of them."""

    def transform(events: Sequence[Event]) -> Sequence[Event]:
        return [
            e for e in events if not (isinstance(e, HostWait) and (line is None or place(e.line) == line))
        ]

    return transform


def fused(
    events: Sequence[Event], regions: Mapping[int, Region] | None = None, outlives: Iterable[int] = ()
) -> list[Event]:
    """Fuse each run of elementwise and row kernels between products into one kernel.

    A fused run reads its inputs from outside and writes only what is read later; products are padded to 16
    bytes. This estimates what a compiler can reach; it does not model one. regions: fuse only inside these
    regions, which torch.compile captured. outlives: storages that are read after these events.
    """
    last_read = dict.fromkeys(outlives, len(events))
    older: dict[int, int] = {}  # storage -> where it was first read, if that was before it was written
    written: set[int] = set()
    for index, event in enumerate(events):
        if isinstance(event, Launch):
            for storage in event.reads:
                last_read[storage] = max(index, last_read.get(storage, 0))
                if storage not in written:
                    older.setdefault(storage, index)
            written.update(event.writes)
    out: list[Event] = []
    run: list[tuple[int, Launch]] = []

    def flush() -> None:
        if len(run) > 1:
            out.append(_one_kernel(run, last_read, older))
        else:
            out.extend(event for _, event in run)
        run.clear()

    for index, event in enumerate(events):
        if not isinstance(event, Launch):
            if isinstance(event, HostWait | Extrapolated | Stall | StreamMark | StreamWait):
                flush()
            out.append(event)
            continue
        if regions is not None and not event.region:
            flush()
            out.append(event)
            continue
        if not event.kernels:
            continue  # a view costs nothing in compiled code
        if run and run[-1][1].region != event.region:
            flush()
        if event.name in _MERGED_CALLS or all(kernel.kind in _MERGED for kernel in event.kernels):
            run.append((index, event))
            continue
        flush()
        if regions is None or event.region not in regions or regions[event.region].padded:
            event = replace(event, kernels=tuple(part for k in event.kernels for part in _padded(k)))
        out.append(event)
    flush()
    return overlapped(out, regions or {})


def _padded(kernel: Kernel) -> tuple[Kernel, ...]:
    """Pad the sizes of a product to 16 bytes: unaligned operands are copied first."""
    if kernel.kind != "gemm" or kernel.alignment >= 16:
        return (kernel,)
    batch, m, n, k = kernel.sizes
    width = element_bytes(kernel.dtype)
    odd_m, odd_n, odd_k = (size * width % 16 != 0 and size > 1 for size in (m, n, k))
    copied = 2.0 * batch * width * ((odd_m or odd_k) * m * k + (odd_n or odd_k) * k * n)
    aligned = kernel._replace(alignment=16)
    return (Kernel("pointwise", copied, 0.0, kernel.dtype), aligned) if copied else (aligned,)


def _one_kernel(
    run: Sequence[tuple[int, Launch]], last_read: dict[int, int], older: dict[int, int]
) -> Launch:
    end = run[-1][0]
    inside: set[int] = set()
    moved = 0.0
    for _, event in run:
        traffic = list(event.traffic)
        if event.kernels[0].kind == "gather" and event.writes:  # only the gathered rows, not the whole table
            traffic[0] = min(traffic[0], traffic[len(event.reads)])
        reads = zip(event.reads, traffic, strict=False)
        moved += sum(nbytes for storage, nbytes in reads if storage not in inside)
        inside.update(event.writes)
    written: dict[int, int] = {}
    for _, event in run:
        for storage, nbytes in zip(event.writes, event.traffic[len(event.reads) :], strict=False):
            # Read later, or updated in place: weights, state, running sums.
            if last_read.get(storage, -1) > end or storage in older:
                written[storage] = max(nbytes, written.get(storage, 0))
    # The run is attributed to the line of the call that moves the most bytes.
    heaviest = max((event for _, event in run), key=lambda event: sum(event.traffic))
    kernel = Kernel("pointwise", moved + sum(written.values()))
    products = tuple(product for _, event in run for product in event.products)
    return replace(
        heaviest, name="fused", kernels=(kernel,), reads=(), writes=(), traffic=(), products=products
    )


def fused_optimizer(storages: dict[int, Storage]) -> Transform:
    """Replace the optimizer's calls by one pass: read and write parameters and state, read gradients."""

    def transform(events: Sequence[Event]) -> Sequence[Event]:
        touched: dict[int, int] = {}
        first: Launch | None = None
        out: list[Event] = []
        for event in events:
            if not (isinstance(event, Launch) and event.phase == "optimizer") or any(
                kernel.kind in ("gemm", "collective", "h2d", "d2h") for kernel in event.kernels
            ):
                out.append(event)
                continue
            first = first or event
            for storage in (*event.reads, *event.writes):
                category = storages[storage].category
                if category in ("parameter", "optimizer state"):
                    touched[storage] = 2 * storages[storage].nbytes
                elif category == "gradient":
                    touched[storage] = storages[storage].nbytes
        if first is None:
            return events
        launches = max(1, -(-len(touched) // 120))
        kernel = Kernel("multi", float(sum(touched.values())), launches=launches)
        where = next((i for i, e in enumerate(out) if isinstance(e, Launch) and e.phase == "optimizer"), None)
        one = replace(
            first, name="fused optimizer", kernels=(kernel,), reads=(), writes=(), traffic=(), products=()
        )
        out.insert(len(out) if where is None else where, one)
        return out

    return transform


@dataclass(frozen=True)
class SyncGain:
    """Syncs of one line, and the milliseconds per step that they cost."""

    line: str
    kind: str
    count: int
    saved_ms: float


def sync_gains(recording: Recording, device: Device, now: Timing | None, at_most: int = 8) -> list[SyncGain]:
    """Return each line that waits in the last step, and the time saved if only that line no longer waits.

    now: the last step without changes.
    """
    if now is None:
        return []
    step = recording.steps[-1]
    counts: Counter[tuple[str, str]] = Counter()
    for event in recording.events[step.first : step.last]:
        if isinstance(event, HostWait) and event.counts:
            counts[place(event.line), event.kind] += 1
    gains = []
    for (line, kind), count in counts.most_common(at_most):
        then = last_step_seconds(recording, device, without_waits(line))
        saved = (now.step_s - then) * 1e3 if then is not None else 0.0
        gains.append(SyncGain(line, kind, count, max(0.0, saved)))
    return sorted(gains, key=lambda gain: -gain.saved_ms)


# Memory replays --------------------------------------------------------------------------------------


def resized_replay(recording: Recording, capacity: int | None, change: str) -> Replay:
    """Replay memory with a change of sizes only: "bf16_state", "zero1:N" (state over N ranks), "fsdp:N"."""
    name, _, value = change.partition(":")
    ranks = int(value or 1)
    largest = max((s.nbytes for s in recording.storages.values() if s.category == "parameter"), default=0)

    def resize(storage: Storage) -> int:
        size = storage.nbytes
        if name == "bf16_state" and storage.category == "optimizer state" and storage.dtype == "float32":
            return size // 2
        if name == "zero1" and storage.category == "optimizer state":
            return -(-size // ranks)
        if name == "fsdp" and storage.category in ("optimizer state", "gradient", "parameter"):
            return -(-size // ranks)
        return size

    got = replay(recording.events, recording.storages, capacity, resize)
    if name == "fsdp":  # the largest parameter and its gradient are gathered temporarily
        got = got._replace(allocated=got.allocated + 2 * largest, reserved=got.reserved + 2 * largest)
    return got


# Reruns ----------------------------------------------------------------------------------------------

# `answers/changes.py` applies these in the process of the rehearsal.
CHANGES = {
    "lean_head": "LM head and cross-entropy by leanstep.logprob (without full logits)",
    "checkpoint": "activation checkpointing of the repeated blocks",
    "micro_batch": "half the micro-batch",
    "normuon": "NorMuon for the matrices",
    "bf16_state": "optimizer state in bf16",
    "zero1": "optimizer state sharded over ranks",
    "fsdp": "parameters, gradients and state sharded over ranks",
    "default_device": "tensors are created on the device unless the program names another",
}
_BATCH = re.compile(r"^(--?[\w-]*batch[\w-]*(?:=|$))(\d*)$")


def changed_request(request: Request, change: str) -> Request | None:
    """Return the request with one more change; None if the program does not allow it."""
    name, _, value = change.partition(":")
    if name != "micro_batch":
        return replace(request, changes=(*request.changes, change))
    divisor = int(value or 2)
    args = list(request.args)
    for i, arg in enumerate(args):
        got = _BATCH.match(arg)
        if got is None:
            continue
        if got.group(2):
            args[i] = got.group(1) + str(max(1, int(got.group(2)) // divisor))
            return replace(request, args=tuple(args))
        if i + 1 < len(args) and args[i + 1].isdigit():
            args[i + 1] = str(max(1, int(args[i + 1]) // divisor))
            return replace(request, args=tuple(args))
    return replace(request, changes=(*request.changes, f"micro_batch:{divisor}"))
