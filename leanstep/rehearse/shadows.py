"""Known values of fake device tensors, and assumed values for the unknown ones.

A device tensor created from host values has a *shadow*: a real CPU tensor, kept up to date as long as every
operand of every later call has one. `.item()`, boolean indices and lengths then read the true values.
Values computed from activations are unknown: the host reads a plausible value, and the line is recorded.
In a small tensor of statistics (a loss, a count) some elements may be known and others unknown.
Unknown values are assumed to be finite: `isfinite` returns True for them, `isnan` and `isinf` return False.
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from leanstep.rehearse.branches import Branches
from leanstep.rehearse.kernel_costs import GEMM, Shape
from leanstep.rehearse.routing import (
    ASSUMED,
    MOST_ELEMENTS,
    SPREAD,
    histogram_of_integers,
    is_choice,
    is_spread,
    mark_spread,
    spread_evenly,
)
from leanstep.tape.lines import Line

SHADOW_ELEMENTS = 1 << 20
# The index assumed for a choice among unknown values. The result is then known: derived values agree with it.
CHOSEN_INDEX = 7
# A larger host copy stays fake: a checkpoint, whose file is not written.
REAL_COPY_BYTES = 64 << 20
# A storage of up to this many elements may be partly known.
PARTLY_ELEMENTS = 4096
OVERWRITES = frozenset({"copy_", "fill_", "zero_"})
WITHOUT_VALUES = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
CHOICES = frozenset({"multinomial", "argmax"})
# False for unknown values. Composites like `isfinite` compare a value with infinity or with itself.
NOT_FINITE = frozenset({"isnan", "isinf", "isposinf", "isneginf"})
COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
# An output of a call whose output shape depends on values: shape, dtype, and its value if known.
Record = tuple[Sequence[int], torch.dtype, "Tensor | None"]


def is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def is_composite(func: Any) -> bool:
    """Whether torch implements a call by other calls; inference mode and DTensor dispatch it undecomposed."""
    keys = torch._C.DispatchKey
    if not hasattr(func, "_schema") or func.has_kernel_for_dispatch_key(keys.CUDA):
        return False
    return func.has_kernel_for_dispatch_key(keys.CompositeImplicitAutograd)


def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None for r in func._schema.returns)


def decides_alone(name: str) -> bool:
    """Whether a call's result may be known even if an operand is unknown."""
    return name in CHOICES | SPREAD | NOT_FINITE or name in COMPARISONS or _absorbing(name) is not None


def _absorbing(name: str) -> bool | None:
    """Return the operand that decides a logical call alone: True for `or`, False for `and`."""
    return {"or": True, "and": False}.get(name.strip("_").removeprefix("bitwise_").removeprefix("logical_"))


def is_assumed(value: Any) -> bool:
    """Whether a value was computed from an assumed one."""
    return getattr(value, "_assumed", False)


def mark_assumed(value: Tensor) -> Tensor:
    value._assumed = True  # pyright: ignore[reportAttributeAccessIssue]
    return value


def storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def shape_of(tensor: Tensor) -> Shape:
    return Shape(tuple(tensor.shape), tensor.stride(), tensor.element_size(), str(tensor.dtype)[6:])


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dicts, all that arguments hold; pytree is slow."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [t for branch in tree for t in tensors_in(branch)] if isinstance(tree, (list, tuple)) else []


def devices_here() -> int:
    """Return the number of visible devices: one per rank of this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 1)


def check_ordinal(device: Any) -> None:
    """Raise as CUDA does for a device that does not exist."""
    named = isinstance(device, str | torch.device)
    index = torch.device(device).index if named else device
    devices = devices_here()
    if isinstance(index, int) and index >= devices:
        there = "cuda:0 exists" if devices == 1 else f"cuda:0 to cuda:{devices - 1} exist"
        raise RuntimeError(f"CUDA error: invalid device ordinal: cuda:{index}; only {there}")


def device_asked_for(args: Any, kwargs: dict[str, Any]) -> torch.device | None:
    """Return the device that a call names, or None."""
    where = kwargs.get("device") or next((a for a in args if isinstance(a, torch.device)), None)
    where = torch.device(where) if where is not None else None
    if where is not None and where.type == "cuda":
        check_ordinal(where)
    return where


def device_tensors(tree: Any) -> list[FakeTensor]:
    # `fake_device` is a plain attribute; `device` would dispatch a call.
    return [t for t in tensors_in(tree) if isinstance(t, FakeTensor) and t.fake_device.type == "cuda"]


def named_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by their names in the schema."""
    schema = func._schema.arguments
    return {a.name: args[i] if i < len(args) else kwargs.get(a.name) for i, a in enumerate(schema)}


def with_shapes(arguments: dict[str, Any]) -> dict[str, Any]:
    """Replace tensors by their shapes, for a registered cost function."""
    return {k: shape_of(v) if isinstance(v, Tensor) else v for k, v in arguments.items()}


class Shadows:
    """The known values by tensor. A write of unknown values into a storage invalidates all shadows on it.

    If such a write covers only part of a small storage, the other elements stay known.
    """

    def __init__(self, fake_mode: FakeTensorMode):
        self.fake_mode = fake_mode
        self.stale: set[int] = set()
        self.partial: dict[int, Tensor] = {}  # storage -> mask of its unknown elements
        self._drawn = torch.get_rng_state()
        self.assumed: Counter[tuple[Line | None, str, str]] = Counter()
        self.branches = Branches()
        self.wraps_reads = False  # numbers read by the host report their own comparisons
        self.read_assumed = False  # the last read was of an assumed value
        self.assumed_on_host = False  # a host tensor holds assumed values

    def get(self, tensor: Tensor) -> Tensor | None:
        """Return the real value of a tensor, or None if it is unknown."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        value = self.in_part(tensor)
        return None if value is None or (self.partial and bool(self._unknown(tensor).any())) else value

    def in_part(self, tensor: Tensor) -> Tensor | None:
        """Return the value of a tensor, some elements of which may be unknown; None if all are."""
        value = getattr(tensor, "_shadow", None)
        return None if value is None or storage_key(tensor) in self.stale else value

    def _unknown(self, tensor: Tensor) -> Tensor:
        """Return the mask of a tensor's unknown elements, a view of its storage's mask."""
        mask = self.partial.get(storage_key(tensor))
        if mask is None:
            return torch.zeros((), dtype=torch.bool, device="cpu")
        if mask.numel() * tensor.element_size() != tensor.untyped_storage().nbytes():  # another dtype
            return torch.ones((), dtype=torch.bool, device="cpu")
        return mask.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def follows(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the result of a call on these tensors may be known."""
        if self.partial and any(storage_key(t) in self.partial for t in tensors):
            return True
        return all(self.get(t) is not None for t in tensors)

    def put(self, tensor: Tensor, value: Tensor | None) -> None:
        if value is not None and value.numel() <= _limit([value]):
            tensor._shadow = value  # pyright: ignore[reportAttributeAccessIssue]

    def forget(self, tensor: Tensor) -> None:
        """Invalidate the shadow: unknown values were written into this tensor's storage."""
        if not isinstance(tensor, FakeTensor):
            return
        key, nbytes = storage_key(tensor), tensor.untyped_storage().nbytes()
        elements = nbytes // tensor.element_size()
        if tensor.numel() < elements <= PARTLY_ELEMENTS and key not in self.stale:
            if key not in self.partial:
                self.partial[key] = torch.zeros(elements, dtype=torch.bool, device="cpu")
                self._forget_when_freed(tensor)
            mask = self.partial[key]
            if mask.numel() == elements:  # else: seen as two dtypes
                self._unknown(tensor).fill_(True)
                return
        tensor._shadow = None  # pyright: ignore[reportAttributeAccessIssue]
        if key not in self.stale:
            self.stale.add(key)
            self._forget_when_freed(tensor)

    def _forget_when_freed(self, tensor: Tensor) -> None:
        """Clear the key when the storage is freed: host storages are not on the tape, and keys are reused."""
        storage = tensor.untyped_storage()
        weakref.finalize(storage, self.freed, storage._cdata).atexit = False

    def copied_in(self, target: Tensor, value: Tensor | None) -> None:
        """Update the shadow of a device tensor into which known values were copied."""
        shadow = self.in_part(target)
        if value is None or value.numel() > SHADOW_ELEMENTS or (shadow is not None and _is_expanded(shadow)):
            self.forget(target)
        elif shadow is not None:
            shadow.copy_(value)
            self._unknown(target).fill_(False)
        elif value.shape == target.shape and self._covers_storage(target):
            self.stale.discard(storage_key(target))
            self.put(target, value.to(target.dtype).clone())

    def received(self, tensor: Tensor, value: Tensor, factor: int) -> None:
        """Update the shadow after a collective: every rank's values or their sum; unknown ones stay so."""
        if value is self.in_part(tensor):
            value.mul_(factor)
        else:
            copies = tensor.numel() // max(1, value.numel())
            self.copied_in(tensor, value.reshape(1, -1).expand(copies, -1).reshape(tensor.shape))

    def freed(self, key: int) -> None:
        """Clear the entries of a freed storage; its key may be reused."""
        self.stale.discard(key)
        self.partial.pop(key, None)

    @staticmethod
    def _covers_storage(tensor: Tensor) -> bool:
        return (
            tensor.is_contiguous()
            and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        )

    def assume(self, line: Line | None, kind: str, value: object) -> None:
        self.assumed[line, kind, str(value)] += 1

    @staticmethod
    def plausible(tensor: Tensor) -> bool | int | float:
        """Return the value assumed for an unknown element: 1.0, 1 or False."""
        if tensor.dtype == torch.bool:
            return False
        return 1.0 if tensor.dtype.is_floating_point else 1

    def item(self, tensor: Tensor, line: Line | None) -> Any:
        """Return what the host reads from a one-element tensor."""
        value = self.get(tensor)
        if value is None or value.numel() != 1:
            read, self.read_assumed = self.plausible(tensor), True
        else:
            read, self.read_assumed = value.item(), is_assumed(value)
        if self.read_assumed:
            self.assume(line, "item", read)
            self.noticed(line, read)
        return read

    def noticed(self, line: Line | None, read: Any) -> None:
        """Record that an assumed value was read; a branch may depend on it."""
        if not self.wraps_reads or isinstance(read, bool):
            self.branches.read(line, read)

    def compare(self, call: Any) -> bool:
        """Return the result of `equal` or `allclose`: the true one if both tensors are known, else True."""
        values = [self.get(a) if isinstance(a, Tensor) else a for a in call.args]
        if all(value is not None for value in values):
            return call.func(*values, **call.kwargs)
        self.assume(call.place.line, call.name, True)
        self.branches.read(call.place.line, True)
        return True

    def no_overflow(self, found_inf: Tensor, line: Line | None) -> None:
        """Report no overflow to GradScaler, which checks unknown gradients."""
        self.assume(line, "found_inf", 0.0)
        self.copied_in(found_inf, torch.zeros(found_inf.shape, device="cpu"))

    def on_host(self, source: Tensor, dtype: torch.dtype, line: Line | None) -> Tensor:
        """Return a host copy of a device tensor: real, unless it is large and unknown."""
        value = self.get(source)
        if value is not None:
            out = value.to(dtype, copy=True)
            return self._on_host_assumed(out) if is_assumed(value) else out
        if source.numel() * source.element_size() > REAL_COPY_BYTES:
            with self.fake_mode:
                return torch.empty_strided(source.shape, source.stride(), dtype=dtype, device="cpu")
        assumed = self.plausible(source)
        self.assume(line, "to host", assumed)
        known = self.in_part(source)
        if known is not None:
            return self._on_host_assumed(known.masked_fill(self._unknown(source), assumed).to(dtype))
        return self._on_host_assumed(torch.full(source.shape, assumed, dtype=dtype, device="cpu"))

    def _on_host_assumed(self, value: Tensor) -> Tensor:
        self.assumed_on_host = True
        return mark_assumed(value)

    def follow_on_host(self, name: str, out: Any, operands: Sequence[Tensor], line: Line | None) -> None:
        """Mark the results of a call on host tensors, some of which may hold assumed values."""
        if not any(is_assumed(t) for t in operands):
            return
        for tensor in tensors_in(out):
            mark_assumed(tensor)
        if name == "_local_scalar_dense":
            self.noticed(line, out)

    def into_host(self, target: Tensor, source: Tensor, line: Line | None) -> Tensor:
        """Copy a device tensor into a host tensor; a real host tensor stays real."""
        if not isinstance(target, FakeTensor):
            value = self.on_host(source, target.dtype, line)
            if not isinstance(value, FakeTensor):
                target.copy_(value)
            if isinstance(value, FakeTensor) or is_assumed(value):
                self._on_host_assumed(target)
        return target

    def follow(
        self,
        func: Callable[..., Any],
        name: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        outs: list[FakeTensor],
        mutated: list[Tensor],
        line: Line | None,
    ) -> None:
        """Set what is known of a call's results: computed on the shadows, assumed by a rule, or nothing."""
        flat, spec = tree_flatten((args, kwargs))
        operands = [x for x in flat if isinstance(x, Tensor)]
        values = [self.get(x) for x in operands]
        # A view of a partly known tensor may be known; overwritten elements are known.
        overwrites = name in OVERWRITES and mutated
        if overwrites or (len(operands) == 1 and not mutated and _is_view(func)):
            values[0] = self.in_part(operands[0])
        if _is_cheap(name, values, outs):
            counted = histogram_of_integers(name, values, args, kwargs)
            real = self._run_on_host(func, flat, spec, values) if counted is None else [counted]
            if len(real) == len(outs):
                if overwrites and self.partial:
                    self._unknown(operands[0]).fill_(False)
                if is_choice(name, args, kwargs):
                    mark_spread(real[-1])
                for out, value in zip(outs, real, strict=True):
                    if out.shape == value.shape:
                        self.put(out, _marked_as(values, value))
                return
        if not outs or not self._assumed(func, name, args, kwargs, values, outs, mutated, line):
            for tensor in mutated:
                self.forget(tensor)

    def _assumed(
        self,
        func: Any,
        name: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        values: Sequence[Tensor | None],
        outs: list[FakeTensor],
        mutated: list[Tensor],
        line: Line | None,
    ) -> bool:
        """Set the result of a call on unknown values that a rule decides; False if none does."""
        out, single = outs[-1], len(outs) == 1
        small = single and out.numel() <= SHADOW_ELEMENTS
        if single and not mutated:
            alike = self._of_uniform(func, name, args, values)
            if alike is not None:
                alike = alike.expand(out.shape)
                if small:  # a large one stays expanded: no memory, never written
                    alike = alike.clone(memory_format=torch.contiguous_format)
                out._shadow = mark_assumed(alike)  # pyright: ignore[reportAttributeAccessIssue]
                return True
            absorbing = _absorbing(name)
            flags = [v for v in values if v is not None and v.dtype == torch.bool and v.numel()]
            decides = torch.all if absorbing else lambda flag: not flag.any()
            if small and absorbing is not None and any(bool(decides(flag)) for flag in flags):
                self.put(out, torch.full(out.shape, absorbing, dtype=out.dtype, device="cpu"))
                return True
        if name in SPREAD and values[0] is None:
            chosen = spread_evenly(name, args, kwargs, out)
            if chosen is not None:
                self.assume(line, name, ASSUMED)
                self.put(out, mark_assumed(chosen))
                return True
        if name in CHOICES and small:
            scores = args[0]
            index = min(CHOSEN_INDEX, max(0, (scores.shape[-1] if scores.dim() else 1) - 1))
            self.assume(line, name, index)
            self.put(out, mark_assumed(torch.full(out.shape, index, dtype=out.dtype, device="cpu")))
            return True
        return False

    def _of_uniform(
        self, func: Any, name: str, args: Sequence[Any], values: Sequence[Tensor | None]
    ) -> Tensor | None:
        """Return the common value of a result's elements, if it follows from the assumptions; else None."""
        if name in NOT_FINITE and values[0] is None:
            return torch.zeros((), dtype=torch.bool, device="cpu")
        if name in COMPARISONS and len(args) == 2:
            return self._compare_unknown(COMPARISONS[name], args[0], args[1])
        # Large tensors whose elements are all equal: `torch.isfinite(gradient).all()`.
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values) or not all(map(_is_uniform, known)):
            return None
        if name in ("all", "any"):
            return _first(known[0]).bool()
        if torch.Tag.pointwise not in func.tags or not all(isinstance(arg, Tensor) for arg in args):
            return None
        return func(*map(_first, known))

    def _compare_unknown(self, compare: Callable[..., Any], left: Any, right: Any) -> Tensor | None:
        """Compare unknown values with themselves or with infinity, or compare single numbers."""
        sides = [self._number(side) for side in (left, right)]
        if any(isinstance(side, Tensor) for side in sides):
            return None  # known elements that differ
        itself = left is right and left.is_floating_point()
        infinite = any(isinstance(side, float) and math.isinf(side) for side in sides)
        single = all(not isinstance(side, Tensor) or side.numel() == 1 for side in (left, right))
        return torch.tensor(compare(*sides), device="cpu") if itself or infinite or single else None

    def _number(self, side: Any) -> Any:
        """Return one side of a comparison: a number (assumed if unknown), or the known tensor."""
        if not isinstance(side, Tensor):
            return side
        value = self.get(side)
        if value is None:
            return self.plausible(side)
        return value.item() if value.numel() == 1 else value

    def _run_on_host(
        self, func: Callable[..., Any], flat: list[Any], spec: Any, values: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Return a call's results on known values; empty if it has no CPU kernel."""
        real_of = iter(values)
        cpu = torch.device("cpu")
        host = [
            next(real_of) if isinstance(x, Tensor) else cpu if isinstance(x, torch.device) else x
            for x in flat
        ]
        host_args, host_kwargs = tree_unflatten(host, spec)
        for key in ("pin_memory", "non_blocking"):
            host_kwargs.pop(key, None)
        try:
            with self._own_randomness(func):
                return tensors_in(func(*host_args, **host_kwargs))
        except Exception:
            return []

    @contextlib.contextmanager
    def _own_randomness(self, func: Any):
        """Keep the device's random draws from advancing the host's generator."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            yield
            return
        host = torch.get_rng_state()
        torch.set_rng_state(self._drawn)
        try:
            yield
        finally:
            self._drawn = torch.get_rng_state()
            torch.set_rng_state(host)

    def masks_to_rows(self, indices: Sequence[Any], line: Line | None) -> list[Any]:
        """Convert boolean indices to integer ones (without a shadow: every element)."""
        rows = []
        for index in indices:
            if not is_mask(index):
                rows.append(index)
                continue
            value = self.get(index)
            if value is None:
                self.assume(line, "boolean index", "all elements")
                count, columns = index.numel(), [None] * index.dim()
            elif value.numel() > SHADOW_ELEMENTS:  # all elements are equal
                count, columns = index.numel() * bool(_first(value)), [None] * index.dim()
            else:
                columns = list(value.nonzero(as_tuple=True))
                count = columns[0].numel()
            for column in columns:
                rows.append(self.fresh((count,), torch.int64, index.device, column))
        return rows

    def fresh(self, shape: Sequence[int], dtype: torch.dtype, device: Any, value: Tensor | None) -> Tensor:
        with self.fake_mode:
            tensor = torch.empty(shape, dtype=dtype, device=device)
        self.put(tensor, value)
        return tensor

    def dynamic(self, call: Any) -> list[Record]:
        """Return the outputs of a call in `DYNAMIC`.

        Without shadows, every element counts as selected and every value as different.
        """
        operands = tensors_in((call.args, call.kwargs))
        values = [self.get(t) for t in operands]
        if all(value is not None for value in values):
            real_of = dict(zip(map(id, operands), values, strict=True))
            args, kwargs = tree_map_only(Tensor, lambda t: real_of[id(t)], (call.args, call.kwargs))
            real = call.func(*args, **kwargs)
            real = real if isinstance(real, (tuple, list)) else (real,)
            return [(r.shape, r.dtype, _marked_as(values, r)) for r in real]
        self.assume(call.place.line, call.name, "all elements")
        arguments = named_arguments(call.func, call.args, call.kwargs)
        return [(shape, dtype, None) for shape, dtype in DYNAMIC[call.name](arguments)]


def _is_uniform(value: Tensor) -> bool:
    return all(stride == 0 or size == 1 for size, stride in zip(value.shape, value.stride(), strict=True))


def _is_expanded(value: Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride(), strict=True))


def _first(value: Tensor) -> Tensor:
    return value[(0,) * value.dim()]


def _is_cheap(name: str, values: Sequence[Tensor | None], outs: Sequence[Tensor]) -> bool:
    """Whether a call can run on its shadows: all are known and small, and it multiplies no matrices."""
    if any(v is None for v in values):
        return False
    limit = SHADOW_ELEMENTS if any(t.is_floating_point() for t in outs) else _limit(values)
    small = sum(v.numel() for v in values if v is not None) <= 4 * _limit(values)
    cheap = name not in GEMM and "attention" not in name and name not in WITHOUT_VALUES
    return small and cheap and sum(t.numel() for t in outs) <= limit


def _limit(values: Sequence[Tensor | None]) -> int:
    """Return the most elements that a shadow may have."""
    return MOST_ELEMENTS if any(is_spread(value) for value in values) else SHADOW_ELEMENTS


def _marked_as(values: Sequence[Tensor | None], value: Tensor) -> Tensor:
    """Mark a result that depends on assumed values or on spread choices."""
    if any(is_assumed(operand) for operand in values):
        mark_assumed(value)
    return mark_spread(value) if any(is_spread(operand) for operand in values) else value


# Calls whose output shapes depend on values


Arguments = Mapping[str, Any]
Sizes = list[tuple[Sequence[int], torch.dtype]]


def _bincount(arguments: Arguments) -> Sizes:
    x, weights = arguments["self"], arguments["weights"]
    dtype = torch.int64
    if weights is not None:
        dtype = torch.float32 if weights.dtype == torch.float32 else torch.float64
    # With minlength, assume that many bins.
    return [((arguments["minlength"] or x.numel(),), dtype)]


def _unique(arguments: Arguments) -> Sizes:
    """Return the sizes of values, inverse and counts, for all elements or slices along `dim`."""
    x, dim = arguments["self"], arguments.get("dim")
    if dim is None:
        return [((x.numel(),), x.dtype), (x.shape, torch.int64), ((x.numel(),), torch.int64)]
    return [(x.shape, x.dtype), *[((x.shape[dim],), torch.int64)] * 2]


# Call -> sizes of its outputs if every element is selected and every value is different.
DYNAMIC: dict[str, Callable[[Arguments], Sizes]] = {
    "nonzero": lambda named: [((named["self"].numel(), named["self"].dim()), torch.int64)],
    "masked_select": lambda named: [
        ((max(named["self"].numel(), named["mask"].numel()),), named["self"].dtype)
    ],
    "repeat_interleave": lambda named: [((named["output_size"] or named["repeats"].numel(),), torch.int64)],
    "bincount": _bincount,
    "_unique": lambda named: _unique(named)[:2],
    **dict.fromkeys(("_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"), _unique),
}
