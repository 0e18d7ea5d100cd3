"""The steps of a rehearsal: events of the tape between two updates of the model."""

from __future__ import annotations

import linecache
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic  # the program's own clock may show predicted time
from typing import Any

import torch

from leanstep.rehearse.answers.generation import Generations
from leanstep.rehearse.answers.repeated_calls import RepeatedCalls
from leanstep.rehearse.branches import NoUpdate
from leanstep.rehearse.events import Alloc, Step
from leanstep.script.hooks import wrap_closure
from leanstep.script.phases import PhaseListener, PhaseMarker
from leanstep.script.steps import StepListener, StepMarker

# Events of the tape without an update after which the program is left: a recording of more takes gigabytes.
MOST_EVENTS = 2_000_000
# Updates that may precede a capture: torch's documentation asks for 3, for 11 with DistributedDataParallel.
MOST_TRIALS = 12
# Two steps of one batch size allocate the same to this share.
SAME_BYTES = 0.2
_CAPTURES = re.compile(r"\bCUDAGraph\(|\bmake_graphed_callables\(|\bcuda\.graph\(")


class StepsDone(BaseException):
    """All steps that were asked for have been seen: leave the program. No `except Exception` stops it."""


class Steps(StepListener, PhaseListener):
    """Cuts the tape into steps, where `script.steps` finds their ends or the program's runner says so."""

    def __init__(self, tape: Any, wanted: int, patience_s: float, progress: Path | None = None):
        self.tape, self.wanted, self.patience_s, self.progress = tape, wanted, patience_s, progress
        self._last_update = (0, monotonic())
        self._num_counted = self._num_trials = 0
        self._reported = 0.0
        self.marker = StepMarker(self, PhaseMarker(self._position, self))
        self.calls, self.generations = RepeatedCalls(tape), Generations(tape)
        self.by_hand = False  # marked by whoever runs the program
        self._part_end = 0  # events of the update's parts that have ended
        self._optimizers: dict[int, Any] = {}

    def _position(self) -> int:
        return len(self.tape.recording.events)

    def run_call(self, call: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Calls that repeat are extrapolated, on the thread that the tape follows."""
        self._report()
        recording = self.tape.recording
        if recording.request.every_call or threading.get_ident() != self.tape.lines.main:
            return call(module, *args, **kwargs)
        return self.calls.run(call, module, args, kwargs)

    def run_generate(self, generate: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.tape.recording.request.every_call or threading.get_ident() != self.tape.lines.main:
            return generate(*args, **kwargs)
        self.calls.paused = True
        try:
            return self.generations.run(generate, args, kwargs)
        finally:
            self.calls.paused = False

    def rollout_begins(self) -> None:
        self._report()

    def backward_begins(self, outputs: Any) -> None:
        self._report()

    def _report(self) -> None:
        """What is running, for whoever waits; at most twice per second."""
        now = monotonic()
        if self.progress is None or now - self._reported < 0.5:
            return
        self._reported = now
        recorded, skipped = self._model_calls
        counted = f", {recorded + skipped:,} model calls ({skipped:,} extrapolated)" if recorded else ""
        self.progress.write_text(
            f"step {self.tape.step + 1} of {self.wanted}: {self.marker.phases.phase}{counted}"
        )

    def close(self) -> None:
        """The program is over: what the recording says about its phases."""
        recording = self.tape.recording
        recording.phases = self.marker.phases.marks
        recording.model_calls = self._model_calls

    @property
    def _model_calls(self) -> tuple[int, int]:
        """Calls without gradients that ran, and those that were extrapolated."""
        return self.calls.recorded, self.calls.skipped + self.generations.extrapolated

    def watch(self) -> None:
        """From now on, until the process ends."""
        self.tape.check_progress = self.check_progress
        self.tape.update_replayed = self.mark
        self.marker.__enter__()
        self._follow_backwards()

    def _follow_backwards(self) -> None:
        run_backward, lines = torch.autograd._engine_run_backward, self.tape.lines

        def backward(*args: Any, **kwargs: Any) -> Any:
            thread = threading.get_ident()
            if thread != lines.main:
                lines.nested[thread] += 1
                try:
                    return run_backward(*args, **kwargs)
                finally:
                    lines.nested[thread] -= 1
            self.tape.backward_begins()
            self.tape.shadows.branches.backward_began()
            lines.called = lines.here()
            return run_backward(*args, **kwargs)

        torch.autograd._engine_run_backward = backward

    def check_progress(self) -> None:
        """Leave a program that makes no update."""
        num_events, seconds = self._last_update
        waited = monotonic() - seconds
        if self.tape.num_events - num_events < MOST_EVENTS and waited < self.patience_s:
            return
        responsible = self.tape.shadows.branches.responsible() or "--patience SECONDS waits longer"
        calls = f"{self.tape.num_events - num_events:,} calls and allocations"
        raise NoUpdate(self.tape.lines.here(), f"no update in {calls} ({waited:.0f} s): {responsible}")

    def optimizer_begins(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self.tape.lines.phase = "optimizer"
        return wrap_closure(args, kwargs, self._outside_optimizer)

    def _outside_optimizer(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure runs the model: LBFGS, Lightning."""

        def run() -> Any:
            self.tape.lines.phase = "forward"
            try:
                return closure()
            finally:
                self.tape.lines.phase = "optimizer"

        return run

    def optimizer_ends(self, optimizer: Any) -> None:
        self.tape.lines.phase = "forward"
        state = [v for s in optimizer.state.values() if isinstance(s, dict) for v in s.values()]
        self.tape.classify(iter(state), "optimizer state")
        self._optimizers[id(optimizer)] = optimizer

    def part_ends(self, optimizer: Any) -> None:
        self._part_end = len(self.tape.recording.events)

    def step_ends(self, late: bool) -> None:
        if not self.by_hand:
            groups = [group for optimizer in self._optimizers.values() for group in optimizer.param_groups]
            if self.tape.capture is not None:  # it happens when the graph is replayed
                self.tape.capture.updates.append(groups)
            else:
                self.mark(groups, self._part_end)
        self._optimizers = {}

    def mark(self, groups: Any, end: int | None = None) -> None:
        """A step ends, at this number of events or here."""
        tape, steps = self.tape, self.tape.recording.steps
        tape.shadows.branches.updated()
        self._last_update = (tape.num_events, monotonic())
        tape.step_ends(p for group in groups for p in group["params"])
        first = steps[-1].last if steps else 0
        steps.append(Step(tape.step, first, len(tape.recording.events) if end is None else end))
        tape.recording.iterations = self.marker.iterations
        tape.step += 1
        self._num_trials += (is_trial := self._is_trial())
        if not is_trial:
            self._num_counted += 1
        if self._num_counted >= self.wanted:
            raise StepsDone

    def _is_trial(self) -> bool:
        """Whether an update does not count towards the steps that were asked for.

        One that warms up for a capture, or looks for a batch that fits.
        """
        if self.by_hand or self._num_trials >= MOST_TRIALS:
            return False
        if not self.tape.num_captures and (self.tape.stream or _names_graphs()):
            return True
        return self._allocates_otherwise() and self.tape.memory.error_is_caught()

    def _allocates_otherwise(self) -> bool:
        """Whether the last step allocated another amount than the one before it."""
        recording = self.tape.recording
        last, before = (
            sum(e.nbytes for e in recording.events[step.first : step.last] if isinstance(e, Alloc))
            for step in (recording.steps[-1], recording.steps[max(0, len(recording.steps) - 2)])
        )
        return len(recording.steps) == 1 or abs(last - before) > SAME_BYTES * before


def _names_graphs() -> bool:
    """Whether the program's own file captures CUDA graphs."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return file is not None and _CAPTURES.search("".join(linecache.getlines(file))) is not None
