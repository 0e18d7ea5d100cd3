"""Cached results of calls by shape: outputs, kernels and traffic.

A training run repeats a few hundred different calls. `FakeTensorMode` evaluates each of them again; a plan
builds the outputs from their sizes, so that a repeated call costs a fraction of that. Only calls whose
outputs follow from shapes, dtypes and plain arguments get a plan; calls that read values do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from leanstep.flops import MATMULS, Counted
from leanstep.rehearse.events import Kernel
from leanstep.rehearse.kernel_costs import GEMM
from leanstep.rehearse.shadows import decides_alone

# The most plans to store, for programs whose shapes change all the time.
MOST_PLANS = 1 << 16
_PLAIN = (int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_KINDS = frozenset(_PLAIN)
# Calls whose output sizes may depend on a float.
_FLOAT_MATTERS = ("upsample", "arange", "linspace", "range")
# Attributes that FakeTensor may set on one tensor and not on the next.
_NOTED = ("constant", "real_tensor")
_make: Callable[..., Any] = torch.Tensor._make_subclass
_guard: Callable[[Any], None] = torch._C._set_throw_on_mutable_data_ptr  # pyright: ignore


def uses_tf32(name: str) -> bool:
    """Return whether a float32 product of this call may use TF32.

    torch's older getters raise once a program has set `fp32_precision`; its newer one does not know the older
    switch of convolutions.
    """
    precision = getattr(torch._C, "_get_fp32_precision_getter", None)  # from torch 2.9
    if "conv" in name:
        try:
            return torch.backends.cudnn.allow_tf32
        except RuntimeError:
            return precision is not None and precision("cuda", "conv") != "ieee"
    if precision is not None:
        return precision("cuda", "matmul") == "tf32"
    return torch.get_float32_matmul_precision() != "highest"


class Arguments:
    """The tensors of a call in order, and a hashable key of everything that its outputs depend on."""

    __slots__ = ("exact", "fakes", "key", "tensors")

    def __init__(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], fake_mode: FakeTensorMode):
        self.tensors: list[Tensor] = []
        self.fakes = False
        # A custom op's price may follow from any of its arguments.
        self.exact = getattr(func, "namespace", "aten") != "aten"
        parts: list[Any] = [func]
        self.key: tuple[Any, ...] | None = None
        usable = self._walk(args, parts, fake_mode)
        for argument, value in kwargs.items():
            if argument in ("generator", "pin_memory"):
                continue
            parts.append(argument)
            usable = self._walk((value,), parts, fake_mode) and usable
        # The price of a custom op may depend on any of its arguments.
        if not usable or getattr(func, "namespace", "aten") not in ("aten", "prims"):
            return
        if not self.fakes or name.startswith(_FLOAT_MATTERS):
            if any(p is float for p in parts):
                return
            parts.append(torch.get_default_dtype())
        if name in GEMM or name in MATMULS or "conv" in name or "attention" in name:
            parts += (uses_tf32("matmul"), uses_tf32("conv"))
        self.key = tuple(parts)

    def _walk(self, values: Any, parts: list[Any], fake_mode: FakeTensorMode) -> bool:
        usable = True
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                self.fakes = True
                self.tensors.append(value)
                usable = usable and value.fake_mode is fake_mode
                parts += (
                    value.shape,
                    value.stride(),
                    value.dtype,
                    value.fake_device,
                    value.storage_offset(),
                )
            elif kind in _KINDS:
                parts += (kind, value)
            elif kind is float:
                # Learning rates and similar values change every step; they do not change a shape.
                parts.append(value if self.exact or value in (0.0, 1.0) else float)
            elif kind is list or kind is tuple:
                parts += (kind, len(value))
                usable = self._walk(value, parts, fake_mode) and usable
            elif isinstance(value, Tensor):
                self.tensors.append(value)
                self.fakes = self.fakes or isinstance(value, FakeTensor)
                usable = usable and kind is Tensor and value.device.type == "cpu"
                parts += (kind, value.shape, value.stride(), value.dtype)
            else:
                usable = False
        return usable


class _Output(NamedTuple):
    """How to build one output: the argument itself, a constant, a view of an argument, or a fresh tensor."""

    same: int = -1
    of: int = -1
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    offset: int = 0
    device: torch.device | None = None
    attributes: dict[str, Any] | None = None
    constant: Any = None


class Taped(NamedTuple):
    """What the tape recorded of a call: its kernels, the tensors it reads and writes, and its FLOPs."""

    kernels: tuple[Kernel, ...]
    reads: Sequence[Tensor]
    writes: Sequence[Tensor]
    traffic: tuple[int, ...]
    counted: tuple[Counted, ...]


class Plan(NamedTuple):
    """Everything needed to repeat a call."""

    outputs: tuple[_Output, ...]
    container: type | None  # tuple, list, or None for a single output
    mutated: tuple[int, ...]  # positions among the arguments' tensors
    kernels: tuple[Kernel, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]  # positions among the arguments' tensors, then the outputs
    traffic: tuple[int, ...]
    counted: tuple[Counted, ...]
    decides: bool  # its result may be known without all operands

    def build(self, tensors: Sequence[Tensor]) -> list[Any]:
        if torch.is_inference_mode_enabled():
            # An inference tensor has no version counter, which a subclass needs.
            with torch.inference_mode(False):
                return [self._output(spec, tensors) for spec in self.outputs]
        return [self._output(spec, tensors) for spec in self.outputs]

    @staticmethod
    def _output(spec: _Output, tensors: Sequence[Tensor]) -> Any:
        if spec.same >= 0:
            return tensors[spec.same]
        if spec.attributes is None:
            return spec.constant
        if spec.of >= 0:
            element = torch.empty(0, dtype=spec.dtype, device="meta")
            storage: Any = tensors[spec.of].untyped_storage()
            element.set_(storage, spec.offset, spec.size, spec.stride)
        else:
            element = torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device="meta")
        attributes = spec.attributes
        tensor = _make(
            FakeTensor,
            element,
            False,
            dispatch_device=True,
            device_for_backend_keys=spec.device,
        )
        _guard(tensor)
        tensor.__dict__.update(attributes)
        return tensor

    def result(self, outputs: Sequence[Any]) -> Any:
        return outputs[0] if self.container is None else self.container(outputs)


def plan_of(
    name: str, tensors: Sequence[Tensor], out: Any, mutated: Sequence[Tensor], taped: Taped
) -> Plan | None:
    """Return the plan of a call that just ran on fakes; None if its outputs depend on more than shapes."""
    container = type(out) if isinstance(out, (tuple, list)) else None
    if container not in (None, tuple, list):
        return None
    outs = list(out) if container is not None else [out]
    positions = {id(t): i for i, t in enumerate(tensors)}
    specs = _output_specs(outs, tensors, positions)
    if specs is None:
        return None
    places = {id(t): len(tensors) + i for i, t in enumerate(outs)} | positions
    try:
        return Plan(
            outputs=specs,
            container=container,
            mutated=tuple(positions[id(t)] for t in mutated),
            kernels=taped.kernels,
            reads=tuple(positions[id(t)] for t in taped.reads),
            writes=tuple(places[id(t)] for t in taped.writes),
            traffic=taped.traffic,
            counted=taped.counted,
            decides=decides_alone(name),
        )
    except KeyError:
        return None


def _output_specs(
    outs: Sequence[Any], tensors: Sequence[Tensor], positions: dict[int, int]
) -> tuple[_Output, ...] | None:
    """Return how to build each output; None if one does not follow from shapes."""
    storages = {t.untyped_storage()._cdata: i for i, t in reversed(list(enumerate(tensors)))}
    specs: list[_Output] = []
    fresh: set[int] = set()
    for value in outs:
        spec: _Output | None = None
        if id(value) in positions:
            spec = _Output(same=positions[id(value)])
        elif value is None or type(value) in (int, float, bool):
            spec = _Output(constant=value)
        elif type(value) is FakeTensor:
            spec = _describe(value, storages, fresh)
        if spec is None:
            return None
        specs.append(spec)
    return tuple(specs)


def _describe(tensor: FakeTensor, storages: dict[int, int], fresh: set[int]) -> _Output | None:
    if tensor.is_conj() or tensor.is_neg() or tensor.layout is not torch.strided:
        return None
    # Leave out the shadow: the tape sets it, not FakeTensor.
    attributes = {k: v for k, v in tensor.__dict__.items() if k != "_shadow"}
    if any(v is not None for k, v in attributes.items() if k in _NOTED or k.endswith("_memo")):
        return None
    size, stride, storage = tuple(tensor.shape), tensor.stride(), tensor.untyped_storage()
    key, offset = storage._cdata, tensor.storage_offset()
    if key in storages:
        return _Output(
            -1, storages[key], size, stride, tensor.dtype, int(offset), tensor.fake_device, attributes
        )
    extent = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if math.prod(size) else 0
    if key in fresh or offset or storage.nbytes() != extent * tensor.element_size():
        return None
    fresh.add(key)
    return _Output(-1, -1, size, stride, tensor.dtype, 0, tensor.fake_device, attributes)
