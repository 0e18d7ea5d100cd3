"""Capture the update that a training step makes: losses, gradients and parameter changes.

    with leanstep.update() as u:
        loss.backward()
        optimizer.step()
    u.gradients["fc.weight"].norm

`tape.steps` decides where a step ends, so gradient accumulation and several optimizers work without special
handling. The program is not edited. The recorder also hooks gradient clipping, and the first layer's call to
see the data. Parameters are named after the largest module that owns them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim.optimizer import Optimizer

from leanstep.prove.captured import Captured, Update, generators, names_by_owner
from leanstep.prove.sketches import Sketch, each, outside_modes, sketch, whole
from leanstep.prove.watch import Values, custom_functions, gradient_of, place_norm, terms
from leanstep.tape.hooks import replace_function, wrap_closure
from leanstep.tape.run import Stop
from leanstep.tape.steps import StepListener, StepMarker

MOST_TARGETS = 1 << 16
# First inputs that are looked at before one reaches a backward.
MOST_INPUTS = 16


@dataclass
class _Data:
    """What a first layer reads. A forward that reaches no backward, such as shape inference, is not data."""

    value: Any
    reached: bool

    @staticmethod
    def of(value: Any, result: Tensor) -> _Data:
        data = _Data(value, not result.requires_grad)
        if result.requires_grad:
            result.register_hook(lambda gradient: setattr(data, "reached", gradient is not None))
        return data


@dataclass
class _Part:
    """One optimizer's part of an update; optimizers that follow the same backward share a part."""

    update: Update = field(default_factory=lambda: Update(0))
    losses: list[Tensor] = field(default_factory=list)
    embedded: dict[int, list[_Data]] = field(default_factory=dict)
    first_inputs: list[_Data] = field(default_factory=list)
    arrived: list[dict[int, Sketch]] = field(default_factory=list)
    terms: dict[tuple[int, str], dict[int, Sketch]] = field(default_factory=dict)
    has_backward: bool = False
    is_over: bool = False


class Recorder(StepListener):
    """Context manager that captures updates until it exits; after `steps` updates it calls `on_done()`.

    Args:
        steps: number of updates to capture; None = all.
        full: also store the full gradients and changes of the latest update: two copies of the gradients.
        parts: also store the gradient that each backward call added, for `same_update`.
        values: records the program's values and lines; the summands of each loss are then stored as well.
        on_done: called from inside the program when `steps` updates are complete.
    """

    def __init__(
        self,
        steps: int | None = None,
        *,
        full: bool = False,
        parts: bool = False,
        values: Values | None = None,
        on_done: Callable[[], None] | None = None,
    ) -> None:
        self.captured = Captured()
        self._steps, self._full, self._parts = steps, full, parts
        self._on_done, self._values = on_done, values
        self._stack = contextlib.ExitStack()
        self._marker = StepMarker(self)
        self._part: _Part | None = None
        self._ended: list[_Part] = []
        self._names: dict[int, str] = {}
        self._held: list[Tensor] = []
        self._watched: set[int] = set()
        self._arrivals: dict[int, None] = {}
        self._fresh: dict[int, Sketch] = {}
        self._seen: list[tuple[str, Any]] = []
        self._targets: list[int] = []
        self._random: list[tuple[str, int, float]] = []
        self._clipping = 0
        self._in_backward = False
        self._before: dict[int, tuple[Sketch, Tensor | None, int | None]] = {}
        self._scales: dict[int, float] = {}
        self._before_by_hand: dict[int, tuple[Tensor, Tensor]] = {}
        self._inside: Optimizer | None = None

    def __enter__(self) -> Captured:
        self._stack.enter_context(self._marker)
        for name in ("clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_"):
            for place in (clip_grad, nn.utils):
                if hasattr(place, name):
                    self._replace(place, name, self._clip)
        self._replace(Optimizer, "add_param_group", self._new_group)
        self._replace(nn.functional, "embedding", self._embedding)
        self._replace(nn.functional, "linear", self._linear)
        return self.captured

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._stack.close()
        if not isinstance(error, Stop):
            self._marker.finish()
        self.captured.iterations = self._marker.iterations
        self.captured.order = self._forward_order()

    def _replace(self, place: Any, name: str, handler: Callable[..., Any]) -> None:
        self._stack.callback(replace_function(place, name, handler))

    # Hooks on functions that the program calls.

    def backward_begins(self, outputs: Any) -> None:
        if _in_transform():
            # torch.func.grad inside a fused loss: a part of its forward.
            return
        if self._inside is None:
            self._leave_ended_part()
        part = self._current()
        if not part.has_backward and part.update.clipped and self._inside is None:
            # The gradients that were clipped are those of the last update: this backward replaces them.
            part.update.gradients, part.update.clipped = {}, {}
            self.captured.clips_late |= bool(self.captured.updates or self._ended)
        part.has_backward = True
        with outside_modes():
            for loss in (outputs,) if isinstance(outputs, Tensor) else outputs:
                if isinstance(loss, Tensor) and loss.numel() == 1:
                    part.losses.append(loss.detach().clone())
        if self._parts:
            part.update.functions += custom_functions(outputs)
        if self._values is not None and isinstance(outputs, Tensor) and outputs.numel() == 1:
            self._note_terms(part, outputs)
        self._in_backward = True
        self._fresh = {}

    def backward_ends(self, result: Any) -> None:
        if _in_transform():
            return
        self._in_backward = False
        part = self._current()
        if self._parts:
            part.arrived.append(self._fresh)
            part.update.counts.append(self._take_counts())
            part.update.targets, self._targets = part.update.targets + self._targets, []
            part.update.random, self._random = part.update.random + self._random, []
        self._note_by_hand(result)

    def _note_terms(self, part: _Part, loss: Tensor) -> None:
        """Sketch the gradient of each summand of the loss; a sum over the update's backward calls."""
        assert self._values is not None
        summands = terms(loss, self._values.lines)
        parameters = [p for p in self._held if p.requires_grad]
        for number, term in enumerate(summands if len(summands) > 1 else []):
            try:
                gradients = gradient_of(term, loss, parameters)
            except RuntimeError:
                # Reentrant checkpoints and some Functions refuse it: nothing is said about summands.
                part.terms = {}
                break
            known = part.terms.setdefault((number, term.line), {})
            with outside_modes():
                for p, gradient in zip(parameters, gradients, strict=True):
                    if gradient is not None:
                        new = sketch(whole(gradient))
                        known[id(p)] = known[id(p)].plus(new) if id(p) in known else new
        part.update.values += self._values.taken(loss)

    def optimizer_constructed(self) -> None:
        # Scripts may draw initial weights in another order: the weights themselves are compared.
        self._random = []

    def note_draw(self, line: str, numbers: Tensor) -> None:
        """Store random numbers before a backward, and their line between the first layer and a backward."""
        if self._parts and not self._in_backward and self._inside is None:
            with outside_modes():
                self._random.append((line, numbers.numel(), place_norm(numbers)))
        if self._parts and self._part is not None and self._part.first_inputs and torch.is_grad_enabled():
            if not self._in_backward and self._inside is None and not self._part.is_over:
                self._part.update.drawn.append(line)

    def count(self, what: str, value: Any) -> None:
        """Store a token count that the program computed since the last backward; the fp64 run reports it."""
        if self._parts and not self._in_backward and self._inside is None:
            self._seen.append((what, value))

    def note_targets(self, targets: Tensor) -> None:
        """Store ids passed to a loss or a gather since the last backward; the fp64 run reports them."""
        remaining = MOST_TARGETS - len(self._targets)
        if self._parts and not self._in_backward and self._inside is None and remaining > 0:
            with outside_modes():
                self._targets += targets.flatten()[:remaining].tolist()

    def _take_counts(self) -> dict[str, float]:
        seen, self._seen = self._seen, []
        values: dict[str, list[float]] = {}
        with outside_modes():
            for what, value in seen:
                values.setdefault(what, []).append(float(value))
        # The sum and each single count: a program that also counts for its metrics divides by one of them.
        totals = {what: sum(counted) for what, counted in values.items()}
        for what, counted in values.items():
            totals |= {
                f"{what} no. {k}": value for k, value in enumerate(counted, 1) if 1 < len(counted) <= 64
            }
        return totals

    def _new_group(self, original: Any, optimizer: Optimizer, group: Any) -> Any:
        result = original(optimizer, group)
        for parameter in optimizer.param_groups[-1]["params"]:
            self._watch(parameter)
        return result

    def _watch(self, parameter: Tensor) -> None:
        """Record the order in which gradients arrive: the reverse of the order of use in the forward."""
        key = id(parameter)
        if key in self._watched or not parameter.requires_grad or hasattr(parameter, "full_tensor"):
            return
        self._watched.add(key)
        self._held.append(parameter)
        parameter.register_hook(lambda gradient: self._arrived(key, gradient))

    def _arrived(self, key: int, gradient: Tensor | None) -> None:
        if gradient is None:
            # A custom Function returned None for a tensor that needs a gradient.
            return
        if not self.captured.updates:
            self._arrivals.pop(key, None)
            self._arrivals[key] = None
        if self._parts and self._in_backward:
            with outside_modes():
                self._fresh[key] = sketch(whole(gradient))

    def _clip(self, original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if self._clipping == 0:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            if self._has_stepped(parameters):
                self.captured.clips_late = True
            else:
                self._keep_gradients(parameters)
                update = self._current().update
                update.clipped = {**dict.fromkeys(update.gradients, _UNREAD), **update.clipped}
        self._clipping += 1
        try:
            return original(parameters, *args, **kwargs)
        finally:
            self._clipping -= 1

    def _has_stepped(self, parameters: list[Tensor]) -> bool:
        """Return whether the optimizers of an update that has not ended yet have changed all `parameters`."""
        if self._part is None or not self._part.is_over or self._inside is not None:
            return False
        changed = self._part.update.changes
        return all(self._name_of(id(p)) in changed for p in parameters if p.grad is not None)

    def _embedding(self, original: Any, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(input, weight, *args, **kwargs)
        if torch.is_grad_enabled() and not self._in_backward and not input.is_meta:
            self._leave_ended_part()
            with outside_modes():
                data = _Data.of(input.detach().reshape(-1), result)
                self._current().embedded.setdefault(id(weight), []).append(data)
                self._first_input(input, result)
        return result

    def _linear(self, original: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(input, *args, **kwargs)
        if torch.is_grad_enabled() and not self._in_backward and self._inside is None and not input.is_meta:
            self._leave_ended_part()
            with outside_modes():
                self._first_input(input, result)
        return result

    def _first_input(self, input: Tensor, result: Tensor) -> None:
        known = self._current().first_inputs
        if not known or (not known[0].reached and not input.requires_grad and len(known) < MOST_INPUTS):
            known.append(_Data.of((input.numel(), float(whole(input).double().sum())), result))

    # Optimizer steps.

    def optimizer_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self._inside is not None or not getattr(optimizer, "param_groups", None):
            return None

        def then_enter_step(closure: Callable[[], Any]) -> Callable[[], Any]:
            def closed() -> Any:
                # As in Lightning, the gradients arrive inside `optimizer.step(closure)`.
                result = closure()
                if self._inside is None:
                    self._enter_step(optimizer)
                return result

            return closed

        with_closure = wrap_closure(args, kwargs, then_enter_step)
        if with_closure is None:
            self._enter_step(optimizer)
        return with_closure

    def _enter_step(self, optimizer: Optimizer) -> None:
        self._inside = optimizer
        update = self._current().update
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._name(parameters)
        with outside_modes():
            self._note_initial(parameters)
            self._note_options(optimizer)
            was_clipped = bool(update.clipped)
            self._keep_gradients(parameters)
            parameters = [p for p in parameters if p.grad is not None]

            def look(p: Tensor) -> tuple[Sketch | None, Sketch, Tensor | None]:
                clipped = sketch(whole(p.grad)) if was_clipped and p.grad is not None else None
                seen = clipped or update.gradients[self._name_of(id(p))]
                self._scales[id(p)] = seen.norm / max(1, p.numel()) ** 0.5
                return clipped, self._weighted(p), whole(p).clone() if self._full else None

            self._before = {}
            for p, (clipped, value, full) in zip(parameters, each(look, parameters), strict=True):
                if clipped is not None:
                    update.clipped[self._name_of(id(p))] = clipped
                assert p.grad is not None
                self._before[id(p)] = (value, full, p.grad._version)
            update.draws = generators()

    def _note_initial(self, parameters: list[Tensor]) -> None:
        if not self.captured.updates:
            for p, initial in zip(parameters, each(lambda p: sketch(whole(p)), parameters), strict=True):
                self.captured.initial.setdefault(self._name_of(id(p)), initial)

    def _note_options(self, optimizer: Optimizer) -> None:
        update, kind = self._current().update, type(optimizer).__name__
        for group in optimizer.param_groups:
            options = {k: v for k, v in group.items() if k not in _NO_OPTIONS and _is_plain(v)}
            options = {k: v if isinstance(v, (tuple, bool)) else float(v) for k, v in options.items()}
            for p in group["params"]:
                update.options[self._name_of(id(p))] = {"optimizer": kind, **options}
                if not p.requires_grad:
                    update.frozen.append(self._name_of(id(p)))

    def _weighted(self, p: Tensor) -> Sketch:
        """Sketch the parameter's current value, with entries weighted by their gradients."""
        assert p.grad is not None
        return sketch(whole(p), whole(p.grad), self._scales[id(p)])

    def optimizer_ends(self, optimizer: Optimizer) -> None:
        if self._inside is not optimizer:
            return
        update = self._current().update
        with outside_modes():
            moved = []
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                version = self._before.get(id(p), (None, None, None))[2]
                if version is None:
                    continue
                if p.grad is None or p.grad._version != version:
                    # The optimizer used the gradient as scratch space: the weights cannot be computed again.
                    name = self._name_of(id(p))
                    self._note(f"{name}: the optimizer overwrote the gradient; its change is not compared")
                    continue
                moved.append(p)
            for p, value in zip(moved, each(self._weighted, moved), strict=True):
                before, full, _ = self._before.pop(id(p))
                change = value.minus(before)
                if full is not None:
                    change = change.with_full(full.neg_().add_(whole(p)))
                update.changes[self._name_of(id(p))] = change
            self._before = {}
        self._inside = None
        update.optimizer_steps += 1

    def _keep_gradients(self, parameters: list[Tensor]) -> None:
        update = self._current().update
        self._name(parameters)
        with outside_modes():
            new = {self._name_of(id(p)): p.grad for p in parameters if p.grad is not None}
            new = {name: gradient for name, gradient in new.items() if name not in update.gradients}

            def look(gradient: Tensor) -> Sketch:
                gradient = whole(gradient)
                result = sketch(gradient)
                return result.with_full(gradient.clone()) if self._full else result

            update.gradients.update(zip(new, each(look, list(new.values())), strict=True))

    # Updates without an optimizer.

    def _note_by_hand(self, result: Any) -> None:
        """Copy parameters and gradients of a script without an optimizer, before the script changes them."""
        leaves = self._marker.leaves_by_hand
        gradients = [leaf.grad for leaf in leaves]
        if result is not None:
            gradients = result.values() if isinstance(result, dict) else result
        self._name(leaves)
        with outside_modes():
            for leaf, gradient in zip(leaves, gradients, strict=False):
                if gradient is not None:
                    self._before_by_hand[id(leaf)] = (whole(leaf).clone(), whole(gradient).clone())

    def _update_by_hand(self) -> None:
        update = self._current().update
        with outside_modes():
            for leaf in self._held:
                if id(leaf) not in self._before_by_hand:
                    continue
                name, (before, gradient) = self._name_of(id(leaf)), self._before_by_hand.pop(id(leaf))
                update.gradients[name] = sketch(gradient)
                scale = update.gradients[name].norm / max(1, leaf.numel()) ** 0.5
                update.changes[name] = sketch(whole(leaf) - before, gradient, scale)
                if not self.captured.updates:
                    self.captured.initial.setdefault(name, sketch(before))
        self._before_by_hand = {}

    # Boundaries between updates.

    def _current(self) -> _Part:
        if self._part is None:
            if self._full and self.captured.updates:
                self.captured.updates[-1].drop_full()
            self._part = _Part()
        return self._part

    def _leave_ended_part(self) -> None:
        """Leave a part that is over: later events belong to another optimizer, or to the next update."""
        if self._part is not None and self._part.is_over:
            self._ended.append(self._part)
            self._part = None

    def part_ends(self, optimizer: Optimizer | None) -> None:
        if optimizer is None:
            self._update_by_hand()
        elif not self._current().update.optimizer_steps:
            # A GradScaler skipped the step: gradients that overflowed cannot be compared.
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self._name(parameters)
            with outside_modes():
                self._note_initial(parameters)
        self._current().is_over = True

    def step_ends(self, late: bool) -> None:
        self._leave_ended_part()
        parts, self._ended = self._ended, []
        with outside_modes():
            for part in parts:
                self._complete(part)
            update = self._merged(parts)
        self.captured.updates.append(update)
        if self._part is not None:
            # The next update has already begun: only the latest one stores full tensors.
            update.drop_full()
        if self._steps is not None and len(self.captured.updates) >= self._steps and self._on_done:
            self._on_done()

    def _complete(self, part: _Part) -> None:
        update = part.update
        update.losses = [float(loss) for loss in part.losses]
        inputs = part.first_inputs
        update.first_input = next((data.value for data in inputs if data.reached), None)
        if update.first_input is None and inputs:
            update.first_input = inputs[0].value
        update.terms = [
            (line, {self._name_of(key): value for key, value in gradients.items()})
            for (_, line), gradients in part.terms.items()
        ]
        update.parts = [
            {self._name_of(key): value for key, value in arrived.items()} for arrived in part.arrived
        ]
        update.clipped = {name: value for name, value in update.clipped.items() if value is not _UNREAD}

    def _merged(self, parts: list[_Part]) -> Update:
        update = Update(len(self.captured.updates) + 1)
        embedded: dict[int, list[_Data]] = {}
        for part in parts:
            update.add(part.update)
            for key, ids in part.embedded.items():
                embedded.setdefault(key, []).extend(ids)
        if embedded:
            used = [[data.value for data in read if data.reached] for read in embedded.values()]
            used = [read for read in used if read] or [[d.value for d in read] for read in embedded.values()]
            update.ids = _histogram(used)
            update.tokens = sum(update.ids.values())
            update.read = _histogram([[data.value for data in read] for read in embedded.values()])
        return update

    def _note(self, text: str) -> None:
        if text not in self.captured.notes:
            self.captured.notes.append(text)

    # Names.

    def _name_of(self, key: int) -> str:
        return self._names.get(key, f"parameter {key}")

    def _name(self, parameters: list[Tensor]) -> None:
        new = [p for p in parameters if id(p) not in self._names]
        if not new:
            return
        self._held += new
        names = names_by_owner({id(p) for p in new})
        taken = set(self._names.values())
        for p in new:
            name = names.get(id(p)) or f"parameter {len(self._names)} {list(p.shape)}"
            while name in taken:
                name += "'"
            taken.add(name)
            self._names[id(p)] = name

    def _forward_order(self) -> list[str]:
        arrived = [self._names[key] for key in reversed(self._arrivals) if key in self._names]
        rest = [name for name in self._names.values() if name not in set(arrived)]
        return arrived + rest


# Options of a parameter group that do not change the update.
_NO_OPTIONS = ("params", "foreach", "fused", "capturable", "differentiable", "initial_lr")


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(each, (int, float)) for each in value)
    return isinstance(value, (bool, int, float)) or (isinstance(value, Tensor) and value.numel() == 1)


def _histogram(embedded: list[list[Tensor]]) -> Counter[int]:
    """Count the ids that the largest embedding reads."""
    largest = max(embedded, key=lambda tensors: sum(t.numel() for t in tensors))
    ids, counts = torch.cat(largest).unique(return_counts=True)
    return Counter(dict(zip(ids.tolist(), counts.tolist(), strict=True)))


_UNREAD = Sketch((), "", 0.0, 0.0, 0, torch.zeros(0, dtype=torch.float64))


def _in_transform() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None  # type: ignore[attr-defined]


@contextlib.contextmanager
def update(*, full: bool = False, parts: bool = False) -> Iterator[Captured]:
    """Capture the updates made inside a `with` block.

        with leanstep.update() as u:
            loss.backward()
            optimizer.step()
        u.loss, u.backward_calls, u.tokens            # of the last update; u.updates lists all of them
        u.gradients["fc.weight"].norm                 # after backward, before clipping

    Args:
        full: also store the full tensors of the latest update, `u.gradients[name].full`.
        parts: also store the gradient that each backward call added, `u.parts[call][name]`.
    """
    recorder = Recorder(full=full, parts=parts)
    with recorder as captured:
        yield captured
