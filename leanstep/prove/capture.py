"""Capture the update that a training step makes: gradients, what the optimizer did with them, the losses.

    with leanstep.update() as u:
        loss.backward()
        optimizer.step()
    u.gradients["fc.weight"].norm

An update is all that happens from a first `backward()` to the last `optimizer.step()` before the next one, so
gradient accumulation and several optimizers need nothing special. Nothing in the program is edited: the
recorder hangs on torch's hook for optimizer steps, on `torch.autograd.backward`, on gradient clipping, and on
the first layer's call for the data. Parameters are named by the largest module that owns them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.nn.utils import clip_grad
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from leanstep.prove.captured import Captured, Update, generators, names_by_owner
from leanstep.prove.sketches import Sketch, each, outside_modes, sketch, whole

# Distinct token ids that a histogram keeps: more than any vocabulary in use.
_MAX_IDS = 1 << 20


class Recorder:
    """Context manager: captures updates until it is left, or until `steps` of them and then `on_done()`.

    Args:
        steps: updates to capture; None = all.
        full: also keep the whole gradients and changes of the latest update: two copies of the gradients.
        parts: also keep what each backward call added, for `same_update`.
        on_done: called when `steps` updates are complete, from inside the program.
        on_update: called with each complete update, whole tensors included.
    """

    def __init__(
        self,
        steps: int | None = None,
        *,
        full: bool = False,
        parts: bool = False,
        on_done: Callable[[], None] | None = None,
        on_update: Callable[[Update], None] | None = None,
    ) -> None:
        self.captured = Captured()
        self._steps, self._full, self._parts = steps, full, parts
        self._on_done, self._on_update = on_done, on_update
        self._stack = contextlib.ExitStack()
        self._now: Update | None = None
        self._names: dict[int, str] = {}
        self._held: list[Tensor] = []
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stepped: set[int] = set()
        self._watched: set[int] = set()
        self._arrivals: dict[int, None] = {}
        self._fresh: dict[int, Sketch] = {}
        self._arrived_parts: list[dict[int, Sketch]] = []
        self._losses: list[Tensor] = []
        self._embedded: dict[int, list[Tensor]] = {}
        self._seen: list[tuple[str, Any]] = []
        self._depth = self._clipping = 0
        self._before: dict[int, tuple[Sketch, Tensor | None, int | None]] = {}
        self._inside: Optimizer | None = None

    def __enter__(self) -> Captured:
        self._stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
        self._patch(torch.autograd, "backward", self._backward)
        for name in ("clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_"):
            for place in (clip_grad, nn.utils):
                if hasattr(place, name):
                    self._patch(place, name, self._clip)
        self._patch(Optimizer, "add_param_group", self._new_group)
        self._patch(nn.functional, "embedding", self._embedding)
        self._patch(nn.functional, "linear", self._linear)
        return self.captured

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._stack.close()
        if self._now is not None and self._now.optimizer_steps:
            self._close()
        self.captured.order = self._forward_order()

    def _patch(self, place: Any, name: str, handler: Callable[..., Any]) -> None:
        original = getattr(place, name)
        busy = False

        def patched(*args: Any, **kwargs: Any) -> Any:
            nonlocal busy
            # A compiler reads this branch as constant and goes on with torch's own function. A function mode
            # hands the public name, which is this one, back to itself. AOTAutograd of torch 2.8 does not say
            # that it compiles, only that it traces.
            if torch.compiler.is_compiling() or busy or TracingContext.try_get() is not None:
                return original(*args, **kwargs)
            busy = True
            try:
                return handler(original, *args, **kwargs)
            finally:
                busy = False

        setattr(place, name, patched)
        self._stack.callback(setattr, place, name, original)

    # What the program calls.

    def _backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if self._depth:
            # Reentrant checkpointing calls backward inside backward.
            return original(tensors, *args, **kwargs)
        if self._inside is None:
            self._finish_pending()
        update = self._current()
        with outside_modes():
            for loss in (tensors,) if isinstance(tensors, Tensor) else tensors:
                if loss.numel() == 1:
                    self._losses.append(loss.detach().clone())
        self._depth += 1
        self._fresh = {}
        try:
            result = original(tensors, *args, **kwargs)
        finally:
            self._depth -= 1
        if self._parts:
            self._arrived_parts.append(self._fresh)
            update.counts.append(self._take_counts())
        return result

    def count(self, what: str, value: Any) -> None:
        """A number of tokens that the program itself counted since the last backward; a twin reports them."""
        if self._parts and not self._depth and self._inside is None:
            self._seen.append((what, value))

    def _take_counts(self) -> dict[str, float]:
        seen, self._seen = self._seen, []
        values: dict[str, list[float]] = {}
        with outside_modes():
            for what, value in seen:
                values.setdefault(what, []).append(float(value))
        # Together, and one by one: a program that counts for its metrics, too, divides by one of them.
        found = {what: sum(counted) for what, counted in values.items()}
        for what, counted in values.items():
            found |= {
                f"{what} no. {k}": value for k, value in enumerate(counted, 1) if 1 < len(counted) <= 64
            }
        return found

    def _new_group(self, original: Any, optimizer: Optimizer, group: Any) -> Any:
        result = original(optimizer, group)
        self._optimizers.add(optimizer)
        for parameter in optimizer.param_groups[-1]["params"]:
            self._watch(parameter)
        return result

    def _watch(self, parameter: Tensor) -> None:
        """Note when a parameter's gradient arrives: the reverse of the order in which the forward used it."""
        key = id(parameter)
        if key in self._watched or not parameter.requires_grad or hasattr(parameter, "full_tensor"):
            return
        self._watched.add(key)
        self._held.append(parameter)
        parameter.register_hook(lambda gradient: self._arrived(key, gradient))

    def _arrived(self, key: int, gradient: Tensor) -> None:
        if not self.captured.updates:
            self._arrivals.pop(key, None)
            self._arrivals[key] = None
        if self._parts and self._depth:
            with outside_modes():
                self._fresh[key] = sketch(whole(gradient))

    def _clip(self, original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if self._clipping == 0:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            self._keep_gradients(parameters)
        self._clipping += 1
        try:
            return original(parameters, *args, **kwargs)
        finally:
            self._clipping -= 1
            if self._now is not None:
                self._now.clipped = dict.fromkeys(self._now.gradients, _UNREAD)

    def _embedding(self, original: Any, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not self._depth:
            self._finish_pending()
            with outside_modes():
                self._embedded.setdefault(id(weight), []).append(input.detach().reshape(-1))
                self._first_input(input)
        return original(input, weight, *args, **kwargs)

    def _linear(self, original: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not self._depth and self._inside is None:
            self._finish_pending()
            with outside_modes():
                self._first_input(input)
        return original(input, *args, **kwargs)

    def _first_input(self, input: Tensor) -> None:
        update = self._current()
        if update.first_input is None:
            update.first_input = (input.numel(), float(whole(input).double().sum()))

    # What the optimizer does.

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self._inside is not None or not getattr(optimizer, "param_groups", None):
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._enter_step(optimizer)
            return None

        def looked_at() -> Any:
            # Lightning's way: the gradients arrive inside `optimizer.step(closure)`.
            result = closure()
            if self._inside is None:
                self._enter_step(optimizer)
            return result

        if len(args) > 1:
            return (args[0], looked_at, *args[2:]), kwargs
        return args, {**kwargs, "closure": looked_at}

    def _enter_step(self, optimizer: Optimizer) -> None:
        self._inside = optimizer
        update = self._current()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._name(parameters)
        with outside_modes():
            if not self.captured.updates:
                found = each(lambda p: sketch(whole(p)), parameters)
                for p, initial in zip(parameters, found, strict=True):
                    self.captured.initial.setdefault(self._name_of(id(p)), initial)
            was_clipped = bool(update.clipped)
            self._keep_gradients(parameters)
            parameters = [p for p in parameters if p.grad is not None]

            def look(p: Tensor) -> tuple[Sketch | None, Sketch, Tensor | None]:
                clipped = sketch(whole(p.grad)) if was_clipped and p.grad is not None else None
                return clipped, self._weighted(p), whole(p).clone() if self._full else None

            self._before = {}
            for p, (clipped, value, kept) in zip(parameters, each(look, parameters), strict=True):
                if clipped is not None:
                    update.clipped[self._name_of(id(p))] = clipped
                assert p.grad is not None
                self._before[id(p)] = (value, kept, p.grad._version)
            update.draws = generators()

    def _weighted(self, p: Tensor) -> Sketch:
        """The parameter as it is now, its entries weighed by their gradients."""
        assert p.grad is not None
        norm = self._current().gradients[self._name_of(id(p))].norm
        return sketch(whole(p), whole(p.grad), norm / max(1, p.numel()) ** 0.5)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._inside is not optimizer:
            return
        update = self._current()
        with outside_modes():
            moved = []
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                version = self._before.get(id(p), (None, None, None))[2]
                if version is None:
                    continue
                if p.grad is None or p.grad._version != version:
                    # The optimizer used the gradient as scratch space: its entries cannot be weighed again.
                    name = self._name_of(id(p))
                    self._note(f"{name}: the optimizer overwrote the gradient; its change is not compared")
                    continue
                moved.append(p)
            for p, value in zip(moved, each(self._weighted, moved), strict=True):
                before, kept, _ = self._before.pop(id(p))
                change = value.minus(before)
                if kept is not None:
                    change = change.with_full(kept.neg_().add_(whole(p)))
                update.changes[self._name_of(id(p))] = change
            self._before = {}
        self._inside = None
        update.optimizer_steps += 1
        self._stepped.add(id(optimizer))
        if self._optimizers and self._stepped >= {id(o) for o in self._optimizers}:
            self._close()

    def _keep_gradients(self, parameters: list[Tensor]) -> None:
        update = self._current()
        self._name(parameters)
        with outside_modes():
            new = {self._name_of(id(p)): p.grad for p in parameters if p.grad is not None}
            new = {name: gradient for name, gradient in new.items() if name not in update.gradients}

            def look(gradient: Tensor) -> Sketch:
                gradient = whole(gradient)
                kept = sketch(gradient)
                return kept.with_full(gradient.clone()) if self._full else kept

            update.gradients.update(zip(new, each(look, list(new.values())), strict=True))

    # Where one update ends and the next begins.

    def _current(self) -> Update:
        if self._now is None:
            if self._full and self.captured.updates:
                self.captured.updates[-1].drop_full()
            self._now = Update(len(self.captured.updates) + 1)
            self._stepped = set()
        return self._now

    def _finish_pending(self) -> None:
        if self._now is not None and self._now.optimizer_steps:
            self._close()

    def _close(self) -> None:
        update, self._now = self._now, None
        assert update is not None
        with outside_modes():
            update.losses = [float(loss) for loss in self._losses]
            if self._embedded:
                largest = max(self._embedded.values(), key=lambda parts: sum(t.numel() for t in parts))
                ids, counts = torch.cat(largest).unique(return_counts=True)
                update.tokens = int(counts.sum())
                if len(ids) <= _MAX_IDS:
                    update.ids = Counter(dict(zip(ids.tolist(), counts.tolist(), strict=True)))
        update.parts = [
            {self._name_of(key): value for key, value in part.items()} for part in self._arrived_parts
        ]
        self._losses, self._embedded, self._arrived_parts = [], {}, []
        update.clipped = {name: value for name, value in update.clipped.items() if value is not _UNREAD}
        self.captured.updates.append(update)
        if self._on_update is not None:
            self._on_update(update)
        if self._steps is not None and len(self.captured.updates) >= self._steps and self._on_done:
            self._on_done()

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
        found = names_by_owner({id(p) for p in new})
        taken = set(self._names.values())
        for p in new:
            name = found.get(id(p)) or f"parameter {len(self._names)} {list(p.shape)}"
            while name in taken:
                name += "'"
            taken.add(name)
            self._names[id(p)] = name

    def _forward_order(self) -> list[str]:
        arrived = [self._names[key] for key in reversed(self._arrivals) if key in self._names]
        rest = [name for name in self._names.values() if name not in set(arrived)]
        return arrived + rest


_UNREAD = Sketch((), "", 0.0, 0.0, 0, np.zeros(0))


@contextlib.contextmanager
def update(*, full: bool = False, parts: bool = False) -> Iterator[Captured]:
    """Capture the updates made inside the block.

        with leanstep.update() as u:
            loss.backward()
            optimizer.step()
        u.loss, u.backward_calls, u.tokens            # of the last update; all of them in u.updates
        u.gradients["fc.weight"].norm                 # as backward left them, before clipping

    Args:
        full: also keep the whole tensors of the latest update, `u.gradients[name].full`.
        parts: also keep what each backward call added, `u.parts[call][name]`.
    """
    recorder = Recorder(full=full, parts=parts)
    with recorder as captured:
        yield captured
