"""What a rehearsal writes down: the records that the tape fills and the time model, replays and reports read.

No torch here: a recording is plain data, pickled from the process of the rehearsal to the one that reports.

`Recording.events` is one list in program order. A replay of memory looks at `Alloc` and `Free`, a replay of
time at `Launch` and `HostWait`; both cut it into steps at `Recording.steps`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from leanstep.script.lines import Line
from leanstep.script.marks import Mark

# The caching allocator hands out multiples of this.
ROUNDING_BYTES = 512

# The name of a launch that is a whole CUDA graph: one call of the host for all of its kernels.
GRAPH_REPLAY = "cudaGraphLaunch"
OOM_MODES = ("auto", "raise", "report")
KINDS = (
    "gemm",
    "conv",
    "attention",
    "attention_bwd",
    "attention_efficient",
    "attention_bwd_efficient",
    "pointwise",
    "cast",
    "broadcast",
    "strided",
    "softmax",
    "norm",
    "batch_norm",
    "reduce",
    "one_warp",
    "gather",
    "scatter",
    "fill",
    "multi",
    "triton",
    "h2d",
    "d2h",
    "collective",
)


def round_up(nbytes: int) -> int:
    """What the allocator hands out for so many bytes."""
    return -(-nbytes // ROUNDING_BYTES) * ROUNDING_BYTES


class Kernel(NamedTuple):
    """One kernel (or `launches` equal ones) as the device sees it; knows no device. Hashable: a cache key.

    kind: one of KINDS.
    nbytes: read and written in all.
    dtype: "bfloat16", "float32", ...; "tf32" for fp32 products that may use TF32; "float8" for any fp8.
    sizes: gemm, conv: (batch, m, n, k); attention: (batch * heads, T, S, D); softmax: (rows, row length);
        norm, batch_norm: (blocks, elements that a block walks one after the other); one_warp: (rows,), a sum
        that a single warp forms; collective: (ranks, distance between neighbours in global ranks);
        else ().
    alignment: bytes (16, 8, 4 or 2) that divide every leading dimension of a product, every row of a softmax,
        norm or gather; pointwise kinds: every row of the operands.
    name: of a Triton kernel or a collective ("all_reduce", "all_gather", "reduce_scatter", "broadcast",
        "all_to_all", "send", "receive"), else "".
    elements: of a kernel that computes an address for each of them (broadcast, strided, cast, gather, ...):
        it may be bound by instructions, not by bytes. 0: vectorised.
    repeated: those of `flops` that a forward has done before: the scores of an attention backward.
    """

    kind: str
    nbytes: float
    flops: float = 0.0
    dtype: str = "float32"
    sizes: tuple[int, ...] = ()
    launches: int = 1
    alignment: int = 16
    name: str = ""
    elements: float = 0.0
    repeated: float = 0.0


class Product(NamedTuple):
    """FLOPs of a call in one part of the step ("forward", "backward", "recompute", "optimizer")."""

    part: str
    dtype: str
    flops: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One call below autograd. `kernels` may be empty: a view, an empty, metadata; they cost host time only.

    reads, writes: storage ids (keys of `Recording.storages`), one for each tensor.
    traffic: bytes of each read, then of each write; as long as reads + writes.
    region: number of the compiled region it belongs to (`Recording.regions`), 0 when eager.
    products: what it multiplies, counted by `leanstep.flops`.
    stream: 0 is the default stream. mark: of a collective, which ends on a stream of its own: what waits for
        it names this number; else 0.
    """

    name: str
    kernels: tuple[Kernel, ...]
    line: Line | None
    phase: str
    step: int
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    traffic: tuple[int, ...] = ()
    region: int = 0
    products: tuple[Product, ...] = ()
    stream: int = 0
    mark: int = 0


@dataclass(frozen=True, slots=True)
class StreamMark:
    """`Event.record`: a number for the end of what was launched on a stream so far."""

    mark: int
    stream: int


@dataclass(frozen=True, slots=True)
class StreamWait:
    """What is launched on a stream from here on starts after a mark."""

    mark: int
    stream: int


@dataclass(frozen=True, slots=True)
class Stall:
    """The default stream waits for other ranks: `share` of the time since a mark, again."""

    mark: int
    share: float


@dataclass(frozen=True, slots=True)
class Extrapolated:
    """A model call that was not run: its kernels follow from recorded calls (`answers/repeated_calls.py`).

    parts: (line, kernel, how often). calls: those that launch; views: those that do not; launches: kernels.
    """

    parts: tuple[tuple[Line | None, Kernel, int], ...]
    calls: int
    views: int
    launches: int
    products: tuple[Product, ...] = ()
    line: Line | None = None
    phase: str = "forward"
    step: int = 0

    def at(self, line: Line | None, phase: str, step: int) -> Extrapolated:
        """The same call from another place."""
        return replace(self, line=line, phase=phase, step=step)


@dataclass(frozen=True, slots=True)
class HostWait:
    """The host waits until the device has done all that was launched, or what was launched before a mark.

    kind: "item", "equal", "to host", "to device", "to device, pageable", "boolean index", "nonzero", ...,
        "synchronize".
    counts: False for the backward of a boolean index: it takes time, but the sync is that of the index.
    mark: 0 waits for all streams.
    """

    kind: str
    line: Line | None
    phase: str
    step: int
    counts: bool = True
    mark: int = 0


@dataclass(frozen=True, slots=True)
class Alloc:
    """A device allocation. All else about it: `Recording.storages[storage]`."""

    storage: int
    nbytes: int  # rounded up to ROUNDING_BYTES
    line: Line | None
    phase: str
    step: int


@dataclass(frozen=True, slots=True)
class Free:
    """The end of a device allocation."""

    storage: int
    step: int


Event = Launch | StreamMark | StreamWait | Stall | Extrapolated | HostWait | Alloc | Free


@dataclass(slots=True)
class Storage:
    """A storage of the device; shape and dtype are those of the tensor that brought it.

    category: parameter, gradient, optimizer state, input, registers, library (cuBLAS workspace),
        communication (buckets, gathered shards), activation (allocated in forward, alive when backward
        begins), buffer (none of these, alive for more than a step), or temporary.
    """

    number: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    line: Line | None
    phase: str
    step: int
    category: str = "temporary"


class Step(NamedTuple):
    """events[first:last] belong to it. Steps count from 0; what lies before step 0's start is the set-up."""

    number: int
    first: int
    last: int


class Region(NamedTuple):
    """A region that torch.compile captured.

    padded: whether Inductor may pad its products (shape_padding). pipelined: whether it overlaps them with
    collectives (_micro_pipeline_tp).
    """

    number: int
    name: str
    line: Line | None
    calls: int
    padded: bool = True
    pipelined: bool = False


class Assumed(NamedTuple):
    """A value of the device that the host asked for and nobody knows."""

    line: Line | None
    kind: str
    count: int
    value: str


class Branch(NamedTuple):
    """A branch or comparison of the program that rests on an assumed value.

    value: what was assumed of a condition, or the outcome of a comparison.
    decides_update: an update happens on one of its ways and not on the other.
    """

    line: Line
    code: str
    value: str
    count: int
    decides_update: bool


class Refusal(NamedTuple):
    """Why the script could not go on, in one sentence."""

    line: Line | None
    reason: str


@dataclass(frozen=True)
class Request:
    """What to rehearse.

    target: path of a script, a module's name (module=True), or the name of a registered case (case=True).
    device: key of `devices.DEVICES`. machine: key of `links.MACHINES` that the device is in, or None.
    ranks, rank: world size; which rank of it this process is.
    received: objects, pickled, that other ranks send to this one: shapes of a pipeline stage's inputs.
    clock: time.time and time.perf_counter show the predicted host clock.
    compiled: capture torch.compile regions; False runs them eagerly.
    settings, implementation: of a case.
    changes: names of `what_if.CHANGES` to apply to the program before it starts.
    host_us: host microseconds for a call that launches; None: the time model's default.
    oom: what a full device does: "raise" torch.OutOfMemoryError, "report" it only, "auto": raise where the
        program catches it.
    patience_s: seconds without an update after which the program is left.
    every_call: run each model call; False: calls without gradients that repeat are extrapolated from a few.
    """

    target: str
    args: tuple[str, ...] = ()
    module: bool = False
    case: bool = False
    device: str = "h100"
    machine: str | None = None
    steps: int = 3
    ranks: int = 1
    rank: int = 0
    received: tuple[bytes, ...] = ()
    clock: bool = False
    compiled: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)
    implementation: str | None = None
    changes: tuple[str, ...] = ()
    host_us: float | None = None
    oom: str = "auto"
    patience_s: float = 600.0
    every_call: bool = False

    @property
    def runs_leanstep(self) -> bool:
        """Whether the program is leanstep's own: a case, or a command run as a module."""
        return self.case or (self.module and self.target.partition(".")[0] == "leanstep")


@dataclass
class Recording:
    """One rehearsal. `steps` holds the steps that ended; with fewer than two there is no step time to report.

    iterations: rollouts that the steps followed, 0 where none was seen.
    phases: where rollouts, scoring and updates begin, as numbers of events.
    model_calls: calls of models without gradients that were recorded, and those that were extrapolated.
    peak_bytes: most live bytes (rounded), over all events: what a replay of Alloc and Free finds, too.
    notes: sentence -> how often.
    ended: "steps" (all that were asked for), "early" (the script ended before), "refused".
    host_s: seconds of this process spent in the script, all in.
    sent: objects for other ranks: (rank, pickled).
    """

    request: Request
    torch: str
    events: list[Event] = field(default_factory=list)
    storages: dict[int, Storage] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    iterations: int = 0
    phases: list[Mark] = field(default_factory=list)
    model_calls: tuple[int, int] = (0, 0)
    regions: dict[int, Region] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    assumed: list[Assumed] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    refused: Refusal | None = None
    ended: str = "early"
    peak_bytes: int = 0
    host_s: float = 0.0
    sent: list[tuple[int, bytes]] = field(default_factory=list)


class LiveClock(Protocol):
    """The two clocks while the script runs, in seconds: `--clock` and torch.cuda.Event read them."""

    host: float

    @property
    def device(self) -> float:
        """When all streams are through with what was launched."""
        ...

    def stream_end(self, stream: int) -> float:
        """When one stream is."""
        ...

    def play(self, event: Event) -> None:
        """Take one event, in program order."""
        ...
