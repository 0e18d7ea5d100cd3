"""`watch()`: enter the recording modes while a training runs, and leave them again.

`tape.steps` finds the steps. What runs between two updates (averages, logging, the preparation of a batch)
is part of the step that follows.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch

from leanstep.diagnose import compiled, cost, iteration_times, unseen
from leanstep.diagnose.compiled_code import CompiledCode
from leanstep.diagnose.find import find, judge
from leanstep.diagnose.findings import Findings
from leanstep.diagnose.iteration_times import IterationClock, PhaseTotal, Position, RecordedStep, Stretch
from leanstep.diagnose.rules import GROWTH_STEPS, Limits
from leanstep.diagnose.step import Step
from leanstep.diagnose.step_clock import StepClock, own_seconds, waited_seconds
from leanstep.tape.events import OP, UPDATE, StepSpan, Tape
from leanstep.tape.hooks import in_engine, replace_function
from leanstep.tape.lines import Site
from leanstep.tape.marks import ROLLOUT
from leanstep.tape.modes import SavedHooks, as_it_is, hide_from_compiler, leave_mode, reach_modes_again
from leanstep.tape.phases import PhaseListener, PhaseMarker
from leanstep.tape.recorder import Recorder
from leanstep.tape.steps import StepListener, StepMarker

# A step that takes longer than this is not repeated just to be timed.
MAX_TIMED_S = 10.0
# Steps whose events are kept; of earlier ones only the hits and totals are.
FULL_STEPS = 8
# Updates that may pass until the next rollout: an iteration with a rollout may take longer than a step.
MAX_ITERATION_S, MAX_WAITING_STEPS = 60.0, 32
# Model calls, and seconds, after which an unrecorded warm-up without an update is recorded: it may never end.
PATIENT_CALLS, PATIENT_S = 64, 60.0
_current: Watch | None = None


def step() -> None:
    """Mark the end of a step from inside a script; does nothing without an active watch."""
    if _current is not None:
        _current.step()


class Watch(StepListener, PhaseListener):
    """Records training steps. Use it through `watch()`.

    Args:
        steps: how many steps to record; afterwards the training runs at full speed.
        warmup: how many steps to drop first.
        limits: thresholds of the rules.
        timed_warmup: run the warm-up unrecorded and time its last step (the command line does).
        on_done: called once when the last step has been recorded.
        timed: time one more step, or an iteration, after the recorded ones.
    """

    def __init__(
        self,
        steps: int = 3,
        warmup: int = 1,
        limits: Limits | None = None,
        *,
        timed_warmup: bool = False,
        on_done: Callable[[], None] | None = None,
        timed: bool = True,
    ) -> None:
        if steps < 1:
            raise ValueError(f"steps: expected at least 1, got {steps}")
        if warmup < 0:
            raise ValueError(f"warmup: expected at least 0, got {warmup}")
        self.num_steps, self.num_warmup = steps, warmup
        self.limits = limits or Limits()
        self.recorder = Recorder()
        self.recorder.marks_graphs = self._grows = steps >= GROWTH_STEPS
        self.steps: list[Step] = []
        self.boundary = "none"
        self._measured_seconds: float | None = None
        self.warmup_done = 0
        self.finished = False
        # Whether the model ran with gradients: what ends the script then is an error of a step.
        self.began = False
        self.exception: BaseException | None = None
        self._entered = self.ran_seconds = 0.0
        self._timed_warmup, self._times_afterwards = timed_warmup and warmup > 0, timed
        self._on_done = on_done
        self._stack = ExitStack()
        self._modes_on = False
        self._hooks = SavedHooks()
        self._compiler = CompiledCode()
        self.compiled = compiled.CompiledReport()
        self.clock = StepClock()
        self.iteration_clock = IterationClock()
        self.marker = StepMarker(self, PhaseMarker(self._position, self))
        # Where steps were recorded, and where the current step began.
        self._recorded: list[RecordedStep] = []
        self._step_began = Position(0.0)
        self._timed: Stretch | None = None
        self.has_loader = False
        # Where the current step begins on the tape, where its last part ended, and when.
        self._first = 0
        self._part_end: int | None = None
        self._part_ended = 0.0
        self._dropped: StepSpan | None = None
        # The recording began inside the current step: it is incomplete.
        self._incomplete = False
        self._iterations: set[int] = set()
        self._last_iteration = 0
        self._scanned = False
        self._cpu_seconds: float | None = None
        self._started = self._last_end = 0.0
        self._closed_at = 0.0
        # The shortest recorded step: a step without the recorder takes no longer.
        self._longest_possible: float | None = None
        self._light = self._clock_waits = False
        self._light_calls, self._light_since = 0, 0.0
        self._calibration: cost.Calibration | None = None
        self._threads: set[str] = set()
        self._jit_entries = 0
        self._findings: Findings | None = None

    # Entering and leaving

    def __enter__(self) -> Watch:
        global _current
        if _current is not None:
            raise RuntimeError("watch(): another watch is already active; recordings cannot be nested")
        self._calibration = cost.calibrate()
        cost.warm_up_torch()
        self._threads = {thread.name for thread in threading.enumerate()}
        self._jit_entries = unseen.triton_entries()
        self._stack.enter_context(self._hooks.stepping_aside())
        self._stack.enter_context(unseen.watch_graphs(self._on_graph_replay))
        self._stack.enter_context(unseen.sync_debug(self.recorder))
        self._stack.enter_context(self._compiler.reading())
        self._stack.enter_context(self.marker)
        self._stack.callback(replace_function(torch.utils.data.DataLoader, "__iter__", self._load))
        _current = self
        self._entered = time.monotonic()
        self._enter_modes()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        global _current
        self.recorder.active = False
        self.ran_seconds = time.monotonic() - self._entered
        self.exception = error
        try:
            self._leave_modes()
            self.clock.stop()
            self._hooks.leave()
        finally:
            self._stack.close()
            _current = None
        self._finish(completed=error is None)

    def _enter_modes(self) -> None:
        if self._modes_on or self.finished:
            return
        self._compiler.enter()
        self._hooks.enter(self.recorder.saved_hooks)
        self.recorder.op_mode.__enter__()
        self.recorder.call_mode.__enter__()
        self._modes_on = True
        self.recorder.start()
        self._step_began = self._position()

    def _leave_modes(self) -> None:
        """Leave all three modes. User code that is still inside a mode of its own keeps that mode."""
        if not self._modes_on:
            return
        self._modes_on = False
        self.recorder.active = False
        leave_mode(self.recorder.call_mode)
        leave_mode(self.recorder.op_mode)
        self._hooks.leave()
        self._compiler.leave()

    # Steps

    def step(self) -> None:
        """Mark the end of a step. After the first call, steps end only here."""
        if self.boundary != "explicit" and not self.finished:
            # What optimizer steps have separated so far is one step.
            self.boundary = "explicit"
            if self.steps:
                self._first = self.steps[0].span.first
                self.steps, self.tape.steps, self._recorded = [], [], []
            self.warmup_done = self.warmup_done if self._light else 0
        self._close_part()
        self._end_step(own_seconds(), late=False)

    def optimizer_constructed(self) -> None:
        """Let the warm-up run unrecorded, now that steps are known to end. Before, everything is recorded."""
        is_undecided = self._modes_on and not self._light and self.boundary == "none"
        if self._timed_warmup and is_undecided and not in_engine():
            self._start_light()

    def optimizer_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.recorder.optimizer_begins(optimizer)
        if self.clock.running:
            self.clock.optimizer_begins()

    def optimizer_ends(self, optimizer: torch.optim.Optimizer) -> None:
        if self.clock.running:
            self.clock.optimizer_ends()
        self.recorder.optimizer_ends(optimizer)
        if self._modes_on and not self._scanned:
            self._scan_objects()

    def part_ends(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._part_ended = own_seconds()
        if self.boundary != "explicit":
            self.boundary = "optimizer"
            self._close_part()

    def step_ends(self, late: bool) -> None:
        if self.boundary != "explicit":
            self._end_step(self._part_ended, late)

    def _close_part(self) -> None:
        if not self._light and not self.finished:
            self._part_end = self.tape.count

    def _end_step(self, now: float, late: bool) -> None:
        if self._light:
            self._light_step(now, late)
        elif self.finished:
            self._end_later_step(now)
        elif self._part_end is not None:
            self._close_step(self._part_end, late)

    def _close_step(self, end: int, late: bool) -> None:
        """Record the end of one step."""
        now = own_seconds()
        if self._closed_at and self._modes_on and now > self._closed_at:
            self._longest_possible = min(self._longest_possible or now, now - self._closed_at)
        cpu_seconds = None if self._cpu_seconds is None else time.thread_time() - self._cpu_seconds
        began, self._step_began = self._step_began, self._position(end)
        has_rollout = self.marker.iterations > self._last_iteration
        self._last_iteration = self.marker.iterations
        self.recorder.end_step()
        self._note_others()
        span = StepSpan(self._first, end, has_rollout, cpu_seconds, self._update_site(end))
        self._first, self._part_end = end, None
        if self._incomplete:
            self._incomplete = False
            self.warmup_done += 1
        elif self.warmup_done < self.num_warmup:
            self.warmup_done += 1
            if self._dropped is not None:
                self.tape.drop_before(self._dropped.first)
            self._dropped = span
        else:
            self._add_step(span)
            self._recorded.append(RecordedStep(began, self._step_began, has_rollout))
            self._iterations.add(self.marker.iterations)
        # What has been done here is no part of the next step.
        self._closed_at, self._cpu_seconds = own_seconds(), time.thread_time()
        if len(self.steps) >= self.num_steps:
            self._done(late)

    def _add_step(self, span: StepSpan) -> None:
        """Keep a step; of the steps before the last few only the hits and totals stay."""
        self.tape.steps.append(span)
        self.steps.append(Step(self.tape, span))
        number = len(self.steps) - FULL_STEPS
        if number > 0:
            self._forget(number - 1)
            self.tape.drop_before(self.steps[number].span.first)

    def _forget(self, number: int) -> None:
        step, recorded = self.steps[number], self._recorded[number]
        recorded.amounts = iteration_times.amounts(self.marker.phases.marks, recorded, step)
        # The lines of the first steps are compared with those of the last ones.
        step.forget(judge(step, self.limits), keep_work=number < FULL_STEPS)

    def _update_site(self, end: int) -> Site | None:
        """Return the line of the last update before `end`."""
        for row in reversed(self.tape.events[: end - self.tape.dropped]):
            if row[0] == UPDATE:
                return self.tape.sites[row[2]]
        return None

    def _done(self, late: bool) -> None:
        self.finished = True
        self._leave_modes()
        self._stop_recorder()
        self._last_end = own_seconds()
        if self._stackless:
            return  # The script has ended: there is nothing to time or stop.
        longest = MAX_ITERATION_S if self._makes_rollouts else MAX_TIMED_S
        if self._times_afterwards and (self.step_seconds or 0.0) <= longest:
            # Only a complete step is worth timing.
            self._clock_waits = late
            if not late:
                self._start_clock()
        elif self._on_done is not None:
            self._on_done()

    def _stop_recorder(self) -> None:
        if self._grows:
            # Reference cycles live until the garbage collector runs.
            gc.collect()
        self.recorder.stop()

    def _start_clock(self) -> None:
        self._timed = Stretch(self._position(), self._position(), 1)
        if self._makes_rollouts:
            self.iteration_clock.start(self._timed.start)
            return
        self.clock.start()
        self._hooks.enter(torch.autograd.graph.saved_tensors_hooks(self.clock.first_op, as_it_is))

    # The unrecorded warm-up and its time

    def _start_light(self) -> None:
        self._leave_modes()
        self._first = self.tape.count
        self._light, self._light_since = True, own_seconds()
        self._hooks.enter(torch.autograd.graph.saved_tensors_hooks(self._note_start, as_it_is))

    def _note_start(self, tensor: Any) -> Any:
        if not self._started:
            self._started = own_seconds()
        return tensor

    def _light_step(self, now: float, late: bool) -> None:
        start = self._last_end or self._started
        if start:
            self._measured_seconds = now - start
        self._last_end = now
        self._compiler.step_ended()
        self.warmup_done += 1
        self._last_iteration = self.marker.iterations
        # A long recording reaches the next rollout anyway.
        waits = self._makes_rollouts and self.num_steps < MAX_WAITING_STEPS
        waits = waits and self.warmup_done < self.num_warmup + MAX_WAITING_STEPS
        if self.warmup_done >= self.num_warmup and not waits:
            self._leave_light(late)

    def _leave_light(self, late: bool) -> None:
        self._light = False
        self._incomplete = late
        self._hooks.leave()
        self._enter_modes()

    # Rollouts

    @property
    def tape(self) -> Tape:
        return self.recorder.tape

    def _position(self, event: int | None = None) -> Position:
        place = self.tape.count if event is None else event
        return Position(own_seconds(), place, waited_seconds())

    @property
    def _makes_rollouts(self) -> bool:
        return self.marker.iterations > 0 and self.boundary != "explicit"

    def call_begins(self, module: torch.nn.Module) -> None:
        """Start recording at the first call after an update, which begins the next iteration."""
        if self._light:
            if self._makes_rollouts and self.warmup_done >= self.num_warmup:
                self._leave_light(late=False)
            else:
                self._note_start(None)

    def model_called(self, module: torch.nn.Module) -> None:
        self.began |= torch.is_grad_enabled()
        if self._light and not self.warmup_done:
            self._light_calls += 1
            if self._light_calls > PATIENT_CALLS or own_seconds() - self._light_since > PATIENT_S:
                self._leave_light(late=True)
        if self._modes_on:
            self.recorder.on_model(module)

    def rollout_begins(self) -> None:
        if self._light and self._makes_rollouts and self.warmup_done >= self.num_warmup:
            self._leave_light(late=False)
        elif self.iteration_clock.rollout_begins():
            self._end_iteration()

    def block_ends(self) -> None:
        if self._modes_on:
            reach_modes_again()

    def positions_again(self, caller: FrameType, length: int) -> None:
        if self._modes_on:
            self.recorder.on_generation("again", caller, length)

    def context_lost(self, caller: FrameType) -> None:
        if self._modes_on:
            self.recorder.on_generation("no context", caller, 0)

    def _end_iteration(self) -> None:
        """End the timing of the current iteration."""
        iteration = self.iteration_clock.iteration
        self.iteration_clock.running = False
        if iteration is not None:
            self._timed = iteration
            self._measured_seconds = (iteration.end.time - iteration.start.time) / iteration.steps
        if self._on_done is not None and not self._stackless:
            self._on_done()

    def _load(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.has_loader = True
        return original(*args, **kwargs)

    def _end_later_step(self, now: float) -> None:
        """Handle a step after the recorded ones: the time of the first one is the step time."""
        self._compiler.step_ended()
        if self._clock_waits:
            self._clock_waits = False
            self._start_clock()
        elif self.iteration_clock.running:
            self.iteration_clock.step_ends(self._position())
            stretch = self.iteration_clock.stretch
            if stretch is not None and stretch.end.time - stretch.start.time > MAX_ITERATION_S:
                self._end_iteration()
        elif self.clock.running:
            self.clock.end()
            if self._timed is not None:
                self._timed.end = self._position()
            self._hooks.leave()
            self._last_end, self._measured_seconds, self._longest_possible = now, self.clock.seconds, None
            if self._on_done is not None:
                self._on_done()
        elif self._last_end:
            elapsed = now - self._last_end
            self._measured_seconds = min(self._measured_seconds or elapsed, elapsed)
            self._last_end = now

    def _scan_objects(self) -> None:
        """Find optimizers, including those that step only occasionally, and loaders with workers."""
        self._scanned = True
        optimizers, has_workers = unseen.scan_objects()
        for optimizer in optimizers:
            self.recorder.note_held(optimizer)
        if has_workers:
            self.tape.note("worker", "", "a DataLoader runs workers: their work is not recorded")

    # Work that a recording cannot see

    def _on_graph_replay(self, where: str) -> None:
        self.tape.note("cuda-graph", where, "a CUDA graph was replayed: its kernels have no Python lines")

    def _note_others(self) -> None:
        for note in unseen.others_at_work(self._threads):
            self.tape.note(*note)
        loading = "torch.utils.data.dataloader" in sys.modules and multiprocessing.active_children()
        if loading and not self._scanned:
            self._scan_objects()

    # Results

    def _finish(self, completed: bool) -> None:
        self.began |= bool(self._started or self.recorder.model_seen)
        if self.iteration_clock.running:
            self._end_iteration()
        if not self.finished:
            self.marker.finish()
            self._stop_recorder()
            if self.boundary == "none" and completed and not self._light:
                self.num_warmup = self.warmup_done = 0
                self._add_step(StepSpan(self._first, self.tape.count))
        if not self.steps and not self._light:
            # Too short for a warm-up, or stopped before the first complete step: use the partial step.
            partial = self._dropped
            interrupted = isinstance(self.exception, KeyboardInterrupt)
            if partial is None and not completed and self._has_ops and (self.began or interrupted):
                partial = StepSpan(self._first, self.tape.count)
                text = "the run stopped inside its first recorded step: findings cover that part only"
                self.tape.note("dropped", "", text)
            if partial is not None:
                self.num_warmup = self.warmup_done = 0
                self._add_step(partial)
        if unseen.triton_entries() > self._jit_entries:
            self.tape.note("triton", "", "Triton kernels were launched directly: they are not recorded")
        self._note_unread_graphs()
        for error in self.recorder.errors:
            self.tape.note("dropped", "", f"the recorder could not read some ops ({error})")
        cost.measure_half_rates([step for step in self.steps if step.hits is None])

    @property
    def _has_ops(self) -> bool:
        return any(event.kind == OP for event in self.tape.between(self._first, self.tape.count))

    def _note_unread_graphs(self) -> None:
        """Mark compiled lines for which no graph was read: they ran eagerly, and nothing else is known."""
        read = {file for graph in self._compiler.graphs for file in graph.files}
        for line in {line for step in self.steps for line in step.compiled if line.file not in read}:
            self.tape.note("compiled", line.place, "a compiled region ran eagerly; no graph of it was seen")

    def findings(self) -> Findings:
        """Return the findings so far, most expensive first; the list prints one line each."""
        if self._findings is not None and self._stackless:
            return self._findings
        findings = find(self.steps, self.limits)
        findings, self.compiled = compiled.after_compiler(findings, self._compiler, self.limits)
        calibration = self._calibration or cost.calibrate()
        rollout = next((p.seconds for p in self.phases if p.phase == ROLLOUT), None)
        self._findings = Findings(
            cost.price(
                findings,
                self.steps,
                self.step_seconds,
                calibration,
                self.iteration_seconds,
                rollout_seconds=rollout,
            )
        )
        return self._findings

    @property
    def step_seconds(self) -> float | None:
        """Seconds of an unrecorded step; None when none was timed, or nothing is left without the waits.

        The first step of a run includes one-time work (threads, allocations, lazy imports). If it takes
        longer than a recorded step, the recorded time is the better bound; `step_is_bound` is then True.
        """
        seconds = self._measured_seconds
        if seconds is not None and self._longest_possible is not None and not self._makes_rollouts:
            seconds = min(seconds, self._longest_possible)
        return seconds if seconds is not None and seconds > 0 else None

    @property
    def step_is_bound(self) -> bool:
        return self.step_seconds is not None and self.step_seconds != self._measured_seconds

    @property
    def waited_seconds(self) -> float:
        """Seconds that the timed step or iteration waited because other processes occupied the cores."""
        return self._timed.end.waited - self._timed.start.waited if self._timed is not None else 0.0

    @property
    def iterations(self) -> int | None:
        """The number of rollouts that the recorded steps belong to; None if there were none."""
        return len(self._iterations) if self.marker.iterations else None

    @property
    def iteration_seconds(self) -> float | None:
        """Seconds of an unrecorded iteration, a rollout and its updates; None if none was timed."""
        iteration = self.iteration_clock.iteration
        seconds = iteration.end.time - iteration.start.time if iteration is not None else 0.0
        return seconds if seconds > 0 else None

    @property
    def phases(self) -> list[PhaseTotal]:
        """Rollout, scoring, update and the rest; empty for a script without rollouts."""
        timed = self.iteration_clock.iteration if self._makes_rollouts else self._timed
        whole = timed if timed is not None and timed.end > timed.start else None
        marks = self.marker.phases.marks
        for recorded, step in zip(self._recorded, self.steps, strict=False):
            if step.hits is None:
                recorded.amounts = iteration_times.amounts(marks, recorded, step)
        return iteration_times.totals(marks, whole, self._recorded, self._makes_rollouts)

    @property
    def accelerator(self) -> bool:
        """Whether the model is not on the CPU."""
        return any(step.run.accelerator for step in self.steps[-1:])

    @property
    def _stackless(self) -> bool:
        return _current is not self

    @property
    def not_seen(self) -> list[dict[str, str]]:
        """Parts of the step that a recording cannot see."""
        return [{"kind": k, "where": w, "note": text} for (k, w), text in sorted(self.tape.notes.items())]


def watch(steps: int = 3, warmup: int = 1, limits: Limits | None = None) -> Watch:
    """Record training steps of a running program.

        with diagnose.watch() as watch:
            for batch in loader:
                train_step(batch)
                watch.step()
        print(watch.findings())

    Without `watch.step()` a step ends where the next one begins after `optimizer.step()`. Recording
    changes no number.
    """
    return Watch(steps, warmup, limits)


# They run below compiled regions as well.
hide_from_compiler(Watch._note_start, StepClock.first_op)
