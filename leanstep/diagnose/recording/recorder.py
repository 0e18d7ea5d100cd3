"""The recorder: two modes and a saved-tensor hook that turn a running step into counters.

Everything here runs once per op of the user's step, so it checks cheap attributes first (names, sizes), and
strides, versions and rows only above the byte thresholds. It reads no device value while the step runs.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from leanstep.diagnose.recording import source
from leanstep.diagnose.recording.op_handlers import handler_of
from leanstep.diagnose.recording.ops import OpInfo, OpRun, output_tensors, storage_of
from leanstep.diagnose.recording.read_counts import ReadCounter
from leanstep.diagnose.recording.source import AutogradLines
from leanstep.diagnose.recording.step import StepState
from leanstep.diagnose.recording.survivors import Survivors
from leanstep.diagnose.recording.torch_hooks import (
    CallMode,
    OpMode,
    function_modes_are_on,
    hide_from_compiler,
)
from leanstep.diagnose.step_records import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    RECOMPUTE,
    Limits,
    Parameter,
    RunRecord,
    tally,
)
from leanstep.tape.lines import (
    IN_CHECKPOINT,
    IN_COMPILED,
    IN_ENGINE,
    IN_OPTIM,
    IN_TRANSFORM,
    UNKNOWN,
    Site,
    Stack,
    short_path,
)
from leanstep.tape.syncs import op_read, read_target

_NO_CHAIN: tuple[int, ...] = ()
_grad_enabled = torch.is_grad_enabled


class Recorder(RunRecord):
    """Counts the ops of a step by line. `watch.py` starts and stops it and marks the ends of steps."""

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self.active = False
        self.stack = Stack()
        self.survivors = Survivors()
        self.state = StepState(self)
        # Optimizers whose step() is running, outermost first.
        self.stepping: list[int] = []
        self.accelerator = False
        self.errors: list[str] = []
        self._infos: dict[int, OpInfo] = {}
        self.reads = ReadCounter(self)
        self._copies = self.reads.copies
        self._last_number = -1
        self._in_backward = False
        self.lines = AutogradLines()
        self._ops = OpMode(self)
        self._calls = CallMode(self)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _identity)

    def modes(self) -> tuple[Any, Any, Any]:
        return self._ops, self._calls, self._hooks

    def start(self) -> None:
        """Start recording; autograd nodes that already exist have no line."""
        if source.sequence_number is not None:
            self._last_number = source.sequence_number()
        self.state.families.model_seen = False
        self.active = True

    def failed(self, error: Exception) -> None:
        """Record an error of the recorder, which must not break the user's step."""
        if len(self.errors) < 10:
            self.errors.append(f"{type(error).__name__}: {error}")

    def new_step(self) -> None:
        """Drop the state of the step that just ended."""
        self.stack.new_step()
        self._copies.clear()
        self.lines.new_step()
        dead = [key for key, parameter in self.parameters.items() if parameter.tensor() is None]
        for key in dead:
            del self.parameters[key]
        self.optimizers = {key: held for key, held in self.optimizers.items() if held() is not None}

    # One op

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, out: Any) -> None:
        info = self._infos.get(id(func))
        if info is None:
            info = self._infos[id(func)] = OpInfo(func)
            info.handler = handler_of(info)
        if info.renames:
            self._on_rename(info, args, out)
            return
        op = OpRun(info, args, kwargs)
        self._locate(op, sys._getframe(2))
        op.first_read = len(self.state.read_log)
        if info.view:
            if not op.built_in:
                self._read_weights(op)
        elif op.built_in:
            op.outs = output_tensors(out)
            _add_sizes(op)
            self._note_gradients(op.outs)
        else:
            self._follow_inputs(op)
            if info.writes and not op.in_engine and not op.created_node:
                self._on_parameter_writes(op)
            op.outs = output_tensors(out)
            self._follow_outputs(op)
        if info.maybe_read:
            self._on_possible_read(op)
        if self._copies.held:
            self._copies.follow(op.tensors, out)
        if info.counted:
            self.state.count(op)
            if self.survivors.on and info.returns_new:
                self.survivors.add(op.outs, op.site)

    def _note_gradients(self, outs: Sequence[Tensor]) -> None:
        """Mark outputs of an autograd node as gradients, even before a weight; hooks may read them."""
        for tensor in outs:
            with contextlib.suppress(RuntimeError):
                self.state.gradients_under_way.add(storage_of(tensor))

    def _on_rename(self, info: OpInfo, args: tuple[Any, ...], out: Any) -> None:
        """Handle detach, the most frequent op: saving a tensor for the backward detaches it, at no cost."""
        if self._copies.held and args:
            self._copies.follow((args[0],), out)
        if info.name == "lift_fresh":
            # torch.tensor(...) has just allocated it, possibly at the address of a freed model tensor.
            storage = out.untyped_storage()._cdata
            self.state.tainted.discard(storage)
            self.state.families.create(storage)

    # Where an op runs

    def _locate(self, op: OpRun, frame: FrameType) -> None:
        """Set the line and the phase of an op."""
        current_node, sequence_number = source.current_node, source.sequence_number
        op.node = node = current_node() if current_node is not None else None
        site, flags = self.stack.locate(frame, node is not None or current_node is None)
        op.flags = flags
        op.direct = direct = site is not None
        op.number = number = sequence_number() if sequence_number is not None else -1
        if node is not None or (current_node is None and flags & IN_ENGINE):
            self._in_backward = op.in_engine = True
            op.built_in = not direct
            op.chain = _NO_CHAIN
            if site is None:
                op.phase = BACKWARD
                site = self.lines.site_of(node, self.parameters)
            else:
                op.phase = RECOMPUTE if flags & IN_CHECKPOINT else BACKWARD
                op.grad = _grad_enabled()
        else:
            op.in_engine = op.built_in = False
            self._find_phase(op, frame)
            if site is None:
                site = UNKNOWN
        op.site = site
        if number != self._last_number:
            self._last_number = number
            if direct:
                self._add_node(number - 1, site)
        if flags & (IN_COMPILED | IN_TRANSFORM):
            self._note_flags(flags, site)

    def _find_phase(self, op: OpRun, frame: FrameType) -> None:
        """Distinguish ops of the forward from ops of an optimizer, outside the backward."""
        if self._in_backward:
            self._end_backward()
        op.grad = grad = _grad_enabled()
        number = op.number
        created = grad and (number != self._last_number if number >= 0 else _any_requires_grad(op.args))
        op.created_node = created
        if created:
            self.state.families.model_seen = True
        in_optimizer = op.flags & IN_OPTIM
        if self.stepping and not in_optimizer and not self.stack.inside(frame, IN_OPTIM):
            # A step() that raised did not report its end.
            self.stepping.clear()
        if in_optimizer or (self.stepping and not created):
            op.phase = OPTIMIZER
            op.chain = _NO_CHAIN
        else:
            op.phase = FORWARD
            op.chain = _NO_CHAIN if grad else self.stack.chain(frame)

    def _add_node(self, number: int, site: Site) -> None:
        if not self.lines.add(number, site):
            most = f"more than {source.MAX_MAP_ENTRIES:,} autograd nodes in one step"
            self.note("dropped", "", f"{most}: lines of later backward ops are unknown")

    # What its inputs depend on

    def _read_weights(self, op: OpRun) -> None:
        """Log the weights among the inputs of a view: a slice of a bank is read here."""
        for tensor in op.tensors:
            try:
                storage = storage_of(tensor)
            except RuntimeError:
                continue
            self._log_weight(op, tensor, storage)

    def _follow_inputs(self, op: OpRun) -> None:
        """Add up the bytes of the inputs, and record what they depend on."""
        state, held = self.state, self.held
        products, product = state.products.of, None
        total = largest = 0
        tainted = trained = False
        data_inputs = []
        for tensor in op.tensors:
            try:
                num_bytes = tensor.nbytes
                storage = storage_of(tensor)
            except RuntimeError:
                op.opaque = True
                continue
            total += num_bytes
            if num_bytes > largest:
                largest = num_bytes
            if products and storage in products:
                product = products[storage]
            if held and (storage in held or storage in state.trained):
                trained = True
            if self._log_weight(op, tensor, storage):
                tainted = tainted or storage in self.parameters
            elif storage in state.tainted or storage in state.gradients_under_way or tensor.requires_grad:
                tainted = True
            else:
                data_inputs.append((storage, tensor))
        op.read_bytes, op.max_bytes = total, largest
        op.tainted, op.trained = tainted, trained
        op.product, op.data_inputs = product, data_inputs

    def _log_weight(self, op: OpRun, tensor: Tensor, storage: int) -> bool:
        """Log the read of a parameter or of a frozen weight; False if the tensor is neither."""
        state = self.state
        is_parameter = type(tensor) is torch.nn.Parameter
        if storage in state.tainted and not is_parameter and storage not in self.parameters:
            # An activation, including a detached leaf (detach().requires_grad_()).
            return False
        # In a backward written in Python; not in a forward that a checkpoint recomputes.
        in_backward = op.in_engine and op.phase != RECOMPUTE
        if op.grad and not in_backward and op.phase != OPTIMIZER:
            if tensor.requires_grad and tensor.is_leaf:
                self._learn(tensor, storage, op.site)
        if storage in self.parameters:
            if not in_backward:
                state.read_log.append(storage + int(tensor.storage_offset()))
        elif is_parameter:
            state.read_log.append(storage)
            state.frozen[storage] = tensor.numel()
        else:
            return False
        return True

    def _follow_outputs(self, op: OpRun) -> None:
        """Add up the bytes of the outputs, and record what they depend on."""
        state = self.state
        products = state.products.of
        tainted, largest = op.tainted, op.max_bytes
        written = 0
        storages: list[int] = []
        for tensor in op.outs:
            try:
                num_bytes = tensor.nbytes
                storage = storage_of(tensor)
            except RuntimeError:
                continue
            written += num_bytes
            if num_bytes > largest:
                largest = num_bytes
            storages.append(storage)
            if products and storage in products:
                del products[storage]
        op.written_bytes, op.max_bytes = written, largest
        if tainted:
            state.tainted.update(storages)
            if op.data_inputs:
                state.families.meet_model(op.data_inputs)
        else:
            state.tainted.difference_update(storages)
            state.families.join(op.data_inputs, storages)
        if self.held:
            self._follow_trained(op, storages)
        if op.product is not None:
            state.products.follow(op.info.name, op.args, op.product, op.outs)

    def _follow_trained(self, op: OpRun, storages: list[int]) -> None:
        """Record whether the outputs depend on a parameter that an optimizer holds."""
        state = self.state
        if op.trained:
            state.trained.update(storages)
        else:
            state.trained.difference_update(storages)
        if op.tainted and op.grad and op.phase == FORWARD:
            (state.trained_sites if op.trained else state.idle_sites).add(op.site)

    def _on_possible_read(self, op: OpRun) -> None:
        kind = op_read(op.info.schema_name, op.args, op.kwargs)
        if kind is not None:
            target = op.tensors[0] if op.tensors else None
            tainted = not op.built_in and op.tainted
            self.reads.count(kind, target, op.site, op.phase, op.flags, tainted)

    def _end_backward(self) -> None:
        self._in_backward = False
        self.lines.end_backward()
        self.state.end_backward()

    def _learn(self, tensor: Tensor, storage: int, site: Site) -> None:
        parameter = self.parameters.get(storage)
        self.state.used.add(storage)
        if parameter is None or parameter.tensor() is None:
            self.parameters[storage] = Parameter(tensor, site)
            self.accelerator |= tensor.device.type not in ("cpu", "meta")
            self.state.first_uses[storage] = site
        elif storage not in self.state.first_uses:
            self.state.first_uses[storage] = site
            parameter.first_use = site

    def _on_parameter_writes(self, op: OpRun) -> None:
        """Record a parameter write outside the backward: it is an update, and its function an optimizer."""
        for position in op.info.writes:
            if position >= len(op.args):
                continue
            target = op.args[position]
            for tensor in target if isinstance(target, (list, tuple)) else (target,):
                if not isinstance(tensor, Tensor):
                    continue
                storage = tensor.untyped_storage()._cdata
                if storage in self.parameters:
                    self.state.written.add(storage)
                    if op.phase != OPTIMIZER:
                        self.writers.add(op.site.code_id)
                        op.phase = OPTIMIZER

    def _note_flags(self, flags: int, site: Site) -> None:
        where = f"{short_path(site.line.file)}:{site.line.number}"
        if flags & IN_COMPILED:
            self.state.compiled.add(site.line)
        else:
            self.note(
                "transform", where, "runs inside torch.func or torch.jit: one op there may hide several"
            )

    def on_positions_again(self, caller: FrameType, length: int) -> None:
        """Record generation that recomputes the positions before its new token."""
        site, _ = self.stack.locate(caller, False)
        if site is not None:
            tally(self.state.again, site, length)

    def on_context_lost(self, caller: FrameType) -> None:
        """Record generation that continues with an empty cache."""
        site, _ = self.stack.locate(caller, False)
        if site is not None:
            tally(self.state.no_context, site, 0)

    def on_backward_call(self, losses: Any, kwargs: dict[str, Any], caller: FrameType) -> None:
        if self.survivors.on or kwargs.get("retain_graph"):
            site, _ = self.stack.locate(caller, False)
            self.state.habits.on_backward_call(kwargs, site)
            if site is not None and self.survivors.on:
                self.survivors.backward_begins(losses, site)

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
        if source.current_node is not None and source.current_node() is not None:
            return
        if tensor.layout is not torch.strided:
            return
        storage = storage_of(tensor)
        state = self.state
        if storage in state.window_storages:
            return
        state.window_storages.add(storage)
        num_bytes = tensor.nbytes
        state.window_bytes += num_bytes
        if tensor.ndim < 2 or num_bytes < 4096:
            return
        site, _ = self.stack.locate(sys._getframe(2), False)
        if site is None:
            return
        width = tensor.shape[-1]
        rows = tensor.numel() // max(width, 1)
        shape = f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        state.window.append((site, width, rows, num_bytes, storage, shape))


def _identity(value: Any) -> Any:
    return value


hide_from_compiler(Recorder._pack, _identity)


def _add_sizes(op: OpRun) -> None:
    """Count an op of the autograd engine, which works on gradients: only sizes matter."""
    total = written = largest = 0
    for tensor in op.tensors:
        try:
            num_bytes = tensor.nbytes
        except RuntimeError:
            op.opaque = True
            continue
        total += num_bytes
        if num_bytes > largest:
            largest = num_bytes
    for tensor in op.outs:
        try:
            num_bytes = tensor.nbytes
        except RuntimeError:
            continue
        written += num_bytes
        if num_bytes > largest:
            largest = num_bytes
    op.read_bytes, op.written_bytes, op.max_bytes = total, written, largest


def _any_requires_grad(args: tuple[Any, ...]) -> bool:
    target = read_target(args)
    return target is not None and any(isinstance(a, Tensor) and a.requires_grad for a in args)
