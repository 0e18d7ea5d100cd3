"""Operations that make the host read a device value: one list, shared by all commands.

On a GPU each of them waits until the device has drained its queue. On a CPU they cost nothing, so a training
step can be checked before it runs on a GPU.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from leanstep.tape.lines import reads_host_data

# Always a read, whatever the arguments. The size or the value of the result is data on the device.
ALWAYS_READ: dict[str, str] = {
    "aten::_local_scalar_dense": "scalar",
    "aten::equal": "equal",
    "aten::allclose": "allclose",
    "aten::nonzero": "nonzero",
    "aten::masked_select": "masked_select",
    "aten::_unique2": "unique",
    "aten::_unique": "unique",
    "aten::unique_dim": "unique",
    "aten::unique_consecutive": "unique",
    "aten::unique_dim_consecutive": "unique",
    "aten::bincount": "bincount",
    "aten::_linalg_check_errors": "linalg check",
}
# A read for some arguments only: see `op_read`.
SOMETIMES_READ = (
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
    "aten::repeat_interleave",
    "aten::histc",
)
SOMETIMES_READ_OR_COPY = (*SOMETIMES_READ, "aten::_to_copy", "aten::copy_")

# Python calls that return values to the host but dispatch no read on a CPU tensor: functions of torch, and
# methods of Tensor by name.
READ_FUNCTIONS: dict[Any, str] = {
    torch.tensor: "torch.tensor",
    torch.as_tensor: "torch.tensor",
    torch.nn.functional.one_hot: "one_hot",
}
READ_METHODS: dict[str, str] = {
    "tolist": "tolist",
    "cpu": "cpu",
    "to": "to",
    "numpy": "numpy",
    "__array__": "numpy",
    "__repr__": "print",
    "__format__": "print",
    "new_tensor": "new_tensor",
}
READ_CALLS = READ_FUNCTIONS | {getattr(Tensor, name): kind for name, kind in READ_METHODS.items()}
# torch's original functions and methods, saved because a script may patch them.
NATIVE_TYPES: frozenset[type] = frozenset(
    map(type, (Tensor.add, torch.add, Tensor.shape, Tensor.__getitem__, Tensor.shape.__get__))  # pyright: ignore
)


def torchs_own(func: Any) -> Any:
    """Return the torch function that `tape.steps` replaced."""
    return getattr(func, "_leanstep_original", func)


# User code runs inside these calls, so a function mode must stay active: see `run_under`.
RUNS_USER_CODE: frozenset[Any] = frozenset(
    map(torchs_own, (Tensor.backward, torch.autograd.backward, torch.autograd.grad))
)

_BOOLEAN = (torch.bool, torch.uint8)
# Calls of one_hot that are running: see `_run_one_hot`.
_one_hot_calls: list[Any] = []


def is_candidate(name: str) -> bool:
    """Return False if the op `name` (such as "aten::index") can never be a read: a cheap check."""
    return name in ALWAYS_READ or name in SOMETIMES_READ_OR_COPY


def op_read(name: str, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> str | None:
    """Return the kind of host read that this dispatch makes, or None.

    Args:
        name: the op's name without overload, `func._schema.name`.
        args, kwargs: the op's arguments; only shapes, dtypes and devices are read, never values.
    """
    kind = ALWAYS_READ.get(name)
    if kind is not None:
        return None if _one_hot_calls and kind == "scalar" else kind
    if name == "aten::index":
        return "boolean index" if _has_boolean(args[1]) else None
    if name in ("aten::index_put", "aten::index_put_"):
        # The backward of a boolean index is charged to that index: one read per place in the source, where it
        # can be removed.
        in_backward = torch._C._current_autograd_node() is not None
        if not _has_boolean(args[1]) or is_masked_fill(args) or in_backward:
            return None
        return "boolean index"
    kwargs = kwargs or {}
    if name == "aten::repeat_interleave":
        return "repeat_interleave" if kwargs.get("output_size") is None else None
    if name == "aten::histc":  # without bounds they are read from the values
        low = args[2] if len(args) > 2 else kwargs.get("min", 0)
        high = args[3] if len(args) > 3 else kwargs.get("max", 0)
        return "histc" if low == high else None
    if name == "aten::_to_copy":
        target = kwargs.get("device")
        return "cpu" if target is not None and _leaves_device(args[0], torch.device(target)) else None
    if name == "aten::copy_":
        return "cpu" if isinstance(args[1], Tensor) and _leaves_device(args[1], args[0].device) else None
    return None


@functools.cache
def _is_whole(func: Any) -> bool:
    """Return whether the op is defined by other ops alone."""
    name = func.name() if isinstance(func, torch._ops.OpOverload) else ""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    # `prim::device` of a tensor subclass is in no dispatch table: asking for its kernels would raise.
    if not name.startswith("aten::"):
        return False
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CPU")


def run_parts(mode: TorchDispatchMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Run an op that consists of others with `mode` active for each of them; NotImplemented for other ops.

    Autograd splits such ops before a mode sees them. Under inference mode, and with tensors made there, they
    arrive whole: `aten::item` with its read inside, `aten::linear` with its product.
    """
    if not _is_whole(func):
        return NotImplemented
    with mode:
        return func.decompose(*args, **(kwargs or {}))


def is_masked_fill(args: Sequence[Any]) -> bool:
    """Return whether an index_put writes one value: under a mask it needs no row numbers."""
    return args[2].numel() == 1 and not (len(args) > 3 and args[3])


def call_kind(func: Any) -> str | None:
    """Return the kind of read that `func` may be, None for most. `func` is the argument of a function mode.

    torch looks its methods up on Tensor when it calls a mode: of a patched method the mode sees the patch.
    """
    kind = READ_CALLS.get(func)
    if kind is None and type(func) not in NATIVE_TYPES:
        for name, of_method in READ_METHODS.items():
            if getattr(Tensor, name) is func:
                return of_method
    return kind


def call_read(func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> str | None:
    """Return the kind of host read of a Python-level call that dispatches no read itself, or None."""
    kind = call_kind(func)
    if kind == "to":
        return "cpu" if _asks_for_host(args, kwargs or {}) else None
    if kind in ("torch.tensor", "new_tensor"):
        position = 1 if kind == "new_tensor" else 0
        data = args[position] if len(args) > position else (kwargs or {}).get("data")
        return "torch.tensor" if isinstance(data, (list, tuple)) and _holds_tensor(data) else None
    return kind


def read_target(args: Sequence[Any]) -> Tensor | None:
    """Return the tensor whose values are read: the first among the arguments, or in their first list."""
    for arg in args:
        if isinstance(arg, Tensor):
            return arg
        if isinstance(arg, (list, tuple)):
            inner = read_target(arg)
            if inner is not None:
                return inner
    return None


def _tensors(args: Sequence[Any]) -> list[Tensor]:
    tensors = []
    for arg in args:
        if isinstance(arg, Tensor):
            tensors.append(arg)
        elif isinstance(arg, (list, tuple)):
            tensors += _tensors(arg)
    return tensors


def _has_boolean(indices: Any) -> bool:
    return any(isinstance(index, Tensor) and index.dtype in _BOOLEAN for index in indices)


def _leaves_device(source: Tensor, target: torch.device) -> bool:
    return target.type == "cpu" and source.device.type not in ("cpu", "meta")


def _asks_for_host(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    # `.to("cpu")` spelled out on a value of the model is a read; `.to(device)` of a batch or of a
    # non-differentiable tensor is how portable code is written, and no read when the device is the same.
    target = kwargs.get("device", args[1] if len(args) > 1 else None)
    source = args[0]
    return isinstance(target, str) and target == "cpu" and isinstance(source, Tensor) and source.requires_grad


def _holds_tensor(data: list[Any] | tuple[Any, ...]) -> bool:
    return any(
        isinstance(item, Tensor) or (isinstance(item, (list, tuple)) and _holds_tensor(item)) for item in data
    )


class HostCopies:
    """Tracks the tensors that `.cpu()` copied to the host: reading them, or their results, does not wait.

    `x.cpu().numpy()` is one read. Tensors are tracked by identity with weak references: on a CPU tensor
    `.cpu()` returns the tensor itself, which shares its storage with values that a GPU would keep.
    """

    def __init__(self) -> None:
        self.held: dict[int, weakref.ref[Tensor]] = {}

    def add(self, tensor: Any) -> None:
        if isinstance(tensor, Tensor):
            self.held[id(tensor)] = weakref.ref(tensor)

    def holds(self, tensor: Any) -> bool:
        reference = self.held.get(id(tensor))
        return reference is not None and reference() is tensor

    def follow(self, inputs: Sequence[Tensor], outputs: Any) -> None:
        """Track results computed only from host copies."""
        if inputs and all(self.holds(tensor) for tensor in inputs):
            for output in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
                self.add(output)

    def clear(self) -> None:
        self.held.clear()


class HostReads:
    """The result of `count_host_reads`: `total`, and how many of each kind."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


class _OpReads(TorchDispatchMode):
    def __init__(self, reads: HostReads, copies: HostCopies) -> None:
        super().__init__()
        self.reads, self.copies = reads, copies

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        parts = run_parts(self, func, args, kwargs)
        if parts is not NotImplemented:
            return parts
        name = func._schema.name
        if is_candidate(name):
            kind = op_read(name, args, kwargs)
            if kind is not None and not self._is_on_host(args):
                self.reads.kinds[kind] += 1
        result = func(*args, **(kwargs or {}))
        if self.copies.held:
            self.copies.follow(_tensors(args), result)
        return result

    def _is_on_host(self, args: Sequence[Any]) -> bool:
        return self.copies.holds(read_target(args)) or reads_host_data(sys._getframe(2))


class _CallReads(TorchFunctionMode):
    def __init__(self, reads: HostReads, copies: HostCopies) -> None:
        super().__init__()
        self.reads, self.copies = reads, copies

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, kwargs = torchs_own(func), kwargs or {}
        if func in RUNS_USER_CODE:
            return run_under(self, func, args, kwargs)
        kind = call_read(func, args, kwargs)
        return run_read_call(func, args, kwargs, kind, self.copies, self._total, self._count)

    def _total(self) -> int:
        return self.reads.total

    def _count(self, kind: str, target: Tensor | None) -> None:
        if not reads_host_data(sys._getframe(1)):
            self.reads.kinds[kind] += 1


def run_under(mode: TorchFunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a backward call with `mode` active inside the engine, where hooks and custom Functions run.

    Re-entering the mode around the whole call would recurse: `torch.autograd.grad` calls the active mode
    first, which leads back here. The engine call inside it does not.
    """
    engine = torch.autograd._engine_run_backward

    def watched(*engine_args: Any, **engine_kwargs: Any) -> Any:
        with mode:
            return engine(*engine_args, **engine_kwargs)

    torch.autograd._engine_run_backward = watched
    try:
        return func(*args, **kwargs)
    finally:
        torch.autograd._engine_run_backward = engine


def run_read_call(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    kind: str | None,
    copies: HostCopies,
    total: Callable[[], int],
    count: Callable[[str, Tensor | None], None],
) -> Any:
    """Run a Python-level call; report it as one read if it is one and no op inside it was counted."""
    if kind is None:
        return func(*args, **kwargs)
    target = read_target(args)
    if kind == "one_hot":
        result = _run_one_hot(func, args, kwargs)
        known = copies.holds(target) or (args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) != -1
        if not known:
            count("scalar", target)
        return result
    known = kind != "cpu" and copies.holds(target)
    before = total()
    result = func(*args, **kwargs)
    if not known and total() == before:
        count(kind, target)
    if kind == "cpu":
        copies.add(result)
    return result


def _run_one_hot(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one_hot without its reads: on a CPU it checks the range of the classes, a device does not.

    On a device it reads the largest class only if the number of classes is not passed.
    """
    _one_hot_calls.append(func)
    try:
        return func(*args, **kwargs)
    finally:
        _one_hot_calls.pop()


@contextmanager
def count_host_reads() -> Iterator[HostReads]:
    """Count how often the host reads a device value.

        with count_host_reads() as reads:
            train_step()
        reads.total, reads.kinds        # 3, Counter({'scalar': 2, 'tolist': 1})

    Counts this thread only. No value is read or changed.
    """
    reads, copies = HostReads(), HostCopies()
    with _OpReads(reads, copies), _CallReads(reads, copies):
        yield reads


def host_syncs(step: Callable[[], Any]) -> int:
    """Return the host reads of one call of `step` (forward and backward), as `diagnose` defines them."""
    return call_counting_reads(step)[1]


def call_counting_reads(step: Callable[[], Any]) -> tuple[Any, int]:
    """Call `step`; return its result and its number of host reads.

    Reads are counted on every device, so a CPU run shows what a GPU run would wait for. Compiled regions run
    uncompiled here, because the compiler does not work under a dispatch mode.
    """
    with torch.compiler.set_stance("force_eager"), count_host_reads() as reads:
        result = step()
    return result, reads.total
