"""Where a training script's steps end: docs/concepts.md has the definition.

A step is one update of the model, whatever the number of optimizers, closures, backward calls and
micro-batches behind it. `StepMarker` is the only code of the package that hooks optimizers to find steps. It
calls a `StepListener` at each part of an update and at the end of each step.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from leanstep.tape.hooks import frame_key, in_engine, replace_function, running_frames
from leanstep.tape.phases import PhaseMarker

# Represents all optimizers that step inside a backward, from gradient hooks, as one member of a round.
_IN_BACKWARD = 0
_MAX_NODES = 2_000


class StepListener:
    """Receives the reports of a `StepMarker`. Each method may be overridden."""

    def optimizer_constructed(self) -> None:
        """The script has an optimizer: its steps will end."""

    def backward_begins(self, outputs: Any) -> None:
        """`outputs`: what backward() or autograd.grad() is called on. Only outermost calls are reported."""

    def backward_ends(self, result: Any) -> None:
        """`result`: what autograd.grad() returned; None after backward()."""

    def optimizer_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """May return other (args, kwargs), like torch's own hook."""

    def optimizer_ends(self, optimizer: Optimizer) -> None: ...

    def part_ends(self, optimizer: Optimizer | None) -> None:
        """An optimizer finished its part of an update, or its GradScaler skipped it. None: no optimizer."""

    def step_ends(self, late: bool) -> None:
        """The parts since the last step form a step. `late`: the next step has already begun."""


class StepMarker:
    """Context manager: finds the steps of the training that runs inside it.

    `steps` and `iterations` count what has ended. An iteration is a rollout and the steps that follow it.

    Args:
        listener: receives each part of an update.
        phases: finds rollouts; its owner may use a different clock.
    """

    def __init__(self, listener: StepListener, phases: PhaseMarker | None = None) -> None:
        self._listener = listener
        self.phases = phases or PhaseMarker(time.perf_counter)
        self.steps = self.iterations = 0
        self._stack = contextlib.ExitStack()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._unknown_optimizer = False
        # The optimizers that stepped since the last step ended, and those that step in every round.
        self._round: set[int] = set()
        self._regulars: set[int] = set()
        # Optimizers whose step() is running, outermost first, with the frame of each.
        self._stepping: list[tuple[int, tuple[int, int]]] = []
        self._attempts = self._depth = 0
        self._stepped_in_backward = False
        self._by_hand = _HandWrittenUpdates()
        self._rollout = False

    def __enter__(self) -> StepMarker:
        self._stack.callback(register_optimizer_step_pre_hook(self._before_optimizer).remove)
        self._stack.callback(register_optimizer_step_post_hook(self._after_optimizer).remove)
        self._replace(Optimizer, "__init__", self._construct)
        self._replace(torch.amp.GradScaler, "step", self._scaled_step)
        self._replace(Tensor, "backward", self._backward)
        self._replace(torch.autograd, "backward", self._backward)
        self._replace(torch.autograd, "grad", self._grad)
        self._stack.enter_context(self.phases)
        return self

    def __exit__(self, *details: Any) -> None:
        self._stack.close()

    def _replace(self, place: Any, name: str, handler: Callable[..., Any]) -> None:
        self._stack.callback(replace_function(place, name, handler))

    def finish(self) -> None:
        """End the training: close a last step that looked like a part of one."""
        # Parameters that were freed with the script's variables count as updated if they were before.
        if self._by_hand.has_update(if_gone=self.steps > 0):
            self._update_by_hand()
        elif self._round and not self._regulars:
            self._end_step(late=True)

    @property
    def leaves_by_hand(self) -> list[Tensor]:
        """The parameters of the last backward, in a script that has no optimizer."""
        return self._by_hand.leaves()

    # Optimizers

    def _construct(self, original: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        self._optimizers.add(optimizer)
        self.phases.watch_generate()
        self._listener.optimizer_constructed()

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        key = frame_key(sys._getframe(1))
        # A step() that raised never ends, and the key of its frame may be reused.
        self._stepping = [entry for entry in self._stepping if entry[1] != key]
        self._stepping.append((id(optimizer), key))
        if self._is_nested(optimizer):
            return None
        if not in_engine():
            self._close_round_before(id(optimizer))
        self.phases.update_begins()
        return self._listener.optimizer_begins(optimizer, args, kwargs)

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        is_nested = self._is_nested(optimizer)
        self._stepping.pop()
        if is_nested:
            return
        self._listener.optimizer_ends(optimizer)
        if in_engine():
            # From a gradient hook: all optimizers of this backward make one update, which ends with it.
            self._attempts += 1
            self._stepped_in_backward = True
            self._optimizers.discard(optimizer)
        else:
            self._attempted(optimizer)

    def _is_nested(self, optimizer: Optimizer) -> bool:
        """Return whether the running step() was called by this optimizer's own step(), as in a subclass."""
        running = running_frames()
        self._stepping = [entry for entry in self._stepping if entry[1] in running]
        return sum(other == id(optimizer) for other, _ in self._stepping) > 1

    def _scaled_step(self, original: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """A GradScaler that detects an overflow does not call the optimizer; this still counts as a step."""
        before = self._attempts
        result = original(scaler, optimizer, *args, **kwargs)
        if self._attempts == before:
            self._close_round_before(id(optimizer))
            self._attempted(optimizer)
        return result

    def _attempted(self, optimizer: Optimizer) -> None:
        self._attempts += 1
        if optimizer not in self._optimizers:
            # Constructed before the marker was entered, perhaps with others: wait until it steps again.
            self._unknown_optimizer = True
        self._join_round(id(optimizer), optimizer)

    # Rounds

    def _close_round_before(self, key: int) -> None:
        """A member of the round steps again, so the round ended after the last part."""
        if key in self._round:
            self._regulars = (self._regulars & self._round) or set(self._round)
            self._end_step(late=True)

    def _join_round(self, key: int, optimizer: Optimizer | None) -> None:
        self._by_hand.stop()
        self._round.add(key)
        self._end_part(optimizer)
        if self._round_is_complete():
            if not self._regulars:
                self._regulars = set(self._round)
            self._end_step(late=False)

    def _round_is_complete(self) -> bool:
        alive = {id(optimizer) for optimizer in self._optimizers}
        if self._regulars and not self._unknown_optimizer:
            self._regulars &= alive | {_IN_BACKWARD}
        if self._regulars:
            return self._round >= self._regulars
        return not self._unknown_optimizer and self._round >= alive

    def _end_part(self, optimizer: Optimizer | None) -> None:
        self._rollout |= self.phases.sampled
        self.phases.sampled = False
        self.phases.update_ends()
        self._listener.part_ends(optimizer)

    def _end_step(self, *, late: bool) -> None:
        self._round = set()
        self.steps += 1
        self.iterations += self._rollout
        self._rollout = False
        self._listener.step_ends(late)

    # Backward calls

    def _backward(self, original: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        return self._run_backward(functools.partial(original, outputs, *args, **kwargs), outputs, None)

    def _grad(self, original: Any, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(original, outputs, inputs, *args, **kwargs)
        return self._run_backward(call, outputs, inputs)

    def _run_backward(self, call: Callable[[], Any], outputs: Any, inputs: Any) -> Any:
        if self._depth:
            # Tensor.backward calls torch.autograd.backward; reentrant checkpoints call it inside another.
            return call()
        if not self._stepping and self._by_hand.has_update(inputs):
            self._update_by_hand()
        self.phases.update_begins()
        self._listener.backward_begins(outputs)
        self._depth += 1
        try:
            result = call()
        finally:
            self._depth -= 1
        if not self._stepping and not self._stepped_in_backward:
            self._by_hand.note_backward(self._optimizers, outputs, inputs)
        self._listener.backward_ends(result)
        if self._stepped_in_backward:
            self._stepped_in_backward = False
            self._close_round_before(_IN_BACKWARD)
            self._join_round(_IN_BACKWARD, None)
        return result

    def _update_by_hand(self) -> None:
        self._by_hand.forget()
        self._end_part(None)
        self._end_step(late=False)


class _HandWrittenUpdates:
    """Updates without an optimizer: parameters that received gradients have changed before the next backward.

    A change shows in the version of a parameter, in a new tensor in its place, or in its gradient being
    cleared: an update through `.data` leaves the version alone. Once an optimizer has stepped, this
    search is off.
    """

    def __init__(self) -> None:
        self._active = True
        self._leaves: list[tuple[weakref.ref[Tensor], tuple[Any, ...]]] = []
        self._known: list[weakref.ref[Tensor]] = []
        # Optimizers from before the marker was entered; None: not searched for yet.
        self._earlier: weakref.WeakSet[Optimizer] | None = None
        self._without_optimizer = True

    def stop(self) -> None:
        self._active = False
        self.forget()

    def forget(self) -> None:
        """The update of the last backward has been seen."""
        self._leaves = []

    def note_backward(self, optimizers: Iterable[Optimizer], outputs: Any, inputs: Any) -> None:
        """A backward has ended. `inputs`: what autograd.grad was asked about; None after backward()."""
        if not self._active or len(list(optimizers)):
            return  # cleared gradients of a script with an optimizer are accumulated elsewhere (main_grad)
        if inputs is not None:
            leaves = _leaves_of(inputs)
        else:
            known = [t for t in (ref() for ref in self._known) if t is not None and t.grad is not None]
            leaves = known or _leaves_behind(outputs)
            self._known = [weakref.ref(leaf) for leaf in leaves]
        # Cleared gradients of an optimizer that has not stepped yet may be those of a trial run.
        self._without_optimizer = not self._belong_to(optimizers, leaves)
        self._leaves = [(weakref.ref(leaf), self._state(leaf)) for leaf in leaves]

    def _belong_to(self, optimizers: Iterable[Optimizer], leaves: list[Tensor]) -> bool:
        keys = {id(leaf) for leaf in leaves}
        if self._earlier is None and not any(_holds(optimizer, keys) for optimizer in optimizers):
            # type(), not isinstance, which would import lazy objects of other packages.
            objects = (o for o in gc.get_objects() if issubclass(type(o), Optimizer))
            self._earlier = weakref.WeakSet(o for o in objects if hasattr(o, "param_groups"))
        return any(_holds(optimizer, keys) for optimizer in (*optimizers, *(self._earlier or ())))

    def leaves(self) -> list[Tensor]:
        tensors = (leaf() for leaf, _ in self._leaves) if self._without_optimizer else ()
        return [tensor for tensor in tensors if tensor is not None]

    def has_update(self, inputs: Any = None, if_gone: bool = True) -> bool:
        """Return whether the parameters of the last backward have changed, or `inputs` replaces them.

        if_gone: the result if none of them exists any more.
        """
        alive = [(t, old) for t, old in ((leaf(), old) for leaf, old in self._leaves) if t is not None]
        if not alive:
            return bool(self._leaves) and if_gone
        if inputs is not None and self._without_optimizer:
            known = {id(tensor) for tensor, _ in alive}
            if any(id(leaf) not in known for leaf in _leaves_of(inputs)):
                return True
        return any(self._state(tensor) != old for tensor, old in alive)

    def _state(self, leaf: Tensor) -> tuple[Any, ...]:
        gradient = leaf.grad if self._without_optimizer else None
        return leaf._version, id(gradient), gradient._version if gradient is not None else 0


def _holds(optimizer: Optimizer, keys: set[int]) -> bool:
    return any(id(p) in keys for group in optimizer.param_groups for p in group["params"])


def _tensors(inputs: Any) -> list[Any]:
    values = inputs.values() if isinstance(inputs, dict) else inputs
    return [inputs] if isinstance(inputs, Tensor) else [v for v in values if isinstance(v, Tensor)]


def _leaves_of(inputs: Any) -> list[Tensor]:
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # type: ignore[attr-defined]
    return [tensor for tensor in _tensors(inputs) if tensor.is_leaf and not is_wrapped(tensor)]


def _leaves_behind(outputs: Any) -> list[Tensor]:
    """Return leaves that a backward from `outputs` reaches; those of the last layers suffice."""
    # Every visited node gets a Python object, and torch frees a long chain of these recursively.
    waiting = deque(tensor.grad_fn for tensor in _tensors(outputs))
    seen, leaves = set(waiting), []
    while waiting and len(seen) < _MAX_NODES:
        node = waiting.popleft()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            leaves.append(leaf)
        following = [f for f, _ in getattr(node, "next_functions", ()) if f is not None and f not in seen]
        seen.update(following)
        waiting.extend(following)
    return leaves
