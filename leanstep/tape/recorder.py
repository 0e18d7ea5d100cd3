"""The recorder: two modes and a saved-tensor hook that write what a script does as one flat list of events.

It judges nothing and knows no rule. It keeps no tensor alive, waits for no device while a step runs, and
writes plain tuples (`Tape.between` returns them as events). All of it runs once per op of the user's step.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from leanstep.flops import MATMULS
from leanstep.tape import nodes
from leanstep.tape.events import (
    BACKWARD,
    BACKWARD_CALL,
    FORWARD,
    GENERATE,
    HELD,
    LEAF,
    MODEL,
    MOVE,
    ON_GPU,
    OP,
    OPTIMIZER,
    PARAMETER,
    READ,
    RECOMPUTE,
    REQUIRES_GRAD,
    SAVE,
    TENSOR,
    TRAINED_LEAF,
    UPDATE,
    UPDATED,
    VIEW,
    Layout,
    Tape,
)
from leanstep.tape.lines import (
    IN_CHECKPOINT,
    IN_COMPILED,
    IN_COUNTER,
    IN_DATA,
    IN_ENGINE,
    IN_FUNCTION,
    IN_LEANSTEP,
    IN_OPTIM,
    IN_TRANSFORM,
    UNKNOWN,
    Site,
    Stack,
    short_path,
)
from leanstep.tape.modes import CallMode, OpMode, as_it_is, function_modes_are_on, hide_from_compiler
from leanstep.tape.nodes import ACCUMULATE_GRAD, NodeLines
from leanstep.tape.syncs import HostCopies, call_read, is_candidate, op_read, read_target, run_read_call

# The address of a tensor's storage: same as `untyped_storage()._cdata`, in half the time.
storage_of: Callable[[Tensor], int] = getattr(
    torch._C, "_storage_address", lambda tensor: tensor.untyped_storage()._cdata
)
# Smaller saved tensors have no line.
MIN_SAVED_BYTES = 4096
# For outputs of at least this size it is known whether a custom Function wrote them.
LARGE_BYTES = 16 * 1024
# The output rows of matmuls at least this many times wider than their input are compared with zero.
WIDE_RATIO = 2
_HOST_KEEPS = IN_COUNTER | IN_DATA | IN_LEANSTEP
_TENSORS = frozenset({Tensor, torch.nn.Parameter})
_Parameter = torch.nn.Parameter
_PLAIN = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout}
)
# Python code in torch 2.13; a method in C, which has no frame, in 2.15.
_APPLY = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)
_KEY = "leanstep"
_grad_enabled = torch.is_grad_enabled


class _Op:
    """Static facts about an op, computed once per overload."""

    __slots__ = ("is_rename", "is_silent", "matmul", "maybe_read", "name", "schema_name", "writes")

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.schema_name: str = schema.name
        self.name = schema.name.removeprefix("aten::")
        self.is_rename = self.name in ("detach", "alias", "lift_fresh")
        # Launches nothing that storages do not tell.
        is_profiler = schema.name.startswith(("profiler::", "prim::"))
        self.is_silent = self.is_rename or is_profiler or bool(getattr(func, "is_view", False))
        self.matmul = MATMULS.get(self.name)
        self.maybe_read = is_candidate(schema.name)
        # Arguments that the op writes in place, by position; `out=` tensors are keyword-only, no parameters.
        self.writes = tuple(
            i
            for i, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write and not argument.kwarg_only
        )


class _Birth(weakref.ref):
    """A weak reference to a storage: its callback runs when the memory is freed, by whoever held it."""

    __slots__ = ("address", "number")
    address: int
    number: int


class _Mark:
    """Stored in the metadata of a graph's last node and freed with the node."""

    __slots__ = ("__weakref__",)


class Recorder:
    """Writes events to `tape`. Its owner starts and stops it, and reports updates and the ends of steps."""

    def __init__(self) -> None:
        self.tape = Tape()
        self.active = False
        self.stack = Stack()
        # Whether graphs are marked, to see which are still alive at the end.
        self.marks_graphs = False
        self.errors: list[str] = []
        # Reads of device tensors, which torch's sync debugging also reports.
        self.reads_on_device = 0
        # Optimizers whose step() is running, outermost first.
        self._stepping: list[int] = []
        self._ops: dict[int, _Op] = {}
        self._nodes = NodeLines()
        self._copies = HostCopies()
        self._last_number = -1
        self._num_reads = 0
        self._in_backward = False
        # Storages by address, and the number of the last one.
        self._births: dict[int, _Birth] = {}
        self._graphs: dict[int, weakref.ref[_Mark]] = {}
        self._num_storages = 0
        self._layout_numbers: dict[tuple[Any, ...], int] = {}
        self._site_numbers: dict[Site, int] = {}
        # Leaves that require a gradient -> the line that used them last for the first time in a step.
        self._first_uses: dict[int, Site] = {}
        self._used: set[int] = set()
        # Whether functions that led to an op include the forward of a `torch.autograd.Function`.
        self._in_function: dict[tuple[int, ...], bool] = {}
        # Weights and casts of weights.
        self._weights: set[int] = set()
        # Node of a wide matmul -> the shape of its output.
        self._wide: dict[int, tuple[int, ...]] = {}
        self._saved: set[int] = set()
        self._models: set[int] = set()
        # Whether an op with gradients ran since the start.
        self.model_seen = False
        # Parameters that had a gradient other than zero: they are not looked at again.
        self._live: set[int] = set()
        # Index of an event -> the device values that complete it at the end of the step.
        self._pending: list[tuple[int, Any, list[Tensor]]] = []
        self.op_mode, self.call_mode = OpMode(self), CallMode(self)
        self.saved_hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, as_it_is)

    def start(self) -> None:
        """Start recording; autograd nodes that already exist have no line."""
        if nodes.sequence_number is not None:
            self._last_number = nodes.sequence_number()
        self.model_seen = False
        self.active = True

    def end_step(self) -> None:
        """Read the values of the step that just ended, once, and drop its state."""
        self._settle()
        self.stack.new_step()
        self._copies.clear()
        self._nodes.new_step()
        self._wide.clear()
        self._models.clear()
        self._used.clear()
        alive = self.tape.alive
        self._weights &= alive
        self._live &= alive
        for storage in [storage for storage in self._first_uses if storage not in alive]:
            del self._first_uses[storage]

    def stop(self) -> None:
        """End the recording: what is freed from now on is not part of it."""
        self.active = False
        self._settle()
        self._births, self._graphs = {}, {}

    def failed(self, error: Exception) -> None:
        """Record an error of the recorder, which must not break the user's step."""
        if len(self.errors) < 10:
            self.errors.append(f"{type(error).__name__}: {error}")

    # Descriptions

    def _tensor(self, tensor: Tensor) -> Any:
        try:
            address = storage_of(tensor)
            birth = self._births.get(address)
            number = birth.number if birth is not None else self._new_storage(tensor, address)
            offset = tensor.storage_offset()
        except (RuntimeError, NotImplementedError):
            return "no storage"
        try:
            version = tensor._version
        except RuntimeError:  # of inference mode
            version = -1
        key = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        layout = self._layout_numbers.get(key)
        if layout is None:
            layout = self._new_layout(key, tensor)
        role = PARAMETER if type(tensor) is _Parameter else 0
        if tensor.requires_grad:
            role += TRAINED_LEAF if role or tensor.is_leaf else REQUIRES_GRAD
        return (TENSOR, number, offset, version, role, layout)

    def _new_layout(self, key: tuple[Any, ...], tensor: Tensor) -> int:
        layouts = self.tape.layouts
        number = self._layout_numbers[key] = len(layouts)
        layouts.append(Layout(tuple(key[0]), tuple(key[1]), key[2], key[3].type, tensor.nbytes))
        return number

    def _new_storage(self, tensor: Tensor, address: int) -> int:
        birth = self._births[address] = _Birth(tensor.untyped_storage(), self._on_free)
        self._num_storages = number = self._num_storages + 1
        birth.address, birth.number = address, number
        self.tape.alive.add(number)
        return number

    def _on_free(self, birth: Any) -> None:
        if self._births.pop(birth.address, None) is not None:
            self._freed(birth.number)

    def _freed(self, number: int) -> None:
        self.tape.alive.discard(number)
        self.tape.freed[number] = self.tape.count

    def storage(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage; 0 if it has none."""
        try:
            address = storage_of(tensor)
            birth = self._births.get(address)
            return birth.number if birth is not None else self._new_storage(tensor, address)
        except (RuntimeError, NotImplementedError):
            return 0

    def _value(self, value: Any) -> Any:
        kind = type(value)
        if kind in _TENSORS:
            return self._tensor(value)
        if kind in _PLAIN:
            return value
        if kind is list or kind is tuple or kind is torch.Size:
            return tuple(map(self._value, value))
        return self._tensor(value) if isinstance(value, Tensor) else kind.__name__

    def _site(self, site: Site | None) -> int:
        site = site or UNKNOWN
        number = self._site_numbers.get(site)
        if number is None:
            number = self._site_numbers[site] = len(self.tape.sites)
            self.tape.sites.append(site)
        return number

    # Ops

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, out: Any) -> None:
        op = self._ops.get(id(func))
        if op is None:
            op = self._ops[id(func)] = _Op(func)
        node = nodes.current_node() if nodes.current_node is not None else None
        number = nodes.sequence_number() if nodes.sequence_number is not None else -1
        if node is not None:
            self._nodes.hold(node)
        if self._copies.held:
            self._copies.follow(_tensors_of(args), out)
        if op.is_silent and self._says_nothing(op, args, node, number):
            return
        frame = sys._getframe(2)
        site, flags = self.stack.locate(frame, node is not None or nodes.current_node is None)
        grad, direct = _grad_enabled(), site is not None
        node_number, leaf, chain = -1, 0, ()
        created = grad and (number != self._last_number if number >= 0 else _any_requires_grad(args))
        if node is not None or (nodes.current_node is None and flags & IN_ENGINE):
            self._in_backward = True
            phase = RECOMPUTE if direct and flags & IN_CHECKPOINT else BACKWARD
            if phase is RECOMPUTE:
                node_number = number - 1 if created else -1
            elif node is not None:
                node_number = node._sequence_nr()
                if node_number == ACCUMULATE_GRAD:
                    node_number, leaf = -1, self._leaf_of(node)
            if site is None:
                site = self._first_uses.get(leaf, UNKNOWN) if leaf else self._nodes.site_of(node_number)
        else:
            if self._in_backward:
                self._end_backward()
            if created:
                node_number, self.model_seen = number - 1, True
            phase = self._phase(flags, created, frame)
            if phase is FORWARD and not grad:
                chain = self.stack.chain(frame)
            if site is None:
                site = UNKNOWN
        if number != self._last_number:
            self._last_number = number
            if direct and not self._nodes.add(number - 1, site):
                most = f"more than {nodes.MAX_MAP_ENTRIES:,} autograd nodes in one step"
                self.tape.note("dropped", "", f"{most}: lines of later backward ops are unknown")
        if flags & (IN_COMPILED | IN_TRANSFORM):
            self._note_flags(flags, site)
        if op.is_silent and not leaf:
            if direct and args and isinstance(args[0], Tensor) and _is_weight(args[0]):
                self._on_view(op, args, site, phase, grad, flags, chain)
            return
        described = tuple([self._value(arg) for arg in args])
        if direct:
            if grad and phase is not OPTIMIZER and phase is not BACKWARD:
                self._note_uses(described, site)
            if op.writes and phase is FORWARD and not created:
                phase = self._phase_of_write(op, described, site)
        kind = type(out)
        outs: tuple[Any, ...] = ()
        if kind in _TENSORS:
            outs = (self._tensor(out),)
        elif kind is tuple or kind is list:
            outs = tuple([self._tensor(one) for one in out if isinstance(one, Tensor)])
        elif isinstance(out, Tensor):
            outs = (self._tensor(out),)
        named = tuple([(key, self._value(kwargs[key])) for key in kwargs]) if kwargs else ()
        read = self._op_read(op, args, kwargs, flags) if op.maybe_read else ""
        events = self.tape.events
        if op.matmul is not None:
            self._look_at_rows(op.matmul, args, described, outs, node_number, direct, phase, flags, out)
        elif op.name == "_to_copy" and phase is not OPTIMIZER and self._is_known_weight(described[0]):
            self._weights.add(outs[0][1])
        if not grad and phase is FORWARD and outs and kind in _TENSORS and out.nbytes >= LARGE_BYTES:
            in_function = self._in_function.get(chain)
            if in_function is None:
                in_function = self._in_function[chain] = _in_autograd_function()
            if in_function:
                flags |= IN_FUNCTION
        events.append(
            (OP, op.name, self._site(site), phase, direct, described, named, outs,
             node_number, leaf, grad, flags, chain, read, None)
        )  # fmt: skip

    def _says_nothing(self, op: _Op, args: tuple[Any, ...], node: Any, number: int) -> bool:
        """Return whether a view or a rename creates no node, reads no weight and yields no gradient."""
        if node is not None and node._sequence_nr() == ACCUMULATE_GRAD:
            return False
        if op.is_rename:
            return True
        if number != self._last_number or number < 0:
            return False
        return not (args and isinstance(args[0], Tensor) and _is_weight(args[0]))

    def _leaf_of(self, node: Any) -> int:
        variable = getattr(node, "variable", None)
        return self.storage(variable) if isinstance(variable, Tensor) else 0

    def _phase(self, flags: int, created: bool, frame: FrameType) -> str:
        """Distinguish ops of the forward from ops of an optimizer, outside the backward."""
        in_optimizer = flags & IN_OPTIM
        if self._stepping and not in_optimizer and not self.stack.inside(frame, IN_OPTIM):
            # A step() that raised did not report its end.
            self._stepping.clear()
        return OPTIMIZER if in_optimizer or (self._stepping and not created) else FORWARD

    def _on_view(
        self, op: _Op, args: tuple[Any, ...], site: Site, phase: str, grad: bool, flags: int, chain: Any
    ) -> None:
        described = tuple(map(self._value, args))
        if grad and phase is not OPTIMIZER and phase is not BACKWARD:
            self._note_uses(described, site)
        self._weights.add(described[0][1])
        self.tape.events.append(
            (VIEW, op.name, self._site(site), phase, True, described, (), (),
             -1, 0, grad, flags, chain, "", None)
        )  # fmt: skip

    def _note_uses(self, described: tuple[Any, ...], site: Site) -> None:
        """Note the weights among the inputs, and where a leaf is used first in the step."""
        for tensor in described:
            if type(tensor) is tuple and tensor:
                if tensor[0] is not TENSOR:
                    self._note_uses(tensor, site)
                elif tensor[4] & (LEAF | PARAMETER):
                    self._weights.add(tensor[1])
                    if tensor[4] & REQUIRES_GRAD and tensor[1] not in self._used:
                        self._used.add(tensor[1])
                        self._first_uses[tensor[1]] = site

    def _phase_of_write(self, op: _Op, described: tuple[Any, ...], site: Site) -> str:
        """Return the phase: a function that writes a parameter outside the backward is an optimizer."""
        for position in op.writes:
            target = described[position] if position < len(described) else None
            if type(target) is not tuple or not target:
                continue
            for tensor in (target,) if target[0] is TENSOR else target:
                if type(tensor) is tuple and tensor and tensor[1] in self._first_uses:
                    self.tape.writers.add(site.code_id)
                    return OPTIMIZER
        return FORWARD

    def _note_flags(self, flags: int, site: Site) -> None:
        if flags & IN_TRANSFORM:
            where = f"{short_path(site.line.file)}:{site.line.number}"
            text = "runs inside torch.func or torch.jit: one op there may hide several"
            self.tape.note("transform", where, text)

    def _end_backward(self) -> None:
        self._in_backward = False
        self._nodes.end_backward()
        self._saved.clear()

    # Rows of zeros

    def _is_known_weight(self, described: Any) -> bool:
        return type(described) is tuple and described[1] in self._weights

    def _look_at_rows(
        self,
        positions: tuple[int, int],
        args: tuple[Any, ...],
        described: tuple[Any, ...],
        outs: tuple[Any, ...],
        node_number: int,
        direct: bool,
        phase: str,
        flags: int,
        out: Any,
    ) -> None:
        """Count the rows of zeros in the output gradient of a wide matmul, in the backward of it.

        In a backward written by hand, a row that is zero in one tile of the columns is zero in all: only
        products with the first slice of a weight count.
        """
        first, second = args[positions[0]], args[positions[1]]
        if direct and phase is BACKWARD:
            weight, gradient = described[positions[1]], described[positions[0]]
            if flags & IN_LEANSTEP or not self._is_known_weight(weight) or self._is_known_weight(gradient):
                return
            if not weight[2] and first.ndim == 2 and type(gradient) is tuple:
                self._count_zero_rows(first)
        elif direct:
            if node_number >= 0 and out.shape[-1] >= WIDE_RATIO * first.shape[-1]:
                self._wide[node_number] = tuple(out.shape)
        elif node_number in self._wide:
            shape = self._wide[node_number]
            for position, operand in zip(positions, (first, second), strict=True):
                gradient = _rows_of_gradient(operand, shape)
                if gradient is not None and not self._is_known_weight(described[position]):
                    del self._wide[node_number]
                    self._count_zero_rows(gradient)
                    return

    def _count_zero_rows(self, gradient: Tensor) -> None:
        if gradient.is_meta or not gradient.numel():
            return
        largest = torch.linalg.vector_norm(gradient.detach(), ord=float("inf"), dim=-1)
        self._pending.append((self.tape.count, largest.numel(), [(largest == 0).sum()]))

    # Reads

    def _op_read(self, op: _Op, args: tuple[Any, ...], kwargs: dict[str, Any] | None, flags: int) -> str:
        kind = op_read(op.schema_name, args, kwargs)
        if kind is None or flags & _HOST_KEEPS:
            return ""
        target = read_target(args)
        if target is not None and self._copies.holds(target):
            return ""
        self._count_read(target)
        return kind

    def _count_read(self, target: Tensor | None) -> None:
        self._num_reads += 1
        if target is not None and target.device.type != "cpu":
            self.reads_on_device += 1

    def on_read_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a Python-level call that may be a read."""
        with torch._C.DisableTorchFunction():
            kind = call_read(func, args, kwargs)
            if kind is None and func is Tensor.to and _names_device(args, kwargs):
                self._on_move(args[0])
        if kind is None:
            return func(*args, **kwargs)
        return run_read_call(func, args, kwargs, kind, self._copies, lambda: self._num_reads, self._on_read)

    def _on_move(self, tensor: Tensor) -> None:
        # Ignore a library's `.to(x.device)`: most of these calls move nothing.
        site, flags = self.stack.locate(sys._getframe(2), in_engine())
        if site is not None and not site.line.library and tensor.layout is torch.strided:
            self._write(MOVE, "to", site, flags, (self._tensor(tensor),))

    def _on_read(self, kind: str, target: Tensor | None) -> None:
        with torch._C.DisableTorchFunction():
            site, flags = self.stack.locate(sys._getframe(1), in_engine())
            if site is None or flags & _HOST_KEEPS or (target is not None and self._copies.holds(target)):
                return
            self._count_read(target)
            args = () if target is None else (self._tensor(target),)
            self._write(READ, kind, site, flags, args, read=kind)

    def _write(
        self,
        kind: str,
        name: str,
        site: Site | None,
        flags: int,
        args: tuple[Any, ...] = (),
        named: tuple[Any, ...] = (),
        outs: tuple[Any, ...] = (),
        read: str = "",
        value: Any = None,
    ) -> None:
        """Write an event that is no op."""
        phase = BACKWARD if in_engine() else OPTIMIZER if self._stepping else FORWARD
        if phase is not BACKWARD and self._in_backward:
            self._end_backward()
        self.tape.events.append(
            (kind, name, self._site(site), phase, True, args, named, outs,
             -1, 0, _grad_enabled(), flags, (), read, value)
        )  # fmt: skip

    # Calls

    def on_backward_call(self, losses: Any, kwargs: dict[str, Any], caller: FrameType) -> None:
        site, flags = self.stack.locate(caller, in_engine())
        named = tuple((key, bool(kwargs.get(key))) for key in ("retain_graph", "create_graph"))
        graph = self._new_graph(losses) if self.marks_graphs else None
        self._write(BACKWARD_CALL, "backward", site, flags, (), named, value=graph)

    def _new_graph(self, losses: Any) -> int | None:
        """Mark the last nodes of the graphs that a backward is about to go through."""
        mark = _Mark()
        losses = losses if isinstance(losses, (list, tuple)) else (losses,)
        last = [node for node in (getattr(loss, "grad_fn", None) for loss in losses) if node is not None]
        for node in last:
            node.metadata[_KEY] = mark
        if not last:
            return None
        self._num_storages = number = self._num_storages + 1
        self._graphs[number] = weakref.ref(mark, functools.partial(self._on_graph_freed, number))
        self.tape.alive.add(number)
        return number

    def _on_graph_freed(self, number: int, mark: Any) -> None:
        if self._graphs.pop(number, None) is not None:
            self._freed(number)

    def on_model(self, module: torch.nn.Module) -> None:
        """Record the first call of a model in a step: its buffers are on its device."""
        if id(module) in self._models:
            return
        self._models.add(id(module))
        with torch._C.DisableTorchFunction():
            args = tuple(self._tensor(b) for b in module.buffers() if b.layout is torch.strided)
            self._write(MODEL, type(module).__name__, None, 0, args)

    def on_generation(self, name: str, caller: FrameType, positions: int) -> None:
        """Record a model call of a generation."""
        site, flags = self.stack.locate(caller, False)
        if site is not None:
            self._write(GENERATE, name, site, flags, value=positions)

    # Optimizers

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        key = id(optimizer)
        if key in self._stepping:
            # Its last step() raised: the hook after it never ran.
            del self._stepping[self._stepping.index(key) :]
        self._stepping.append(key)
        if self.active:
            self._on_update(UPDATE, optimizer, sys._getframe(1))

    def optimizer_ends(self, optimizer: torch.optim.Optimizer) -> None:
        if self.active:
            self._on_update(UPDATED, optimizer, sys._getframe(1))
        key = id(optimizer)
        if key in self._stepping:
            del self._stepping[self._stepping.index(key) :]

    def _on_update(self, kind: str, optimizer: torch.optim.Optimizer, frame: FrameType) -> None:
        self.active = False
        try:
            with torch._C.DisableTorchFunction(), torch.no_grad(), _disable_current_modes():
                site, flags = self.stack.locate(frame, in_engine())
                index, held = self.tape.count, self._held(optimizer, kind == UPDATED)
                state = self._state_of(optimizer) if kind == UPDATE else ()
                named = (ON_GPU,) if _is_foreach_on_gpu(optimizer) else ()
                name = type(optimizer).__name__
                self._write(kind, name, site, flags, held, named, state, value=id(optimizer))
                assert index == self.tape.count - 1
        except Exception as error:
            self.failed(error)
        finally:
            self.active = True

    def _held(self, optimizer: torch.optim.Optimizer, only_with_gradients: bool) -> tuple[Any, ...]:
        """Return its parameters. Whether a gradient is zero is read at the end of the step."""
        rows, unknown, gradients = [], [], []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                storage = self.storage(parameter)
                self.tape.held.add(storage)
                if gradient is None and only_with_gradients:
                    continue
                text = "none" if gradient is None else "live"
                if gradient is not None and storage not in self._live:
                    if type(gradient) is Tensor and gradient.layout is torch.strided and gradient.numel():
                        unknown.append(len(rows))
                        gradients.append(gradient.detach())
                    else:
                        self._live.add(storage)
                layout = self._layout(parameter)
                grad_storage = self.storage(gradient) if gradient is not None else 0
                rows.append((HELD, storage, grad_storage, text, parameter.requires_grad, layout))
        if gradients:
            norms = torch._foreach_norm(gradients, float("inf"))
            self._pending.append((self.tape.count, unknown, list(norms)))
        return tuple(rows)

    def note_held(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the parameters of an optimizer that may not step in this recording."""
        for group in optimizer.param_groups:
            self.tape.held.update(self.storage(p) for p in group["params"] if isinstance(p, Tensor))

    def _layout(self, tensor: Tensor) -> int:
        key = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        number = self._layout_numbers.get(key)
        return self._new_layout(key, tensor) if number is None else number

    def _state_of(self, optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
        state = []
        for values in optimizer.state.values():
            if isinstance(values, dict):
                state += [self.storage(value) for value in values.values() if isinstance(value, Tensor)]
        return tuple(state)

    def _settle(self) -> None:
        """Read what was left on the devices, with one read for each device, and complete its events."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        active, self.active = self.active, False
        try:
            with torch._C.DisableTorchFunction(), torch.no_grad(), _disable_current_modes():
                scalars = [scalar for _, _, those in pending for scalar in those]
                values = iter(_read_all(scalars))
                for index, what, those in pending:
                    self._complete(index - self.tape.dropped, what, [next(values) for _ in those])
        except Exception as error:
            self.failed(error)
        finally:
            self.active = active

    def _complete(self, at: int, what: Any, values: Sequence[float]) -> None:
        row = self.tape.events[at]
        if isinstance(what, int):
            self.tape.events[at] = (*row[:-1], (what, int(values[0])))
            return
        held = list(row[5])
        for position, norm in zip(what, values, strict=True):
            parameter = held[position]
            if norm == 0:
                held[position] = (*parameter[:3], "zero", *parameter[4:])
            else:
                self._live.add(parameter[1])
        self.tape.events[at] = (*row[:5], tuple(held), *row[6:])

    # Saved tensors

    def _pack(self, tensor: Tensor) -> Tensor:
        if self.active:
            try:
                if function_modes_are_on():
                    with torch._C.DisableTorchFunction():
                        self._on_saved(tensor)
                else:
                    self._on_saved(tensor)
            except Exception as error:
                self.failed(error)
        return tensor

    def _on_saved(self, tensor: Tensor) -> None:
        if in_engine() or tensor.layout is not torch.strided:
            return
        if self._in_backward:
            self._end_backward()
        described = self._tensor(tensor)
        if type(described) is not tuple or described[1] in self._saved:
            return
        self._saved.add(described[1])
        site, flags = None, 0
        if tensor.ndim >= 2 and tensor.nbytes >= MIN_SAVED_BYTES:
            site, flags = self.stack.locate(sys._getframe(2), False)
        self._write(SAVE, "", site, flags, (described,))


hide_from_compiler(Recorder._pack)


def in_engine() -> bool:
    return nodes.current_node is not None and nodes.current_node() is not None


def _tensors_of(args: Sequence[Any]) -> list[Tensor]:
    tensors: list[Tensor] = []
    for arg in args:
        if isinstance(arg, Tensor):
            tensors.append(arg)
        elif isinstance(arg, (list, tuple)):
            tensors += [item for item in arg if isinstance(item, Tensor)]
    return tensors


def _is_weight(tensor: Tensor) -> bool:
    return type(tensor) is _Parameter or (tensor.requires_grad and tensor.is_leaf)


def _names_device(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of `Tensor.to` names a device, as device-independent scripts do."""
    return any(isinstance(arg, (str, torch.device)) for arg in (*args[1:], kwargs.get("device")))


def _any_requires_grad(args: tuple[Any, ...]) -> bool:
    target = read_target(args)
    return target is not None and any(isinstance(a, Tensor) and a.requires_grad for a in args)


def _rows_of_gradient(operand: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """Return the gradient of an output of this shape, if the operand is it or its transpose."""
    transposed = (*shape[:-2], shape[-1], shape[-2]) if len(shape) > 1 else shape
    actual = tuple(operand.shape)
    if actual not in (shape, transposed):
        return None
    # For a square gradient the strides, not the shape, tell its orientation.
    square = shape == transposed and len(shape) > 1
    if actual != shape or (square and operand.stride(-1) > operand.stride(-2)):
        return operand.mT
    return operand


def _read_all(scalars: list[Tensor]) -> list[float]:
    """Return the values of scalars, with one read for each device."""
    values: dict[int, float] = {}
    devices = {scalar.device for scalar in scalars}
    for device in devices:
        positions = [i for i, scalar in enumerate(scalars) if scalar.device == device]
        joined = torch.stack([scalars[i].to(torch.float32) for i in positions])
        values.update(zip(positions, joined.tolist(), strict=True))
    return [values[i] for i in range(len(scalars))]


def _in_autograd_function() -> bool:
    """Return whether a `torch.autograd.Function` forward runs: gradients are off inside."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is _APPLY or (_APPLY is None and code.co_name == "forward" and _is_functions(code)):
            return True
        frame = frame.f_back
    return False


@functools.lru_cache(maxsize=1024)
def _is_functions(code: CodeType) -> bool:
    """Return whether this is the forward of a `torch.autograd.Function`."""
    kinds = [torch.autograd.Function]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return any(getattr(inspect.unwrap(kind.forward), "__code__", None) is code for kind in kinds)


def _is_foreach_on_gpu(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch itself chooses how to update: one by one on a CPU, together on a GPU."""
    return type(optimizer).__module__.startswith("torch.optim.") and all(
        "foreach" in group and group["foreach"] is None and not group.get("fused")
        for group in optimizer.param_groups
    )
