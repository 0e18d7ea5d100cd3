"""The dispatch mode of a rehearsal: fake CUDA tensors, real CPU tensors, a tape of calls below autograd.

A call without fake tensors is host work and runs unchanged. A call with fake tensors runs under
`FakeTensorMode`: shapes, strides and storage identity, no data. The tape records its kernels, its line, its
allocations and frees, and where the host waits for the device.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from leanstep.flops import CountCall, Counted, counter_of, operand_type
from leanstep.rehearse import events
from leanstep.rehearse.answers.custom_ops import ONE_PASS, body_of, needs_a_price
from leanstep.rehearse.answers.in_place import REPLACED, as_on_a_device
from leanstep.rehearse.cuda_allocator import Settings
from leanstep.rehearse.events import Kernel
from leanstep.rehearse.kernel_costs import FREE, kernels, one_pass, registered_cost
from leanstep.rehearse.lines import WORKSPACE, Lines, Place
from leanstep.rehearse.out_of_memory import DeviceMemory
from leanstep.rehearse.plans import MOST_PLANS, Arguments, Plan, Taped, plan_of, uses_tf32
from leanstep.rehearse.refusals import SPARSE, Refused
from leanstep.rehearse.shadows import (
    DYNAMIC,
    Shadows,
    device_asked_for,
    device_tensors,
    is_composite,
    is_mask,
    named_arguments,
    shape_of,
    storage_key,
    tensors_in,
    with_shapes,
)
from leanstep.tape.syncs import is_masked_fill, op_read

PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)
# Metadata queries on fake tensors: answered without a record.
QUESTIONS = frozenset(
    {"device", "sym_size", "sym_stride", "sym_numel", "is_contiguous", "dim", "layout", "sym_storage_offset"}
)
FACTORIES = frozenset({"randn", "rand", "empty", "zeros", "ones", "full"})
FLOATS = (None, torch.float32, torch.bfloat16, torch.float16, torch.float64)
Tensors = Sequence[Tensor]
STRIDED = frozenset({"as_strided", "as_strided_", "as_strided_copy"})
WRITES_ONLY = frozenset({"fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"})
# Reads in `leanstep.tape.syncs` that have another name in a recording.
WAITS = {"scalar": "item"}
# Floats in a real host tensor; larger ones stay fake, they go to the device later.
MOST_ON_HOST = 1 << 30
# Events, or calls on host tensors, between two checks of whether the program makes updates.
CHECKED_EVERY = 1024
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_CHECKPOINT = torch.utils.checkpoint.__file__


class DeviceCall(NamedTuple):
    """A call with device tensors. read: the kind of host read that it makes, or None."""

    func: Any
    name: str
    args: Any
    kwargs: dict[str, Any]
    where: torch.device | None
    place: Place
    read: str | None

    def mutated(self) -> list[Tensor]:
        """Return the tensor arguments that it writes."""
        written = [
            self.args[i] if i < len(self.args) else self.kwargs.get(argument.name)
            for i, argument in enumerate(self.func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        return tensors_in(written)

    def is_view(self) -> bool:
        """Whether an output aliases an argument."""
        return any(r.alias_info is not None for r in self.func._schema.returns)


def _traffic(*groups: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(shape_of(t).nbytes for group in groups for t in group)


def _counted_in(kernels: Iterable[Kernel]) -> tuple[Counted, ...]:
    """Return the FLOPs of kernels that are not torch's, as their cost functions state them."""
    return tuple(Counted(k.dtype, int(k.flops - k.repeated), int(k.repeated)) for k in kernels if k.flops)


def _is_recomputed() -> bool:
    """Whether a checkpoint recomputes this call: its frame is between the call and the engine."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not _ENGINE:
        if frame.f_code.co_filename == _CHECKPOINT:
            return True
        frame = frame.f_back
    return False


class Tape(TorchDispatchMode):
    """Runs a program on fake CUDA tensors and records it in a `Recording`."""

    def __init__(
        self,
        recording: events.Recording,
        clock: events.LiveClock,
        memory: DeviceMemory,
        workspace_bytes: int,
    ):
        super().__init__()
        self.recording, self.clock, self.workspace_bytes = recording, clock, workspace_bytes
        self.memory = memory
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.lock = threading.RLock()  # one thread at a time; the program's loaders have threads too
        self.shadows = Shadows(self.fake_mode)
        self.lines = Lines(recording.request.runs_leanstep)
        self.notes: Counter[str] = Counter()
        self.step = 0
        self.live_bytes = self.peak_bytes = self.window_peak_bytes = 0
        self._with_workspace: set[int] = set()  # threads with a cuBLAS workspace
        self.pinned: set[int] = set()  # host storages
        self._numbers: dict[int, int] = {}  # storage -> number in the recording
        self._watched: dict[int, Any] = {}
        self._category = ""
        self._parameters: list[Any] = []
        self.ranks = 1
        self.in_registers = False  # outputs of the next call take no memory: a compiler fuses them
        self.capture: Any = None  # the CUDA graph that is being captured
        self.num_captures = 0
        self.captured: set[int] = set()  # storages allocated by captures
        self.pools: dict[int, Any] = {}  # storage of a capture's pool -> called when it is released
        self.stream = 0  # the current stream
        self.num_marks = self._transfer_mark = 0
        self.update_replayed: Callable[[Any], None] = lambda groups: None  # a graph with an update ran
        self._held: list[events.Event] | None = None
        self.num_events = 0  # of the whole run, over all event lists
        self.num_host_calls = 0
        self.check_progress: Callable[[], None] = lambda: None
        self.collective: Any = None  # tapes a c10d call; set with the simulated torch.distributed
        self._names: dict[Any, str] = {}
        self._counters: dict[Any, CountCall | None] = {}
        self._whole: set[Any] = set()  # calls that are not composites
        self._plans: dict[Any, Plan | None] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: Dynamo captures no graph under a mode that returns False."""
        return True

    if not hasattr(TorchDispatchMode, "ignore_compile_internals"):  # torch 2.8 calls this method

        @classmethod
        def is_infra_mode(cls) -> bool:
            return True

    # Events

    def add(self, event: events.Event) -> None:
        self.recording.events.append(event)
        if self._held is None:
            self.clock.play(event)
        else:
            self._held.append(event)
        self.num_events += 1
        if not self.num_events % CHECKED_EVERY:
            self.check_progress()

    @contextlib.contextmanager
    def aside(self):
        """Keep launches and waits of leanstep's own calls out of the recording."""
        taped, self.recording.events = self.recording.events, []
        try:
            yield
        finally:
            ours = [e for e in self.recording.events if isinstance(e, events.Alloc | events.Free)]
            self.recording.events = taped + ours

    @contextlib.contextmanager
    def clock_held(self, fuse: Callable[[list[events.Event]], Iterable[events.Event]]):
        """Collect the events taped inside, and play the events that `fuse` makes of them."""
        outer, self._held = self._held, []
        try:
            yield
        finally:
            played, self._held = fuse(self._held), outer
            if outer is None:
                for event in played:
                    self.clock.play(event)
            else:
                outer.extend(played)

    def wait(
        self, kind: str, place: Place | None = None, *, counts: bool = True, mark: int | None = None
    ) -> None:
        """Tape a host wait: for the launches of the current stream, or for a mark; 0: for all streams."""
        place = place or self.lines.place()
        if mark is None:
            mark = self.mark(self.stream) if self.num_marks else 0  # with one stream there are no marks
        self.add(events.HostWait(kind, place.line, place.phase, self.step, counts, mark))

    def mark(self, stream: int) -> int:
        """Return a mark at the end of what was launched on a stream."""
        self.num_marks += 1
        self.add(events.StreamMark(self.num_marks, stream))
        return self.num_marks

    def hold_stream(self, mark: int, stream: int) -> None:
        """Start later launches on a stream after a mark; 0: the mark of an event that was never recorded."""
        if mark:
            self.add(events.StreamWait(mark, stream))

    def transfer(self, kernel: Kernel, tensors: Any, forget: bool = True) -> int:
        """Tape a collective and return the mark of its end."""
        self.num_marks += 1
        self._transfer_mark = self.num_marks
        self.custom(kernel.name, [kernel], tensors, tensors, forget)
        self._transfer_mark = 0
        return self.num_marks

    def custom(
        self, name: str, launched: Sequence[Kernel], reads: Any = (), writes: Any = (), forget: bool = True
    ) -> None:
        """Tape a kernel that is not torch's; the values that it writes become unknown."""
        place = self.lines.place()
        into = device_tensors(writes)
        for tensor in into if forget else ():
            self.shadows.forget(tensor)
        self._launch(name, tuple(launched), device_tensors(reads), into, place, _counted_in(launched))

    def _launch(
        self,
        name: str,
        launched: tuple[Kernel, ...],
        reads: Tensors,
        writes: Tensors,
        place: Place,
        counted: tuple[Counted, ...] = (),
    ) -> None:
        read_ids = tuple(self.hold(t, place) for t in reads)
        written_ids = tuple(self.hold(t, place) for t in writes)
        self._taped(name, launched, read_ids, written_ids, _traffic(reads, writes), place, counted)

    def _taped(
        self,
        name: str,
        launched: tuple[Kernel, ...],
        reads: tuple[int, ...],
        writes: tuple[int, ...],
        traffic: tuple[int, ...],
        place: Place,
        counted: tuple[Counted, ...],
    ) -> None:
        thread = threading.get_ident()
        if thread not in self._with_workspace and any(k.kind == "gemm" for k in launched):
            self._with_workspace.add(thread)
            self.allocate(self.workspace_bytes, (self.workspace_bytes,), "uint8", WORKSPACE, "library")
        launch = events.Launch(
            name=name,
            kernels=launched,
            line=place.line,
            phase=place.phase,
            step=self.step,
            reads=reads,
            writes=writes,
            traffic=traffic,
            region=place.region,
            products=self._products(counted, place) if counted else (),
            stream=self.stream,
            mark=self._transfer_mark,
        )
        self.add(launch)

    @staticmethod
    def _products(counted: Sequence[Counted], place: Place) -> tuple[events.Product, ...]:
        """Return the matrix products of a call, by the part of the step that they belong to."""
        part = place.phase
        if part == "backward" and _is_recomputed():
            part = "recompute"
        own = [events.Product(part, c.dtype, c.flops) for c in counted]
        again = [events.Product("recompute", c.dtype, c.repeated) for c in counted if c.repeated]
        return (*own, *again)

    # Memory

    def hold(self, tensor: Tensor, place: Place) -> int:
        """Return the number of a device tensor's storage; record an allocation if the storage is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        nbytes = events.round_up(storage.nbytes())
        number = self._numbers.get(key)
        if number is not None:
            known = self.recording.storages[number]
            if known.nbytes == nbytes or known.category == "registers":
                return number
            self._free(key)
        self._watch(storage, key)
        category = self._category or "temporary"
        if self.in_registers:
            nbytes, category = 0, "registers"
        number = self.allocate(nbytes, tuple(tensor.shape), str(tensor.dtype)[6:], place, category)
        self._numbers[key] = number
        return number

    def allocate(self, nbytes: int, shape: tuple[int, ...], dtype: str, place: Place, category: str) -> int:
        """Tape an allocation and return its number."""
        number = len(self.recording.storages)
        if not number and not self.recording.allocator:
            names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
            self.configure_allocator(next((os.environ[name] for name in names if name in os.environ), ""))
        self.memory.allocate(number, nbytes, self.stream)
        record = events.Storage(number, nbytes, shape, dtype, place.line, place.phase, self.step, category)
        self.recording.storages[number] = record
        if nbytes:
            self.live_bytes += nbytes
            self.add(events.Alloc(number, nbytes, place.line, place.phase, self.step, self.stream))
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            self.window_peak_bytes = max(self.window_peak_bytes, self.live_bytes)
        return number

    def configure_allocator(self, text: str) -> None:
        """Set what PYTORCH_ALLOC_CONF sets; the last text counts for the whole run."""
        self.recording.allocator = text
        self.memory.configure(Settings.read(text, self.recording.torch))

    def _free(self, key: int) -> None:
        number = self._numbers.pop(key, None)
        if number is None:
            return
        self.release(number)
        released = self.pools.pop(number, lambda: None)()
        if released is not None:
            released(number)

    def release(self, number: int) -> None:
        """Tape the end of an allocation."""
        storage = self.recording.storages[number]
        if storage.nbytes:
            self.live_bytes -= storage.nbytes
            self.memory.release(number, storage.nbytes)
            self.add(events.Free(number, self.step))

    def _forget_storage(self, key: int) -> None:
        self._watched.pop(key, None)
        self.shadows.freed(key)
        self._free(key)

    def number_of(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's storage, None if it has none yet."""
        return self._numbers.get(storage_key(tensor))

    def held_numbers(self) -> set[int]:
        """Return the numbers of all storages that tensors hold."""
        return set(self._numbers.values())

    def bind(self, tensor: Tensor, number: int) -> None:
        """Make a new tensor the holder of an allocation."""
        storage = tensor.untyped_storage()
        self._watch(storage, storage._cdata)
        self._numbers[storage._cdata] = number

    def _watch(self, storage: Any, key: int) -> None:
        """Tape the end of a storage."""
        if key not in self._watched:
            self._watched[key] = weakref.ref(storage, lambda _: self._forget_storage(key))

    def disown(self, tensor: Tensor) -> None:
        """Tape the end of a tensor's allocation before the tensor ends."""
        self._free(storage_key(tensor))

    def resized(self, storage: Any) -> None:
        """Tape `UntypedStorage.resize_`, by which sharded parameters free and refill their storages."""
        number = self._numbers.get(storage._cdata)
        if number is None or self.recording.storages[number].nbytes == events.round_up(storage.nbytes()):
            return
        old = self.recording.storages[number]
        self._free(storage._cdata)
        place = self.lines.place()
        replacement = self.allocate(
            events.round_up(storage.nbytes()), old.shape, old.dtype, place, old.category
        )
        self._numbers[storage._cdata] = replacement

    def classify(self, tensors: Iterable[Any], category: str) -> None:
        """Set the category of the tensors' storages."""
        for tensor in tensors:
            tensor = getattr(tensor, "_local_tensor", tensor)
            if isinstance(tensor, FakeTensor):
                number = self._numbers.get(storage_key(tensor))
                if number is not None:
                    self.recording.storages[number].category = category

    def track_parameter(self, parameter: Tensor) -> None:
        self._parameters.append(weakref.ref(parameter))

    def backward_begins(self) -> None:
        for number in self._numbers.values():
            storage = self.recording.storages[number]
            if storage.category == "temporary" and storage.phase == "forward":
                storage.category = "activation"

    def step_ends(self, more: Iterable[Tensor]) -> None:
        """Classify parameters, their gradients, and other storages that outlive a step."""
        for number in self._numbers.values():
            storage = self.recording.storages[number]
            if storage.step < self.step and storage.category in ("temporary", "activation", "input"):
                storage.category = "buffer"
        seen = [*(p for p in (ref() for ref in self._parameters) if p is not None), *more]
        self.classify(seen, "parameter")
        self.classify((p.grad for p in seen if p.grad is not None), "gradient")

    def pin(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self.pinned.add(key)
        weakref.finalize(storage, self.pinned.discard, key).atexit = False
        return tensor

    # Calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self.lock:
            if func in REPLACED:
                func, args = as_on_a_device(func, args, kwargs)
            return self._call(func, args, dict(kwargs or {}))

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = self._name(func)
        if name in QUESTIONS:
            return func(*args, **kwargs)
        if self._is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if name in STRIDED:
            _check_bounds(func, name, args, kwargs)
        arguments = Arguments(func, name, args, kwargs, self.fake_mode)
        plan = self._plans.get(arguments.key)
        if plan is not None:
            return self._repeat(plan, func, name, args, kwargs, arguments.tensors)
        # A DTensor unwraps itself and calls this again with its shards.
        if any(type(t) not in PLAIN for t in arguments.tensors):
            return NotImplemented
        where = device_asked_for(args, kwargs)
        pinned = kwargs.pop("pin_memory", None)
        if not arguments.fakes and (where is None or where.type != "cuda"):
            out = self._on_host(func, name, args, kwargs, where)
            if self.shadows.assumed_on_host:
                self.shadows.follow_on_host(name, out, arguments.tensors, self.lines.here())
            return self.pin(out) if pinned and not isinstance(out, FakeTensor) else out
        if "sparse" in name or any(t.layout is not torch.strided for t in arguments.tensors):
            raise Refused(SPARSE)
        if not hasattr(func, "_schema"):  # a higher-order operator: its body is dispatched here again
            with self.fake_mode:
                return func(*args, **kwargs)
        if "generator" in kwargs:
            kwargs["generator"] = None
        read = op_read(func._schema.name, args, kwargs)
        call = DeviceCall(func, name, args, kwargs, where, self.lines.place(), read)
        body = body_of(func)
        answer = self._answer(call) if body is None else self._run_body(call, body)
        return self._on_device(call, arguments) if answer is NotImplemented else answer

    def _name(self, func: Any) -> str:
        name = self._names.get(func)
        if name is None:
            name = func.__name__.partition(".")[0] if hasattr(func, "_schema") else str(func)
            self._names[func] = name
        return name

    def _is_composite(self, func: Any) -> bool:
        if func in self._whole:
            return False
        if is_composite(func):
            return True
        self._whole.add(func)
        return False

    def _on_host(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], where: Any) -> Any:
        """Run a host call; a large tensor that will be copied to the device stays fake."""
        self.num_host_calls += 1
        if not self.num_host_calls % CHECKED_EVERY:
            self.check_progress()
        large = name in FACTORIES and math.prod(args[0]) > MOST_ON_HOST
        if large and kwargs.get("dtype") in FLOATS and str(where) != "meta":
            if "generator" in kwargs:  # overloads that take a generator need the keyword
                kwargs["generator"] = None
            with self.fake_mode:
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _repeat(
        self, plan: Plan, func: Any, name: str, args: Any, kwargs: Any, tensors: Sequence[Tensor]
    ) -> Any:
        """Tape a repeated call with the same shapes."""
        place = self.lines.place()
        outs = plan.build(tensors)
        shadows, mutated = self.shadows, [tensors[i] for i in plan.mutated]
        if plan.decides or shadows.follows(tensors):
            fakes: list[Any] = [t for t in outs if isinstance(t, FakeTensor)]
            shadows.follow(func, name, args, kwargs, fakes, mutated, place.line)
        else:
            for tensor in mutated:
                shadows.forget(tensor)
        if plan.reads or plan.writes:
            named = [*tensors, *outs]
            reads = tuple([self.hold(named[i], place) for i in plan.reads])
            writes = tuple([self.hold(named[i], place) for i in plan.writes])
            self._taped(name, plan.kernels, reads, writes, plan.traffic, place, plan.counted)
        return plan.result(outs)

    def _answer(self, call: DeviceCall) -> Any:
        """Handle calls by which the host reads from the device or copies to it."""
        answer = _ANSWERS.get(call.name)
        if answer is None:
            self._wait_for(call, call.args)
            return NotImplemented
        return answer(self, call)

    def _run_body(self, call: DeviceCall, body: Callable[..., Any]) -> Any:
        """Run the body of a custom op in Python. It is in no region: a compiler does not look into it.

        Return NotImplemented if the body needs real device memory or a compiled library.
        """
        taped, lines = self.recording.events, self.lines
        start, outer, fixed = len(taped), self.in_registers, lines.fixed
        self.in_registers = False
        if fixed is not None:
            lines.fixed = (fixed[0], 0)
        try:
            with self:
                return body(*call.args, **call.kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            taped[start:] = [e for e in taped[start:] if isinstance(e, events.Alloc | events.Free)]
            return NotImplemented
        finally:
            self.in_registers, lines.fixed = outer, fixed

    def _wait_for(self, call: DeviceCall, tensors: Any) -> None:
        """Tape a host wait if the call is a read and one of these tensors is on the device."""
        if call.read is not None and device_tensors(tensors):
            self.wait(WAITS.get(call.read, call.read), call.place)

    def _item(self, call: DeviceCall) -> Any:
        self._wait_for(call, call.args)
        return self.shadows.item(call.args[0], call.place.line)

    def _compare(self, call: DeviceCall) -> bool:
        self._wait_for(call, call.args)
        return self.shadows.compare(call)

    def _index(self, call: DeviceCall) -> Any:
        """Convert a boolean mask to row numbers, which the host must count; one value is a masked fill."""
        masks = [i for i in call.args[1] if is_mask(i)]
        if not masks:
            return NotImplemented
        self._wait_for(call, masks)
        if len(call.args) > 2 and is_masked_fill(call.args):
            filled = self._masked_fill(call)
            if filled is not NotImplemented:
                return filled
        elif call.read is None and device_tensors(masks):
            # Backward counts the rows again: it takes time, but it is not a separate read in the source.
            self.wait("boolean index", call.place, counts=False)
        rows = self.shadows.masks_to_rows(call.args[1], call.place.line)
        for row in device_tensors(rows):
            self.hold(row, call.place)
        return self._call(call.func, (call.args[0], rows, *call.args[2:]), call.kwargs)

    def _masked_fill(self, call: DeviceCall) -> Any:
        """Run `x[mask] = 0.0` as torch does; NotImplemented with other indices or a mask on the host."""
        target, indices, value = call.args[:3]
        defined = [(position, index) for position, index in enumerate(indices) if index is not None]
        (position, mask), *others = defined
        if others or mask.dtype != torch.bool or mask.device != target.device:
            return NotImplemented
        aten = torch.ops.aten
        for _ in range(target.dim() - position - mask.dim()):
            mask = self._call(aten.unsqueeze.default, (mask, -1), {})
        if value.dim():
            value = self._call(aten.view.default, (value, []), {})
        fill = aten.masked_fill_.Tensor if call.name.endswith("_") else aten.masked_fill.Tensor
        return self._call(fill, (target, mask, value), {})

    def _dynamic(self, call: DeviceCall) -> Any:
        """Tape a call whose output shape depends on values."""
        reads = device_tensors((call.args, call.kwargs))
        if not reads:
            return NotImplemented
        self._wait_for(call, reads)
        records = self.shadows.dynamic(call)
        device = call.args[0].device
        outs = [self.shadows.fresh(shape, dtype, device, value) for shape, dtype, value in records]
        launched = kernels(call.name, [shape_of(t) for t in reads], [shape_of(t) for t in outs], {})
        self._launch(call.name, tuple(launched), reads, outs, call.place)
        return outs[0] if len(call.func._schema.returns) == 1 else tuple(outs)

    def _copy(self, call: DeviceCall) -> Any:
        """Tape a copy between host and device; other copies are ordinary kernels."""
        name, args, kwargs, where, place = call.name, call.args, call.kwargs, call.where, call.place
        source = args[0] if name == "_to_copy" else args[1]
        here = source.device.type
        there = args[0].device.type if name == "copy_" else where.type if where is not None else here
        if here == there or "meta" in (here, there):
            return NotImplemented
        blocking = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        dtype = args[0].dtype if name == "copy_" else kwargs.get("dtype") or source.dtype
        nbytes = source.numel() * source.element_size()
        if there == "cpu":
            moved = Kernel("d2h", nbytes, dtype=str(source.dtype)[6:])
            self._launch("to host", (moved,), [source], [], place)
            if blocking:
                self.wait("to host", place)
            if name == "copy_":
                return self.shadows.into_host(args[0], source, place.line)
            return self.shadows.on_host(source, dtype, place.line)
        with self.fake_mode:
            out = args[0]
            if name == "_to_copy":
                out = torch.empty_strided(source.shape, source.stride(), dtype=dtype, device="cuda")
        self._category = "input" if name == "_to_copy" else ""
        self._launch("to device", (Kernel("h2d", nbytes, dtype=str(dtype)[6:]),), [], [out], place)
        self._category = ""
        value = self.shadows.get(source)
        if name == "copy_":
            self.shadows.copied_in(out, value)
        elif value is not None:
            self.shadows.put(out, value.to(dtype).clone())
        pinned = storage_key(source) in self.pinned
        if blocking or (not pinned and source.numel() > 1):
            self.wait("to device" if blocking else "to device, pageable", place)
        return out

    def _without_meta(self, tensor: Tensor) -> Tensor:
        """Convert a real meta tensor (deferred construction) to a fake one."""
        if isinstance(tensor, FakeTensor) or tensor.device.type != "meta":
            return tensor
        with self.fake_mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    def _on_device(self, call: DeviceCall, arguments: Arguments) -> Any:
        """Run a call on fake tensors and tape it."""
        func, name, args, kwargs = call.func, call.name, call.args, call.kwargs
        if any(t.device.type == "meta" for t in arguments.tensors if not isinstance(t, FakeTensor)):
            args, kwargs = tree_map_only(Tensor, self._without_meta, (args, kwargs))
            call = call._replace(args=args, kwargs=kwargs)
        with self.fake_mode:
            # Fused optimizers return nothing, and not all of them have a fake implementation.
            nothing = name.startswith("_fused_") and not func._schema.returns
            out = None if nothing else func(*args, **kwargs)
        if self.collective is not None and func.namespace in ("c10d", "_c10d_functional"):
            self.collective(name, args, out)
            return out
        return self._tape(call, out, arguments)

    def _tape(self, call: DeviceCall, out: Any, arguments: Arguments) -> Any:
        func, name, args, kwargs = call.func, call.name, call.args, call.kwargs
        mutated = call.mutated()
        if mutated and not isinstance(mutated[0], FakeTensor):
            return mutated[0]  # a real host tensor keeps its values when unknown ones are written
        outs = [t for t in tensors_in(out) if isinstance(t, FakeTensor)]
        self.shadows.follow(func, name, args, kwargs, outs, mutated, call.place.line)
        if name.startswith("_amp_foreach_non_finite"):
            self.shadows.no_overflow(args[1], call.place.line)
        reads = device_tensors((args, kwargs))
        writes = device_tensors(outs) or device_tensors(mutated)
        if not reads and not writes:
            return out  # parameters in simulated host memory, before the copy to the device
        launched: tuple[Kernel, ...] = ()
        counted: tuple[Counted, ...] = ()
        if name not in FREE and (mutated or not call.is_view()):
            reads = _reads(call, reads)
            launched, counted = self._price(call, reads, writes, outs)
        self._launch(name, launched, reads, writes, call.place, counted)
        # A plan builds outputs; it does not change the shape of an argument, as `resize_` does.
        changes_shape = torch.Tag.inplace_view in func.tags
        repeats = arguments.key is not None and call.read is None and not name.startswith("_amp_")
        repeats = repeats and not changes_shape
        if repeats and len(self._plans) < MOST_PLANS:
            taped = Taped(launched, reads, writes, _traffic(reads, writes), counted)
            self._plans[arguments.key] = plan_of(name, arguments.tensors, out, mutated, taped)
        return out

    def _price(
        self, call: DeviceCall, reads: Tensors, writes: Tensors, outs: Tensors
    ) -> tuple[tuple[Kernel, ...], tuple[Counted, ...]]:
        """Return a call's kernels and its FLOPs."""
        func, name = call.func, call.name
        named = named_arguments(func, call.args, call.kwargs)
        priced = registered_cost(f"{func.namespace}::{name}", with_shapes(named))
        if priced is None:
            before, after = [shape_of(t) for t in reads], [shape_of(t) for t in writes]
            priced = tuple(kernels(name, before, after, _info(named)))
            if needs_a_price(func):
                priced = (one_pass(name, [*before, *after]),)
                self.notes[f"custom op {func._schema.name}: {ONE_PASS}"] += 1
        return priced, self._count(call, outs) if func.namespace == "aten" else _counted_in(priced)

    def _count(self, call: DeviceCall, outs: Tensors) -> tuple[Counted, ...]:
        """Return the FLOPs of a torch call."""
        if call.func not in self._counters:
            self._counters[call.func] = counter_of(call.func._schema)
        counter = self._counters[call.func]
        counted = None if counter is None else counter(call.args, call.kwargs, outs)
        if counted is None:
            return ()
        dtype = operand_type(counted.dtype, uses_tf32(call.name))
        return (Counted(dtype, counted.flops, counted.repeated),)

    def finish(self) -> events.Recording:
        """Complete the recording and return it."""
        record = self.recording
        if self.memory.num_errors:
            self.notes["the device was full: torch.OutOfMemoryError was raised"] = self.memory.num_errors
        record.notes = dict(self.notes)
        record.peak_bytes = self.peak_bytes
        record.branches = self.shadows.branches.listed()
        record.assumed = [events.Assumed(*k[:2], n, k[2]) for k, n in self.shadows.assumed.most_common()]
        return record


def _check_bounds(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise for a view beyond its storage, as torch does: fake tensors do not check."""
    named = named_arguments(func, args, kwargs)
    tensor, size, stride = named["self"], named["size"], named["stride"]
    offset = named["storage_offset"]
    offset = tensor.storage_offset() if offset is None else offset
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=False))
    elements = 0 if 0 in size else last + 1
    there = tensor.untyped_storage().nbytes() // tensor.element_size()
    if elements > there or min((offset, *stride)) < 0:
        raise RuntimeError(
            f"{name}: size {list(size)}, stride {list(stride)}, storage_offset {offset} need {elements} "
            f"elements, out of bounds for a storage of {there}"
        )


_ANSWERS: dict[str, Callable[[Tape, DeviceCall], Any]] = {
    "_local_scalar_dense": Tape._item,
    "equal": Tape._compare,
    "allclose": Tape._compare,
    "_to_copy": Tape._copy,
    "copy_": Tape._copy,
    **dict.fromkeys(("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"), Tape._index),
    **dict.fromkeys(DYNAMIC, Tape._dynamic),
}


def _reads(call: DeviceCall, reads: Tensors) -> Tensors:
    """Return the device tensors that a call reads, without those that it only writes."""
    if call.name == "copy_":
        return device_tensors(call.args[1])
    if call.name in WRITES_ONLY:
        return []
    if "out" in call.kwargs:
        return device_tensors((call.args, {k: v for k, v in call.kwargs.items() if k != "out"}))
    return reads


def _info(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the facts about a call that its shapes do not show."""
    lists = [v for v in arguments.values() if isinstance(v, (list, tuple)) and v and isinstance(v[0], Tensor)]
    return {
        "causal": bool(arguments.get("is_causal")),
        "lists": len(lists),
        "beta": arguments.get("beta", 1),
        "accumulate": bool(arguments.get("accumulate")),
        "tf32": uses_tf32("matmul"),
        "conv_tf32": uses_tf32("convolution"),
        "windows": _windows(arguments.get("kernel_size"), arguments.get("stride")),
    }


def _windows(kernel_size: Any, stride: Any) -> float | None:
    """Return the number of pooling windows that contain one element; None for other calls."""
    if not isinstance(kernel_size, (list, tuple)) or not kernel_size:
        return None
    return math.prod(kernel_size) / math.prod(stride or kernel_size)
