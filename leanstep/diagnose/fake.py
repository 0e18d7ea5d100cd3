"""The fake gate: run the first step without data and stop where the host wants to look at a value."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.optim.optimizer import register_optimizer_step_post_hook

from leanstep.diagnose.script import Outcome, Stop, run_script
from leanstep.diagnose.source import IN_OPTIM, LIBRARY, USER, Line, judge_code


@dataclass
class FakeVerdict:
    """The first read: its line and the op that asked; `line` is None when the first step ran through."""

    line: Line | None = None
    op: str = ""
    steps: int = 0
    in_optimizer: bool = False


class _FakeRun:
    """Fake CPU tensors around the script.
    Fake CUDA tensors would abort the process on a CPU build of torch.
    """

    def __init__(self) -> None:
        self.verdict = FakeVerdict()
        self._stack = ExitStack()

    def __enter__(self) -> _FakeRun:
        self._stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
        self._stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        return self

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.verdict.steps += 1
        raise Stop

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()
        wanted = _wants_a_value(error)
        if wanted is None:
            return
        for frame, number in reversed(list(traceback.walk_tb(trace))):
            code = frame.f_code
            verdict = judge_code(code.co_filename, code.co_name)
            self.verdict.in_optimizer |= bool(verdict & IN_OPTIM)
            if verdict & (LIBRARY | USER):
                self.verdict.line = Line(code.co_filename, number, code.co_name, bool(verdict & LIBRARY))
                self.verdict.op = wanted
                break
        raise Stop from error


def _wants_a_value(error: BaseException | None) -> str | None:
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return str(getattr(error, "func", error))
    if isinstance(error, RuntimeError) and "numpy" in str(error).lower() and "fake" in str(error).lower():
        return "numpy"
    if isinstance(error, RuntimeError) and ".numpy() is not supported" in str(error):
        return "numpy"
    return None


def run_fake(path: Path, argv: Sequence[str]) -> tuple[FakeVerdict, Outcome]:
    """Run the script's first step under fake tensors."""
    run = _FakeRun()
    outcome = run_script(path, argv, run)
    return run.verdict, outcome
