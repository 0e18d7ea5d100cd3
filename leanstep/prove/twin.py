"""Run a program in double precision, with the random numbers of the original run: the fp64 reference.

Two modes do this. The function mode handles dtypes in the program's code: explicit dtypes, `.float()`,
`.to(bfloat16)`. It stores the *nominal* dtype of a tensor (its dtype in the original run) next to the fp64
values, because `.float()` of an fp32 tensor returns the tensor itself and in-place changes to the result must
reach it. The dispatch mode handles every op below autograd: it draws random numbers in the nominal dtype and
widens them, and runs ops without an fp64 kernel in fp32. Autocast does not change fp64 tensors, so it needs
no handling.

Weights that the program rounds to 16 bits are rounded in fp64 too: they are an input of the computation.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, _utils, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from leanstep.prove.watch import NoDropout, shown
from leanstep.tape.lines import Stack
from leanstep.tape.syncs import RUNS_USER_CODE, run_under, torchs_own

LOW = (torch.float32, torch.float16, torch.bfloat16)
HALF = (torch.float16, torch.bfloat16)
_NOMINAL = "_leanstep_nominal"
# A gather from fewer columns is not a token lookup.
SMALLEST_VOCABULARY = 16
# Methods named after a dtype.
_CASTS: dict[Any, torch.dtype] = {
    Tensor.float: torch.float32,
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
    Tensor.double: torch.float64,
}
# These functions take bytes or dtypes: their arguments pass through unchanged.
_AS_WRITTEN = {
    torch.frombuffer,
    torch.promote_types,
    torch.can_cast,
    torch.result_type,
    # Module.to passes its arguments to this function.
    torch._C._nn._parse_to,  # type: ignore[attr-defined]
}
# Random factories that return the default float dtype unless a dtype is passed.
_FLOAT_FACTORIES = ("aten::rand", "aten::randn", "aten::normal")
_GETTERS = ("__get__", "__set__", "__delete__")
Count = Callable[[str, Any], None]


class Twin:
    """Context manager that runs the code inside it in fp64.

    Args:
        dropout: False replaces dropout by the identity, for comparisons in which masks cannot be equal.
        count: called with (name, value) for every token count that the program computes.
        note_targets: called with the ids passed to losses and to gathers from a vocabulary.
        note_draw: called with the line of each op that draws random numbers, and the numbers.

    `fallbacks` counts the ops that ran in fp32, by name.
    """

    def __init__(
        self,
        *,
        dropout: bool = True,
        count: Count | None = None,
        note_targets: Callable[[Tensor], None] | None = None,
        note_draw: Callable[[str, Tensor], None] | None = None,
    ) -> None:
        self.default = torch.get_default_dtype()
        self.fallbacks: dict[str, int] = {}
        self.count = count
        self.note_targets = note_targets
        self.note_draw = note_draw
        self.lines = Stack()
        self.dropout = dropout
        self._off = 0
        self._rounds = 0
        # Whether any tensor has a nominal dtype other than the default: in most programs none has.
        self.mixed = False
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Twin:
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        self._stack.callback(torch.set_default_dtype, previous)
        self._swap(torch, "set_default_dtype", self._set_default)
        self._swap(torch, "get_default_dtype", lambda: torch.float64)
        self._swap(torch, "compile", _not_compiled)
        self._swap(nn.Module, "compile", lambda module, *args, **kwargs: None)
        self._swap(_utils, "_rebuild_tensor", self._around(_utils._rebuild_tensor))
        self._swap(nn.Parameter, "__new__", staticmethod(self._parameter(nn.Parameter.__new__)))
        self._swap(nn.Module, "_apply", self._applied(nn.Module._apply))
        self._stack.enter_context(_Ops(self))
        self._stack.enter_context(_Calls(self))
        if not self.dropout:
            self._stack.enter_context(NoDropout())
        return self

    def __exit__(self, *details: Any) -> None:
        self._stack.close()

    def _swap(self, place: Any, name: str, value: Any) -> None:
        original = place.__dict__[name] if isinstance(place, type) else getattr(place, name)
        setattr(place, name, value)
        self._stack.callback(setattr, place, name, original)

    @property
    def off(self) -> bool:
        return self._off > 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self._off += 1
        try:
            yield
        finally:
            self._off -= 1

    def nominal(self, tensor: Tensor) -> torch.dtype:
        """Return the dtype that a tensor has in the original run."""
        if tensor.dtype is not torch.float64:
            return tensor.dtype
        return getattr(tensor, _NOMINAL, self.default)

    def mark(self, tensor: Any, dtype: torch.dtype) -> Any:
        if isinstance(tensor, Tensor) and tensor.dtype is torch.float64:
            if dtype is not self.default:
                self.mixed = True
            if dtype is not self.default or hasattr(tensor, _NOMINAL):
                setattr(tensor, _NOMINAL, dtype)
        return tensor

    def widened(self, tensor: Tensor) -> Tensor:
        """Return an fp64 copy of a low-precision tensor that enters from outside; other tensors unchanged."""
        if tensor.dtype not in LOW:
            return tensor
        wide = tensor.detach().double()
        if tensor.requires_grad and tensor.is_leaf:
            wide.requires_grad_(True)
        return self.mark(wide, tensor.dtype)

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `tensor.to(dtype)` as the original run does: the tensor itself if it has that dtype."""
        if self.nominal(tensor) is dtype:
            return tensor
        copy = tensor.clone()
        if self._rounds and dtype in HALF:
            with self.paused():
                copy = copy.to(dtype).double()
        return self.mark(copy, dtype)

    # Replacements of torch's functions.

    def _set_default(self, dtype: torch.dtype) -> None:
        self.default = dtype if isinstance(dtype, torch.dtype) else torch.float32

    def _around(self, original: Any) -> Any:
        def rebuilt(*args: Any, **kwargs: Any) -> Tensor:
            # The tensor is built from bytes, so the dtype must be that of the bytes.
            with self.paused():
                return self.widened(original(*args, **kwargs))

        return rebuilt

    def _parameter(self, original: Any) -> Any:
        def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
            if isinstance(data, Tensor) and data.dtype in LOW and type(data) is Tensor:
                with self.paused():
                    data = self.widened(data)
            parameter = original(cls, data, requires_grad)
            return self.mark(parameter, self.nominal(data)) if isinstance(data, Tensor) else parameter

        return new

    def _applied(self, original: Any) -> Any:
        def apply(module: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
            # `module.bfloat16()` rounds the weights in the fp64 run as well.
            self._rounds += 1
            try:
                result = original(module, self._with_marks(fn), *args, **kwargs)
            finally:
                self._rounds -= 1
            return result

        return apply

    def _with_marks(self, fn: Any) -> Any:
        def applied(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            # Module._apply copies the values into the existing parameter: update its mark as well.
            if isinstance(result, Tensor) and tensor.dtype is torch.float64 and result is not tensor:
                self.mark(tensor, self.nominal(result))
            return result

        return applied


def _not_compiled(model: Any = None, **options: Any) -> Any:
    return model if model is not None else lambda function: function


class _Calls(TorchFunctionMode):
    """Replaces low-precision dtypes in the program's calls by fp64 and records the nominal dtypes."""

    def __init__(self, twin: Twin) -> None:
        super().__init__()
        self.twin = twin

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, kwargs = torchs_own(func), kwargs or {}
        twin = self.twin
        if twin.off or func in _AS_WRITTEN:
            return func(*args, **kwargs)
        if func in RUNS_USER_CODE:
            return run_under(self, func, args, kwargs)
        if getattr(func, "__name__", "") in _GETTERS:
            return self._got(func, args, kwargs)
        if func in _CASTS:
            return self._cast(func, args, kwargs, _CASTS[func])
        if func in (Tensor.to, Tensor.type):
            return self._to(func, args, kwargs)
        if func is Tensor.view and any(isinstance(a, torch.dtype) for a in (*args, kwargs.get("dtype"))):
            source = args[0].to(twin.nominal(args[0])) if args[0].dtype is torch.float64 else args[0]
            return twin.widened(func(source, *args[1:], **kwargs))
        return self._general(func, args, kwargs)

    def _got(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        # `.data`, `.grad`, `.T`: the same values, so the same nominal dtype.
        if self.twin.mixed and isinstance(result, Tensor) and isinstance(args[0], Tensor):
            self.twin.mark(result, self.twin.nominal(args[0]))
        return result

    def _cast(self, func: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
        tensor = args[0]
        if not tensor.is_floating_point():
            return self.twin.mark(tensor.double(), dtype)
        return self.twin.cast(self.twin.widened(tensor), dtype)

    def _to(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        values = [*args[1:], *kwargs.values()]
        wanted = [a if isinstance(a, torch.dtype) else _typed(a) for a in values]
        like = next((a for a in values if isinstance(a, Tensor)), None)
        target = next((dtype for dtype in wanted if dtype is not None), None)
        if like is not None:
            target = self.twin.nominal(like)
        elif func is Tensor.type and target is None:
            return func(*args, **kwargs)
        if target is None or not target.is_floating_point:
            return self._general(func, args, kwargs)
        swap = lambda a: torch.float64 if isinstance(a, (torch.dtype, str)) and _dtype(a) else a  # noqa: E731
        if func is Tensor.to:
            new_args = tuple(swap(a) if not isinstance(a, str) else a for a in args[1:])
            moved = func(tensor, *new_args, **{k: swap(v) if k == "dtype" else v for k, v in kwargs.items()})
        else:
            moved = tensor.to(torch.float64)
        if not tensor.is_floating_point() or tensor.dtype in LOW:
            return self.twin.mark(moved, target)
        if moved is not tensor:
            return self.twin.mark(moved, target)
        return self.twin.cast(moved, target)

    def _general(self, func: Any, args: Any, kwargs: Any) -> Any:
        twin = self.twin
        asked = kwargs.get("dtype")
        if not isinstance(asked, torch.dtype):
            asked = next((a for a in args if isinstance(a, torch.dtype)), None)
        if asked is not None and asked.is_floating_point:
            low = asked in LOW
            if low:
                args = tuple(torch.float64 if a is asked else a for a in args)
                kwargs = {k: torch.float64 if v is asked else v for k, v in kwargs.items()}
            with draws_in(twin, asked):
                result = func(*args, **kwargs)
            return tree_map_only(Tensor, lambda t: twin.mark(twin.widened(t), asked), result)
        result = func(*args, **kwargs)
        if not twin.mixed:
            if isinstance(result, Tensor) and result.dtype in LOW:
                return twin.widened(result)
            return result
        return self._propagated(func, args, kwargs, result)

    def _propagated(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        twin = self.twin
        if getattr(func, "__name__", "").endswith("_"):
            return result
        # Follow torch's type promotion: a 0-d tensor does not raise the dtype of a tensor with dimensions.
        nominal: dict[bool, torch.dtype] = {}
        for value in tree_flatten((args, kwargs))[0]:
            if isinstance(value, Tensor) and value.is_floating_point():
                key, dtype = value.dim() > 0, twin.nominal(value)
                nominal[key] = torch.promote_types(nominal[key], dtype) if key in nominal else dtype
        promoted = nominal.get(True, nominal.get(False))

        def marked(tensor: Tensor) -> Tensor:
            tensor = twin.widened(tensor)
            return twin.mark(tensor, promoted) if promoted is not None else tensor

        return tree_map_only(Tensor, marked, result)


@contextlib.contextmanager
def draws_in(twin: Twin, dtype: torch.dtype) -> Iterator[None]:
    """Make random factories inside the block draw in `dtype`, whatever the default dtype is."""
    previous, twin.default = twin.default, dtype
    try:
        yield
    finally:
        twin.default = previous


def _dtype(value: Any) -> bool:
    dtype = value if isinstance(value, torch.dtype) else _typed(value)
    return dtype is not None and dtype.is_floating_point


def _typed(value: Any) -> torch.dtype | None:
    """Return the dtype of a legacy tensor type such as `torch.FloatTensor` or "torch.HalfTensor"."""
    name = value if isinstance(value, str) else getattr(value, "__name__", "")
    names = {
        "FloatTensor": torch.float32,
        "DoubleTensor": torch.float64,
        "HalfTensor": torch.float16,
        "BFloat16Tensor": torch.bfloat16,
        "LongTensor": torch.int64,
    }
    return names.get(name.split(".")[-1]) if isinstance(name, str) else None


class _Ops(TorchDispatchMode):
    """Runs every op below autograd in fp64."""

    def __init__(self, twin: Twin) -> None:
        super().__init__()
        self.twin = twin

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        twin = self.twin
        if twin.off:
            return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            if twin.note_draw is None:
                return self._drawn(func, args, kwargs)
            before = torch.get_rng_state()
            result = self._drawn(func, args, kwargs)
            # Fused attention has the tag too, and draws nothing without dropout.
            if kwargs.get("generator") is not None or not torch.equal(before, torch.get_rng_state()):
                line = twin.lines.line(sys._getframe(1), False)
                numbers = [value for value in tree_flatten(result)[0] if isinstance(value, Tensor)]
                twin.note_draw(shown(line) if line is not None else func._schema.name, numbers[-1])
            return result
        if kwargs.get("dtype") in LOW:
            kwargs = {**kwargs, "dtype": torch.float64}
        if func._schema.name.startswith("aten::_amp_"):
            with twin.paused():
                return self._scaled(func, args)
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if "not implemented for 'Double'" not in str(error):
                raise
            result = self._in_fp32(func, args, kwargs)
        if twin.count is not None:
            self._counted(func, args, result)
        if twin.note_targets is not None:
            targets = _targets_of(func._schema.name, args)
            if targets is not None:
                with twin.paused():
                    twin.note_targets(targets)
        return result

    def _counted(self, func: Any, args: Any, result: Any) -> None:
        """Report token counts: the tokens that a loss averages over, and sums of masks."""
        count, name = self.twin.count, func._schema.name
        assert count is not None
        if name == "aten::nll_loss_forward":
            count("labelled tokens", result[1])
            count("rows of the loss", args[0].shape[0])
        elif name == "aten::embedding":
            count("tokens with padding", args[1].numel())
        elif name in ("aten::sum", "aten::count_nonzero") and result.dim() == 0 and args[0].dim() > 0:
            source = args[0]
            with self.twin.paused():
                is_mask = not source.is_floating_point() or bool(((source == 0) | (source == 1)).all())
            if is_mask:
                count("sum of a mask", result)

    def _scaled(self, func: Any, args: Any) -> Any:
        """Run a GradScaler op, which takes fp32: gradients overflow where their nominal dtype would."""
        if func._schema.name != "aten::_amp_foreach_non_finite_check_and_unscale_":
            return self._narrowed(func, args, {})
        gradients, overflow, inverse = args
        for gradient in gradients:
            is_finite = gradient.to(self.twin.nominal(gradient)).isfinite().all()
            overflow.copy_(torch.where(is_finite, overflow, torch.ones_like(overflow)))
            gradient.mul_(inverse)
        return None

    def _drawn(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Draw in the nominal dtype, then widen the result."""
        twin = self.twin
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is not None and first.is_floating_point():
            draw_in = twin.nominal(first)
        else:
            draw_in = kwargs.get("dtype")
            if draw_in in (torch.float64, *LOW) or (
                draw_in is None and func._schema.name in _FLOAT_FACTORIES
            ):
                draw_in = twin.default
        if draw_in not in LOW:
            return func(*args, **kwargs)
        in_place = func._schema.name.endswith("_")
        narrow = lambda t: t.to(twin.nominal(t)) if t.dtype is torch.float64 else t  # noqa: E731
        low_args, low_kwargs = tree_map_only(Tensor, narrow, (args, kwargs))
        takes_dtype = any(argument.name == "dtype" for argument in func._schema.arguments)
        if takes_dtype and (first is None or low_kwargs.get("dtype") is not None):
            low_kwargs = {**low_kwargs, "dtype": draw_in}
        result = func(*low_args, **low_kwargs)
        if in_place:
            return first.copy_(result)  # type: ignore[union-attr]
        return tree_map_only(Tensor, lambda t: t.double() if t.dtype in LOW else t, result)

    def _in_fp32(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.twin.fallbacks[name] = self.twin.fallbacks.get(name, 0) + 1
        return self._narrowed(func, args, kwargs)

    def _narrowed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the op in fp32; widen its results and the tensors that it changes in place."""
        narrow = lambda t: t.float() if t.dtype is torch.float64 else t  # noqa: E731
        low_args, low_kwargs = tree_map_only(Tensor, narrow, (args, kwargs))
        result = func(*low_args, **low_kwargs)
        if func._schema.is_mutable:
            for whole, low in zip(tree_flatten(args)[0], tree_flatten(low_args)[0], strict=True):
                if isinstance(whole, Tensor) and whole is not low:
                    whole.copy_(low)
            return args[0] if isinstance(result, Tensor) else result
        return tree_map_only(Tensor, lambda t: t.double() if t.dtype is torch.float32 else t, result)


def _targets_of(name: str, args: Any) -> Tensor | None:
    """Return the ids that an op selects from a vocabulary, one per row; None for other ops."""
    if name == "aten::nll_loss_forward":
        return args[1]
    if name == "aten::gather" and args[2].shape[-1:] == (1,) and args[0].shape[-1] >= SMALLEST_VOCABULARY:
        return args[2]
    return None
