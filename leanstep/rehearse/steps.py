"""The steps of a rehearsal: events of the tape between two updates of the model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from leanstep.rehearse.events import Step
from leanstep.script.steps import StepListener, StepMarker, wrap_closure


class StepsDone(BaseException):
    """All steps that were asked for have been seen: leave the program. No `except Exception` stops it."""


class Steps(StepListener):
    """Cuts the tape into steps, where `script.steps` finds their ends or the program's runner says so."""

    def __init__(self, tape: Any, wanted: int):
        self.tape, self.wanted = tape, wanted
        self.marker = StepMarker(self)
        self.by_hand = False  # marked by whoever runs the program
        self._part_end = 0  # events of the update's parts that have ended
        self._optimizers: dict[int, Any] = {}

    def watch(self) -> None:
        """From now on, until the process ends."""
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
            lines.called = lines.here()
            return run_backward(*args, **kwargs)

        torch.autograd._engine_run_backward = backward

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
            self.mark(groups, self._part_end)
        self._optimizers = {}

    def mark(self, groups: Any, end: int | None = None) -> None:
        """A step ends, at this number of events or here."""
        tape, steps = self.tape, self.tape.recording.steps
        tape.step_ends(p for group in groups for p in group["params"])
        first = steps[-1].last if steps else 0
        steps.append(Step(tape.step, first, len(tape.recording.events) if end is None else end))
        tape.recording.iterations = self.marker.iterations
        tape.step += 1
        if tape.step >= self.wanted:
            raise StepsDone
