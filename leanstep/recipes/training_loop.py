"""The training loop that every recipe shares: logging, evaluation, checkpoints, resuming, signals.

A recipe knows how to take a step; the loop knows everything around it. To write one:

    class Doubling:
        name = "doubling"
        cadence = Cadence(log=10, evaluate=50, save=50)

        def __init__(self, preset, seed, steps):
            self.settings = {"preset": preset, "seed": seed, "steps": steps}   # JSON; names the run
            self.num_steps = steps
            torch.manual_seed(seed)
            self.weight = torch.randn(3)

        def step(self, i):                      # i = 0 .. num_steps-1: forward, backward, update
            self.weight *= 2
            return {"loss": self.weight.norm(), "lr": 0.1, "tokens": 1024}

        def evaluate(self):                     # plain numbers; must leave the state as it was
            return {"val_loss": float(self.weight.norm())}

        def state_dict(self):                   # everything a step reads or writes
            return {"weight": self.weight}

        def load_state_dict(self, state):
            self.weight.copy_(state["weight"])

    outcome = run(Doubling("tiny", 0, 100), Path("out"), resume=True)

The contract:
- `step` reads no device value (no `.item()`): it returns scalar tensors, which the loop averages over the
  log interval and reads once, and plain numbers (last value wins; `tokens` is summed and gives tokens/s).
- `state_dict` covers parameters, optimizer, schedule and data position, own random generators. It is built
  of dicts, lists, tuples, tensors, numbers, strings and None. The loop itself saves the global random
  states (torch, CUDA, python, numpy), the clock and the half-filled log interval. Then `resume=True`
  continues bit-exactly: a run killed at any moment ends with the same weights as one left alone.
- `settings` identifies the run: a checkpoint made with other settings is refused, and the differences named.
- `load_state_dict` is only called with a state that has the entries, types and shapes of a fresh one and
  finite numbers; whatever it raises about the rest refuses the checkpoint, and the one before it is tried.
- A `loss` or `val_loss` that is not finite ends the run (`Diverged`), and so do such weights at a checkpoint:
  what is on disk is always worth resuming from.
- Several ranks: every rank calls every method at the same step; `state_dict` may communicate and must
  return the full state; rank 0 writes; metrics are averaged over ranks at log time.

Files in `out`: `checkpoints/step-XXXXXXXX.safetensors`, `metrics.jsonl`, `tensorboard/` when installed,
and `settings.json`. Lines of `metrics.jsonl`: `{"step", <metrics>, "train_time_s"}` at each log step and
`{"step", "eval": true, <evaluate()>, "train_time_s"}` at each evaluation (also before the first step).
`train_time_s` counts steps only; it stands still during evaluations and checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch

try:
    import fcntl
except ImportError:
    fcntl = None

from leanstep.files import write_atomically
from leanstep.recipes import checkpoint
from leanstep.recipes.checkpoint import CheckpointError
from leanstep.recipes.distributed import World, current_world
from leanstep.recipes.metrics import Board, Interval, Metrics, MetricsLog


@dataclass(frozen=True)
class Cadence:
    """Steps between log lines, evaluations and checkpoints; 0 = only at the end."""

    log: int = 10
    evaluate: int = 100
    save: int = 100

    def __post_init__(self) -> None:
        for name in ("log", "evaluate", "save"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected 0 or more steps, got {getattr(self, name)}")


class Diverged(RuntimeError):
    """The loss or the weights are no longer finite; the message names the last good checkpoint."""


class Recipe(Protocol):
    """What `run` needs; the module's docstring has the contract and an example."""

    name: str
    num_steps: int
    settings: dict[str, Any]
    cadence: Cadence

    def step(self, i: int) -> Metrics: ...

    def evaluate(self) -> Mapping[str, float]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class Outcome:
    """How a run ended.

    `stopped_by`: `end`, `target`, `limit` (stop_after), `SIGTERM` or `SIGINT`. `evaluations` holds the
    evaluation lines of the whole run, those before a resume included.
    """

    stopped_by: str
    step: int
    train_time_s: float
    resumed_from: int | None
    checkpoint: Path | None
    evaluations: list[dict[str, Any]] = field(default_factory=list)

    @property
    def last_evaluation(self) -> dict[str, Any]:
        return self.evaluations[-1] if self.evaluations else {}


def run(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    cadence: Cadence | None = None,
    target_loss: float | None = None,
    stop_after: int | None = None,
    keep: int = 3,
    world: World | None = None,
    say: Callable[[str], None] | None = None,
    report: Callable[[str, float], None] | None = None,
) -> Outcome:
    """Train until the recipe's last step, the target, `stop_after` steps, or a signal.

    Args:
        recipe: freshly built, at step 0.
        out: directory of the run. One that already holds checkpoints needs `resume=True`.
        resume: continue from the newest whole checkpoint in `out`; start at step 0 when there is none.
        cadence: overrides the recipe's own.
        target_loss: stop at the first evaluation whose `val_loss` is at or below it.
        stop_after: stop (and save) when this many steps are completed; the schedule still spans
            `recipe.num_steps`.
        keep: how many checkpoints stay on disk.
        world: the process group; default: the one that is initialised, or one rank.
        say: receives one-line messages; default: standard error.
        report: called with (figures, share of the steps done) after every step, for a progress bar.

    SIGTERM and SIGINT end the run after the step in progress, with a checkpoint; a second SIGINT at once.
    Raises `CheckpointError` when no checkpoint in `out` can be used, `Diverged` when the loss is not finite.
    Host synchronisations: one per log interval, plus those of evaluation and saving.
    """
    world = world or current_world()
    cadence = cadence or recipe.cadence
    last = recipe.num_steps if stop_after is None else min(stop_after, recipe.num_steps)
    progress = _Progress(recipe, out, world, (say or _print_line) if world.is_main else _silence)
    stopped_by = "end" if last == recipe.num_steps else "limit"
    with _Signals() as signals, contextlib.closing(progress):
        progress.begin(resume=resume)
        if progress.step == 0 and cadence.evaluate > 0:
            progress.evaluate()
        while progress.step < last:
            progress.take_step()
            finished = progress.step == recipe.num_steps
            if finished or progress.is_due(cadence.log):
                progress.log_interval()
            if report is not None and world.is_main:
                share = progress.step / recipe.num_steps
                report(f"{progress.step}/{recipe.num_steps} {progress.figures}", share)
            signalled = world.any(signals.received is not None)
            reached = False
            if not signalled and (finished or progress.is_due(cadence.evaluate)):
                reached = progress.evaluate_against(target_loss)
                signalled = world.any(signals.received is not None)
            if signalled or reached or progress.step == last or progress.is_due(cadence.save):
                progress.save(keep)
            if signalled:
                stopped_by = signals.received or "SIGTERM"
                progress.say(f"{stopped_by}: saved step {progress.step}/{recipe.num_steps}, stopping")
                break
            if reached:
                stopped_by = "target"
                break
    return Outcome(
        stopped_by,
        progress.step,
        progress.train_time_s,
        progress.resumed_from,
        progress.saved,
        progress.evaluations,
    )


class _Progress:
    """How far a run is: its clock, the half-filled log interval, and what it wrote to disk.

    Args:
        recipe: what is trained.
        out: directory of the run.
        world: the process group; the main rank writes.
        say: receives one-line messages.
    """

    def __init__(self, recipe: Recipe, out: Path, world: World, say: Callable[[str], None]) -> None:
        self.recipe, self.out, self.world, self.say = recipe, out, world, say
        self.settings = {"recipe": recipe.name, **recipe.settings}
        self.directory = out / "checkpoints"
        self.log = MetricsLog(out / "metrics.jsonl")
        self.board: Board | None = None
        self.interval = Interval()
        self.step = 0
        self.train_time_s = 0.0
        self.resumed_from: int | None = None
        self.saved: Path | None = None
        self.evaluations: list[dict[str, Any]] = []
        self._unlock = contextlib.ExitStack()
        # What the last log line said, for a progress bar.
        self.figures = ""

    def begin(self, *, resume: bool) -> None:
        """Prepare the directory and, with `resume`, continue from its newest whole checkpoint."""
        self._lock_directory()
        self._prepare_directory(resume=resume)
        if resume:
            self._resume()
        self.world.barrier()  # every rank has read before the first write
        if self.world.is_main:
            self.log.truncate_to(-1 if self.resumed_from is None else self.resumed_from, say=self.say)
            self.board = Board(self.out / "tensorboard", self.step)
            self.evaluations = [line for line in self.log.read() if line.get("eval")]

    def close(self) -> None:
        if self.board is not None:
            self.board.close()
        self._unlock.close()

    def _lock_directory(self) -> None:
        """Refuse a directory that another run is writing to. The lock ends with the process that holds it."""
        is_taken = False
        if self.world.is_main and fcntl is not None:
            self.out.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.out, os.O_RDONLY)
            self._unlock.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                is_taken = True
            except OSError:
                pass  # a file system without locks
        if self.world.any(is_taken):
            self._unlock.close()
            raise CheckpointError(f"out: another run is writing to {self.out}; name another directory")

    def is_due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def take_step(self) -> None:
        start = time.perf_counter()
        metrics = self.recipe.step(self.step)
        elapsed = time.perf_counter() - start
        self.train_time_s += elapsed
        self.step += 1
        self.interval.add(metrics, elapsed)

    def log_interval(self) -> None:
        """One log line over the steps since the last one; raises when the loss is not finite."""
        start = time.perf_counter()
        values = _over_ranks(self.interval.read(), self.world)
        # The read waits for the device: what the steps left running belongs to their time.
        self.train_time_s += time.perf_counter() - start
        self.interval = Interval()
        line = {"step": self.step, **values, "train_time_s": round(self.train_time_s, 6)}
        self._write(line, line)
        self.figures = describe(values)
        if not math.isfinite(values.get("loss", 0.0)):
            raise Diverged(f"loss: {values['loss']} at {self._where()}")

    def evaluate(self) -> dict[str, float]:
        """One evaluation line; raises when the loss is not finite."""
        before = checkpoint.random_state()
        values = dict(self.recipe.evaluate())
        checkpoint.set_random_state(before)
        line = {"step": self.step, "eval": True, **values, "train_time_s": round(self.train_time_s, 6)}
        self.evaluations.append(line)
        self._write(line, values)
        shown = " ".join(f"{k}:{v:.4f}" for k, v in values.items() if isinstance(v, float))
        milliseconds = self.train_time_s * 1000
        self.say(f"step:{self.step}/{self.recipe.num_steps} {shown} train_time:{milliseconds:.0f}ms")
        loss = values.get("val_loss", 0.0)
        if self.world.any(not math.isfinite(loss)):
            raise Diverged(f"val_loss: {loss} at {self._where()}")
        return values

    def evaluate_against(self, target_loss: float | None) -> bool:
        """Evaluate; whether `val_loss` is at or below the target, the same answer on every rank."""
        loss = self.evaluate().get("val_loss")
        return self.world.any(target_loss is not None and loss is not None and loss <= target_loss)

    def save(self, keep: int) -> None:
        """Write a checkpoint and keep the newest `keep`; raises when the weights are not finite."""
        state = {
            "recipe": self.recipe.state_dict(),
            "interval": self.world.gather(self.interval.state_dict()),
            "train_time_s": self.train_time_s,
            "random": self.world.gather(checkpoint.random_state()),
        }
        bad = self.interval.nonfinite_loss() or checkpoint.find_nonfinite(state["recipe"], "weights")
        if self.world.any(bad is not None):
            raise Diverged(f"{bad or 'weights'}: not finite after {self._where()}")
        if self.world.is_main:
            self.log.sync()
            checkpoint.save(self.directory, self.step, state, settings=self.settings, keep=keep)
        self.saved = checkpoint.checkpoint_path(self.directory, self.step)
        self.world.barrier()

    def _write(self, line: dict[str, Any], values: Mapping[str, Any]) -> None:
        """The line into the log, and its values to TensorBoard; on the main rank."""
        if self.board is not None:
            self.log.append(line)
            self.board.add(self.step, values)

    def _where(self) -> str:
        saved = self.saved
        last = f"the last good checkpoint is {saved}" if saved is not None else "there is no checkpoint yet"
        return f"step {self.step}/{self.recipe.num_steps}, stopping; {last}"

    def _prepare_directory(self, *, resume: bool) -> None:
        present = checkpoint.list_checkpoints(self.directory)
        if present and not resume:
            raise CheckpointError(
                f"out: {self.out} already holds a run ({present[-1].name}); "
                "pass resume to continue it or name another directory"
            )
        self.world.barrier()
        if self.world.is_main:
            self.directory.mkdir(parents=True, exist_ok=True)
            checkpoint.remove_leftovers(self.directory)
            checkpoint.remove_leftovers(self.out)
            settings = json.dumps(self.settings, indent=2) + "\n"
            write_atomically(self.out / "settings.json", settings.encode())
        self.world.barrier()

    def _resume(self) -> None:
        loaded = self._load_latest()
        if loaded is None:
            self.say(f"no checkpoint in {self.directory}: starting at step 0")
            return
        self.step = self.resumed_from = loaded.step
        self.train_time_s = float(loaded.state["train_time_s"])
        self.saved = loaded.path
        self.say(f"resumed at step {self.step}/{self.recipe.num_steps} from {loaded.path}")

    def _load_latest(self) -> checkpoint.Loaded | None:
        """Put the newest usable checkpoint into recipe and interval; None when there is none at all."""
        if not checkpoint.list_checkpoints(self.directory):
            return None
        template = {
            "recipe": self.recipe.state_dict(),
            "interval": [self.interval.state_dict()],
            "train_time_s": 0.0,
            "random": [{"torch": torch.get_rng_state(), "python": random.getstate()}],
        }
        return checkpoint.load_latest(
            self.directory,
            settings=self.settings,
            say=self.say,
            use=lambda loaded: self._use(loaded, template),
        )

    def _use(self, loaded: checkpoint.Loaded, template: dict[str, Any]) -> None:
        """Load one checkpoint; raises `CheckpointError` when it does not fit this run."""
        if loaded.step > self.recipe.num_steps:
            raise CheckpointError(f"step {loaded.step} is beyond the run's {self.recipe.num_steps} steps")
        checkpoint.check_like(template, loaded.state)
        bad = checkpoint.find_nonfinite(loaded.state["recipe"], "weights")
        if bad is not None:
            raise CheckpointError(f"{bad} is not finite")
        seconds = loaded.state["train_time_s"]
        if not math.isfinite(seconds):
            raise CheckpointError(f"train_time_s: expected a finite number, got {seconds}")
        intervals = loaded.state["interval"]
        try:
            self.recipe.load_state_dict(loaded.state["recipe"])
            self.interval.load_state_dict(intervals[self.world.rank % len(intervals)], self.world.device)
            checkpoint.restore_random_state(loaded.state["random"], self.world, self.say)
        except CheckpointError:
            raise
        except (
            RuntimeError,
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            ArithmeticError,
            SystemError,
        ) as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise CheckpointError(f"does not fit this run ({reason})") from error


def _over_ranks(values: dict[str, float | int], world: World) -> dict[str, float | int]:
    """Means over ranks of the measured values; plain counts are the same everywhere."""
    names = [name for name, value in values.items() if isinstance(value, float)]
    if world.size == 1 or not names:
        return values
    means = world.mean(torch.tensor([values[name] for name in names], dtype=torch.float64)).tolist()
    return {**values, **dict(zip(names, means, strict=True))}


def describe(metrics: Mapping[str, float | int]) -> str:
    """`loss 4.213 · 35,120 tok/s`"""
    parts = []
    if "loss" in metrics:
        parts.append(f"loss {metrics['loss']:.4f}")
    if "tokens_per_s" in metrics:
        parts.append(f"{metrics['tokens_per_s']:,.0f} tok/s")
    return " · ".join(parts)


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _silence(line: str) -> None:
    pass


class _Signals:
    """Remember SIGTERM and SIGINT instead of dying from them; only the main thread may listen."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == "SIGINT":
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
