"""The steps of a rehearsal: the events of the tape between two model updates."""

from __future__ import annotations

import linecache
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic, process_time  # the program's own clock may return predicted time
from typing import Any

import torch

from leanstep.rehearse.answers.repeats import Repeats
from leanstep.rehearse.branches import NoUpdate
from leanstep.rehearse.events import Alloc, Launch, Step
from leanstep.tape.hooks import replace_function, wrap_closure
from leanstep.tape.phases import PhaseListener, PhaseMarker
from leanstep.tape.steps import StepListener, StepMarker

# The rehearsal stops after this many events without an update: a longer recording takes gigabytes.
MOST_EVENTS = 2_000_000
# ... and after this many seconds of this process's own work without one, however busy the machine is.
PATIENCE_S = 600.0
# Updates that may precede a capture: torch's documentation requires 3, or 11 with DistributedDataParallel.
MOST_TRIALS = 12
# Two steps with the same batch size allocate the same amount, up to this relative difference.
SAME_BYTES = 0.2
_CAPTURES = re.compile(r"\bCUDAGraph\(|\bmake_graphed_callables\(|\bcuda\.graph\(")


class StepsDone(BaseException):
    """All requested steps are recorded: stop the program. No `except Exception` catches it."""


class Steps(StepListener, PhaseListener):
    """Splits the tape into steps; `tape.steps` finds their ends."""

    def __init__(self, tape: Any, wanted: int, progress: Path | None = None):
        self.tape, self.wanted, self.progress = tape, wanted, progress
        self._last_update = (0, process_time())
        self._num_counted = self._num_trials = 0
        self._reported = 0.0
        self.marker = StepMarker(self, PhaseMarker(self._position, self))
        self.repeats = Repeats(tape)
        self._part_end = 0  # event index at which the last part of the update ended
        self._optimizers: dict[int, Any] = {}

    def _position(self) -> int:
        return len(self.tape.recording.events)

    def _may_repeat(self) -> bool:
        """Whether this thread's calls may be repeated."""
        return not self.tape.recording.request.every_call and threading.get_ident() == self.tape.lines.main

    def run_call(self, call: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        self._report()
        if not self._may_repeat():
            return call(module, *args, **kwargs)
        return self.repeats.call(call, module, args, kwargs)

    def run_generate(self, generate: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not self._may_repeat():
            return generate(*args, **kwargs)
        return self.repeats.generate(generate, args, kwargs)

    def rollout_begins(self) -> None:
        self._report()

    def backward_begins(self, outputs: Any) -> None:
        self._report()

    def _report(self) -> None:
        """Write the progress for the waiting process, at most twice per second."""
        now = monotonic()
        if self.progress is None or now - self._reported < 0.5:
            return
        self._reported = now
        recorded, skipped = self.repeats.recorded, self.repeats.extrapolated
        counted = f", {recorded + skipped:,} model calls ({skipped:,} extrapolated)" if recorded else ""
        self.progress.write_text(
            f"step {self.tape.step + 1} of {self.wanted}: {self.marker.phases.phase}{counted}"
        )

    def close(self) -> None:
        """Store the phases in the recording after the program ended."""
        recording = self.tape.recording
        recording.phases = self.marker.phases.marks
        recording.model_calls = self.repeats.recorded, self.repeats.extrapolated

    def watch(self) -> None:
        """Start watching; it lasts until the process ends."""
        self.tape.check_progress = self.check_progress
        self.tape.update_replayed = self.mark
        replace_function(torch.nn.Module, "__call__", self._call_module)
        self.marker.__enter__()
        self._follow_backwards()

    def _call_module(self, original: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run an outermost call of a module; the marker handles it first."""
        if not self._may_repeat():
            return original(module, *args, **kwargs)
        return self.repeats.call_in_update(original, module, args, kwargs)

    def optimizer_constructed(self) -> None:
        self.repeats.repeats_updates = True

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
            # The fifth argument lists the inputs of `backward(inputs=...)`.
            accumulates = bool(kwargs.get("accumulate_grad")) and not (args[4:5] and args[4])
            try:
                return run_backward(*args, **kwargs)
            finally:
                self.repeats.backward_ended(accumulates)

        torch.autograd._engine_run_backward = backward

    def check_progress(self) -> None:
        """Stop a program that makes no update."""
        num_events, seconds = self._last_update
        waited = process_time() - seconds
        if self.tape.num_events - num_events < MOST_EVENTS and waited < PATIENCE_S:
            return
        responsible = self.tape.shadows.branches.responsible()
        calls = f"{self.tape.num_events - num_events:,} calls and allocations"
        reason = f": {responsible}" if responsible else ""
        raise NoUpdate(self.tape.lines.here(), f"no update in {calls} ({waited:.0f} s){reason}")

    def optimizer_begins(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self.tape.lines.phase = "optimizer"
        return wrap_closure(args, kwargs, self._outside_optimizer)

    def _outside_optimizer(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap a closure, which runs the model (LBFGS, Lightning)."""

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
        groups = [group for optimizer in self._optimizers.values() for group in optimizer.param_groups]
        if self.tape.capture is not None:  # the update happens when the graph is replayed
            self.tape.capture.updates.append(groups)
        else:
            self.mark(groups, self._part_end)
        self._optimizers = {}

    def mark(self, groups: Any, end: int | None = None) -> None:
        """End a step at this event index, or here."""
        tape, steps = self.tape, self.tape.recording.steps
        tape.shadows.branches.updated()
        self._last_update = (tape.num_events, process_time())
        tape.step_ends(p for group in groups for p in group["params"])
        first = steps[-1].last if steps else 0
        steps.append(Step(tape.step, first, len(tape.recording.events) if end is None else end))
        tape.recording.iterations = self.marker.iterations
        tape.step += 1
        self._num_trials += (is_trial := self._is_trial())
        if not is_trial:
            self._num_counted += 1
        # A first step without a launch: the program does not use the device, and further steps would not.
        if self._num_counted >= self.wanted or not any(isinstance(e, Launch) for e in tape.recording.events):
            raise StepsDone

    def _is_trial(self) -> bool:
        """Whether an update does not count towards the requested steps.

        Such an update warms up for a capture, or searches for a batch that fits.
        """
        if self._num_trials >= MOST_TRIALS:
            return False
        if not self.tape.num_captures and (self.tape.stream or _names_graphs()):
            return True
        return self._allocates_otherwise() and self.tape.memory.error_is_caught()

    def _allocates_otherwise(self) -> bool:
        """Whether the last step allocated a different amount than the previous one."""
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
