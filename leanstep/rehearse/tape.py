"""The dispatch mode of a rehearsal: CUDA tensors fake, CPU tensors real, calls below autograd on a tape.

A call without a fake tensor is the host's own work and runs as it is. One with fake tensors runs under
`FakeTensorMode`: shapes, strides and storage identity, no data. The tape notes its kernels, its line, the
storages that are born and die, and where the host waits for the device.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from leanstep.rehearse import events
from leanstep.rehearse.answers.in_place import REPLACED, as_on_a_device
from leanstep.rehearse.events import Kernel
from leanstep.rehearse.kernel_costs import FREE, kernels, registered_cost
from leanstep.rehearse.lines import Lines, Place
from leanstep.rehearse.plans import MOST_PLANS, Arguments, Plan, plan_of
from leanstep.rehearse.shadows import (
    DYNAMIC,
    INDEXED,
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
from leanstep.script.lines import Line

PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)
# Asked of fake tensors while Python looks at them: answered without a record.
QUESTIONS = frozenset(
    {"device", "sym_size", "sym_stride", "sym_numel", "is_contiguous", "dim", "layout", "sym_storage_offset"}
)
FACTORIES = frozenset({"randn", "rand", "empty", "zeros", "ones", "full"})
FLOATS = (None, torch.float32, torch.bfloat16, torch.float16, torch.float64)
Tensors = Sequence[Tensor]
WRITES_ONLY = frozenset({"fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"})


def _traffic(*groups: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(shape_of(t).nbytes for group in groups for t in group)


class Tape(TorchDispatchMode):
    """Runs a program on fake CUDA tensors and keeps a `Recording` of it."""

    def __init__(self, recording: events.Recording, clock: events.LiveClock, workspace_bytes: int):
        super().__init__()
        self.recording, self.clock, self.workspace_bytes = recording, clock, workspace_bytes
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.lock = threading.RLock()  # it serves one thread at a time; loaders of the program have theirs
        self.shadows = Shadows(self.fake_mode)
        self.lines = Lines()
        self.notes: Counter[str] = Counter()
        self.step = 0
        self.live_bytes = self.peak_bytes = self.window_peak_bytes = 0
        self.has_workspace = False
        self.pinned: set[int] = set()  # storages of the host
        self._numbers: dict[int, int] = {}  # storage -> number in the recording
        self._watched: dict[int, Any] = {}
        self._category = ""
        self._parameters: list[Any] = []
        self.ranks = 1
        self.in_registers = False  # what the next call makes gets no memory: a compiler would fuse it away
        self.most_on_host = 1 << 30  # floats of a host tensor; more are on their way to the device
        self.collective: Any = None  # tapes a call of c10d; set where torch.distributed is answered
        self._names: dict[Any, str] = {}
        self._whole: set[Any] = set()  # calls that are not made of others
        self._plans: dict[Any, Plan | None] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    # Events ------------------------------------------------------------------------------------------

    def add(self, event: events.Event) -> None:
        self.recording.events.append(event)
        self.clock.play(event)

    @contextlib.contextmanager
    def aside(self):
        """Calls of our own: their launches and waits are not the program's."""
        taped, self.recording.events = self.recording.events, []
        try:
            yield
        finally:
            ours = [e for e in self.recording.events if isinstance(e, events.Alloc | events.Free)]
            self.recording.events = taped + ours

    def wait(self, kind: str, place: Place | None = None) -> None:
        """The host waits for the device."""
        place = place or self.lines.place()
        self.add(events.HostWait(kind, place.line, place.phase, self.step))

    def custom(
        self, name: str, made: Sequence[Kernel], reads: Any = (), writes: Any = (), forget: bool = True
    ) -> None:
        """Tape a kernel that is not torch's; what it writes is no longer known."""
        place = self.lines.place()
        into = device_tensors(writes)
        for tensor in into if forget else ():
            self.shadows.forget(tensor)
        self._launch(name, tuple(made), device_tensors(reads), into, place)

    def _launch(
        self, name: str, made: tuple[Kernel, ...], reads: Tensors, writes: Tensors, place: Place
    ) -> None:
        self._taped(
            *(name, made, tuple(self.hold(t, place) for t in reads)),
            *(tuple(self.hold(t, place) for t in writes), _traffic(reads, writes), place),
        )

    def _taped(
        self,
        name: str,
        made: tuple[Kernel, ...],
        reads: tuple[int, ...],
        writes: tuple[int, ...],
        traffic: tuple[int, ...],
        place: Place,
    ) -> None:
        if not self.has_workspace and any(k.kind == "gemm" for k in made):
            self.has_workspace = True
            self._born(self.workspace_bytes, (self.workspace_bytes,), "uint8", _WORKSPACE, "library")
        self.add(
            events.Launch(
                *(name, made, place.line, place.phase, self.step, reads, writes, traffic, place.region)
            )
        )

    # Memory ------------------------------------------------------------------------------------------

    def hold(self, tensor: Tensor, place: Place) -> int:
        """The number of a device tensor's storage, which is born when it was not seen before."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        nbytes = events.round_up(storage.nbytes())
        number = self._numbers.get(key)
        if number is not None:
            known = self.recording.storages[number]
            if known.nbytes == nbytes or known.category == "registers":
                return number
            self._died(key)
        if key not in self._watched:
            self._watched[key] = weakref.ref(storage, lambda _: self._forget_storage(key))
        category = self._category or "temporary"
        if self.in_registers:
            nbytes, category = 0, "registers"
        number = self._born(nbytes, tuple(tensor.shape), str(tensor.dtype)[6:], place, category)
        self._numbers[key] = number
        return number

    def _born(self, nbytes: int, shape: tuple[int, ...], dtype: str, place: Place, category: str) -> int:
        number = len(self.recording.storages)
        made = events.Storage(number, nbytes, shape, dtype, place.line, place.phase, self.step, category)
        self.recording.storages[number] = made
        if nbytes:
            self.live_bytes += nbytes
            self.add(events.Alloc(number, nbytes, place.line, place.phase, self.step))
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            self.window_peak_bytes = max(self.window_peak_bytes, self.live_bytes)
        return number

    def _died(self, key: int) -> None:
        number = self._numbers.pop(key, None)
        if number is None:
            return
        storage = self.recording.storages[number]
        if storage.nbytes:
            self.live_bytes -= storage.nbytes
            self.add(events.Free(number, self.step))

    def _forget_storage(self, key: int) -> None:
        self._watched.pop(key, None)
        self.shadows.died(key)
        self._died(key)

    def resized(self, storage: Any) -> None:
        """`UntypedStorage.resize_`: sharded parameters free and fill their storages this way."""
        number = self._numbers.get(storage._cdata)
        if number is None or self.recording.storages[number].nbytes == events.round_up(storage.nbytes()):
            return
        old = self.recording.storages[number]
        self._died(storage._cdata)
        place = self.lines.place()
        made = self._born(events.round_up(storage.nbytes()), old.shape, old.dtype, place, old.category)
        self._numbers[storage._cdata] = made

    def classify(self, tensors: Iterable[Any], category: str) -> None:
        """Say what storages are for."""
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
        """Parameters, their gradients, and what else outlives a step."""
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

    # Calls -------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self.lock:
            if func in REPLACED:
                func, args = as_on_a_device(func, args, kwargs)
            return self._call(func, args, dict(kwargs or {}))

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = self._names.get(func)
        if name is None:
            name = func.__name__.partition(".")[0] if hasattr(func, "_schema") else str(func)
            self._names[func] = name
        if name in QUESTIONS:
            return func(*args, **kwargs)
        if func not in self._whole and is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        self._whole.add(func)
        given = Arguments(func, name, args, kwargs, self.fake_mode)
        plan = self._plans.get(given.key)
        if plan is not None:
            return self._repeat(plan, func, name, args, kwargs, given.tensors)
        # A DTensor unwraps itself; its shards come back here.
        if any(type(t) not in PLAIN for t in given.tensors):
            return NotImplemented
        where = device_asked_for(args, kwargs)
        pinned = kwargs.pop("pin_memory", None)
        if not given.fakes and (where is None or where.type != "cuda"):
            large = name in FACTORIES and math.prod(args[0]) > self.most_on_host
            if large and kwargs.get("dtype") in FLOATS and str(where) != "meta":
                with self.fake_mode:
                    # Overloads that take a generator want it named.
                    return func(*args, **{k: None if k == "generator" else v for k, v in kwargs.items()})
            out = func(*args, **kwargs)  # the host's own work
            return self.pin(out) if pinned else out
        if not hasattr(func, "_schema"):  # a higher-order operator: its body comes back here
            with self.fake_mode:
                return func(*args, **kwargs)
        if "generator" in kwargs:
            kwargs["generator"] = None
        place = self.lines.place()
        got = self._answer(func, name, args, kwargs, where, place)
        if got is not NotImplemented:
            return got
        if any(t.device.type == "meta" for t in given.tensors if not isinstance(t, FakeTensor)):
            args, kwargs = tree_map_only(Tensor, self._without_meta, (args, kwargs))
        with self.fake_mode:
            # An optimizer in one kernel gives nothing back, and not each has a fake implementation.
            nothing = name.startswith("_fused_") and not func._schema.returns
            out = None if nothing else func(*args, **kwargs)
        if self.collective is not None and func.namespace in ("c10d", "_c10d_functional"):
            self.collective(name, args, out)
            return out
        return self._tape(func, name, args, kwargs, out, place, given)

    def _repeat(
        self, plan: Plan, func: Any, name: str, args: Any, kwargs: Any, tensors: Sequence[Tensor]
    ) -> Any:
        """A call that came before with the same shapes."""
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
            self._taped(name, plan.kernels, reads, writes, plan.traffic, place)
        return plan.result(outs)

    def _answer(self, func: Any, name: str, args: Any, kwargs: Any, where: Any, place: Place) -> Any:
        """Calls through which the host learns something of the device."""
        if name == "_local_scalar_dense":
            if args[0].device.type == "cuda":
                self.wait("item", place)
            return self.shadows.item(args[0], place.line)
        if name == "equal":
            if device_tensors(args):
                self.wait("equal", place)
            return self.shadows.equal(args[0], args[1], place.line)
        if name in ("_to_copy", "copy_"):
            return self._copy(name, args, kwargs, where, place)
        if name in INDEXED and any(is_mask(i) for i in args[1]):
            rows, waits = self.shadows.masks_to_rows(args[1], place.line)
            for _ in range(waits):
                self.wait("boolean index", place)
            for row in device_tensors(rows):
                self.hold(row, place)
            return self._call(func, (args[0], rows, *args[2:]), kwargs)
        if name in DYNAMIC and device_tensors(args):
            if kwargs.get("output_size") is None:
                self.wait(name, place)
            device = args[0].device
            found = self.shadows.dynamic(func, name, args, kwargs, place.line)
            outs = [self.shadows.fresh(shape, dtype, device, value) for shape, dtype, value in found]
            made = kernels(name, [shape_of(t) for t in device_tensors(args)], [shape_of(t) for t in outs], {})
            self._launch(name, tuple(made), device_tensors(args), outs, place)
            return outs[0] if len(func._schema.returns) == 1 else tuple(outs)
        if name.startswith("_amp_foreach_non_finite"):
            args[1]._reads_as = 0.0
        return NotImplemented

    def _copy(self, name: str, args: Any, kwargs: Any, where: Any, place: Place) -> Any:
        """Copies between host and device; others are kernels like any."""
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
                return self.shadows.into_host(args[0], source)
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
        """A real meta tensor (deferred construction) as a fake one."""
        if isinstance(tensor, FakeTensor) or tensor.device.type != "meta":
            return tensor
        with self.fake_mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    def _tape(
        self, func: Any, name: str, args: Any, kwargs: Any, out: Any, place: Place, given: Arguments
    ) -> Any:
        schema = func._schema
        written = [
            args[i] if i < len(args) else kwargs.get(a.name)
            for i, a in enumerate(schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        mutated = tensors_in(written)
        if mutated and not isinstance(mutated[0], FakeTensor):
            return mutated[0]  # a real host tensor changed by unknown values keeps its own
        outs = [t for t in tensors_in(out) if isinstance(t, FakeTensor)]
        self.shadows.follow(func, name, args, kwargs, outs, mutated, place.line)
        reads = device_tensors((args, kwargs))
        writes = device_tensors(outs) or device_tensors(mutated)
        if not reads and not writes:
            return out  # parameters on their way: host memory that is not there
        is_view = not mutated and any(r.alias_info is not None for r in schema.returns)
        if name in FREE or is_view:
            made: list[Kernel] = []
        else:
            if name == "copy_":
                reads = device_tensors(args[1])
            elif name in WRITES_ONLY:
                reads = []
            elif "out" in kwargs:
                reads = device_tensors((args, {k: v for k, v in kwargs.items() if k != "out"}))
            named = named_arguments(func, args, kwargs)
            costs = registered_cost(f"{func.namespace}::{name}", with_shapes(named))
            before, after = [shape_of(t) for t in reads], [shape_of(t) for t in writes]
            made = list(costs) if costs is not None else kernels(name, before, after, _info(named))
        self._launch(name, tuple(made), reads, writes, place)
        if given.key is not None and len(self._plans) < MOST_PLANS and not name.startswith("_amp_"):
            launch = (made, reads, writes, _traffic(reads, writes))
            self._plans[given.key] = plan_of(name, given.tensors, out, mutated, launch)
        return out

    def finish(self) -> events.Recording:
        """The recording, complete."""
        record = self.recording
        record.notes = dict(self.notes)
        record.peak_bytes = self.peak_bytes
        record.assumed = [events.Assumed(*k[:2], n, k[2]) for k, n in self.shadows.assumed.most_common()]
        return record


_WORKSPACE = Place(Line("cuBLAS workspace", 0, ""), "forward", 0)


def _info(given: dict[str, Any]) -> dict[str, Any]:
    """What shapes do not tell of a call."""
    lists = [v for v in given.values() if isinstance(v, (list, tuple)) and v and isinstance(v[0], Tensor)]
    return {
        **{"causal": bool(given.get("is_causal")), "lists": len(lists), "beta": given.get("beta", 1)},
        "accumulate": bool(given.get("accumulate")),
        "tf32": torch.get_float32_matmul_precision() != "highest",
        "conv_tf32": torch.backends.cudnn.allow_tf32,
    }
