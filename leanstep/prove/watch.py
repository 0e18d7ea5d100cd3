"""Function modes for the runs that judge: one switches dropout off, one records what a difference needs.

`Values` records the values that the program computes from its parameters, with their lines. Two scripts that
make different updates agree up to some value; the line behind it is where to look. `terms` splits a loss into
its summands, and `gradient_of` runs the backward of one of them.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from leanstep.prove.sketches import outside_modes
from leanstep.tape.hooks import in_engine
from leanstep.tape.lines import TORCH_FOLDER, Line, Stack
from leanstep.tape.syncs import RUNS_USER_CODE, run_under, torchs_own

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_DROPOUTS += ("dropout_", "alpha_dropout_", "feature_alpha_dropout_", "feature_dropout", "feature_dropout_")
# Position of the probability in functions that also do something else.
_PROBABILITY = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}
_RNNS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
# A loss with more summands is not split.
MOST_TERMS = 16
# Results of these ops are linear in their differentiable input, so a sum below them is a sum of losses.
_LINEAR = ("Add", "Sub", "Neg", "Mul", "Div", "Mean", "Sum", "View", "UnsafeView", "Reshape", "Squeeze")
_LINEAR += ("Unsqueeze", "ToCopy", "Clone", "Alias", "Expand", "Slice", "Select", "Index", "MaskedSelect")


class NoDropout(TorchFunctionMode):
    """Replaces dropout by the identity in torch's functions: layers, fused attention, attention and RNNs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, kwargs = torchs_own(func), kwargs or {}
        if func in RUNS_USER_CODE:
            return run_under(self, func, args, kwargs)
        name = getattr(func, "__name__", "")
        if name in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if name in _PROBABILITY:
            place = _PROBABILITY[name]
            if len(args) > place:
                args = (*args[:place], 0.0, *args[place + 1 :])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
        elif name in _RNNS:
            # The probability follows has_biases, the first flag, and num_layers; packed sequences add an
            # argument.
            place = next((i + 2 for i, value in enumerate(args) if isinstance(value, bool)), len(args))
            args = (*args[:place], *(0.0 for _ in args[place : place + 1]), *args[place + 1 :])
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Value:
    """A value that depends on parameters: the op and line that computed it, its size and norm.

    `others`: norms of the op's operands that do not depend on parameters, such as masks and weights.
    """

    op: str
    line: str
    size: int
    norm: float
    others: tuple[float, ...] = ()


class Values(TorchFunctionMode):
    """Records values and, for the nodes of the autograd graph, the lines that made them."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Value] = []
        self.lines: dict[Any, Line] = {}
        self._stack = Stack()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, kwargs = torchs_own(func), kwargs or {}
        if func in RUNS_USER_CODE:
            return run_under(self, func, args, kwargs)
        result = func(*args, **kwargs)
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor) and value.grad_fn is not None and not in_engine():
                self._note(getattr(func, "__name__", ""), value, args)
        return result

    def _note(self, name: str, value: Tensor, args: Any) -> None:
        line = self._stack.line(sys._getframe(2), False)
        if line is None or name.startswith("__get") or not value.is_floating_point() or value.numel() == 0:
            return
        self.lines[value.grad_fn] = line
        with outside_modes():
            others = [a for a in args if isinstance(a, Tensor) and not a.requires_grad and a.dim() > 0]
            norms = tuple(_place_norm(other) for other in others)
            size, norm = value.numel(), float(value.detach().double().norm())
        self.values.append(Value(name.strip("_"), shown(line), size, norm, norms))

    def clear(self) -> None:
        """Release the graph of a step that is over."""
        self.lines = {}


def shown(line: Line) -> str:
    """`package/file.py:line` in a package, `file.py:line` in the user's files."""
    return line.place if line.library else f"{line.file.rpartition('/')[2]}:{line.number}"


def _place_norm(tensor: Tensor) -> float:
    """A number that also changes when entries change their places: a mask rolled by one has the same norm."""
    flat = tensor.detach().double().reshape(-1)
    return float((flat * torch.linspace(1.0, 2.0, flat.numel(), dtype=torch.float64)).norm())


def first_difference(
    mine: list[Value], theirs: list[Value]
) -> tuple[Value | None, Value, Value | None] | None:
    """Find where `theirs` leaves `mine`.

    Returns the last value in common, the first one behind it, and what `mine` computes with the same op; None
    if `theirs` ends with a value in common.
    """
    known = _index(mine)
    common: int | None = None
    for place, value in enumerate(theirs):
        if math.isfinite(value.norm) and _found(known, value):
            common = place
    # After the last value in common, the computation has parted for good.
    own = next(iter(theirs[0 if common is None else common + 1 :]), None)
    if own is None:
        return None
    last = None if common is None else theirs[common]
    computed = _index(theirs)
    after = [value for value in mine if not _found(computed, value)]
    partner = next((v for v in after if v.op == own.op and v.size == own.size), None)
    return last, own, partner


def _index(values: list[Value]) -> dict[tuple[int, int], float]:
    return {_key(v): v.norm for v in values if math.isfinite(v.norm)}


def _key(value: Value, shift: int = 0) -> tuple[int, int]:
    return value.size, (round(math.log(value.norm) * 1e8) if value.norm > 0 else -(10**12)) + shift


def _found(known: dict[tuple[int, int], float], value: Value) -> bool:
    return any(_key(value, shift) in known for shift in (-1, 0, 1))


# The graph of a loss.


def custom_functions(outputs: Any) -> list[str]:
    """Return `Name (file:line)` of each autograd Function in the graph that is not torch's own."""
    names: dict[str, None] = {}
    for node in _nodes([t.grad_fn for t in _tensors(outputs)]):
        function = getattr(type(node), "_forward_cls", None)
        file = inspect.getsourcefile(function) if function is not None else None
        if function is None or file is None or file.startswith((TORCH_FOLDER, str(Path(__file__).parent))):
            continue
        try:
            number = inspect.getsourcelines(function)[1]
        except (OSError, TypeError):
            number = 0
        line = Line(file, number, library="site-packages" in file)
        names[f"{function.__name__} ({shown(line)})"] = None
    return list(names)


def _tensors(outputs: Any) -> list[Tensor]:
    return [t for t in ((outputs,) if isinstance(outputs, Tensor) else outputs) if isinstance(t, Tensor)]


def _nodes(roots: list[Any]) -> Iterator[Any]:
    seen, waiting = set(), [node for node in roots if node is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [child for child, _ in node.next_functions if child is not None]


@dataclass(frozen=True)
class Term:
    """A summand: the line that computed it, and which input to follow at each sum on the way to it."""

    line: str
    choices: tuple[tuple[Any, int], ...]


def terms(loss: Tensor, lines: dict[Any, Line]) -> list[Term]:
    """Split a loss into its summands; a loss that is no sum is one term."""
    parts: list[Term] = []
    visited: set[Any] = set()

    def walk(node: Any, line: Line | None, choices: tuple[tuple[Any, int], ...]) -> None:
        line = lines.get(node, line)
        children = [
            (place, child) for place, (child, _) in enumerate(node.next_functions) if child is not None
        ]
        name = type(node).__name__.partition("Backward")[0].rstrip("0123456789")
        is_sum = name in ("Add", "Sub") and len(children) == 2
        if node in visited or name not in _LINEAR or not (len(children) == 1 or is_sum):
            parts.append(Term(shown(line) if line is not None else "", choices))
            return
        visited.add(node)
        for place, child in children:
            walk(
                child,
                line if not is_sum else lines.get(child, line),
                (*choices, (node, place)) if is_sum else choices,
            )

    if loss.grad_fn is not None:
        walk(loss.grad_fn, None, ())
    return parts if len(parts) <= MOST_TERMS else []


def gradient_of(term: Term, loss: Tensor, parameters: list[Tensor]) -> tuple[Tensor | None, ...]:
    """Return the gradients of one summand: at every sum on the way only its own input gets a gradient."""

    def only(place: int) -> Callable[..., Any]:
        return lambda inputs, outputs: tuple(
            g if k == place or g is None else torch.zeros_like(g) for k, g in enumerate(inputs)
        )

    handles = [node.register_hook(only(place)) for node, place in term.choices]
    try:
        grad = torchs_own(torch.autograd.grad)
        return grad(loss, parameters, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
