"""One recorded step as the rules see it: its ops, and what several rules derive from them.

    steps = steps_of(tape)
    steps[0].ops, steps[0].head_width, steps[0].reads

Everything is computed when a rule first asks. `origins.Run` has what only the whole recording tells.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch

from leanstep.diagnose.findings import Hit, Work, callers_of
from leanstep.diagnose.heads import HeadWalk
from leanstep.diagnose.origins import Run
from leanstep.flops import MATMULS, FusedProducts, MatmulSizes, matmul_sizes
from leanstep.tape import events
from leanstep.tape.events import BACKWARD, OPTIMIZER, RECOMPUTE, Event, StepSpan, Tape, TensorInfo
from leanstep.tape.lines import IN_COMPILED, UNKNOWN, UNKNOWN_LINE, Line, Site

KIB, MIB = 1024, 1024 * 1024
HALF = (torch.bfloat16, torch.float16)
# Ops that launch nothing: they create views, allocate without writing, or query shapes.
NO_KERNEL = frozenset(
    "_unsafe_view _reshape_alias detach detach_ alias lift lift_fresh set_ resize_ is_same_size "
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided _local_scalar_dense".split()
)
# Smaller tensors do not matter for memory.
MIN_LEFT, MIN_SAVED, LARGE_BYTES = 1024, 4096, MIB
# In a trace without shapes, a shorter op counts as tiny.
TINY_NS = 20_000
T = TypeVar("T")


class Op:
    """One kernel of the step: the event, its sizes and its FLOPs."""

    __slots__ = (
        "direct", "event", "flops", "index", "largest", "matmul", "name", "outs", "phase", "read_bytes",
        "repeated", "site", "tensors", "written_bytes",
    )  # fmt: skip

    def __init__(self, event: Event, index: int, phase: str) -> None:
        self.event, self.index, self.phase = event, index, phase
        self.name, self.site, self.direct = event.name, event.site, event.direct
        self.tensors, self.outs = event.tensors, event.results
        read = [tensor.layout.num_bytes for tensor in self.tensors]
        written = [tensor.layout.num_bytes for tensor in self.outs]
        self.read_bytes, self.written_bytes = sum(read), sum(written)
        self.largest = max(*read, *written, 0, 0)
        self.matmul = _matmul_of(event)
        self.flops, self.repeated = (self.matmul.flops, 0) if self.matmul is not None else (0, 0)

    @property
    def line(self) -> Line:
        return self.site.line

    @property
    def built_in(self) -> bool:
        """Return whether autograd dispatched it, not a line."""
        return not self.direct and self.phase == BACKWARD

    @property
    def in_leanstep(self) -> bool:
        return self.site.in_leanstep

    @property
    def factors(self) -> tuple[TensorInfo, TensorInfo]:
        """The two factors of a matmul."""
        first, second = MATMULS[self.name]
        return self.event.args[first], self.event.args[second]

    @property
    def matmul_shape(self) -> tuple[int, int, int, int, bool]:
        """(batch, rows, inner, columns, second factor is column-major) of a matmul."""
        assert self.matmul is not None
        strides = self.factors[1].layout.stride
        transposed = len(strides) > 1 and strides[-1] != 1 and strides[-2] == 1
        batch, rows, inner, columns = self.matmul
        return batch, rows, inner, columns, transposed or self.name == "linear"

    @property
    def makes_buffers(self) -> bool:
        """Return whether it writes new memory only."""
        read = {tensor.storage for tensor in self.tensors}
        return bool(self.outs) and all(tensor.storage not in read for tensor in self.outs)


def _matmul_of(event: Event) -> MatmulSizes | None:
    places = MATMULS.get(event.name)
    if places is None or len(event.args) <= max(places):
        return None
    first, second = (event.args[i] for i in places)
    if type(first) is not TensorInfo or type(second) is not TensorInfo or not first.shape or not second.shape:
        return None
    if event.name != "linear" and first.ndim < 2:
        return None
    return matmul_sizes(event.name, first.shape, second.shape)


@functools.cache
def _fused(name: str) -> FusedProducts | None:
    """Return how to count attention, grouped products and convolutions; None for other ops."""
    if not ("attention" in name or "convolution" in name or "grouped" in name):
        return None
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if packet is not None else []
    return FusedProducts.of(getattr(packet, overloads[0])._schema) if overloads else None


class Read(NamedTuple):
    """A host read. `seconds`: how long a trace says that the device was idle meanwhile."""

    site: Site
    kind: str
    phase: str
    origin: str
    seconds: float


class Saved(NamedTuple):
    """A tensor that autograd keeps; `window`: the run of the backward that frees it."""

    site: Site
    tensor: TensorInfo
    window: int


class Left(NamedTuple):
    """A buffer of a step, or a graph (no bytes); `number`: its storage, or the graph's number."""

    site: Site
    number: int
    num_bytes: int


class Amount(NamedTuple):
    """The work of some ops: of a step, of one line with its backward, of a part of the step."""

    ops: int = 0
    flops: int = 0
    written_bytes: int = 0

    def plus(self, op: Op) -> Amount:
        return Amount(self.ops + 1, self.flops + op.flops, self.written_bytes + op.written_bytes)


class Step:
    """The events of one step, and what several rules derive from them."""

    def __init__(self, tape: Tape, span: StepSpan) -> None:
        self.run, self.span = run_of(tape), span
        # The step before it; None for the first one.
        before = self.run.last_step
        self.before: Step | None = before if before is not None and before.span.last <= span.first else None
        self.run.last_step = self
        self.has_rollout = span.has_rollout
        self.cpu_seconds, self.update_site = span.cpu_seconds, span.update_site
        # The hits of all rules, once the step was judged and its events were dropped.
        self.hits: dict[str, dict[Line, Hit]] | None = None

    @property
    def tape(self) -> Tape:
        return self.run.tape

    @cached_property
    def events(self) -> list[Event]:
        self.run.read_on(self.span.last)
        return self.tape.between(self.span.first, self.span.last)

    @property
    def end_of_next(self) -> int | None:
        """Where the step after this one ends; None for the last one."""
        return next((span.last for span in self.tape.steps if span.first >= self.span.last), None)

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    @cached_property
    def ops(self) -> list[Op]:
        """The ops that launch a kernel. `index`: where the event is on the tape."""
        ops = []
        for index, event in enumerate(self.events, self.span.first):
            name = event.name
            if event.kind != events.OP or name in NO_KERNEL or name.startswith(("profiler::", "prim::")):
                continue
            op = Op(event, index, self.phase_of(event))
            if op.matmul is None and (fused := _fused(name)) is not None:
                self._count_fused(op, fused)
            ops.append(op)
        return ops

    def _count_fused(self, op: Op, fused: FusedProducts) -> None:
        counted = fused.count(op.event.args, dict(op.event.named), op.event.outs)
        if counted is None:
            text = "attention over packed sequences: only the device knows how many FLOPs it computes"
            self.tape.note("dropped", "", text)
            return
        op.flops, op.repeated = counted.flops + counted.repeated, counted.repeated

    def phase_of(self, event: Event) -> str:
        """Return the phase: a function that wrote a parameter is an optimizer, known only afterwards."""
        in_writer = event.chain and not self.tape.writers.isdisjoint(event.chain)
        return OPTIMIZER if in_writer else event.phase

    def forget(self, hits: dict[str, dict[Line, Hit]], keep_work: bool = True) -> None:
        """Keep the hits and the totals instead of the ops: a recording of many steps must stay small.

        keep_work: also keep the work of each line.
        """
        self.hits = hits
        for name in (
            "totals", "line_work", "products", "saved_bytes", "peak_wide_bytes", "backward_runs", "left",
            "compiled", "head_sites",
        ):  # fmt: skip
            getattr(self, name)
        for name in ("events", "ops", "by_line", "first_use", "heads", "_saves", "_weight_reads", "_sums"):
            self.__dict__.pop(name, None)
        if not keep_work:
            self.line_work = {}
        self.run.forget_before(self.span.last)

    def amount(self, first: int, last: int) -> Amount:
        """Return the work of the events from the `first`-th to before the `last`-th."""
        places, sums = self._sums
        before, after = (sums[bisect.bisect_left(places, place)] for place in (first, last))
        return Amount(*(now - then for now, then in zip(after, before, strict=True)))

    @cached_property
    def _sums(self) -> tuple[list[int], list[Amount]]:
        sums = itertools.accumulate(self.ops, Amount.plus, initial=Amount())
        return [op.index for op in self.ops], list(sums)

    # Sums

    @cached_property
    def by_line(self) -> dict[Line, list[Op]]:
        return by_line(self.ops)

    @cached_property
    def totals(self) -> Amount:
        return self._sums[1][-1]

    @property
    def num_ops(self) -> int:
        return self.totals.ops

    @property
    def flops(self) -> int:
        return self.totals.flops

    @property
    def written_bytes(self) -> int:
        return self.totals.written_bytes

    @cached_property
    def line_work(self) -> dict[Site, Amount]:
        work: dict[Site, Amount] = defaultdict(Amount)
        for op in self.ops:
            work[op.site] = work[op.site].plus(op)
        return dict(work)

    @cached_property
    def products(self) -> Counter[tuple[str, torch.dtype]]:
        """FLOPs of all matmuls, including attention and convolutions, by phase and dtype."""
        flops: Counter[tuple[str, torch.dtype]] = Counter()
        for op in self.ops:
            if op.flops:
                dtype = op.factors[0].dtype if op.matmul is not None else op.tensors[0].dtype
                flops[op.phase, dtype] += op.flops - op.repeated
                if op.repeated:
                    flops[RECOMPUTE, dtype] += op.repeated
        return flops

    @cached_property
    def compiled(self) -> set[Line]:
        """Lines of compiled regions."""
        return {e.site.line for e in self.events if e.flags & IN_COMPILED and e.site is not UNKNOWN}

    @cached_property
    def left(self) -> list[Left]:
        """New buffers of the step, and the graphs that its backward went through, still alive when asked."""
        entries = [
            Left(op.site, tensor.storage, tensor.num_bytes)
            for op in self.ops
            if op.makes_buffers
            for tensor in op.outs
            if tensor.num_bytes >= MIN_LEFT
        ]
        entries += [
            Left(event.site, event.value, 0)
            for event in self.of_kind(events.BACKWARD_CALL)
            if type(event.value) is int
        ]
        return [entry for entry in entries if entry.number in self.tape.alive]

    # Host reads, and idle time of a device

    @cached_property
    def reads(self) -> list[Read]:
        """Reads of values that the host does not have."""
        self.run.read_on(self.span.last)
        reads = []
        for place, event in enumerate(self.events, self.span.first):
            origin = self.run.origin(place) if event.read else None
            if origin is not None:
                phase = self.phase_of(event)
                reads.append(Read(event.site, event.read, phase, origin, event.took_ns / 1e9))
        return reads

    def idle(self, name: str) -> Iterator[Hit]:
        """Return the idle time of a device by line, in a trace."""
        for line, gaps in grouped(self.of_kind(events.IDLE), lambda event: event.site).items():
            gaps = [event for event in gaps if event.name == name]
            seconds = sum(event.took_ns for event in gaps) / 1e9
            if not gaps:
                continue
            by: Counter[str] = Counter()
            for event in gaps:
                by.update(dict(event.named))
            count = sum(event.value for event in gaps)
            share = seconds / self.span.seconds if self.span.seconds else 0.0
            evidence = {"idle_seconds": seconds, "share": share, "by": dict(by.most_common())}
            callers = callers_of(event.site for event in gaps)
            yield Hit(line, count, callers, gaps[0].phase, evidence, Work(seconds=seconds))

    def is_small(self, op: Op, limit: float) -> bool:
        """Return whether every tensor of an op is at most this large; without sizes its time tells."""
        if not op.tensors and op.event.took_ns:
            return op.event.took_ns <= TINY_NS
        return op.largest <= limit

    # The backward and what is saved for it

    @cached_property
    def _saves(self) -> tuple[list[Saved], list[int], int]:
        """Saved tensors, the bytes saved for each run of the backward, and the number of these runs."""
        saves: list[Saved] = []
        sizes, seen = [0], set[int]()
        in_backward, runs = False, 0
        for event in self.events:
            if event.kind in (events.OP, events.VIEW, events.SAVE):
                if event.phase in (BACKWARD, RECOMPUTE):
                    in_backward = True
                    continue
                if in_backward:
                    in_backward, runs = False, runs + 1
                    sizes.append(0)
                    seen = set()
            if event.kind != events.SAVE:
                continue
            for tensor in event.tensors:
                if tensor.storage not in seen:
                    seen.add(tensor.storage)
                    sizes[-1] += tensor.num_bytes
                    saves.append(Saved(event.site, tensor, runs))
        return saves, sizes, runs + in_backward

    @property
    def saved(self) -> list[Saved]:
        """Storages that autograd keeps for a backward."""
        return self._saves[0]

    @cached_property
    def saved_bytes(self) -> list[int]:
        """Bytes that autograd kept for each run of the backward."""
        return self._saves[1]

    @property
    def peak_saved_bytes(self) -> int:
        return max(self.saved_bytes)

    @cached_property
    def held_by_line(self) -> dict[Line, int]:
        """The most bytes that each line saves for one backward; a library's line counts for the user's."""
        held: dict[tuple[Line, int], int] = defaultdict(int)
        for entry in self.saved:
            site = entry.site
            line = site.caller if site.line.library and site.caller is not None else site.line
            if line is not UNKNOWN_LINE:
                held[line, entry.window] += entry.tensor.num_bytes
        lines: dict[Line, int] = {}
        for (line, _), num_bytes in held.items():
            lines[line] = max(lines.get(line, 0), num_bytes)
        return lines

    @cached_property
    def backward_runs(self) -> int:
        return self._saves[2]

    # The head

    @cached_property
    def heads(self) -> HeadWalk:
        return HeadWalk(self)

    @cached_property
    def head_sites(self) -> list[Site]:
        """Where the head is multiplied; its backward was seen."""
        return list(self.heads.heads)

    @property
    def wide(self) -> list[Saved]:
        """Tensors of the head's width that autograd keeps, without weights."""
        width = self.heads.width
        return [
            entry
            for entry in self.saved
            if width
            and entry.tensor.ndim > 1
            and entry.tensor.shape[-1] == width
            and entry.tensor.num_bytes >= MIN_SAVED
            and self.heads.weight_of(entry.tensor) is None
        ]

    @cached_property
    def peak_wide_bytes(self) -> int:
        """Return the most bytes of tensors of the head's width that are alive at once, saved or not."""
        width = self.heads.width
        alive: dict[int, tuple[int, int]] = {}
        for op in self.ops if width else ():
            if op.written_bytes >= LARGE_BYTES and op.index >= self.heads.first_product:
                for tensor in op.outs:
                    if tensor.shape[-1:] == (width,):
                        alive.setdefault(tensor.storage, (op.index, tensor.num_bytes))
        changes = []
        for storage, (begin, num_bytes) in alive.items():
            end = self.tape.freed.get(storage, self.span.last + 1)
            changes += [(begin, 1, num_bytes), (max(end, begin + 1), 0, -num_bytes)]
        peak = now = 0
        for _, _, change in sorted(changes):
            now += change
            peak = max(peak, now)
        return peak

    # Weights

    @cached_property
    def first_use(self) -> dict[int, Site]:
        """Parameters -> the line that reads them first in this step."""
        self.run.read_on(self.span.last)
        uses: dict[int, Site] = {}
        for index, event in enumerate(self.events, self.span.first):
            for storage in self.run.learned.get(index, ()):
                uses.setdefault(storage, event.site)
        return uses

    @cached_property
    def _weight_reads(self) -> tuple[list[int], list[tuple[int, int]]]:
        """Where weights are read, and which: slices of a bank differ by their offset."""
        places: list[int] = []
        weights: list[tuple[int, int]] = []
        run = self.run
        for index, event in enumerate(self.events, self.span.first):
            if event.kind not in (events.OP, events.VIEW) or event.phase == BACKWARD:
                continue
            view = event.results if event.kind == events.VIEW else ()
            for position, tensor in enumerate(event.tensors):
                if tensor.storage in run.parameters:
                    seen = view[position] if position < len(view) else tensor
                    places.append(index)
                    weights.append((tensor.storage, seen.offset))
                elif tensor.storage in run.frozen:
                    places.append(index)
                    weights.append((tensor.storage, 0))
        return places, weights

    def weights_read(self, first: int, last: int, *, distinct: bool) -> int:
        """Return how many weights are read from one event to another; slices of a bank are different ones."""
        places, weights = self._weight_reads
        read = weights[bisect.bisect_left(places, first) : bisect.bisect_right(places, last)]
        return len(set(read)) if distinct else len(read)


def steps_of(tape: Tape) -> list[Step]:
    """Return the recorded steps of a tape."""
    return [Step(tape, span) for span in tape.steps]


def run_of(tape: Tape) -> Run:
    """Return the facts of a tape's whole recording; its steps share them."""
    if tape.run is None:
        tape.run = Run(tape)
    return tape.run


# Groups


def by_line(ops: Iterable[Op]) -> dict[Line, list[Op]]:
    """Group ops by line; ops without a line are left out."""
    return grouped(ops, lambda op: op.site)


def grouped(items: Iterable[T], site_of: Callable[[T], Site]) -> dict[Line, list[T]]:
    groups: dict[Line, list[T]] = defaultdict(list)
    for item in items:
        line = site_of(item).line
        if line is not UNKNOWN_LINE:
            groups[line].append(item)
    return groups


def shape_text(tensor: TensorInfo) -> str:
    """Return "[8, 512] float32"."""
    return f"{list(tensor.shape)} {dtype_text(tensor.dtype)}"


def dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def pairs(op: Op) -> Iterator[tuple[TensorInfo, Any]]:
    """Return the pairs of operands of an elementwise op: one, or those of its lists."""
    first, second = op.event.args[:2]
    if type(first) is TensorInfo:
        yield first, second
    elif isinstance(first, tuple) and isinstance(second, tuple):
        yield from zip(first, second, strict=False)
