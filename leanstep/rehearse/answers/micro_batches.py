"""Equal micro-batches: a model call with gradients and its backward are recorded once and then repeated.

A call that equals an earlier one (the same module in the same state, arguments of the same shapes, the same
line) is not run. Its recorded events are repeated with new storages, its outputs are new, and backward
repeats the recorded backward: activations are freed and gradients appear where they did.

What surrounds the call, such as the loss, runs as usual. A call runs unchanged if its backward cannot be
separated from that of its surroundings, or if it leaves something behind: another update, a cache, a marker
of a stream, code of the program in a hook.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from leanstep.rehearse.answers.repeated_calls import State
from leanstep.rehearse.events import Alloc, Event, Free, HostWait, Launch
from leanstep.rehearse.lines import Place
from leanstep.rehearse.plans import uses_tf32
from leanstep.tape.hooks import in_engine
from leanstep.tape.lines import USER, judge_code

_sequence_number: Any = torch._C._autograd._get_sequence_nr  # pyright: ignore[reportAttributeAccessIssue]
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_CONTAINERS = (list, tuple, dict, set, deque)
# Reads whose result decides the shapes that follow.
_DYNAMIC = ("boolean index", "nonzero")
# Recorded passes per key: an earlier one is complete once the program has dropped its outputs.
_CANDIDATES = 4


class _Output(NamedTuple):
    """A tensor of the output: a new one on a recorded storage, or an argument of the call (its slot)."""

    storage: int
    nbytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    differentiable: bool
    argument: int | None


class _Placeholder:
    """Takes the place of a tensor or of an argument in the pattern of an output; copies are the same."""

    def __deepcopy__(self, memo: Any) -> _Placeholder:
        return self


@dataclass
class Pass:
    """A recorded call and its backward.

    arguments: storages of the tensors among the arguments. gradients: of each parameter's gradient after
    backward, None without one. received: storage of an output's gradient -> output. remains: storages that
    live as long as the graph.
    """

    forward: list[Event]
    backward: list[Event]
    pattern: Any
    outputs: list[tuple[_Placeholder, _Output]]
    objects: list[tuple[_Placeholder, int]]
    arguments: list[int | None]
    gradients: list[int | None]
    received: dict[int, int]
    remains: set[int]


@dataclass
class _Open:
    """A call that ran, until its backward has ended."""

    key: Any
    module: torch.nn.Module
    step: int
    events: list[Event]
    first: int
    last: int = 0
    start: int | None = None
    pattern: Any = None
    outputs: list[tuple[_Placeholder, _Output]] = field(default_factory=list)
    objects: list[tuple[_Placeholder, int]] = field(default_factory=list)
    arguments: list[int | None] = field(default_factory=list)
    received: dict[int, int] = field(default_factory=dict)
    gradients: list[int | None] = field(default_factory=list)


class MicroBatches:
    """Runs the calls of models with gradients, or repeats their recording."""

    def __init__(self, tape: Any) -> None:
        self.tape = tape
        self.enabled = False  # without an optimizer, steps are recorded by the parameters of the graph
        self._passes: dict[Any, list[Pass]] = {}
        self._open: _Open | None = None
        self._after_backward = 0
        self._cast_generation = 0
        self._cast_in: dict[int, int] = {}  # module -> generation of the autocast cache in its last call
        self._anchor = torch.zeros((), requires_grad=True)
        clear = torch.clear_autocast_cache

        def cleared() -> None:
            self._cast_generation += 1
            clear()

        torch.clear_autocast_cache = cleared

    def run(self, call: Callable[..., Any], module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return `call(module, *args, **kwargs)`, run or repeated."""
        tape = self.tape
        usable = self.enabled and torch.is_grad_enabled() and not in_engine() and tape.capture is None
        usable = usable and tape.ranks == 1 and not torch.is_inference_mode_enabled()
        if not usable or not any(p.requires_grad for p in module.parameters()):
            return call(module, *args, **kwargs)
        self._open = None  # a second call in one backward: their events cannot be separated
        state = State(module, args, kwargs)
        key = self._key(state)
        if key is None:
            return call(module, *args, **kwargs)
        known = next((p for p in self._passes.get(key, ()) if not self._alive(p.remains)), None)
        if known is not None:
            tape.notes["equal micro-batches: the recording of an earlier one was repeated"] += 1
            return self._repeat(known, state)
        # Nodes created since the last backward would run within this call's backward.
        is_alone = _sequence_number() == self._after_backward
        opened = _Open(key, module, tape.step, tape.recording.events, len(tape.recording.events))
        opened.arguments = [tape.number_of(t) for t in _tensors_of(state)]
        output = call(module, *args, **kwargs)
        if is_alone and tape.recording.events is opened.events:
            opened.last = len(opened.events)
            self._open = opened if self._describe(opened, output, state) else None
        return output

    def backward_ended(self, accumulates: bool) -> None:
        """A backward of the main thread has ended."""
        opened, self._open = self._open, None
        self._after_backward = _sequence_number()
        if opened is not None and accumulates and opened.start is not None:
            recorded = self._pass_of(opened)
            if recorded is not None:
                passes = self._passes.setdefault(opened.key, [])
                passes.append(recorded)
                del passes[:-_CANDIDATES]

    def _alive(self, storages: set[int]) -> bool:
        return bool(storages) and not storages.isdisjoint(self.tape.held_numbers())

    # What a call depends on

    def _key(self, state: State) -> Any:
        """Return everything that the events of a call follow from; None if it must run."""
        tensors = _tensors_of(state)
        inside = _module_state(state.module)
        if inside is None or any(t.requires_grad for t in tensors):
            return None
        generation, before = self._cast_generation, self._cast_in.get(id(state.module))
        self._cast_in[id(state.module)] = generation
        return (
            id(state.module),
            self.tape.lines.here(),
            state.structure,
            state.sizes,
            tuple(self._is_full(t) for t in tensors),
            inside,
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

    # Recording

    def _describe(self, opened: _Open, output: Any, state: State) -> bool:
        """Describe the output, and watch its gradients; False if it cannot be built again."""
        tape, memo = self.tape, {}
        arguments = {id(slot.value): i for i, slot in enumerate(state.slots)}
        for number, (key, _) in enumerate(state.objects.items()):
            memo[key] = _Placeholder()
            opened.objects.append((memo[key], number))
        watched: list[tuple[int, Tensor]] = []
        for slot in State(opened.module, (output,), {}).slots:
            tensor = slot.value
            if not isinstance(tensor, Tensor) or id(tensor) in memo:
                continue
            known = tape.number_of(tensor) if isinstance(tensor, FakeTensor) else None
            if known is None or tape.shadows.get(tensor) is not None or type(tensor) is not FakeTensor:
                return False
            argument = arguments.get(id(tensor))
            if tensor.requires_grad and (tensor.grad_fn is None or argument is not None):
                return False
            memo[id(tensor)] = _Placeholder()
            described = _Output(
                known,
                tensor.untyped_storage().nbytes(),
                tuple(tensor.shape),
                tensor.stride(),
                int(tensor.storage_offset()),
                tensor.dtype,
                tensor.fake_device,
                tensor.requires_grad,
                argument,
            )
            if tensor.requires_grad:
                watched.append((len(opened.outputs), tensor))
            opened.outputs.append((memo[id(tensor)], described))
        try:
            opened.pattern = copy.deepcopy(output, memo)
        except Exception:  # an object of the program that cannot be copied
            return False
        for index, tensor in watched:
            tensor.register_hook(lambda grad, index=index: self._gradient_arrives(opened, index, grad))
        return bool(watched)

    def _gradient_arrives(self, opened: _Open, index: int, gradient: Tensor) -> None:
        if opened.start is None:
            opened.start = len(opened.events)
            opened.gradients = [self._gradient_of(p) for p in opened.module.parameters()]
        number = self.tape.number_of(gradient)
        if number is not None:
            opened.received[number] = index

    def _gradient_of(self, parameter: Tensor) -> int | None:
        return None if parameter.grad is None else self.tape.number_of(parameter.grad)

    def _pass_of(self, opened: _Open) -> Pass | None:
        """Return what was recorded of a call and its backward; None if it cannot be repeated."""
        tape, events = self.tape, self.tape.recording.events
        if opened.start is None or events is not opened.events or tape.step != opened.step:
            return None
        forward, backward = events[opened.first : opened.last], events[opened.start :]
        # What the end of the call frees, such as the casts of autocast.
        created = {event.storage for event in forward if isinstance(event, Alloc)}
        between = [
            e for e in events[opened.last : opened.start] if isinstance(e, Free) and e.storage in created
        ]
        forward += between
        if not all(map(_is_plain, (*forward, *backward))) or _module_state(opened.module) is None:
            return None
        created = {e.storage for e in (*forward, *backward) if isinstance(e, Alloc)}
        freed = {e.storage for e in (*forward, *backward) if isinstance(e, Free)}
        if any(tape.recording.storages[number].category == "library" for number in created):
            return None
        gradients = [self._gradient_of(p) for p in opened.module.parameters()]
        if any(
            before not in (None, after) for before, after in zip(opened.gradients, gradients, strict=True)
        ):
            return None
        new = {n for before, n in zip(opened.gradients, gradients, strict=True) if before is None and n}
        outputs = {o.storage for _, o in opened.outputs if o.argument is None}
        if not created >= outputs | new:
            return None
        return Pass(
            forward=forward,
            backward=backward,
            pattern=opened.pattern,
            outputs=opened.outputs,
            objects=opened.objects,
            arguments=opened.arguments,
            gradients=gradients,
            received=opened.received,
            remains=created - freed - outputs - new,
        )

    # Repeating

    def _repeat(self, known: Pass, state: State) -> Any:
        run = _Run(self.tape, known, state.module)
        run.know(known.arguments, [self.tape.number_of(t) for t in _tensors_of(state)])
        run.play(known.forward)
        built = _Repeated.apply(run, self._anchor)
        fresh, memo = iter(built), {}
        for placeholder, output in known.outputs:
            value = next(fresh) if output.argument is None else state.slots[output.argument].value
            memo[id(placeholder)] = value
        objects = list(state.objects.values())
        memo |= {id(placeholder): objects[number] for placeholder, number in known.objects}
        return copy.deepcopy(known.pattern, memo)


class _Run:
    """One repetition of a pass. numbers: recorded storage -> new one; own: those that no tensor holds."""

    def __init__(self, tape: Any, known: Pass, module: torch.nn.Module) -> None:
        self.tape, self.known, self.module = tape, known, module
        self.numbers: dict[int, int] = {}
        self.own: set[int] = set()
        self.held: dict[int, Any] = {}  # storages of outputs that backward reads

    def know(self, recorded: Sequence[int | None], now: Sequence[int | None]) -> None:
        """Add storages that the program holds."""
        pairs = zip(recorded, now, strict=True)
        self.numbers |= {old: new for old, new in pairs if old is not None and new is not None}

    def play(self, span: Sequence[Event], received: Sequence[Tensor | None] = ()) -> None:
        tape, numbers = self.tape, self.numbers
        storages = tape.recording.storages
        for event in span:
            if isinstance(event, Alloc):
                old = storages[event.storage]
                place = Place(event.line, event.phase, 0)
                numbers[event.storage] = tape.allocate(
                    event.nbytes, old.shape, old.dtype, place, old.category
                )
                self.own.add(numbers[event.storage])
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

    def tensors(self, outputs: Sequence[_Output]) -> list[Tensor]:
        """Return new tensors on the storages of this run."""
        built: list[Tensor] = []
        bases: dict[int, Any] = {}
        with _disable_current_modes(), torch.inference_mode(False):
            for output in outputs:
                elements = output.nbytes // output.dtype.itemsize
                base = bases.get(output.storage)
                if base is None:
                    base = bases[output.storage] = torch.empty(elements, dtype=output.dtype, device="meta")
                element = torch.empty(0, dtype=output.dtype, device="meta")
                element.set_(base.untyped_storage(), output.offset, output.shape, output.stride)
                tensor = FakeTensor(self.tape.fake_mode, element, output.device)
                number = self.numbers[output.storage]
                if number in self.own:
                    self.own.discard(number)
                    self.tape.bind(tensor, number)
                built.append(tensor)
        return built

    def backward(self, received: Sequence[Tensor | None]) -> None:
        """Repeat the backward, and leave the gradients that it left."""
        tape, known = self.tape, self.known
        parameters = list(self.module.parameters())
        with tape.lock:
            now = [None if p.grad is None else tape.number_of(p.grad) for p in parameters]
            self.know(known.gradients, now)
            for storage, index in known.received.items():
                gradient = received[index]
                self.know([storage], [None if gradient is None else tape.number_of(gradient)])
            self.play(known.backward, received)
            # A program that drops its gradients between forward and backward may need one more or one less.
            for p, storage in zip(parameters, known.gradients, strict=True):
                if storage is None:
                    continue
                if storage not in self.numbers:
                    p.grad = torch.empty_like(p)
                elif self.numbers[storage] in self.own:
                    (new,) = self.tensors([_like(p, storage)])
                    p.grad = new if p.grad is None else p.grad.add_(new)

    def __del__(self) -> None:
        for number in sorted(self.own):
            self.tape.release(number)


def _like(parameter: Tensor, storage: int) -> _Output:
    nbytes = parameter.numel() * parameter.element_size()
    shape, device = tuple(parameter.shape), torch.device("cuda", 0)
    return _Output(storage, nbytes, shape, parameter.stride(), 0, parameter.dtype, device, False, None)


class _Repeated(torch.autograd.Function):
    """The outputs of a repeated call; its backward repeats the recorded one."""

    @staticmethod
    def forward(ctx: Any, run: _Run, anchor: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        outputs = [output for _, output in run.known.outputs if output.argument is None]
        built = run.tensors(outputs)
        freed = {event.storage for event in run.known.backward if isinstance(event, Free)}
        for output, tensor in zip(outputs, built, strict=True):
            if output.storage in freed:
                run.held[output.storage] = tensor.untyped_storage()
        ctx.mark_non_differentiable(*(t for o, t in zip(outputs, built, strict=True) if not o.differentiable))
        return tuple(built)

    @staticmethod
    def backward(ctx: Any, *received: Tensor | None) -> tuple[None, None]:
        outputs = iter(received)
        ctx.run.backward([next(outputs) if o.argument is None else None for _, o in ctx.run.known.outputs])
        return None, None


def _is_plain(event: Event) -> bool:
    """Whether an event may be repeated: on the default stream, without a choice by values."""
    if isinstance(event, Launch):
        return not event.stream and not event.mark and not event.region
    if isinstance(event, HostWait):
        return not event.mark and event.kind not in _DYNAMIC
    return isinstance(event, Free) or (isinstance(event, Alloc) and not event.stream)


def _module_state(module: torch.nn.Module) -> tuple[Any, ...] | None:
    """Return the settings of a module and its parts; None if the program's own code runs in its hooks."""
    parts: list[Any] = []
    for part in module.modules():
        for name, value in part.__dict__.items():
            if type(value) in _PLAIN:
                parts.append(value)
            elif isinstance(value, _CONTAINERS):
                if value and name.endswith("_hooks") and any(map(_is_users, _values(value))):
                    return None
                parts.append((len(value), *(v for v in _values(value) if type(v) in _PLAIN)))
            elif isinstance(value, Tensor):
                parts.append(tuple(value.shape))
        for p in part._parameters.values():
            if p is not None:
                if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
                    return None
                parts.append((p.requires_grad, p.dtype, p.grad is None))
        parts += [tuple(b.shape) for b in part._buffers.values() if b is not None]
    return tuple(parts)


def _tensors_of(state: State) -> list[Tensor]:
    return [slot.value for slot in state.slots if isinstance(slot.value, Tensor)]


def _values(container: Any) -> Any:
    return list(container.values() if isinstance(container, dict) else container)


def _is_users(hook: Any) -> bool:
    while hasattr(hook, "func"):
        hook = hook.func
    code = getattr(hook, "__code__", None) or getattr(type(hook).__call__, "__code__", None)
    return code is not None and bool(judge_code(code.co_filename, code.co_name) & USER)
