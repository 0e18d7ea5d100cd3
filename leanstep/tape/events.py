"""What a recording is: one flat list of immutable events.

An event is one call that torch made, with every tensor replaced by its description. `recorder.py` writes
events while a script runs, `diagnose.traces` writes them from a profiler trace. Rules read them afterwards.
Nothing here knows a rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from leanstep.tape.lines import UNKNOWN, Site

# Kinds of events.
OP = "op"  # an op of torch; in a trace also an op without Python stack
VIEW = "view"  # a view of a leaf or a weight: a slice of a bank is read here
READ = "read"  # a Python call that returns values to the host and dispatches no read
MOVE = "move"  # `.to(device)` of a value: what was read of it before was on the host
SAVE = "save"  # autograd keeps a tensor for the backward
BACKWARD_CALL = "backward call"  # `loss.backward(...)`; `named` has retain_graph and create_graph
UPDATE = "update"  # an optimizer's step() begins: `args` are `Held`, `outs` its state, `named` see `ON_GPU`
# Of an update: torch's own optimizer with its default, which is a loop on a CPU and foreach on a GPU.
ON_GPU = ("foreach_on_gpu", True)
UPDATED = "updated"  # an optimizer's step() has ended: `args` are `Held` of its parameters with gradients
MODEL = "model"  # a model is called for the first time in a step: `args` are its buffers
GENERATE = "generate"  # a model call of a generation; `name`: "again" or "no context", `value`: positions
# Only in traces: the device is idle, or the host waits for a copy; `took_ns` says how long.
IDLE = "idle"
COPY = "copy"

# Phases of a step.
FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER = "forward", "backward", "recompute", "optimizer"

# Roles of a tensor, added up.
REQUIRES_GRAD, LEAF, PARAMETER = 1, 2, 4
TRAINED_LEAF = REQUIRES_GRAD | LEAF
# The first item of a row that stands for a tensor, or for a parameter of an optimizer.
TENSOR, HELD = Ellipsis, NotImplemented
# The storage of a tensor in a trace without storages: rules must not conclude anything from it.
NO_STORAGE = 0


class Layout(NamedTuple):
    """What tensors have in common: steps repeat their shapes, so there is one object per distinct layout."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    num_bytes: int


class TensorInfo(NamedTuple):
    """A tensor.

    storage: a number that is never used again, so views share it and later tensors do not.
    version: how often it was written in place; -1 if unknown.
    role: the sum of REQUIRES_GRAD, LEAF and PARAMETER (an nn.Parameter, also a frozen one).
    """

    storage: int
    offset: int
    version: int
    role: int
    layout: Layout

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.dtype

    @property
    def num_bytes(self) -> int:
        return self.layout.num_bytes

    @property
    def ndim(self) -> int:
        return len(self.layout.shape)

    def numel(self) -> int:
        return math.prod(self.layout.shape)


class Held(NamedTuple):
    """A parameter of an optimizer. `gradient`: none, zero, or live (some element is not zero)."""

    storage: int
    grad_storage: int
    gradient: str
    trains: bool
    layout: Layout


class Event(NamedTuple):
    """One call. Fields that a source cannot know have their defaults."""

    kind: str
    name: str
    # Of a built-in backward op: the line of the forward op that created its node.
    site: Site = UNKNOWN
    phase: str = FORWARD
    # Dispatched by the line itself, not by its backward.
    direct: bool = True
    # Arguments: tensors as `TensorInfo`, lists as tuples, plain values as they are, names of other types.
    args: tuple[Any, ...] = ()
    named: tuple[tuple[str, Any], ...] = ()
    outs: tuple[Any, ...] = ()
    # Sequence number: of the node that a forward op created, of the node that runs a backward op; -1: none.
    node: int = -1
    # Storage of the leaf whose gradient the op accumulates; 0: none.
    leaf: int = 0
    # Whether gradients are enabled.
    grad: bool = True
    # Frames between the line and the op: the flags of `tape.lines`.
    flags: int = 0
    # Ids of the functions that led to an op without gradients, innermost first.
    chain: tuple[int, ...] = ()
    # The kind of host read that it is (`tape.syncs`), "" for most.
    read: str = ""
    # What only the running step knows: (rows, rows of zeros) of a gradient, positions, which optimizer.
    value: Any = None
    start_ns: int = 0
    took_ns: int = 0

    @property
    def tensors(self) -> list[TensorInfo]:
        return list(flat(self.args))

    @property
    def results(self) -> list[TensorInfo]:
        return list(flat(self.outs))


def flat(values: Sequence[Any]) -> Iterator[TensorInfo]:
    """Return the tensors among values and in their lists."""
    for value in values:
        if type(value) is TensorInfo:
            yield value
        elif type(value) is tuple:
            yield from flat(value)


class StepSpan(NamedTuple):
    """One step of the tape: the events from `first` to before `last`."""

    first: int
    last: int
    has_rollout: bool = False
    # CPU time of the main thread, and the line that ended the step with an update.
    cpu_seconds: float | None = None
    update_site: Site | None = None
    # Of a trace: how long the step took.
    seconds: float | None = None


class Tape:
    """A recording.

    events: everything that was recorded, also the steps that are not judged; read them with `between`.
    dropped: how many events at the front are gone: a long recording keeps only its last steps.
    steps: the recorded steps, in order.
    freed: number of a storage -> `count` when its memory was freed; absent: still alive at the end.
    alive: the storages that are alive now, or were when the recording ended.
    held: storages of the parameters that any optimizer of the process holds.
    notes: (kind, where) -> a part of the run that the recording cannot see.
    has_storages: whether tensors have storages, versions and roles; a trace has none.
    """

    def __init__(self, has_storages: bool = True) -> None:
        self.events: list[Any] = []
        self.dropped = 0
        self.steps: list[StepSpan] = []
        self.freed: dict[int, int] = {}
        self.alive: set[int] = set()
        self.held: set[int] = set()
        self.notes: dict[tuple[str, str], str] = {}
        self.has_storages = has_storages
        # Ids of the functions that wrote a parameter outside the backward: what they call is an optimizer.
        self.writers: set[int] = set()
        # Half dtype -> its GFLOP/s on this CPU and those of float32, measured after the recording.
        self.half_rates: dict[torch.dtype, tuple[float, float]] = {}
        # What a reader derives from the whole recording.
        self.run: Any = None
        # What the rows of a recorder refer to by index.
        self.sites: list[Site] = []
        self.layouts: list[Layout] = []

    @property
    def count(self) -> int:
        """How many events were recorded so far."""
        return self.dropped + len(self.events)

    def between(self, first: int, last: int) -> list[Event]:
        """Return the events from the `first`-th to before the `last`-th of the recording."""
        rows = self.events[max(0, first - self.dropped) : max(0, last - self.dropped)]
        return [row if type(row) is Event else self._event(row) for row in rows]

    def _event(self, row: tuple[Any, ...]) -> Event:
        """Return the event that a recorder wrote as a plain tuple.

        Python's collector does not walk plain tuples of plain values, but would walk a list of events again
        and again.
        """
        kind, name, site, phase, direct, args, named, outs, node, leaf, grad, flags, chain, read, value = row
        return Event(
            kind, name, self.sites[site], phase, direct, self._values(args),
            tuple((key, self._value(one)) for key, one in named), self._values(outs),
            node, leaf, grad, flags, chain, read, value,
        )  # fmt: skip

    def _values(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(map(self._value, values))

    def _value(self, value: Any) -> Any:
        if type(value) is not tuple:
            return value
        if value and (value[0] is TENSOR or value[0] is HELD):
            mark, first, second, third, fourth, layout = value
            record = TensorInfo if mark is TENSOR else Held
            return record(first, second, third, fourth, self.layouts[layout])
        return self._values(value)

    def drop_before(self, first: int) -> None:
        """Forget the events before the `first`-th, and what was freed before it."""
        del self.events[: first - self.dropped]
        self.dropped = first
        self.freed = {storage: at for storage, at in self.freed.items() if at >= first}

    def note(self, kind: str, where: str, text: str) -> None:
        """Record a part of the run that the recording cannot see."""
        self.notes.setdefault((kind, where), text)
