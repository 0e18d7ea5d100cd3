"""Record a few steps of a running training, print the worst lines once, log three figures, then stop.

    Trainer(..., callbacks=[LeanstepCallback()])              # transformers, TRL
    lightning.Trainer(..., callbacks=[LeanstepLightning()])   # Lightning
    for batch in recorded(loader, log=wandb.log):             # a loop of your own

The figures go where the trainer logs (TensorBoard, W&B, MLflow ...): `leanstep/host_reads` per step,
`leanstep/wasted_ms` per step as `leanstep diagnose` estimates it, and `leanstep/mfu` where the device's peak
is known. Recording changes no number. The two classes are created on first access: neither package is
imported before.
"""

from __future__ import annotations

import functools
import importlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from leanstep import units
from leanstep.diagnose.cost import is_small
from leanstep.diagnose.findings import Finding
from leanstep.diagnose.mfu import step_flops
from leanstep.diagnose.outputs import gate, screen
from leanstep.diagnose.watch import Watch
from leanstep.flops import operand_type, utilisation
from leanstep.rehearse.devices import DEVICES, Device, device_named


class StepReport:
    """Counts the steps of a loop, records some of them and reports once.

    Args:
        steps: how many to record; the step after them is timed at full speed.
        warmup: how many to skip first.
        top: how many entries to print.
        log: called once with {"leanstep/host_reads": ..., ...}.
        show: called once with the text; default: `print`. Only the first rank shows anything.
        device: a key of `leanstep rehearse --device`, whose published peaks the products are held against;
            without it the GPU at hand, where the table knows it by its exact name.
        peak_flops: FLOP/s of a device that is not in that table.
    """

    def __init__(
        self,
        steps: int = 3,
        warmup: int = 2,
        *,
        top: int = 5,
        log: Callable[[dict[str, float]], Any] | None = None,
        show: Callable[[str], Any] | None = None,
        device: str | None = None,
        peak_flops: float | None = None,
    ) -> None:
        if warmup < 0:
            raise ValueError(f"warmup: expected at least 0, got {warmup}")
        if top < 1:
            raise ValueError(f"top: expected at least 1, got {top}")
        if peak_flops is not None and not peak_flops > 0:
            raise ValueError(f"peak_flops: expected FLOP/s above 0, got {peak_flops!r}")
        self._device = device_named(device) if device is not None else None
        self._peak_flops = peak_flops
        self.watch = Watch(steps, warmup=0)
        # Steps end where the loop says so.
        self.watch.boundary = "explicit"
        self.num_warmup, self.num_top = warmup, top
        self._log, self._show = log, show or print
        self._seen = 0
        self._running = False
        self._recorded_at = 0.0
        self.step_seconds: float | None = None
        self.done = False
        self.scalars: dict[str, float] = {}
        self.findings: list[Finding] = []

    def begin(self) -> None:
        """Start with the loop."""
        if not self.num_warmup:
            self._start()

    def step(self) -> None:
        """Record the end of one training step, including its optimizer."""
        self._seen += 1
        if self._running:
            timed = self.watch.finished
            if timed:
                _wait_for_device()
                self.step_seconds = time.perf_counter() - self._recorded_at
            self.watch.step()
            if timed:
                self.close()
            elif self.watch.finished:
                _wait_for_device()
                self._recorded_at = time.perf_counter()
        elif self._seen == self.num_warmup:
            self._start()

    def _start(self) -> None:
        if self.done or self._running:
            return
        try:
            self.watch.__enter__()
        except RuntimeError:
            # Under `leanstep diagnose`, or with another report active: that one records, the training
            # continues.
            self.done = True
            self._show("leanstep: another recording is already running; this one is off")
            return
        self._running = True
        self.watch.warmup_done = self._seen

    def abandon(self) -> None:
        """Stop after a failed loop: restore everything, report nothing."""
        if self._running:
            self._running, self.done = False, True
            self.watch.__exit__(*sys.exc_info())

    def close(self) -> None:
        """Stop the recording and report; a second call does nothing."""
        if self.done:
            return
        self.done = True
        if self._running:
            self._running = False
            self.watch.__exit__(None, None, None)
        if not self.watch.steps:
            self._tell(f"leanstep: no step was recorded: the training ended within {self._seen} steps")
            return
        self.findings, _ = gate.without_ignored(self.watch.findings())
        self.scalars = self._figures()
        entries = screen.entries_of(self.findings)
        large = [entry for entry in entries if not all(is_small(f) for f in entry.findings)]
        shown = [finding for entry in large[: self.num_top] for finding in entry.findings]
        text = screen.screen(self.watch, shown, "of this training", show_all=True)
        more = len(entries) - min(len(large), self.num_top)
        if more:
            text += f"\n  and {more} more, smaller: leanstep diagnose shows all"
        self._tell(text + self._utilisation())
        if self._log is not None:
            self._log(dict(self.scalars))

    def _figures(self) -> dict[str, float]:
        reads = sum(f.work.reads for f in self.findings)
        wasted = sum(f.seconds or 0.0 for f in self.findings)
        if self.watch.accelerator:
            # The cost of a read is assumed, and only counts where there is a device to wait for.
            wasted += sum(sum(f.seconds_range) / 2 for f in self.findings if f.seconds_range)
        if self.watch.step_seconds:
            # Two findings may count the same time: never report more than the step.
            wasted = min(wasted, self.watch.step_seconds)
        return {"leanstep/host_reads": float(reads), "leanstep/wasted_ms": 1e3 * wasted}

    def _utilisation(self) -> str:
        """Return a line on the MFU and add `leanstep/mfu` to the figures; empty if no peak is known."""
        device = self._device or (_device_at_hand() if self.watch.accelerator else None)
        if self.step_seconds is None or (device is None and self._peak_flops is None):
            return ""
        flops = step_flops(self.watch.steps)
        name = (
            f"a device of {self._peak_flops:.3g} FLOP/s" if self._peak_flops else getattr(device, "name", "")
        )
        try:
            share = utilisation(flops, self.step_seconds, self._peak_flops or _peaks(device), name)
        except ValueError as error:
            return f"\n  {error}"
        self.scalars["leanstep/mfu"] = share
        again = flops.all / flops.model - 1 if flops.model else 0.0
        return (
            f"\n  MFU {share:.1%} of {name}: {flops.model:.3g} FLOPs of the model's products in "
            f"{units.about(self.step_seconds)}; {again:.0%} on top recomputed or the optimizer's"
        )

    def _tell(self, text: str) -> None:
        if not _is_other_rank():
            self._show(text)


def recorded(batches: Iterable[Any], *, steps: int = 3, warmup: int = 2, **options: Any) -> Iterator[Any]:
    """Yield the batches of a loop, one training step each; a few steps are recorded and reported.

        for batch in recorded(loader, log=wandb.log):
            train_step(batch)

    `log` is called once with the figures (`mlflow.log_metrics`, or a function around TensorBoard's
    `add_scalar`); the other options are those of `StepReport`.
    """
    report = StepReport(steps, warmup, **options)
    report.begin()
    try:
        for batch in batches:
            yield batch
            report.step()
    except GeneratorExit:
        # The loop ended early: its last step is incomplete, earlier ones are complete.
        report.close()
        raise
    except BaseException:
        report.abandon()
        raise
    report.close()


@functools.cache
def _transformers_callback() -> type:
    from transformers import Trainer, TrainerCallback

    class LeanstepCallback(TrainerCallback):
        """For `transformers.Trainer` and TRL's trainers; takes the options of `StepReport`."""

        def __init__(self, steps: int = 3, warmup: int = 2, **options: Any) -> None:
            self.report = StepReport(steps, warmup, **options)
            self._logged = False
            self._trainer: Any = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # transformers passes a callback everything but its trainer.
            self._trainer = _caller(Trainer)
            if self._trainer is not None:
                # Reporters read the logs in the order of this list: the figures must come first.
                callbacks = self._trainer.callback_handler.callbacks
                callbacks.remove(self)
                callbacks.insert(0, self)
                _leave_on_error(self._trainer, self.report)
            self.report.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.report.step()

        def on_log(
            self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
        ) -> None:
            if logs is None:
                return
            if "train_runtime" in logs:
                self.report.close()
            # Added to the trainer's next log: an additional log would change the range of its averages.
            if self.report.scalars and not self._logged:
                self._logged = True
                logs.update(self.report.scalars)
                if state.log_history:
                    state.log_history[-1].update(self.report.scalars)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.report.close()
            if self._trainer is not None:
                self._trainer.__dict__.pop("training_step", None)
                self._trainer = None

    return _named(LeanstepCallback)


@functools.cache
def _lightning_callback() -> type:
    # Two names of one package; a program uses one of them.
    package = "pytorch_lightning" if "pytorch_lightning" in sys.modules else "lightning.pytorch"
    if "lightning.pytorch" in sys.modules:
        package = "lightning.pytorch"
    try:
        callback: Any = importlib.import_module(package).Callback
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "lightning is not installed: pip install lightning", name=error.name
        ) from None

    class LeanstepLightning(callback):
        """For `lightning.Trainer`; takes the options of `StepReport`."""

        def __init__(self, steps: int = 3, warmup: int = 2, **options: Any) -> None:
            self.report = StepReport(steps, warmup, **options)
            self._steps_before = 0
            self._logged = False

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self._steps_before = trainer.global_step
            self.report.begin()

        def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
            # Batches that only accumulate gradients do not end a step.
            if trainer.global_step != self._steps_before:
                self._steps_before = trainer.global_step
                self.report.step()
                self._send(trainer)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.report.close()
            self._send(trainer)

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self.report.abandon()

        def _send(self, trainer: Any) -> None:
            if self.report.scalars and not self._logged:
                self._logged = True
                for logger in trainer.loggers:
                    logger.log_metrics(self.report.scalars, step=trainer.global_step)

    return _named(LeanstepLightning)


# The classes by name, created on first access.
_MADE = {"LeanstepCallback": _transformers_callback, "LeanstepLightning": _lightning_callback}
__all__ = ["recorded", *_MADE]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _MADE:
        return _MADE[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _named(kind: type) -> type:
    """Set the class's module and name, for pickle and messages."""
    kind.__module__, kind.__qualname__ = __name__, kind.__name__
    return kind


def _caller(kind: type) -> Any:
    """Return the nearest `kind` on the stack whose method is running."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, kind):
            return owner
        frame = frame.f_back
    return None


def _leave_on_error(trainer: Any, report: StepReport) -> None:
    """Stop recording if a step raises: transformers does not tell callbacks, and the error may be caught."""
    stock = trainer.training_step

    @functools.wraps(stock)
    def training_step(*args: Any, **kwargs: Any) -> Any:
        try:
            return stock(*args, **kwargs)
        except BaseException:
            report.abandon()
            raise

    trainer.training_step = training_step


def _wait_for_device() -> None:
    """Synchronise, so that a step's time on a GPU includes its kernels; done twice per run."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _device_at_hand() -> Device | None:
    """Return this GPU's entry in the table, by its exact name: related models have other peaks."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((device for device in DEVICES.values() if device.name == name), None)


def _peaks(device: Device | None) -> Callable[[str], float]:
    """Return FLOP/s by operand type: float32 on the matrix units where torch may use them."""
    assert device is not None

    def peak(dtype: str) -> float:
        return device.flops(operand_type(dtype, tf32=torch.get_float32_matmul_precision() != "highest"))

    return peak


def _is_other_rank() -> bool:
    return (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_rank() != 0
    )
