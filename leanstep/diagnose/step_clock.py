"""Split the time of one unrecorded step: before the model's first op, forward, backward, optimizer.

Only the ends of a few calls are recorded, so the step runs at full speed. On a GPU these are host times. Time
in which other processes occupied the cores does not count: on a busy machine a step would take many times as
long, and the same finding would be a smaller share of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PARTS = ("before the model", "forward", "backward", "optimizer", "other")


_SCHEDULER_STATISTICS = Path("/proc/self/schedstat")


def own_seconds() -> float:
    """A clock that stops while the main thread is ready to run, but other processes occupy the cores."""
    return time.perf_counter() - waited_seconds()


def waited_seconds() -> float:
    """Return how long the main thread has waited for a core; 0 where the system does not report it."""
    try:
        return int(_SCHEDULER_STATISTICS.read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


class StepClock:
    """Times one step, from the end of the previous one to its own.

    Args:
        now: the clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = own_seconds) -> None:
        self._now = now
        self.running = False
        self.seconds: float | None = None
        # Part -> seconds; None until a complete step has been timed.
        self.parts: dict[str, float] | None = None
        self._engine: Any = None

    def start(self) -> None:
        """Start timing: the previous step has just ended."""
        self.running = True
        self._started = self._now()
        self._first_op: float | None = None
        self._spent: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._optimizer_began = 0.0
        # End of the last backward, or the first op: forward is the time from here to the next backward.
        self._forward_began: float | None = None
        engine = self._engine = torch.autograd._engine_run_backward

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.backward_begins()
            try:
                return engine(*args, **kwargs)
            finally:
                self.backward_ends()

        torch.autograd._engine_run_backward = timed

    def first_op(self, tensor: Any = None) -> Any:
        """Record that the model runs, as a tensor is saved for the backward. Return the tensor."""
        if self._first_op is None:
            self._first_op = self._forward_began = self._now()
            self._spent["before the model"] = self._first_op - self._started
        return tensor

    def backward_begins(self) -> None:
        now = self._now()
        if self._forward_began is not None:
            self._spent["forward"] += now - self._forward_began
        self._backward_began, self._forward_began = now, None

    def backward_ends(self) -> None:
        now = self._now()
        self._spent["backward"] += now - self._backward_began
        self._forward_began = now

    def optimizer_begins(self) -> None:
        self._optimizer_began = self._now()
        # The time between backward and optimizer (clipping, logging) is not forward time.
        self._forward_began = None

    def optimizer_ends(self) -> None:
        if self._optimizer_began:
            self._spent["optimizer"] += self._now() - self._optimizer_began
        self._optimizer_began = 0.0

    def end(self) -> None:
        """Record the end of the step."""
        self.seconds = self._now() - self._started
        self._spent["other"] = max(0.0, self.seconds - sum(self._spent.values()))
        self.parts = self._spent
        self.stop()

    def stop(self) -> None:
        """Remove the hooks from torch, whether a step has been timed or not."""
        if self.running:
            torch.autograd._engine_run_backward = self._engine
        self.running = False
