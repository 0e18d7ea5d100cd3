"""The records of a rehearsal: the tape writes them; the time model, the replays and the reports read them.

This module does not import torch. A recording is plain data: the process of the rehearsal pickles it and the
reporting process reads it.

`Recording.events` is one list in program order. A memory replay reads `Alloc` and `Free`, a time replay reads
`Launch` and `HostWait`; both split the list into steps at `Recording.steps`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from leanstep.tape.lines import Line
from leanstep.tape.marks import Mark

# The caching allocator rounds sizes up to a multiple of this.
ROUNDING_BYTES = 512

# The name of a launch that is a whole CUDA graph: one host call for all of its kernels.
GRAPH_REPLAY = "cudaGraphLaunch"
OOM_MODES = ("auto", "raise", "report")
KINDS = (
    "gemm",
    "conv",
    "attention",
    "attention_bwd",
    "attention_efficient",
    "attention_bwd_efficient",
    "attention_hopper",
    "attention_bwd_hopper",
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
    """Return the bytes that the allocator reserves for a request of `nbytes`."""
    return -(-nbytes // ROUNDING_BYTES) * ROUNDING_BYTES


class Kernel(NamedTuple):
    """One kernel (or `launches` equal ones), independent of the device. Hashable: used as a cache key.

    kind: one of KINDS.
    nbytes: total bytes read and written.
    dtype: "bfloat16", "float32", ...; "tf32" for fp32 products that may use TF32; "float8" for any fp8.
    sizes: gemm, conv: (batch, m, n, k); attention: (batch * heads, T, S, D); softmax: (rows, row length);
        norm, batch_norm: (blocks, elements that a block reads in turn); one_warp: (rows,), a sum computed by
        a single warp; collective: (ranks, distance between neighbours in global ranks); else ().
    alignment: bytes (16, 8, 4 or 2) that divide every leading dimension of a product, every row of a softmax,
        norm or gather; pointwise kinds: every row of the operands.
    name: of a Triton kernel or a collective ("all_reduce", "all_gather", "reduce_scatter", "broadcast",
        "all_to_all", "send", "receive"), else "".
    elements: of a kernel that computes an address per element (broadcast, strided, cast, gather, ...):
        it may be bound by instructions, not by bytes. 0: vectorised.
    repeated: the part of `flops` that the forward already computed: the scores in an attention backward.
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
    """One call below autograd. `kernels` is empty for views, `empty` and metadata: they cost host time only.

    reads, writes: storage ids (keys of `Recording.storages`), one per tensor.
    traffic: bytes of each read, then of each write; as long as reads + writes.
    region: number of the compiled region it belongs to (`Recording.regions`), 0 when eager.
    products: its matrix products, counted by `leanstep.flops`.
    stream: 0 is the default stream. mark: the number by which waits refer to a collective, which ends on its
        own stream; 0 for other launches.
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
    """`Event.record`: a mark at the end of everything launched on a stream so far."""

    mark: int
    stream: int


@dataclass(frozen=True, slots=True)
class StreamWait:
    """Later launches on a stream start after a mark."""

    mark: int
    stream: int


@dataclass(frozen=True, slots=True)
class Extrapolated:
    """A model call that was not run; its kernels follow from recorded calls (`answers/repeats.py`).

    parts: (line, kernel, count). calls: number of calls that launch; views: of those that do not; launches:
        number of kernels.
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
        """Return the same call at another place."""
        return replace(self, line=line, phase=phase, step=step)

    def times(self, count: int) -> Extrapolated:
        """Return this many calls."""
        return replace(
            self,
            parts=tuple((line, kernel, count * times) for line, kernel, times in self.parts),
            calls=count * self.calls,
            views=count * self.views,
            launches=count * self.launches,
            products=tuple(product._replace(flops=count * product.flops) for product in self.products),
        )


@dataclass(frozen=True, slots=True)
class HostWait:
    """The host waits until the device has finished all launches, or those before a mark.

    kind: "item", "equal", "to host", "to device", "to device, pageable", "boolean index", "nonzero", ...,
        "synchronize".
    counts: False for the backward of a boolean index: it takes time, but the index already counts the sync.
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
    """A device allocation; `Recording.storages[storage]` describes it."""

    storage: int
    nbytes: int  # rounded up to ROUNDING_BYTES
    line: Line | None
    phase: str
    step: int
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Free:
    """The end of a device allocation."""

    storage: int
    step: int


Event = Launch | StreamMark | StreamWait | Extrapolated | HostWait | Alloc | Free


@dataclass(slots=True)
class Storage:
    """A device storage; shape and dtype are those of the tensor that allocated it.

    category: parameter, gradient, optimizer state, input, registers, library (cuBLAS workspace),
        communication (buckets, gathered shards), activation (allocated in forward, alive when backward
        begins), buffer (none of these, alive for more than one step), or temporary.
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
    """A step: events[first:last]. Steps count from 0; events before the start of step 0 are the set-up."""

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
    """A device value that the host read and that the rehearsal does not know."""

    line: Line | None
    kind: str
    count: int
    value: str


class Branch(NamedTuple):
    """A branch or comparison of the program that depends on an assumed value.

    value: what was assumed of a condition, or the outcome of a comparison.
    decides_update: an update happens on one of its paths and not on the other.
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

    target: path of a script, or a module's name (module=True).
    device: key of `devices.DEVICES`. machine: key of `links.MACHINES` that contains the device, or None.
    ranks: world size; the rehearsal runs rank 0.
    clock: time.time and time.perf_counter return the predicted host clock.
    compiled: capture torch.compile regions; False runs them eagerly.
    host_us: host microseconds per call that launches; None: the time model's default.
    oom: what happens when the device is full: "raise" torch.OutOfMemoryError, "report" it only, or "auto":
        raise where the program catches it.
    default_device: tensors that name no device are created on the GPU: for a program that selects none.
    every_call: run each model call; False: repeated calls without gradients are extrapolated from a few. The
        tests compare the extrapolation with it.
    """

    target: str
    args: tuple[str, ...] = ()
    module: bool = False
    device: str = "h100"
    machine: str | None = None
    steps: int = 3
    ranks: int = 1
    clock: bool = False
    compiled: bool = True
    host_us: float | None = None
    oom: str = "auto"
    default_device: bool = False
    every_call: bool = False

    @property
    def runs_leanstep(self) -> bool:
        """Whether the program is leanstep's own: a command run as a module."""
        return self.module and self.target.partition(".")[0] == "leanstep"


@dataclass
class Recording:
    """One rehearsal. `steps` holds the steps that ended; with fewer than two there is no step time to report.

    iterations: rollouts that precede the steps; 0 if there are none.
    phases: where rollouts, scoring and updates begin, as event indices.
    model_calls: number of model calls without gradients that were recorded, and that were extrapolated.
    peak_bytes: maximum of live bytes (rounded) over all events; a replay of Alloc and Free gives the same.
    allocator: text of PYTORCH_ALLOC_CONF when the device was first used.
    batches: how many batches of a DataLoader were seen, and whether their sizes vary.
    notes: sentence -> count.
    ended: "steps" (all requested steps), "early" (the script ended before), "refused".
    host_s: total seconds that this process spent in the script.
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
    allocator: str = ""
    batches: str = ""
    host_s: float = 0.0


class LiveClock(Protocol):
    """The two clocks while the script runs, in seconds: `--clock` and torch.cuda.Event read them."""

    host: float

    @property
    def device(self) -> float:
        """Return the time at which all streams have finished their launches."""
        ...

    def stream_end(self, stream: int) -> float:
        """Return the time at which one stream has finished its launches."""
        ...

    def play(self, event: Event) -> None:
        """Play one event, in program order."""
        ...
