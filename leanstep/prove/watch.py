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
from dataclasses import dataclass, replace
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
    """A value that depends on parameters: the op and line that computed it, its size, norm and mean cube.

    Norm and mean cube do not depend on the order of the entries. All normalized tensors have the same norm.
    `others`: norms of the op's operands that do not depend on parameters, such as masks and weights.
    `parents`: how many values earlier each value was recorded that this one is computed from.
    """

    op: str
    line: str
    size: int
    norm: float
    cube: float
    others: tuple[float, ...] = ()
    parents: tuple[int, ...] = ()
    is_loss: bool = False


class Values(TorchFunctionMode):
    """Records values and, for the nodes of the autograd graph, the lines that made them."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[Any, Line] = {}
        self._values: list[tuple[Value, tuple[Any, int]]] = []
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
        if line is None or name == "__get__" or not value.is_floating_point() or value.numel() == 0:
            return
        self.lines[value.grad_fn] = line
        with outside_modes():
            others = [a for a in args if isinstance(a, Tensor) and not a.requires_grad and a.dim() > 0]
            norms = tuple(place_norm(other) for other in others)
            # Scores that a mask sets to -inf say nothing about the others.
            finite = value.detach().double().nan_to_num(0.0, 0.0, 0.0)
            size, norm = value.numel(), float(finite.norm())
            cube = float((finite * (size**0.5 / norm)).pow(3).mean()) if norm > 0 else 0.0
        new = Value(name.strip("_"), shown(line), size, norm, cube, norms)
        self._values.append((new, (value.grad_fn, value.output_nr)))

    def taken(self, loss: Tensor) -> list[Value]:
        """Return the values that `loss` is computed from, in order, and release them."""
        places = {key: number for number, (_, key) in enumerate(self._values)}

        def sources(node: Any) -> set[int]:
            numbers: set[int] = set()
            seen, waiting = set(), [node]
            while waiting:
                for child in waiting.pop().next_functions:
                    if child in places:
                        numbers.add(places[child])
                    elif child[0] is not None and child[0] not in seen:
                        seen.add(child[0])
                        waiting.append(child[0])
            return numbers

        root = places.get((loss.grad_fn, loss.output_nr))
        used: dict[int, set[int]] = {}
        waiting = [] if root is None else [root]
        while waiting:
            number = waiting.pop()
            if number not in used:
                used[number] = sources(self._values[number][1][0])
                waiting += used[number]
        order = {number: place for place, number in enumerate(sorted(used))}
        values = [
            replace(
                self._values[number][0],
                parents=tuple(order[number] - order[source] for source in sorted(used[number])),
                is_loss=number == root,
            )
            for number in order
        ]
        # Another loss may be computed from the rest.
        self._values = [entry for number, entry in enumerate(self._values) if number not in used]
        self.lines = {node: self.lines[node] for _, (node, _) in self._values}
        return values


def shown(line: Line) -> str:
    """`package/file.py:line` in a package, `file.py:line` in the user's files."""
    return line.place if line.library else f"{line.file.rpartition('/')[2]}:{line.number}"


def place_norm(tensor: Tensor) -> float:
    """A number that also changes when entries change their places: a mask rolled by one has the same norm."""
    flat = tensor.detach().double().nan_to_num(0.0, 0.0, 0.0).reshape(-1)
    return float((flat * torch.linspace(1.0, 2.0, flat.numel(), dtype=torch.float64)).norm())


def first_difference(
    mine: list[Value], theirs: list[Value]
) -> tuple[Value | None, Value, Value | None] | None:
    """Find where `theirs` leaves `mine`: the first value that differs, computed from values in common.

    Values that differ and that the losses reach only through a value in common are another way to write the
    same. Returns the last value in common, the first one behind it, and what `mine` computes there, by the
    same op if possible; None if the losses agree.
    """
    own = next(iter(_leaving(theirs, mine)), None)
    if own is None:
        return None
    value = theirs[own]
    last = theirs[own - min(value.parents)] if value.parents else None
    partners = [mine[place] for place in _leaving(mine, theirs)]
    same = [other for other in partners if other.op == value.op and other.size == value.size]
    return last, value, next(iter([*same, *partners]), None)


def _leaving(values: list[Value], others: list[Value]) -> list[int]:
    """Return the places of values that differ from all of `others` and are computed from values in common."""
    known = {_key(value) for value in others}
    differs = [not _found(known, value) for value in values]
    places: set[int] = set()
    seen: set[int] = set()
    waiting = [place for place, value in enumerate(values) if value.is_loss and differs[place]]
    while waiting:
        place = waiting.pop()
        if place in seen:
            continue
        seen.add(place)
        sources = [place - back for back in values[place].parents if differs[place - back]]
        waiting += sources
        if not sources:
            places.add(place)
    return sorted(places)


def _key(value: Value, shift: int = 0, turn: int = 0) -> tuple[int, int, int]:
    if value.norm <= 1e-12 * value.size**0.5:
        return value.size, 0, 0
    return value.size, round(math.log(value.norm) * 1e8) + shift, round(value.cube * 1e7) + turn


def _found(known: set[tuple[int, int, int]], value: Value) -> bool:
    return any(_key(value, shift, turn) in known for shift in (-1, 0, 1) for turn in (-1, 0, 1))


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
