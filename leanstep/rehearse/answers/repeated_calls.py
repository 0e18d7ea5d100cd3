"""Repeated model calls without gradients: a few are recorded, the others are extrapolated.

Token-by-token generation calls a model hundreds of times, each time with one more position in its input or
in its KV cache. After `RECORDED` calls whose sizes grow by the same amount from call to call, the kernels of
the next ones are known: their sizes, bytes and FLOPs continue the series (linear, or quadratic where all
recorded calls agree). Such a call is not run. It leaves one `Extrapolated` event, outputs of the right shape,
caches that have grown, and the memory that it needs while it runs.

A call runs unchanged if anything about it does not fit the series: a different structure of its arguments,
an output whose values are known, other launches, a captured graph.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from leanstep.rehearse.events import Alloc, Event, Extrapolated, Free, HostWait, Kernel, Launch, Product
from leanstep.rehearse.lines import WORKSPACE
from leanstep.tape.lines import Line

# Calls of a series that are recorded. Alignment to 16 bytes repeats after 8 positions of 2 bytes.
RECORDED = 8
_PLAIN = (bool, float, str, bytes, type(None), torch.dtype, torch.device)
_MAX_DEPTH = 6


class _Tuple(NamedTuple):
    """A tuple that a call can reach, such as the keys and values of a layer: its place holds a new one."""

    owner: Any
    key: Any

    def get(self) -> Any:
        owner = self.owner.get() if isinstance(self.owner, _Tuple) else self.owner
        return owner[self.key] if isinstance(owner, (dict, list, tuple)) else getattr(owner, self.key)


def _put(owner: Any, key: Any, value: Any) -> None:
    """Set an entry of a container or an attribute of an object."""
    if isinstance(owner, _Tuple):
        entries = owner.get()
        changed = [value if i == key else entry for i, entry in enumerate(entries)]
        replacement = type(entries)(*changed) if hasattr(entries, "_fields") else type(entries)(changed)
        _put(owner.owner, owner.key, replacement)
    elif isinstance(owner, (dict, list)):
        owner[key] = value
    else:
        setattr(owner, key, value)


class Slot(NamedTuple):
    """A tensor or integer that a call can reach, and how to replace it: an entry or attribute of `owner`."""

    path: tuple[Any, ...]
    value: Any
    owner: Any
    key: Any

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.value.shape) if isinstance(self.value, Tensor) else (self.value,)

    def replace(self, value: Any) -> None:
        _put(self.owner, self.key, value)


class State:
    """Everything a call can reach whose size may change: arguments, objects in them, tensors of the module.

    `structure`: what must stay the same in a series; `sizes`: the integers that may change.
    """

    def __init__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module = module
        self.slots: list[Slot] = []
        self._structure: list[Any] = []
        self._seen: set[int] = set()
        self.objects: dict[int, Any] = {}
        self._walk((), list(args), None, None, 0)
        self._walk((), dict(kwargs), None, None, 0)
        # The module's own tensors come after those of the arguments: `add_module`.
        self.structure = tuple(self._structure)
        self.arguments = len(self.slots)
        self.module_structure: tuple[Any, ...] = ()
        self.sizes = tuple(size for slot in self.slots for size in slot.sizes)

    def add_module(self) -> State:
        """Add the tensors of the module: buffers, caches."""
        known = len(self._structure)
        self._walk_module(self.module)
        self.module_structure = tuple(self._structure[known:])
        self.sizes = tuple(size for slot in self.slots for size in slot.sizes)
        return self

    def _walk(self, path: tuple[Any, ...], value: Any, owner: Any, key: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            self.slots.append(Slot(path, value, owner, key))
            self._structure.append((path, value.dtype, value.device, value.dim()))
        elif type(value) is int:
            self.slots.append(Slot(path, value, owner, key))
            self._structure.append((path, int))
        elif isinstance(value, _PLAIN):
            self._structure.append((path, value))
        elif isinstance(value, (dict, list, tuple)):
            self._structure.append((path, type(value), len(value)))
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            holder = _Tuple(owner, key) if isinstance(value, tuple) else value
            for name, entry in list(entries):
                self._walk((*path, name), entry, holder, name, depth)
        elif (
            depth < _MAX_DEPTH
            and id(value) not in self._seen
            and not isinstance(value, (type, torch.nn.Module))
        ):
            self._seen.add(id(value))
            self.objects[id(value)] = value
            self._structure.append((path, type(value)))
            for name, entry in list(getattr(value, "__dict__", {}).items()):
                self._walk((*path, name), entry, value, name, depth + 1)
        else:
            self._structure.append((path, type(value)))

    def _walk_module(self, module: torch.nn.Module) -> None:
        """Add tensors and counters of the module, and the lengths of its own containers."""
        for number, part in enumerate(module.modules()):
            for owner in (part.__dict__, part._buffers):
                for name, value in owner.items():
                    if isinstance(value, Tensor):
                        self.slots.append(Slot((number, name), value, owner, name))
                        self._structure.append((number, name, value.dtype, value.dim()))
                    elif type(value) is int and not name.startswith("_"):
                        self.slots.append(Slot((number, name), value, owner, name))
                        self._structure.append((number, name, int))
                    elif isinstance(value, (list, dict, set, deque)) and not name.startswith("_"):
                        self._structure.append((number, name, len(value)))


@dataclass
class RecordedCall:
    """A call that ran. `transient`: its peak of live bytes above the level before it."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    outputs: tuple[int, ...]
    launches: list[Launch]
    waits: list[HostWait]
    transient: int


def recorded_call(
    span: Sequence[Event],
    before: tuple[int, ...] = (),
    after: tuple[int, ...] = (),
    outputs: tuple[int, ...] = (),
) -> RecordedCall:
    """Build a call from its events and from the sizes before it, after it and of its outputs."""
    launches = [e for e in span if isinstance(e, Launch)]
    waits = [e for e in span if isinstance(e, HostWait)]
    return RecordedCall(before, after, outputs, launches, waits, _transient(span))


@dataclass
class Template:
    """A launch that is the same in all recorded calls, and how many times it occurs."""

    kernels: list[tuple[Kernel, ...]]
    line: Line | None
    products: list[tuple[Product, ...]]
    times: int


@dataclass
class Family:
    """Calls of one module with one structure. `series`: the last ones that ran, sizes growing evenly."""

    series: list[RecordedCall] = field(default_factory=list)
    output: Any = None
    changed: tuple[int, ...] = ()
    arguments: int = 0
    module_sizes: int = 0
    templates: list[Template] | None = None
    continued: dict[int, Extrapolated] = field(default_factory=dict)
    usable: bool = True

    @property
    def is_complete(self) -> bool:
        return self.usable and self.templates is not None

    @property
    def module_is_static(self) -> bool:
        """Return whether all of the module's own tensors keep their size in the series."""
        first, last = self.series[0], self.series[-1]
        count = len(last.before) - self.module_sizes
        same = first.before[count:] == last.before[count:] == last.after[count:]
        return same and all(index < self.arguments for index in self.changed)

    def position(self, sizes: tuple[int, ...]) -> int | None:
        """Return the number of calls from the last recorded one to one of these sizes; None if outside.

        Sizes of the module's own tensors may be omitted if they never change.
        """
        length = len(self.series[-1].before)
        if len(sizes) > length or (len(sizes) < length and not self.module_is_static):
            return None
        last, before = (call.before[: len(sizes)] for call in (self.series[-1], self.series[-2]))
        growth = [b - a for a, b in zip(before, last, strict=True)]
        moved = [b - a for a, b in zip(last, sizes, strict=True)]
        ratios = {m // g if g else 0 for m, g in zip(moved, growth, strict=True) if g}
        position = ratios.pop() if len(ratios) == 1 else 0
        if ratios or any(m != position * g for m, g in zip(moved, growth, strict=True)):
            return None
        return position


class RepeatedCalls:
    """Runs the calls of models without gradients, or continues a series of them."""

    def __init__(self, tape: Any) -> None:
        self.tape = tape
        self.families: dict[Any, Family] = {}
        self.recorded = self.skipped = 0
        # True while another part of the rehearsal handles the calls.
        self.paused = False

    def run(self, call: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Return `call(module, *args, **kwargs)`, run or extrapolated."""
        if self.paused:
            self.recorded += 1
            return call(module, *args, **kwargs)
        state = State(module, args, kwargs)
        family = self.families.setdefault((id(module), state.structure), Family())
        if family.is_complete:
            if not family.module_is_static:
                state.add_module()
            position = family.position(state.sizes)
            if position is not None:
                self.skipped += 1
                return self._continue(family, position, state)
        return self._record(family, state, call, module, args, kwargs)

    # Recording

    def _record(
        self, family: Family, state: State, call: Callable[..., Any], module: Any, args: Any, kwargs: Any
    ) -> Any:
        events = self.tape.recording.events
        first, arguments = len(events), len(state.sizes)
        if not state.module_structure:
            state.add_module()
        output = call(module, *args, **kwargs)
        self.recorded += 1
        if self.tape.recording.events is not events or not family.usable:
            return output
        span = events[first:]
        after = State(module, args, kwargs).add_module()
        if state.module_structure != after.module_structure:
            # A cache or a container was created: a series may begin after it.
            family.series, family.templates = [], None
            return output
        outputs = _output_tensors(output, state.objects)
        if outputs is None or not self._is_plain(span, outputs, state, after):
            family.usable = False
            return output
        sizes = tuple(size for tensor in outputs for size in tensor.shape)
        _add(family, recorded_call(span, state.sizes, after.sizes, sizes))
        family.arguments, family.module_sizes = state.arguments, len(state.sizes) - arguments
        family.output = _Output(output, state)
        changed = zip(state.slots, after.slots, strict=True)
        family.changed = tuple(i for i, (old, new) in enumerate(changed) if old.sizes != new.sizes)
        return output

    def _is_plain(self, span: Sequence[Event], outputs: list[Tensor], before: State, after: State) -> bool:
        """Return whether the call left behind only tensors of unknown values and longer caches."""
        if any(part._forward_hooks or part._forward_pre_hooks for part in before.module.modules()):
            return False
        launches = [e for e in span if isinstance(e, Launch)]
        return (
            before.structure == after.structure
            and bool(launches)
            and not any(e.region for e in launches)
            and not any(isinstance(e, Extrapolated) for e in span)
            and all(isinstance(t, FakeTensor) and self.tape.shadows.get(t) is None for t in outputs)
        )

    # Continuing

    def _continue(self, family: Family, position: int, state: State) -> Any:
        tape, place, series = self.tape, self.tape.lines.place(), family.series
        self._place = place
        event = family.continued.get(position)
        if event is None:
            event = family.continued[position] = extrapolated(family, position)
        transient = next_value([call.transient for call in series], position)
        if transient > 0:
            number = tape.allocate(int(transient), (int(transient),), "uint8", place, "temporary")
            tape.release(number)
        tape.add(event.at(place.line, place.phase, tape.step))
        for wait in series[-1].waits:
            tape.add(HostWait(wait.kind, wait.line, wait.phase, tape.step, wait.counts))
        self._grow(family, position, state)
        sizes = [
            int(next_value([call.outputs[i] for call in series], position))
            for i in range(len(series[-1].outputs))
        ]
        return family.output.build(sizes, state, self._fresh)

    def _fresh(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        mode: Any = self.tape.fake_mode
        with _disable_current_modes(), torch.inference_mode(False):
            tensor = FakeTensor(mode, torch.empty(shape, dtype=dtype, device="meta"), device)
            self.tape.hold(tensor, self._place)
        return tensor

    def _grow(self, family: Family, position: int, state: State) -> None:
        """Set caches and counters to the state that the call would leave."""
        offsets = _offsets(state.slots)
        grown: dict[Any, Tensor] = {}  # one tensor may be reached twice
        for index in family.changed:
            slot = state.slots[index]
            sizes = [
                int(next_value([call.after[i] for call in family.series], position))
                for i in range(offsets[index], offsets[index + 1])
            ]
            if isinstance(slot.value, Tensor):
                key = (id(slot.value), *sizes)
                if key not in grown:
                    grown[key] = self._fresh(sizes, slot.value.dtype, slot.value.device)
                slot.replace(grown[key])
            else:
                slot.replace(sizes[0])


def _offsets(slots: Sequence[Slot]) -> list[int]:
    offsets = [0]
    for slot in slots:
        offsets.append(offsets[-1] + len(slot.sizes))
    return offsets


def _add(family: Family, call: RecordedCall) -> None:
    """Add a call that ran: it continues the series or begins a new one."""
    family.series.append(call)
    family.templates = None
    if len(family.series) > 2 and not _even(family.series[-3:]):
        family.series = family.series[-2:]
    elif len(family.series) > RECORDED:
        family.series = family.series[-RECORDED:]
    if len(family.series) == RECORDED:
        family.templates = templates_of([c.launches for c in family.series])
        family.continued = {}


def _even(calls: Sequence[RecordedCall]) -> bool:
    """Return whether the sizes grow by the same amount from call to call."""
    for name in ("before", "after", "outputs"):
        first, second, third = (getattr(call, name) for call in calls)
        if not len(first) == len(second) == len(third):
            return False
        if any(b - a != c - b for a, b, c in zip(first, second, third, strict=True)):
            return False
    return len({(len(c.launches), len(c.waits)) for c in calls}) == 1


def templates_of(calls: Sequence[Sequence[Launch]]) -> list[Template] | None:
    """Return the launches common to the calls, with equal layers joined; None if the calls differ."""
    templates: dict[Any, Template] = {}
    for launches in zip(*calls, strict=True):
        kinds = {
            (e.name, e.line, tuple((k.kind, k.dtype, len(k.sizes)) for k in e.kernels)) for e in launches
        }
        if len(kinds) != 1 or len({len(e.products) for e in launches}) != 1:
            return None
        kernels, products = [e.kernels for e in launches], [e.products for e in launches]
        key = (launches[0].line, tuple(kernels), tuple(products))
        template = templates.setdefault(key, Template(kernels, launches[0].line, products, 0))
        template.times += 1
    return list(templates.values())


def next_value(values: Sequence[float], position: float) -> float:
    """Extrapolate `values` by `position` calls: quadratic if every second difference agrees, else linear."""
    steps = [b - a for a, b in pairwise(values)]
    bends = {b - a for a, b in pairwise(steps)}
    if len(bends) == 1:
        bend = bends.pop()
        return values[-1] + position * steps[-1] + bend * position * (position + 1) / 2
    return max(0.0, values[-1] + position * (values[-1] - values[0]) / (len(values) - 1))


def extrapolated(family: Family, position: float) -> Extrapolated:
    assert family.templates is not None
    parts: Counter[tuple[Line | None, Kernel]] = Counter()
    products: Counter[tuple[str, str]] = Counter()
    calls = views = launches = 0
    for template in family.templates:
        if not template.kernels[-1]:
            views += template.times
            continue
        calls += template.times
        for column in zip(*template.kernels, strict=True):
            kernel = _next_kernel(column, position)
            parts[template.line, kernel] += template.times
            launches += template.times * kernel.launches
        for column in zip(*template.products, strict=True):
            flops = int(next_value([product.flops for product in column], position))
            products[column[-1].part, column[-1].dtype] += template.times * flops
    return Extrapolated(
        parts=tuple((line, kernel, times) for (line, kernel), times in parts.items()),
        calls=calls,
        views=views,
        launches=launches,
        products=tuple(Product(part, dtype, flops) for (part, dtype), flops in products.items()),
    )


def _next_kernel(column: Sequence[Kernel], position: float) -> Kernel:
    if all(kernel == column[0] for kernel in column):
        return column[0]
    # Use the recorded call whose position has the same remainder, because alignments repeat.
    like = column[(int(position) - 1) % len(column)]
    return like._replace(
        nbytes=next_value([k.nbytes for k in column], position),
        flops=next_value([k.flops for k in column], position),
        elements=next_value([k.elements for k in column], position),
        repeated=next_value([k.repeated for k in column], position),
        sizes=tuple(
            int(next_value([k.sizes[i] for k in column], position)) for i in range(len(column[-1].sizes))
        ),
    )


def _transient(span: Sequence[Event]) -> int:
    live = most = 0
    sizes: dict[int, int] = {}
    for event in span:
        if isinstance(event, Alloc) and event.line is not WORKSPACE.line:
            sizes[event.storage] = event.nbytes
            live += event.nbytes
            most = max(most, live)
        elif isinstance(event, Free):
            live -= sizes.get(event.storage, 0)
    return most


# Outputs


def _output_tensors(output: Any, arguments: Mapping[int, Any]) -> list[Tensor] | None:
    """Return the tensors of an output; None if it holds an object that is neither plain nor an argument."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, (dict, list, tuple)):
        values = output.values() if isinstance(output, dict) else output
        entries = [_output_tensors(value, arguments) for value in values]
        if any(entry is None for entry in entries):
            return None
        return [tensor for entry in entries if entry is not None for tensor in entry]
    return [] if isinstance(output, (*_PLAIN, int)) or id(output) in arguments else None


class _Pattern(NamedTuple):
    """A tensor of an output: an argument of the call (its slot), or a new one."""

    argument: int | None
    dim: int
    dtype: torch.dtype
    device: torch.device


class _Object(NamedTuple):
    """An object of an output that was an argument of the call, such as a cache: which of them."""

    number: int


class _Output:
    """Return an output as a pattern without tensors."""

    def __init__(self, output: Any, state: State) -> None:
        self._arguments = {id(slot.value): i for i, slot in enumerate(state.slots)}
        self._objects = {key: i for i, key in enumerate(state.objects)}
        self.pattern = self._pattern_of(output)

    def _pattern_of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return _Pattern(self._arguments.get(id(value)), value.dim(), value.dtype, value.device)
        if isinstance(value, (dict, list, tuple)):
            return _rebuilt(value, self._pattern_of)
        return _Object(self._objects[id(value)]) if id(value) in self._objects else value

    def build(self, sizes: Sequence[int], state: State, fresh: Callable[..., Tensor]) -> Any:
        remaining, objects = iter(sizes), list(state.objects.values())

        def again(value: Any) -> Any:
            if isinstance(value, _Pattern):
                shape = [next(remaining) for _ in range(value.dim)]
                if value.argument is not None:
                    return state.slots[value.argument].value
                return fresh(shape, value.dtype, value.device)
            if isinstance(value, _Object):
                return objects[value.number]
            return _rebuilt(value, again) if isinstance(value, (dict, list, tuple)) else value

        return again(self.pattern)


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container of the same type with its entries replaced."""
    if isinstance(value, dict):
        built = copy.copy(value)
        for key, entry in value.items():
            built[key] = change(entry)
        return built
    entries = [change(entry) for entry in value]
    return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
