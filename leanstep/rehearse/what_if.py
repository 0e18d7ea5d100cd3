"""The effect of one change: replays of a recording without syncs, fused or resized.

A replay keeps the recording and changes the events that are played.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from leanstep.rehearse.async_products import overlapped
from leanstep.rehearse.cuda_allocator import Replay, Settings, place, replay
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
    Step,
    Storage,
    StreamMark,
    StreamWait,
)
from leanstep.rehearse.time_model import Clock, HostCosts, Timing, element_bytes, joined, time_steps
from leanstep.tape.marks import ROLLOUT, SCORING, spans

# Kernels that a compiler merges into their neighbours.
_MERGED = frozenset(
    ("pointwise", "strided", "broadcast", "cast", "fill", "reduce", "softmax", "norm", "gather")
)
# Calls that a compiler includes in its fused kernels, whatever kernel torch itself uses for them.
_MERGED_CALLS = frozenset(("select_scatter", "slice_scatter", "cat", "constant_pad_nd"))
Transform = Callable[[Sequence[Event]], Sequence[Event]]
# Steps among which the median is taken: the last ones.
_MOST_TIMED = 9
# Lines whose syncs are replayed one by one: those with the most.
_MOST_SYNCS = 8


def timed_step(recording: Recording, device: Device) -> Step | None:
    """Return the step whose update takes the median time; None without steps.

    The first step, which also sets up the program, counts only if there is no other. Updates that search for
    a batch that fits, or warm up a graph, precede the requested steps and do not count.
    """
    most = min(_MOST_TIMED, recording.request.steps)
    steps = recording.steps[1:][-most:] or recording.steps
    if len(steps) < 2:
        return steps[-1] if steps else None
    times = {step: update_seconds(recording, device, step=step) or 0.0 for step in steps}
    return sorted(steps, key=lambda step: times[step])[(len(steps) - 1) // 2]


def update_step(
    recording: Recording,
    device: Device,
    compiled: bool = True,
    step: Step | None = None,
) -> Timing | None:
    """Return the time of a step's update on `device`, after the previous step filled the queue.

    Forwards without gradients are played but not counted (`aside_seconds`). None without steps.

    compiled: regions that torch.compile captured are fused; False plays their calls one by one.
    step: the default is `timed_step`.
    """
    timings = _timed_pieces(recording, device, compiled, step)
    return joined([timing for is_update, timing in timings if is_update], device) if timings else None


def aside_seconds(recording: Recording, device: Device, step: Step) -> float:
    """Return the seconds of a step's forwards without gradients: evaluation, scoring, rollouts."""
    timings = _timed_pieces(recording, device, True, step)
    return sum(timing.step_s for is_update, timing in timings if not is_update)


def _timed_pieces(
    recording: Recording,
    device: Device,
    compiled: bool,
    step: Step | None,
) -> list[tuple[bool, Timing]]:
    step = step or timed_step(recording, device)
    if step is None:
        return []
    played, pieces = _played(recording, step, None, compiled)
    ends = [end for _, end in pieces]
    timings = time_steps(played, ends, device, HostCosts.of(recording.request.host_us))
    own = sum(is_update is not None for is_update, _ in pieces)
    return [(bool(kind), timing) for (kind, _), timing in zip(pieces[-own:], timings[-own:], strict=True)]


def update_seconds(
    recording: Recording, device: Device, transform: Transform | None = None, step: Step | None = None
) -> float | None:
    """Return only `update_step(...).step_s`, at low cost: a long iteration is replayed once per change."""
    step = step or timed_step(recording, device)
    if step is None:
        return None
    played, pieces = _played(recording, step, transform)
    clock = Clock(device, costs=HostCosts.of(recording.request.host_us))
    at, seconds = 0, 0.0
    for is_update, end in pieces:
        began = clock.now
        for event in played[at:end]:
            clock.play(event)
        seconds += clock.now - began if is_update else 0.0
        at = end
    return seconds


def _played(
    recording: Recording, step: Step, transform: Transform | None, compiled: bool = True
) -> tuple[list[Event], list[tuple[bool | None, int]]]:
    """Return the events of a step and of the one before it, and where each piece ends.

    A piece is part of the update (True), or of the forwards without gradients (False); None marks the step
    before, which fills the queue.
    """
    played: list[Event] = []
    ends: list[tuple[bool | None, int]] = []
    for before in recording.steps:
        if before.number == step.number - 1:
            for _, piece in pieces_of(recording, before):
                part = step_events(recording, piece, compiled)
                played += _with_time(transform(part) if transform is not None else part)
            ends.append((None, len(played)))
    for is_update, piece in pieces_of(recording, step):
        part = step_events(recording, piece, compiled)
        played += _with_time(transform(part) if transform is not None else part)
        ends.append((is_update, len(played)))
    return played, ends


def _with_time(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if not isinstance(event, Alloc | Free)]


def pieces_of(recording: Recording, step: Step) -> list[tuple[bool, Step]]:
    """Split a step into the parts that belong to its update (True) and its forwards without gradients."""
    pieces: list[tuple[bool, Step]] = []
    for phase, first, last in spans(recording.phases, step.first, step.last):
        is_update = phase not in (ROLLOUT, SCORING)
        if pieces and pieces[-1][0] == is_update:
            first = pieces.pop()[1].first
        pieces.append((is_update, Step(step.number, first, last)))
    if not any(is_update for is_update, _ in pieces):  # a program that updates parameters by hand
        return [(True, step)]
    return pieces


def update_events(recording: Recording, step: Step) -> list[Event]:
    """Return the events of a step's update, captured regions fused."""
    parts = [piece for is_update, piece in pieces_of(recording, step) if is_update]
    return [event for piece in parts for event in step_events(recording, piece)]


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
            if isinstance(event, HostWait | Extrapolated | StreamMark | StreamWait):
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


def sync_gains(recording: Recording, device: Device, now: Timing | None) -> list[SyncGain]:
    """Return each line that waits in the update, and the time saved if only that line no longer waits.

    now: the step without changes.
    """
    step = timed_step(recording, device)
    if now is None or step is None:
        return []
    counts: Counter[tuple[str, str]] = Counter()
    for event in update_events(recording, step):
        if isinstance(event, HostWait) and event.counts:
            counts[place(event.line), event.kind] += 1
    gains = []
    for (line, kind), count in counts.most_common(_MOST_SYNCS):
        then = update_seconds(recording, device, without_waits(line), step)
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

    settings = Settings.read(recording.allocator, recording.torch)
    got = replay(recording.events, recording.storages, capacity, resize, settings)
    if name == "fsdp":  # the largest parameter and its gradient are gathered temporarily
        got = got._replace(allocated=got.allocated + 2 * largest, reserved=got.reserved + 2 * largest)
    return got
