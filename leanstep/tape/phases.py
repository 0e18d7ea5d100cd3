"""The phases of an iteration: rollout, scoring and update. docs/concepts.md has the definition.

`PhaseMarker` watches outermost calls of modules with parameters, sampling, and the ends of no-grad blocks. It
distinguishes phases by what the program does, not by names: whether gradients are enabled, whether a
call leads to a sampled token or action, and how the length of its input changes from call to call.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor

from leanstep.tape.hooks import frame_key, in_engine, replace_function, running_frames
from leanstep.tape.marks import OTHER, ROLLOUT, SCORING, UPDATE, Mark

# This many consecutive calls, each with one more position than the last or with one position, are generation.
MIN_STREAK = 4
# Classes whose `generate` is a rollout.
_GENERATORS = (("transformers.generation.utils", "GenerationMixin"), ("vllm", "LLM"))
_SAMPLED_DISTRIBUTIONS = ("Bernoulli", "Categorical", "MultivariateNormal", "Normal")


class ModelCall(NamedTuple):
    """A call of a module without gradients.

    length: positions of its token input, 0 if it has none. streak: how many calls of the module before it
    were part of the same generation, the first of which began at `first`. cache: its KV cache argument.
    """

    position: Any
    frame: tuple[int, int]
    length: int
    streak: int
    first: Any
    cache: weakref.ref[Any] | None


class PhaseListener:
    """Receives the reports of a `PhaseMarker`. Each method may be overridden."""

    def rollout_begins(self) -> None:
        """A rollout begins, or an earlier call turns out to be one."""

    def model_called(self, module: torch.nn.Module) -> None:
        """A module with parameters is called, from outside any module."""

    def call_begins(self, module: torch.nn.Module) -> None:
        """A module is called without gradients, and not from another module."""

    def run_call(self, call: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a call without gradients."""
        return call(module, *args, **kwargs)

    def run_generate(self, generate: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a call of transformers' `generate`."""
        return generate(*args, **kwargs)

    def block_ends(self) -> None:
        """A no_grad or inference_mode block has ended."""

    def positions_again(self, caller: FrameType, length: int) -> None:
        """A call recomputes the positions of the last call plus one: generation without a cache."""

    def context_lost(self, caller: FrameType) -> None:
        """A call gets one position and an empty cache that the previous call should have filled."""


class PhaseMarker:
    """Context manager: finds where the phases of a training begin.

    Args:
        position: the coordinate of a mark, such as `time.perf_counter` or a number of events.
        listener: receives rollouts and calls without gradients.
    """

    def __init__(self, position: Callable[[], Any], listener: PhaseListener | None = None) -> None:
        self._position, self._listener = position, listener or PhaseListener()
        self.marks: list[Mark] = []
        # Whether a token or an action was sampled without gradients since its owner cleared this.
        self.sampled = False
        # Calls of the current scoring phase, and the last call of each module since the last update.
        self._calls: list[ModelCall] = []
        self._last: dict[int, ModelCall] = {}
        self._rollout_frame: tuple[int, int] | None = None
        # The phase that continues when gradients are enabled again.
        self._interrupted = OTHER
        self._generating = False
        self._watched: set[str] = set()
        # Reentrant checkpoints that are running: their forward has no gradients but belongs to the update.
        self._checkpoints = 0
        self._undo: list[Callable[[], None]] = []

    @property
    def phase(self) -> str:
        return self.marks[-1].phase if self.marks else OTHER

    def __enter__(self) -> PhaseMarker:
        self._replace(torch.nn.Module, "__call__", self._module_call)
        self._replace(torch, "multinomial", self._sample)
        for name in _SAMPLED_DISTRIBUTIONS:
            self._replace(getattr(torch.distributions, name), "sample", self._sample)
        for block in (torch.no_grad, torch.inference_mode):
            self._replace(block, "__exit__", self._leave_block)
        self._replace(torch.utils.checkpoint.CheckpointFunction, "apply", self._checkpoint)
        self.watch_generate()
        return self

    def __exit__(self, *details: Any) -> None:
        while self._undo:
            self._undo.pop()()

    def _replace(self, place: Any, name: str, handler: Callable[..., Any]) -> None:
        self._undo.append(replace_function(place, name, handler))

    def watch_generate(self) -> None:
        """Hook `generate`, which may choose tokens greedily or in an engine."""
        for module, name in _GENERATORS:
            generator = vars(sys.modules[module]).get(name) if module in sys.modules else None
            if generator is not None and module not in self._watched:
                self._watched.add(module)
                in_engine = module == "vllm"
                self._replace(generator, "generate", self._engine if in_engine else self._generate)

    # What the program does

    def _checkpoint(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not in_engine():
            self.update_begins()
        self._checkpoints += 1
        try:
            return original(*args, **kwargs)
        finally:
            self._checkpoints -= 1

    def _module_call(self, original: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not in_engine() and next(module.parameters(), None) is not None:
            self._listener.model_called(module)
            if self._checkpoints:
                return original(module, *args, **kwargs)
            if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
                self.update_begins()
            else:
                # The caller is two frames up: the function that replaces Module.__call__ is between.
                self._call_without_gradients(module, (*args, *kwargs.values()), sys._getframe(2))
                return self._listener.run_call(original, module, args, kwargs)
        return original(module, *args, **kwargs)

    def _call_without_gradients(
        self, module: torch.nn.Module, inputs: Sequence[Any], caller: FrameType
    ) -> None:
        self._listener.call_begins(module)
        call = self._next_call(id(module), _token_length(inputs), _dynamic_cache(inputs), caller)
        if self._generating or (not call.length and call.frame == self._rollout_frame):
            self._begin(ROLLOUT, call.position)
            return
        if call.streak < MIN_STREAK:
            self._calls.append(call)
            self._begin(SCORING, call.position)
            if call.length:
                self._rollout_frame = None
        else:
            self._begin(SCORING, call.position)
            self._is_rollout_from(call.first if call.streak == MIN_STREAK else call.position, call.frame)

    def _next_call(self, module: int, length: int, cache: Any, caller: FrameType) -> ModelCall:
        before, position, frame = self._last.get(module), self._position(), frame_key(caller)
        streak, first = 0, position
        if before is not None and length:
            grows = length > 1 and length == before.length + 1
            if grows or (length == 1 and (before.length > 1 or before.streak)):
                streak, first = before.streak + 1, before.first
            if grows:
                self._listener.positions_again(caller, length)
        if before is not None and cache is not None and before.cache is not None and length == 1:
            if before.cache() is cache and not cache.get_seq_length():
                self._listener.context_lost(caller)
        reference = weakref.ref(cache) if cache is not None else None
        call = self._last[module] = ModelCall(position, frame, length, streak, first, reference)
        return call

    def _sample(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            self.sampled = True
            if self.phase == SCORING and self._calls:
                self._is_rollout_from(*self._sampled_call())
            # If the script samples tokens, a growing input proves nothing: the sequence may be scored.
            self._last = {key: call._replace(streak=0) for key, call in self._last.items()}
        return original(*args, **kwargs)

    def _sampled_call(self) -> tuple[Any, tuple[int, int] | None]:
        """Return where the model call began whose output is sampled now, and its frame if that still runs.

        A model that is run by another method (`model.inference(...)`, `model.forward(...)`) shows as calls of
        its layers from one frame, which has returned by now.
        """
        last = self._calls[-1]
        if last.frame in running_frames():
            return last.position, last.frame
        first = last
        for call in reversed(self._calls):
            if call.frame != last.frame:
                break
            first = call
        return first.position, None

    def _engine(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """A separate engine: the time of the call is known, what runs in it is not."""
        self.sampled = True
        self._begin(ROLLOUT, self._position())
        try:
            return original(*args, **kwargs)
        finally:
            self._resume()

    def _generate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.sampled = self._generating = True
        self._begin(ROLLOUT, self._position())
        try:
            return self._listener.run_generate(original, args, kwargs)
        finally:
            self._generating = False
            self._resume()

    def _leave_block(self, original: Any, block: Any, *details: Any) -> Any:
        result = original(block, *details)
        if self._checkpoints:
            return result
        self._listener.block_ends()
        if not self._generating:
            self._resume()
        return result

    def _resume(self) -> None:
        """End the phase without gradients when gradients are enabled again."""
        if torch.is_grad_enabled() and self.phase in (ROLLOUT, SCORING):
            self._begin(self._interrupted, self._position())

    # Marks

    def update_begins(self) -> None:
        """A forward pass with gradients, a backward or an optimizer runs."""
        self._forget_calls()
        self._begin(UPDATE, self._position())

    def update_ends(self) -> None:
        """An optimizer has finished its part of an update."""
        self._forget_calls()
        self._begin(OTHER, self._position())

    def _forget_calls(self) -> None:
        self._calls, self._last, self._rollout_frame = [], {}, None

    def _begin(self, phase: str, position: Any) -> None:
        before = self.phase
        if phase == before:
            return
        if before in (UPDATE, OTHER):
            self._interrupted = before
        self.marks.append(Mark(position, phase))
        if phase == ROLLOUT:
            self._listener.rollout_begins()

    def _is_rollout_from(self, position: Any, frame: tuple[int, int] | None) -> None:
        """The current phase is generation from `position` on."""
        self.sampled = True
        self._rollout_frame = frame
        self._calls = []
        while self.marks and self.marks[-1].phase == SCORING and self.marks[-1].position >= position:
            self.marks.pop()
        self._begin(ROLLOUT, position)


def _dynamic_cache(inputs: Sequence[Any]) -> Any:
    """Return the length of transformers' growing KV cache. Reading other caches' lengths needs a kernel."""
    return next((value for value in inputs if type(value).__name__ == "DynamicCache"), None)


def _token_length(inputs: Iterable[Any]) -> int:
    """Return the positions of the first integer tensor: token ids [..., T]."""
    for value in inputs:
        if isinstance(value, Tensor) and value.dim() and not value.is_floating_point():
            return int(value.shape[-1]) if value.dtype is not torch.bool else 0
    return 0
