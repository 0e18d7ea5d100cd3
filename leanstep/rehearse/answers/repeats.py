"""Equal work is recorded once and counted n times: calls of models, tokens of `generate`, micro-batches.

Every outermost call of a module can be repeated. What it can reach is a `State`, and what it returns a
`Pattern`, from which the same output is built again on new tensors.

Calls without gradients grow: token-by-token generation gives each call one more position in its input or
its KV cache. After `RECORDED` calls whose sizes grow evenly (a `Series`), the kernels of the next ones are
known: sizes, bytes and FLOPs continue. Such a call leaves one `Extrapolated` event, grown caches, and the
memory that it needs while it runs. `generate` of transformers is a series of tokens: it is told to stop after
a few, and the others are priced at once.

Calls with gradients repeat exactly: one that equals an earlier call (the same module in the same state,
arguments of the same shapes, the same line) repeats the events of that call one by one with new storages, and
its backward those of the recorded backward. What surrounds the call, such as the loss, runs.

A call runs unchanged if anything about it differs, or if it leaves something behind: known values, a captured
region, a marker of a stream, code of the program in a hook.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import isclose
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from leanstep.rehearse.answers.process_group import REDUCES
from leanstep.rehearse.events import Alloc, Event, Extrapolated, Free, HostWait, Kernel, Launch, Product
from leanstep.rehearse.lines import WORKSPACE, Place
from leanstep.rehearse.plans import uses_tf32
from leanstep.rehearse.shadows import CHOSEN_INDEX
from leanstep.tape.hooks import in_engine, replace_function
from leanstep.tape.lines import USER, Line, judge_code

# Calls of a series that are recorded. Alignment to 16 bytes repeats after 8 positions of 2 bytes.
RECORDED = 8
# Recorded per `generate`: the prompt, a first token, and a series.
TOKENS = RECORDED + 2
# This many tokens share the price of the middle one.
CHUNK = 16
# Number of stored series of tokens, and how closely a token must agree with one.
MAX_SERIES, FITS = 16, 1e-3
# Recorded passes per key: an earlier one is complete once the program has dropped its outputs.
_CANDIDATES = 4
# Arguments of `generate` that select other ways to generate; such calls run unchanged.
_OTHER_WAYS = ("streamer", "assistant_model", "custom_generate", "prompt_lookup_num_tokens")
# Reads whose result decides the shapes that follow.
_DYNAMIC = ("boolean index", "nonzero")
_PLAIN = (bool, float, str, bytes, type(None), torch.dtype, torch.device)
_MAX_DEPTH = 6
_sequence_number: Any = torch._C._autograd._get_sequence_nr  # pyright: ignore[reportAttributeAccessIssue]


class Repeats:
    """Runs calls of models and of `generate`, or repeats what was recorded of earlier ones."""

    def __init__(self, tape: Any) -> None:
        self.tape = tape
        self.recorded = self.extrapolated = 0  # calls without gradients
        # Without an optimizer, steps are recorded by the parameters of the graph: updates run.
        self.repeats_updates = False
        self._number = Numbers()
        self._families: dict[Any, _Family] = {}
        self._generates = False
        self._rollouts: deque[_Rollout] = deque(maxlen=MAX_SERIES)
        self._passes: dict[Any, list[_Pass]] = {}
        self._open: _Pass | None = None  # the last call with gradients, until its backward has ended
        self._after_backward = 0
        self._anchor = torch.zeros((), requires_grad=True)
        self._cast_generation = 0
        self._cast_in: dict[int, int] = {}  # module -> generation of the autocast cache in its last call
        clear = torch.clear_autocast_cache

        def cleared() -> None:
            self._cast_generation += 1
            clear()

        torch.clear_autocast_cache = cleared

    # Calls without gradients

    def call(self, call: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Return `call(module, *args, **kwargs)`, a call without gradients, run or extrapolated."""
        if self._generates:
            self.recorded += 1
            return call(module, *args, **kwargs)
        state = State(module, args, kwargs)
        family = self._families.setdefault((self._number(module), state.structure), _Family())
        if family.usable and family.series.launches is not None:
            if not family.module_is_static:
                state.add_module()
            position = family.position(state.sizes)
            if position is not None:
                self.extrapolated += 1
                return family.go_on(self.tape, position, state)
        state.add_module()
        events = self.tape.recording.events
        first = len(events)
        output = call(module, *args, **kwargs)
        self.recorded += 1
        if self.tape.recording.events is events and family.usable:
            after = State(module, args, kwargs).add_module()
            family.add(self.tape, events[first:], output, state, after)
        return output

    def generate(self, generate: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `generate(*args, **kwargs)` with fewer recorded tokens, if its result is a tensor of tokens."""
        if not _samples_plainly(args, kwargs):
            return generate(*args, **kwargs)
        rollout = _Rollout(self.tape, self._rollouts)
        criteria = sys.modules["transformers.generation.stopping_criteria"].StoppingCriteriaList
        undo, self._generates = replace_function(criteria, "__call__", rollout.token_ends), True
        try:
            tokens = generate(*args, **kwargs)
        finally:
            self._generates = False
            undo()
        if rollout.like is None or not isinstance(tokens, Tensor):
            return tokens
        self.extrapolated += rollout.left_out
        return rollout.completed(rollout.like, tokens)

    # Calls with gradients

    def call_in_update(
        self, call: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Return `call(module, *args, **kwargs)`; if it is part of an update, run or repeated."""
        tape = self.tape
        usable = self.repeats_updates and torch.is_grad_enabled() and not in_engine() and not tape.capture
        usable = usable and not torch.is_inference_mode_enabled()
        if not usable or not any(p.requires_grad for p in module.parameters()):
            return call(module, *args, **kwargs)
        self._open = None  # a second call in one backward: their events cannot be separated
        state = State(module, args, kwargs).add_module()
        key = self._key(state)
        if key is None:
            return call(module, *args, **kwargs)
        held = tape.held_numbers()
        known = next((p for p in self._passes.get(key, ()) if held.isdisjoint(p.remains)), None)
        if known is not None:
            tape.notes["equal forwards and backwards: the recording of an earlier one was repeated"] += 1
            return _Run(tape, known, state).call(state, self._anchor)
        # Nodes created since the last backward would run within this call's backward.
        is_alone = _sequence_number() == self._after_backward
        opened = _Pass(key, state, tape)
        output = call(module, *args, **kwargs)
        if is_alone and opened.watch(output, state):
            self._open = opened
        return output

    def backward_ended(self, accumulates: bool) -> None:
        """A backward of the main thread has ended."""
        opened, self._open = self._open, None
        self._after_backward = _sequence_number()
        if opened is not None and accumulates and opened.close():
            passes = self._passes.setdefault(opened.key, [])
            passes.append(opened)
            del passes[:-_CANDIDATES]

    def _key(self, state: State) -> Any:
        """Return everything that the events of a call follow from; None if it must run."""
        module, tensors = state.module, state.tensors
        if _has_code_of_program(module) or any(t.requires_grad for t in tensors):
            return None
        number = self._number(module)
        generation, before = self._cast_generation, self._cast_in.get(number)
        self._cast_in[number] = generation
        return (
            number,
            self.tape.lines.here(),
            state.structure,
            state.module_structure,
            state.sizes,
            tuple((p.requires_grad, p.dtype, p.grad is None) for p in module.parameters()),
            tuple(self._is_full(t) for t in tensors),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"),
            generation == before,
            uses_tf32("matmul"),
        )

    def _is_full(self, tensor: Tensor) -> bool | None:
        """Whether no element of a known mask is zero: libraries skip a mask that hides nothing."""
        value = None if tensor.is_floating_point() else self.tape.shadows.get(tensor)
        if value is None or isinstance(value, FakeTensor):
            return None
        with _disable_current_modes():
            return bool((value != 0).all())


class Numbers:
    """A number per object that no later object gets, as `id` is given again once an object is deleted."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._next = 0

    def __call__(self, value: Any) -> int:
        known = self._known.get(id(value))
        if known is None or known[0]() is not value:
            known = self._known[id(value)] = weakref.ref(value), self._next
            self._next += 1
        return known[1]


# What a call can reach, and what it returns ------------------------------------------------------------


class _Tuple(NamedTuple):
    """A tuple that a call can reach, such as the keys and values of a layer: its place holds a new one."""

    owner: Any
    key: Any

    def get(self) -> Any:
        owner = self.owner.get() if isinstance(self.owner, _Tuple) else self.owner
        return owner[self.key] if isinstance(owner, (dict, list, tuple)) else getattr(owner, self.key)


class Slot(NamedTuple):
    """A tensor or integer that a call can reach: an entry or attribute of `owner`."""

    value: Any
    owner: Any
    key: Any

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.value.shape) if isinstance(self.value, Tensor) else (self.value,)

    def replace(self, value: Any) -> None:
        owner, key = self.owner, self.key
        while isinstance(owner, _Tuple):
            entries = owner.get()
            changed = [value if i == key else entry for i, entry in enumerate(entries)]
            value = type(entries)(*changed) if hasattr(entries, "_fields") else type(entries)(changed)
            owner, key = owner.owner, owner.key
        if isinstance(owner, (dict, list)):
            owner[key] = value
        else:
            setattr(owner, key, value)


class State:
    """Everything that a call can reach and whose size may change.

    slots: tensors and integers. structure: what must stay the same otherwise. objects: neither plain values
    nor containers, by their ids. The module's own part is added by `add_module`.
    """

    def __init__(self, module: torch.nn.Module, args: Any, kwargs: Any, known: Sequence[int] = ()) -> None:
        self.module = module
        self.slots: list[Slot] = []
        self.objects: dict[int, Any] = {}
        self._noted: list[Any] = []
        self._seen = set(known)
        self._walk((), list(args), None, None, 0)
        self._walk((), dict(kwargs), None, None, 0)
        self.structure, self.module_structure = tuple(self._noted), ()
        self.sizes = tuple(size for slot in self.slots for size in slot.sizes)
        self.arguments, self.argument_sizes = len(self.slots), len(self.sizes)

    @property
    def tensors(self) -> list[Tensor]:
        """Return the tensors among the arguments."""
        return [slot.value for slot in self.slots[: self.arguments] if isinstance(slot.value, Tensor)]

    def add_module(self) -> State:
        """Add tensors, counters and settings of the module, and the lengths of its containers."""
        if self.module_structure:
            return self
        for number, part in enumerate(self.module.modules()):
            for owner in (part.__dict__, part._buffers):
                for name, value in owner.items():
                    if isinstance(value, (list, tuple, dict, set, deque)):
                        entries = value.values() if isinstance(value, dict) else value
                        plain = [v for v in entries if isinstance(v, _PLAIN) or type(v) is int]
                        self._noted.append((number, name, len(value), *plain))
                    elif isinstance(value, (Tensor, int, *_PLAIN)):
                        self._note((number, name), value, owner, name)
        self.module_structure = tuple(self._noted[len(self.structure) :])
        self.sizes = tuple(size for slot in self.slots for size in slot.sizes)
        return self

    def _note(self, path: tuple[Any, ...], value: Any, owner: Any, key: Any) -> None:
        if isinstance(value, Tensor):
            self.slots.append(Slot(value, owner, key))
            self._noted.append((path, value.dtype, value.device, value.dim()))
        elif type(value) is int:
            self.slots.append(Slot(value, owner, key))
            self._noted.append((path, int))
        else:
            self._noted.append((path, value if isinstance(value, _PLAIN) else type(value)))

    def _walk(self, path: tuple[Any, ...], value: Any, owner: Any, key: Any, depth: int) -> None:
        if isinstance(value, (dict, list, tuple)):
            self._noted.append((path, type(value), len(value)))
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            holder = _Tuple(owner, key) if isinstance(value, tuple) else value
            for name, entry in list(entries):
                self._walk((*path, name), entry, holder, name, depth)
            return
        self._note(path, value, owner, key)
        plain = isinstance(value, (Tensor, int, type, torch.nn.Module, *_PLAIN))
        if not plain and depth < _MAX_DEPTH and id(value) not in self._seen:
            self._seen.add(id(value))
            self.objects[id(value)] = value
            for name, entry in list(getattr(value, "__dict__", {}).items()):
                self._walk((*path, name), entry, value, name, depth + 1)


class _Placeholder:
    """Takes the place of a tensor or an object in a pattern; copies are the same."""

    def __deepcopy__(self, memo: Any) -> _Placeholder:
        return self


class Pattern(NamedTuple):
    """An output without its tensors. places: each is a new tensor, a slot or an object of the arguments."""

    output: Any
    places: list[tuple[_Placeholder, str, int]]

    @classmethod
    def of(cls, output: Any, state: State, tape: Any) -> tuple[Pattern, list[Tensor], bool] | None:
        """Return the pattern, its new tensors, and whether it has objects that the arguments do not have.

        None if it cannot be built again: a tensor has a known value or a type of the program's own.
        """
        inside = State(state.module, (output,), {}, tuple(state.objects))
        places = {key: (_Placeholder(), "object", n) for n, key in enumerate(state.objects)}
        slots = {id(slot.value): i for i, slot in enumerate(state.slots) if isinstance(slot.value, Tensor)}
        new: list[Tensor] = []
        for tensor in inside.tensors:
            if type(tensor) is not FakeTensor or tape.shadows.get(tensor) is not None:
                return None
            if id(tensor) in slots:
                places[id(tensor)] = (_Placeholder(), "slot", slots[id(tensor)])
            elif id(tensor) not in places:
                places[id(tensor)] = (_Placeholder(), "new", len(new))
                new.append(tensor)
        try:
            pattern = copy.deepcopy(output, {key: place[0] for key, place in places.items()})
        except Exception:  # an object of the program that cannot be copied
            return None
        return cls(pattern, list(places.values())), new, bool(inside.objects)

    def build(self, new: Sequence[Tensor], state: State) -> Any:
        sources = {"new": new, "slot": [s.value for s in state.slots], "object": [*state.objects.values()]}
        return copy.deepcopy(self.output, {id(place): sources[kind][n] for place, kind, n in self.places})


# Series of calls ---------------------------------------------------------------------------------------


@dataclass
class RecordedCall:
    """A call that ran: sizes before and after it and of its outputs.

    transient: its peak of live bytes above the level before it.
    """

    launches: list[Launch]
    waits: list[HostWait]
    transient: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()

    @classmethod
    def of(cls, span: Sequence[Event], *sizes: tuple[int, ...]) -> RecordedCall:
        launches = [e for e in span if isinstance(e, Launch)]
        return cls(launches, [e for e in span if isinstance(e, HostWait)], _transient(span), *sizes)


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


def next_value(values: Sequence[float], position: float) -> float:
    """Extrapolate `values` by `position` calls: quadratic if every second difference agrees, else linear."""
    steps = [b - a for a, b in pairwise(values)]
    bends = {b - a for a, b in pairwise(steps)}
    if len(bends) == 1:
        bend = bends.pop()
        return values[-1] + position * steps[-1] + bend * position * (position + 1) / 2
    return max(0.0, values[-1] + position * (values[-1] - values[0]) / (len(values) - 1))


class Series:
    """The last calls that ran, their sizes growing evenly.

    launches: (line, kernels in each call, products in each call) -> how often, with equal layers joined; None
    before the series is complete, or if its calls launch different kernels.
    """

    def __init__(self, calls: Sequence[RecordedCall] = ()) -> None:
        self.calls = list(calls)
        self.launches = self._common_launches() if calls else None
        self._events: dict[float, Extrapolated] = {}

    def add(self, call: RecordedCall) -> None:
        """Add a call: it continues the series or begins a new one."""
        self.calls.append(call)
        if len(self.calls) > 2 and not _grow_evenly(self.calls[-3:]):
            self.calls = self.calls[-2:]
        self.calls = self.calls[-RECORDED:]
        self.launches, self._events = None, {}
        if len(self.calls) == RECORDED:
            self.launches = self._common_launches()

    def _common_launches(self) -> Counter[Any] | None:
        common: Counter[Any] = Counter()
        if len({len(call.launches) for call in self.calls}) != 1:
            return None
        for column in zip(*(call.launches for call in self.calls), strict=True):
            if len({(_kinds(e), len(e.products), *(len(k.sizes) for k in e.kernels)) for e in column}) != 1:
                return None
            common[column[0].line, tuple(e.kernels for e in column), tuple(e.products for e in column)] += 1
        return common

    def transient(self, position: float) -> float:
        return next_value([call.transient for call in self.calls], position)

    def event(self, position: float) -> Extrapolated:
        """Return the call this many positions after the last one."""
        assert self.launches is not None
        if position in self._events:
            return self._events[position]
        parts: Counter[tuple[Line | None, Kernel]] = Counter()
        products: Counter[tuple[str, str]] = Counter()
        calls = views = launches = 0
        for (line, kernels, products_of), times in self.launches.items():
            if not kernels[-1]:
                views += times
                continue
            calls += times
            for column in zip(*kernels, strict=True):
                kernel = _next_kernel(column, position)
                parts[line, kernel] += times
                launches += times * kernel.launches
            for column in zip(*products_of, strict=True):
                flops = int(next_value([product.flops for product in column], position))
                products[column[-1].part, column[-1].dtype] += times * flops
        event = Extrapolated(
            parts=tuple((line, kernel, times) for (line, kernel), times in parts.items()),
            calls=calls,
            views=views,
            launches=launches,
            products=tuple(Product(part, dtype, flops) for (part, dtype), flops in products.items()),
        )
        self._events[position] = event
        return event


def _grow_evenly(calls: Sequence[RecordedCall]) -> bool:
    """Return whether the sizes grow by the same amount from call to call."""
    for sizes in zip(*((c.before, c.after, c.outputs) for c in calls), strict=True):
        if len({len(entry) for entry in sizes}) != 1:
            return False
        if any(b - a != c - b for a, b, c in zip(*sizes, strict=True)):
            return False
    return len({(len(c.launches), len(c.waits)) for c in calls}) == 1


def _next_kernel(column: Sequence[Kernel], position: float) -> Kernel:
    if all(kernel == column[0] for kernel in column):
        return column[0]
    # Use the recorded call whose position has the same remainder, because alignments repeat.
    like = column[(int(position) - 1) % len(column)]
    rates = {
        name: next_value([getattr(k, name) for k in column], position)
        for name in ("nbytes", "flops", "elements", "repeated")
    }
    sizes = [int(next_value(size, position)) for size in zip(*(k.sizes for k in column), strict=True)]
    return like._replace(sizes=tuple(sizes), **rates)


def _kinds(launch: Launch) -> tuple[Any, ...]:
    return launch.name, launch.line, tuple((kernel.kind, kernel.dtype) for kernel in launch.kernels)


class _Family:
    """Calls without gradients of one module with one structure of its arguments."""

    def __init__(self) -> None:
        self.series = Series()
        self.usable = True
        self.pattern: Any = None
        self.outputs: list[tuple[int, torch.dtype, torch.device]] = []  # of the new tensors
        self.changed: list[int] = []  # slots that a call changes
        self.arguments = self.argument_sizes = 0

    def add(self, tape: Any, span: Sequence[Event], output: Any, before: State, after: State) -> None:
        """Add a call that ran; the family is not usable if it left anything behind but longer caches."""
        if before.module_structure != after.module_structure:
            # A cache or a container was created: a series may begin after it.
            self.series = Series()
            return
        described = Pattern.of(output, before, tape)
        launches = [e for e in span if isinstance(e, Launch)]
        plain = bool(launches) and not any(e.region for e in launches)
        plain = plain and not any(isinstance(e, Extrapolated) for e in span)
        plain = plain and before.structure == after.structure and not any(_hooks(before.module))
        if described is None or described[2] or not plain:
            self.usable = False
            return
        self.pattern, new, _ = described
        sizes = tuple(size for tensor in new for size in tensor.shape)
        self.series.add(RecordedCall.of(span, before.sizes, after.sizes, sizes))
        self.outputs = [(t.dim(), t.dtype, t.device) for t in new]
        slots = enumerate(zip(before.slots, after.slots, strict=True))
        self.changed = [i for i, (old, new) in slots if old.sizes != new.sizes]
        self.arguments, self.argument_sizes = before.arguments, before.argument_sizes

    @property
    def module_is_static(self) -> bool:
        """Return whether all of the module's own tensors keep their size in the series."""
        first, last, count = self.series.calls[0], self.series.calls[-1], self.argument_sizes
        same = first.before[count:] == last.before[count:] == last.after[count:]
        return same and all(index < self.arguments for index in self.changed)

    def position(self, sizes: tuple[int, ...]) -> int | None:
        """Return the number of calls from the last recorded one to one of these sizes; None if outside.

        Sizes of the module's own tensors may be omitted if they never change.
        """
        before, last = (call.before for call in self.series.calls[-2:])
        if len(sizes) != len(last) and not (len(sizes) == self.argument_sizes and self.module_is_static):
            return None
        steps = [(b - a, size - b) for a, b, size in zip(before, last, sizes, strict=False)]
        ratios = {moved // growth for growth, moved in steps if growth}
        position = ratios.pop() if len(ratios) == 1 else 0
        return None if ratios or any(m != position * g for g, m in steps) else position

    def go_on(self, tape: Any, position: int, state: State) -> Any:
        """Record the call at a position of the series without running it."""
        place, calls = tape.lines.place(), self.series.calls
        transient = int(self.series.transient(position))
        if transient > 0:
            tape.release(tape.allocate(transient, (transient,), "uint8", place, "temporary"))
        tape.add(self.series.event(position).at(place.line, place.phase, tape.step))
        for wait in calls[-1].waits:
            tape.add(replace(wait, step=tape.step, mark=0))

        def sizes_of(recorded: list[tuple[int, ...]], first: int, last: int) -> list[int]:
            return [int(next_value([sizes[i] for sizes in recorded], position)) for i in range(first, last)]

        def fresh(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
            with _disable_current_modes(), torch.inference_mode(False):
                tensor = FakeTensor(tape.fake_mode, torch.empty(shape, dtype=dtype, device="meta"), device)
                tape.hold(tensor, place)
            return tensor

        ends = [0, *accumulate(len(slot.sizes) for slot in state.slots)]
        after, grown = [call.after for call in calls], {}  # one tensor may be reached twice
        for index in self.changed:
            slot, sizes = state.slots[index], sizes_of(after, ends[index], ends[index + 1])
            if not isinstance(slot.value, Tensor):
                slot.replace(sizes[0])
                continue
            key = (id(slot.value), *sizes)
            if key not in grown:
                grown[key] = fresh(sizes, slot.value.dtype, slot.value.device)
            slot.replace(grown[key])
        ends = [0, *accumulate(dim for dim, _, _ in self.outputs)]
        shapes = [sizes_of([call.outputs for call in calls], a, b) for a, b in pairwise(ends)]
        kinds = [(dtype, device) for _, dtype, device in self.outputs]
        new = [fresh(shape, *kind) for shape, kind in zip(shapes, kinds, strict=True)]
        return self.pattern.build(new, state)


# Tokens of `generate` ------------------------------------------------------------------------------------


def _samples_plainly(args: Any, kwargs: Any) -> bool:
    """Whether a call of `generate` returns only tokens, one per call of the model."""
    configs = [kwargs.get("generation_config"), getattr(args[0], "generation_config", None)]

    def setting(name: str) -> Any:
        values = [kwargs.get(name), *(getattr(config, name, None) for config in configs)]
        return next((value for value in values if value is not None), None)

    if any(kwargs.get(name) for name in _OTHER_WAYS) or setting("return_dict_in_generate"):
        return False
    return (setting("num_beams") or 1) == 1


class _Rollout:
    """One call of `generate`, whose loop calls its stopping criteria once per token.

    ends, live: number of events and live bytes after each token. length: of the sequences after the last one.
    series: its last tokens, if enough were recorded. like: the rollout that the left out tokens continue. A
    call whose second token continues an earlier rollout stops there: prompts of another length give the same.
    """

    def __init__(self, tape: Any, earlier: deque[_Rollout]) -> None:
        self.tape, self.earlier = tape, earlier
        self.ends: list[int] = []
        self.live: list[int] = []
        self.length = self.left_out = 0
        self.series = Series()
        self.like: _Rollout | None = None

    def token_ends(self, original: Any, criteria: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call the stopping criteria; report that all sequences have ended once enough is recorded."""
        self.ends.append(len(self.tape.recording.events))
        self.live.append(self.tape.live_bytes)
        done = original(criteria, input_ids, *args, **kwargs)
        longest, self.length = criteria.max_length, input_ids.shape[1]
        if isinstance(longest, int) and isinstance(done, Tensor) and longest > self.length:
            if len(self.ends) == 2:
                token = self._tokens(self.ends)[0]
                self.like = next((r for r in reversed(self.earlier) if r.precedes(token, self.length)), None)
            elif len(self.ends) >= TOKENS:
                self.like = self._recorded()
            if self.like is not None:
                self.left_out = longest - self.length
                return torch.ones_like(done)
        return done

    def _tokens(self, ends: Sequence[int]) -> list[RecordedCall]:
        events = self.tape.recording.events
        return [RecordedCall.of(events[a:b]) for a, b in pairwise(ends)]

    def _recorded(self) -> _Rollout:
        """Store the last tokens as a series."""
        tokens = self._tokens(self.ends[-RECORDED - 1 :])
        self.series = Series(tokens)
        if self.series.launches is None:
            self.tape.notes[
                "generate: recorded tokens differ; the last one is used for the tokens left out"
            ] += 1
            self.series = Series(tokens[-1:] * RECORDED)
        self.live = self.live[-RECORDED:]
        self.earlier.append(self)
        return self

    def precedes(self, token: RecordedCall, length: int) -> bool:
        """Whether a token continues the series: the same kernels, bytes and FLOPs."""
        recorded = [call.launches for call in self.series.calls]
        if [_kinds(launch) for launch in token.launches] != [_kinds(launch) for launch in recorded[-1]]:
            return False
        if any(len(launches) != len(token.launches) for launches in recorded):
            return False
        totals = zip(*map(_work, recorded), strict=True)
        expected = [next_value(column, length - self.length) for column in totals]
        pairs = zip(_work(token.launches), expected, strict=True)
        return all(isclose(work, value, rel_tol=FITS) for work, value in pairs)

    def completed(self, like: _Rollout, tokens: Tensor) -> Tensor:
        """Record the price of the tokens that are left out and the memory of their cache; add them."""
        tape, place, series = self.tape, self.tape.lines.place(), like.series
        ran = self.length - like.length
        last = ran + self.left_out
        grown = next_value(like.live, last) - next_value(like.live, ran)
        extra = int(self.live[-1] + grown + series.transient(last)) - tape.live_bytes
        if extra > 0:
            tape.release(tape.allocate(extra, (extra,), "uint8", place, "temporary"))
        for first in range(0, self.left_out, CHUNK):
            count = min(CHUNK, self.left_out - first)
            event = series.event(ran + first + (count + 1) / 2).times(count)
            tape.add(event.at(place.line, place.phase, tape.step))
            for wait in series.calls[-1].waits * count:
                tape.add(replace(wait, step=tape.step, mark=0))
        more = (tokens.shape[0], self.left_out)
        return torch.cat(
            [tokens, torch.full(more, CHOSEN_INDEX, dtype=tokens.dtype, device=tokens.device)], 1
        )


def _work(launches: Sequence[Launch]) -> tuple[float, float]:
    kernels = [kernel for launch in launches for kernel in launch.kernels]
    return sum(kernel.nbytes for kernel in kernels), sum(kernel.flops for kernel in kernels)


# Equal micro-batches -------------------------------------------------------------------------------------


class _Made(NamedTuple):
    """A tensor that a repetition makes on a storage of its own."""

    storage: int  # the recorded one
    nbytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    differentiable: bool


class _Pass:
    """A call with gradients and its backward.

    arguments: storages of the tensors among the arguments. before, gradients: storages of the parameters'
    gradients before and after backward, None without one. received: storage of an output's gradient ->
    output. remains: storages that live as long as the graph.
    """

    def __init__(self, key: Any, state: State, tape: Any) -> None:
        self.key, self.tape, self.step = key, tape, tape.step
        self.module: Any = state.module  # until backward has ended
        self.events = tape.recording.events
        self.first = self.last = len(self.events)
        self.start: int | None = None
        self.arguments = [tape.number_of(t) for t in state.tensors]
        self.outputs: list[_Made] = []
        self.before: list[int | None] = []
        self.gradients: list[int | None] = []
        self.received: dict[int, int] = {}
        self.forward: list[Event] = []
        self.backward: list[Event] = []
        self.remains: set[int] = set()

    def watch(self, output: Any, state: State) -> bool:
        """Describe the output, and watch its gradients; False if it cannot be built again."""
        tape = self.tape
        described = Pattern.of(output, state, tape) if tape.recording.events is self.events else None
        if described is None:
            return False
        self.last = len(self.events)
        self.pattern, new, _ = described
        for tensor in new:
            number = tape.number_of(tensor)
            if number is None or (tensor.requires_grad and tensor.grad_fn is None):
                return False
            nbytes, offset = tensor.untyped_storage().nbytes(), int(tensor.storage_offset())
            shape, device = tuple(tensor.shape), tensor.fake_device  # pyright: ignore[reportAttributeAccessIssue]
            kind = (tensor.dtype, device, tensor.requires_grad)
            self.outputs.append(_Made(number, nbytes, shape, tensor.stride(), offset, *kind))
        if any(t.requires_grad for t in state.tensors) or not any(t.requires_grad for t in new):
            return False
        for index, tensor in enumerate(new):
            if tensor.requires_grad:
                tensor.register_hook(lambda grad, index=index: self._gradient_arrives(index, grad))
        return True

    def _gradient_arrives(self, index: int, gradient: Tensor) -> None:
        if self.start is None:
            self.start = len(self.events)
            self.before = self._gradients()
        number = self.tape.number_of(gradient)
        if number is not None:
            self.received[number] = index

    def _gradients(self) -> list[int | None]:
        grads = [p.grad for p in self.module.parameters()]
        return [None if grad is None else self.tape.number_of(grad) for grad in grads]

    def close(self) -> bool:
        """Store what was recorded of the call and its backward; False if it cannot be repeated."""
        tape, events = self.tape, self.tape.recording.events
        if self.start is None or events is not self.events or tape.step != self.step:
            return False
        self.forward, self.backward = events[self.first : self.last], events[self.start :]
        # What the end of the call frees, such as the casts of autocast; its output ends by itself.
        outputs = {output.storage for output in self.outputs}
        inside = {event.storage for event in self.forward if isinstance(event, Alloc)} - outputs
        between = events[self.last : self.start]
        self.forward += [e for e in between if isinstance(e, Free) and e.storage in inside]
        both = (*self.forward, *self.backward)
        if not all(map(_is_plain, both)) or _has_code_of_program(self.module):
            return False
        created = {e.storage for e in both if isinstance(e, Alloc)}
        freed = {e.storage for e in both if isinstance(e, Free)}
        if any(tape.recording.storages[number].category == "library" for number in created):
            return False
        self.gradients = self._gradients()
        pairs = list(zip(self.before, self.gradients, strict=True))
        if any(before not in (None, after) for before, after in pairs):
            return False
        new = {after for before, after in pairs if before is None and after}
        self.remains = created - freed - outputs - new
        self.module = None
        return created >= outputs | new


def _is_plain(event: Event) -> bool:
    """Whether an event may be repeated: on the default stream, without a choice by values."""
    if isinstance(event, Launch):
        return not event.stream and not event.mark and not event.region
    if isinstance(event, HostWait):
        return not event.mark and event.kind not in _DYNAMIC
    return isinstance(event, Free) or (isinstance(event, Alloc) and not event.stream)


class _Run:
    """One repetition of a pass. numbers: recorded storage -> new one; own: those that no tensor holds."""

    def __init__(self, tape: Any, known: _Pass, state: State) -> None:
        self.tape, self.known, self.module = tape, known, state.module
        self.numbers: dict[int, int] = {}
        self.own: set[int] = set()
        self.held: dict[int, Any] = {}  # storages of outputs that backward reads
        self._know(known.arguments, state.tensors)

    def call(self, state: State, anchor: Tensor) -> Any:
        """Repeat the forward and return its output."""
        self._play(self.known.forward)
        return self.known.pattern.build(_Repeated.apply(self, anchor), state)

    def _know(self, recorded: Sequence[int | None], now: Sequence[Tensor | None]) -> None:
        """Add storages that the program holds."""
        for old, tensor in zip(recorded, now, strict=True):
            new = None if tensor is None else self.tape.number_of(tensor)
            if old is not None and new is not None:
                self.numbers[old] = new

    def _play(self, span: Sequence[Event], received: Sequence[Tensor | None] = ()) -> None:
        tape, numbers = self.tape, self.numbers
        for event in span:
            if isinstance(event, Alloc):
                old = tape.recording.storages[event.storage]
                place = Place(event.line, event.phase, 0)
                new = tape.allocate(event.nbytes, old.shape, old.dtype, place, old.category)
                numbers[event.storage] = new
                self.own.add(new)
            elif isinstance(event, Free):
                self._free(event.storage, received)
            elif isinstance(event, Launch):
                reads, writes = (tuple(map(self._renumbered, ids)) for ids in (event.reads, event.writes))
                tape.add(replace(event, step=tape.step, reads=reads, writes=writes))
            else:
                tape.add(replace(event, step=tape.step))

    def _free(self, recorded: int, received: Sequence[Tensor | None]) -> None:
        number = self.numbers.get(recorded)
        if number in self.own:
            self.own.discard(number)
            self.tape.release(number)
        elif recorded in self.held:
            self.held.pop(recorded)
        elif recorded in self.known.received and received:
            gradient = received[self.known.received[recorded]]
            if gradient is not None:
                self.tape.disown(gradient)

    def _renumbered(self, recorded: int) -> int:
        storage = self.tape.recording.storages[recorded]
        if recorded not in self.numbers and storage.category == "registers":
            self.numbers[recorded] = number = len(self.tape.recording.storages)
            self.tape.recording.storages[number] = replace(storage, number=number)
        return self.numbers.get(recorded, recorded)

    def tensors(self, outputs: Sequence[_Made]) -> list[Tensor]:
        """Return new tensors on the storages of this run."""
        built: list[Tensor] = []
        bases: dict[int, Tensor] = {}
        with _disable_current_modes(), torch.inference_mode(False):
            for output in outputs:
                if output.storage not in bases:
                    elements = output.nbytes // output.dtype.itemsize
                    bases[output.storage] = torch.empty(elements, dtype=output.dtype, device="meta")
                element = torch.empty(0, dtype=output.dtype, device="meta")
                storage = bases[output.storage].untyped_storage()
                element.set_(storage, output.offset, output.shape, output.stride)  # pyright: ignore[reportArgumentType]
                tensor = FakeTensor(self.tape.fake_mode, element, output.device)
                number = self.numbers[output.storage]
                if number in self.own:
                    self.own.discard(number)
                    self.tape.bind(tensor, number)
                built.append(tensor)
        return built

    def backward(self, received: Sequence[Tensor | None]) -> None:
        """Repeat the backward, and leave the gradients that it left."""
        known, parameters = self.known, list(self.module.parameters())
        with self.tape.lock:
            self._know(known.gradients, [p.grad for p in parameters])
            for storage, index in known.received.items():
                self._know([storage], [received[index]])
            self._play(known.backward, received)
            # A program that drops its gradients between forward and backward may need one more or one less.
            for p, storage in zip(parameters, known.gradients, strict=True):
                if storage is None:
                    continue
                if storage not in self.numbers:
                    p.grad = torch.empty_like(p)
                elif self.numbers[storage] in self.own:
                    nbytes, shape = p.numel() * p.element_size(), tuple(p.shape)
                    kind = (p.dtype, torch.device("cuda", 0), False)
                    (new,) = self.tensors([_Made(storage, nbytes, shape, p.stride(), 0, *kind)])
                    p.grad = new if p.grad is None else p.grad.add_(new)

    def __del__(self) -> None:
        for number in sorted(self.own):
            self.tape.release(number)


class _Repeated(torch.autograd.Function):
    """The outputs of a repeated call; its backward repeats the recorded one."""

    @staticmethod
    def forward(ctx: Any, run: _Run, anchor: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        outputs = run.known.outputs
        built = run.tensors(outputs)
        freed = {event.storage for event in run.known.backward if isinstance(event, Free)}
        for output, tensor in zip(outputs, built, strict=True):
            if output.storage in freed:
                run.held[output.storage] = tensor.untyped_storage()
        ctx.mark_non_differentiable(*(t for m, t in zip(outputs, built, strict=True) if not m.differentiable))
        return tuple(built)

    @staticmethod
    def backward(ctx: Any, *received: Tensor | None) -> tuple[None, None]:
        ctx.run.backward(received)
        return None, None


def _hooks(module: torch.nn.Module) -> Iterator[Any]:
    """The hooks around calls of a module and its parts."""
    for part in module.modules():
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks):
            yield from hooks.values()
        yield from part._backward_pre_hooks.values()


def _has_code_of_program(module: torch.nn.Module) -> bool:
    """Whether a call of a module or its backward runs code of the program, in a hook."""
    for hook in _hooks(module):
        while hasattr(hook, "func"):
            hook = hook.func
        code = getattr(hook, "__code__", None) or getattr(type(hook).__call__, "__code__", None)
        if code is not None and judge_code(code.co_filename, code.co_name) & USER:
            return True
    for p in module.parameters():
        after = getattr(p, "_post_accumulate_grad_hooks", None) or {}
        # DistributedDataParallel's do nothing inside `no_sync`; outside, they launch a collective.
        if p._backward_hooks or any(getattr(hook, "__name__", "") != REDUCES for hook in after.values()):
            return True
    return False
