"""Record the steps of a script as a tape (for tests of rules)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from leanstep.tape.events import StepSpan, Tape
from leanstep.tape.modes import SavedHooks, leave_mode, reach_modes_again
from leanstep.tape.phases import PhaseListener, PhaseMarker
from leanstep.tape.recorder import Recorder
from leanstep.tape.run import Program, Stop, as_main
from leanstep.tape.steps import StepListener, StepMarker


class _Run(StepListener, PhaseListener):
    def __init__(self, steps: int, warmup: int) -> None:
        self.num_steps, self.num_warmup = steps, warmup
        self.recorder = Recorder()
        self.recorder.marks_graphs = True
        self.marker = StepMarker(self, PhaseMarker(lambda: self.recorder.tape.count, self))
        self.first = self.last = self.done = self.iterations = 0

    def optimizer_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.recorder.optimizer_begins(optimizer)

    def optimizer_ends(self, optimizer: Any) -> None:
        self.recorder.optimizer_ends(optimizer)

    def part_ends(self, optimizer: Any) -> None:
        self.last = self.recorder.tape.count

    def step_ends(self, late: bool) -> None:
        self.recorder.end_step()
        self.done += 1
        if self.done > self.num_warmup:
            has_rollout = self.marker.iterations > self.iterations
            self.recorder.tape.steps.append(StepSpan(self.first, self.last, has_rollout))
        self.iterations = self.marker.iterations
        self.first = self.last
        if len(self.recorder.tape.steps) >= self.num_steps:
            raise Stop

    def model_called(self, module: torch.nn.Module) -> None:
        self.recorder.on_model(module)

    def block_ends(self) -> None:
        reach_modes_again()

    def positions_again(self, caller: FrameType, length: int) -> None:
        self.recorder.on_generation("again", caller, length)

    def context_lost(self, caller: FrameType) -> None:
        self.recorder.on_generation("no context", caller, 0)


def record(script: str, arguments: Sequence[str] = (), steps: int = 3, warmup: int = 1) -> Tape:
    """Run a script until `steps` steps after `warmup` others are recorded; without an update: the whole run."""
    run, hooks = _Run(steps, warmup), SavedHooks()
    recorder, program = run.recorder, Program.find(script)
    with contextlib.ExitStack() as stack:
        stack.enter_context(as_main(program, arguments))
        stack.enter_context(hooks.stepping_aside())
        stack.enter_context(run.marker)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        hooks.enter(recorder.saved_hooks)
        recorder.op_mode.__enter__()
        recorder.call_mode.__enter__()
        recorder.start()
        try:
            with contextlib.suppress(Stop):
                program.run()
                recorder.active = False
                run.marker.finish()
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        except Stop:
            pass
        finally:
            recorder.active = False
            leave_mode(recorder.call_mode)
            leave_mode(recorder.op_mode)
            hooks.leave()
    if not recorder.tape.steps:
        last = run.last if run.done else recorder.tape.count
        recorder.tape.steps.append(StepSpan(0, last))
    recorder.stop()
    return recorder.tape
