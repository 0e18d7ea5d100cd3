"""The recorder: two modes and a saved-tensor hook that turn a running step into counters.

Everything here runs once per op of the user's step, so it looks at cheap things first (names, sizes) and at
strides, versions and rows only past the byte thresholds. No value on a device is read while the step runs.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from leanstep.diagnose.recording import source
from leanstep.diagnose.recording.habits import MIN_BYTES
from leanstep.diagnose.recording.ops import OpInfo, matmul_shape, storage_of
from leanstep.diagnose.recording.read_counts import ReadCounter
from leanstep.diagnose.recording.source import AutogradLines
from leanstep.diagnose.recording.step import StepState
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
)
from leanstep.script.lines import (
    IN_CHECKPOINT,
    IN_COMPILED,
    IN_ENGINE,
    IN_LEANSTEP,
    IN_OPTIM,
    IN_TRANSFORM,
    UNKNOWN,
    Site,
    Stack,
    short_path,
)
from leanstep.script.syncs import op_read, read_target

LARGE_BYTES = 1024 * 1024
_NO_CHAIN: tuple[int, ...] = ()
# What most arguments are; `isinstance` of torch's classes costs more than the rest of the question.
_TENSORS = frozenset({Tensor, torch.nn.Parameter})
_SCALARS = frozenset({int, float, bool, type(None)})
_grad_enabled = torch.is_grad_enabled


class Recorder(RunRecord):
    """Counts the ops of a step by line. `watch.py` switches it on and off and says where steps end."""

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self.active = False
        self.stack = Stack()
        self.state = StepState(self)
        # Optimizers whose step() is running, outermost first.
        self.stepping: list[int] = []
        self.on_first_node: Any = None
        self.node_seen = False
        self.accelerator = False
        # Storages of parameters that some optimizer holds.
        self.held: set[int] = set()
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
        """Begin to listen; autograd nodes made before are nobody's."""
        if source.sequence_number is not None:
            self._last_number = source.sequence_number()
        self.state.families.model_seen = False
        self.active = True

    def failed(self, error: Exception) -> None:
        """A fault of the recorder must not become a fault of the user's step."""
        if len(self.errors) < 10:
            self.errors.append(f"{type(error).__name__}: {error}")

    def new_step(self) -> None:
        """Forget what belongs to the step that just ended."""
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
        if info.renames:
            # Saving a tensor for the backward detaches it: the most frequent op of all, and no work.
            if self._copies.held and args:
                self._copies.follow((args[0],), out)
            if info.name == "lift_fresh":
                # torch.tensor(...) made it a moment ago; its storage may be where a value of the model was.
                storage = out.untyped_storage()._cdata
                self.state.tainted.discard(storage)
                self.state.families.made(storage)
            return
        grad = _grad_enabled()
        current_node = source.current_node
        node = current_node() if current_node is not None else None
        in_engine = node is not None
        frame = sys._getframe(2)
        site, flags = self.stack.locate(frame, in_engine or current_node is None)
        direct = site is not None
        if current_node is None and flags & IN_ENGINE:
            in_engine = True
        number = source.sequence_number() if source.sequence_number is not None else -1

        built_in = False
        chain = _NO_CHAIN
        if in_engine:
            if site is None:
                phase, built_in = BACKWARD, True
                site = self.lines.site_of(node, self.parameters)
            else:
                phase = RECOMPUTE if flags & IN_CHECKPOINT else BACKWARD
            self._in_backward = True
        else:
            if self._in_backward:
                self._end_backward()
            if site is None:
                site = UNKNOWN
            created = grad and (number != self._last_number if number >= 0 else _any_requires_grad(args))
            if created:
                if self.on_first_node is not None:
                    self.on_first_node()
                self.node_seen = self.state.families.model_seen = True
            if self.stepping and not flags & IN_OPTIM and not self.stack.inside(frame, IN_OPTIM):
                # A step() that raised never reported its end.
                self.stepping.clear()
            if flags & IN_OPTIM or (self.stepping and not created):
                phase = OPTIMIZER
            else:
                phase = FORWARD
                if not grad:
                    chain = self.stack.chain(frame)
        if number != self._last_number:
            self._last_number = number
            if direct and not self.lines.add(number - 1, site):
                most = f"more than {source.MAX_MAP_ENTRIES:,} autograd nodes in one step"
                self.note("dropped", "", f"{most}: lines of later backward ops are unknown")
        if flags & (IN_COMPILED | IN_TRANSFORM):
            self._note_flags(flags, site)

        state = self.state
        reads_before = len(state.read_log)
        learn = grad and (not in_engine or phase == RECOMPUTE) and phase != OPTIMIZER
        tensors: list[Tensor] = []
        for arg in args:
            kind = type(arg)
            if kind in _TENSORS:
                tensors.append(arg)
            elif kind in _SCALARS:
                continue
            elif kind is list or kind is tuple:
                tensors.extend(item for item in arg if isinstance(item, Tensor))
            elif isinstance(arg, Tensor):
                tensors.append(arg)
        plain = info.plain
        max_bytes = total_bytes = 0
        tainted = False
        products, product = state.products.of, None
        held, trained = self.held, False
        own: list[tuple[int, Tensor]] = []
        if built_in:
            # The engine's own ops work on gradients: only their sizes are of interest.
            for tensor in tensors:
                try:
                    num_bytes = tensor.nbytes
                except RuntimeError:
                    plain = True
                    continue
                total_bytes += num_bytes
                if num_bytes > max_bytes:
                    max_bytes = num_bytes
        else:
            for tensor in tensors:
                try:
                    num_bytes = tensor.nbytes
                    storage = storage_of(tensor)
                except RuntimeError:
                    # Sparse tensors have no storage of their own: counted as ops, not looked into.
                    plain = True
                    continue
                total_bytes += num_bytes
                if num_bytes > max_bytes:
                    max_bytes = num_bytes
                if products and storage in products:
                    product = products[storage]
                if held and (storage in held or storage in state.trained):
                    trained = True
                if learn and tensor.requires_grad and tensor.is_leaf:
                    # A leaf cut out of the graph (detach().requires_grad_()) is an activation.
                    if (
                        type(tensor) is torch.nn.Parameter
                        or storage in self.parameters
                        or storage not in state.tainted
                    ):
                        self._learn(tensor, storage, site)
                if storage in self.parameters:
                    tainted = True
                    if not in_engine or phase == RECOMPUTE:
                        state.read_log.append(storage + int(tensor.storage_offset()))
                elif type(tensor) is torch.nn.Parameter:
                    state.read_log.append(storage)
                    state.frozen[storage] = tensor.numel()
                elif storage in state.tainted or tensor.requires_grad:
                    tainted = True
                else:
                    own.append((storage, tensor))

        if info.view:
            if self._copies.held:
                self._copies.follow(tensors, out)
            return
        if info.writes and not in_engine and not (grad and created):
            phase = self._parameter_writes(info, args, site, phase)

        outs: Any
        if type(out) in _TENSORS or isinstance(out, Tensor):
            outs = (out,)
        elif isinstance(out, (tuple, list)):
            outs = [item for item in out if isinstance(item, Tensor)]
        else:
            outs = ()
        written = 0
        out_storages: list[int] = []
        for tensor in outs:
            try:
                num_bytes = tensor.nbytes
                storage = storage_of(tensor) if not built_in else 0
            except RuntimeError:
                continue
            written += num_bytes
            if num_bytes > max_bytes:
                max_bytes = num_bytes
            if built_in:
                continue
            if trained:
                state.trained.add(storage)
            elif held:
                state.trained.discard(storage)
            if tainted:
                state.tainted.add(storage)
            else:
                state.tainted.discard(storage)
                out_storages.append(storage)
            if products and storage in products:
                del products[storage]
        if not built_in and not tainted:
            state.families.join(own, out_storages)
        elif own:
            state.families.meet_model(own)
        if held and grad and tainted and phase == FORWARD:
            (state.trained_sites if trained else state.idle_sites).add(site)
        if product is not None:
            state.products.follow(info.name, args, product, outs)

        if info.maybe_read:
            kind = op_read(info.schema_name, args, kwargs)
            if kind is not None:
                self.reads.count(kind, tensors[0] if tensors else None, site, phase, flags, tainted)
        if self._copies.held:
            self._copies.follow(tensors, out)
        if not info.counted:
            return

        state.num_ops += 1
        state.written_bytes += written
        flops = 0
        if not plain:
            if info.matmul:
                shape = matmul_shape(info, args)
                flops = 2 * shape[0] * shape[1] * shape[2] * shape[3]
                state.on_matmul(
                    info, args, outs, shape, site, phase, direct, chain, number, node if built_in else None
                )
                if phase == BACKWARD and not built_in and not flags & IN_LEANSTEP:
                    state.on_backward_product(info, args)
            elif info.products is not None:
                flops = state.on_fused(info.products.count(args, kwargs, outs), phase, chain)
            elif info.cast:
                state.on_cast(tensors[0], outs[0], site, phase)
            elif built_in or phase == BACKWARD:
                state.on_backward_write(info, args, outs, site)
            if direct and written >= self.layout_bytes and not info.matmul:
                state.on_layout(info, args, kwargs, outs, site)
        if written >= LARGE_BYTES and state.wide:
            state.on_large(outs)
        if direct and written >= MIN_BYTES and outs and not flags & IN_LEANSTEP:
            state.habits.on_op(info, args, outs, site, phase)
            if info.clone and not in_engine:
                storage = tensors[0].untyped_storage()._cdata
                if storage in self.parameters or storage in self.held:
                    state.habits.on_clone(tensors[0], outs[0], site)
        if (
            not grad
            and not in_engine
            and info.fresh
            and max_bytes >= self.churn_bytes
            and not info.cast
            and not info.matmul
        ):
            state.churn.made(outs, site, self.churn_bytes, state.weight_matmuls)

        key = (site, info, phase, direct, chain)
        entry = state.ops.get(key)
        if entry is None:
            entry = state.ops[key] = [0, 0, 0, 0, 0, 0, 0, reads_before, 0]
        entry[0] += 1
        if max_bytes <= self.tiny_bytes:
            entry[1] += 1
        if max_bytes <= self.small_bytes:
            entry[2] += 1
        if max_bytes > entry[3]:
            entry[3] = max_bytes
        entry[4] += total_bytes + written
        entry[5] += written
        entry[6] += flops
        entry[8] = len(state.read_log)

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

    def _parameter_writes(self, info: OpInfo, args: tuple[Any, ...], site: Site, phase: str) -> str:
        """A parameter written outside the backward: this is an update, and its function an optimizer."""
        for position in info.writes:
            if position >= len(args):
                continue
            target = args[position]
            for tensor in target if isinstance(target, (list, tuple)) else (target,):
                if not isinstance(tensor, Tensor):
                    continue
                storage = tensor.untyped_storage()._cdata
                if storage in self.parameters:
                    self.state.written.add(storage)
                    if phase != OPTIMIZER:
                        self.writers.add(site.code_id)
                        phase = OPTIMIZER
        return phase

    def _note_flags(self, flags: int, site: Site) -> None:
        where = f"{short_path(site.line.file)}:{site.line.number}"
        if flags & IN_COMPILED:
            self.state.compiled.add(site.line)
        else:
            self.note(
                "transform", where, "runs inside torch.func or torch.jit: one op there may hide several"
            )

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


def _any_requires_grad(args: tuple[Any, ...]) -> bool:
    target = read_target(args)
    return target is not None and any(isinstance(a, Tensor) and a.requires_grad for a in args)
