"""What the three recipes share: options, checkpoints that survive `kill -9`, exact resuming, metrics.jsonl.

A recipe is a script that owns its loop:

    @dataclass
    class Settings:                      # every field becomes an option: --lr 0.1, --bias false
        steps: int = 200                 # these two must exist
        seed: int = 0
        lr: float = 3e-3

    PRESETS = {"tiny": {}, "small": {"steps": 6000, "lr": 1e-3}}     # --preset; the first one is the default

    def main(arguments=None):
        settings, run = start(__doc__, Settings, PRESETS, arguments, eval_every=50, save_every=50)
        model, optimizer = ...                              # on run.device, the same weights on every rank
        if (state := run.load()) is not None:               # --resume found a checkpoint
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        if run.step == 0:
            run.evaluation(val_loss=evaluate(model))
        for step in run.steps():                            # 0 .. settings.steps - 1, or the rest of them
            draw = torch.Generator().manual_seed(...)       # of seed, step and run.rank: no position to save
            loss = ...
            run.log(loss=loss.detach(), lr=lr, tokens=n)    # exactly once per step, when the update is done
            if run.eval_due:
                run.evaluation(val_loss=evaluate(model))
            if run.save_due:                                # last in the loop
                run.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

`run.device`, `run.rank` and `run.world_size` describe the process; `start` joins the group that torchrun
announces. Every rank makes the same calls. The state given to `save` must be the same on every rank (a recipe
that shards its state gathers it first); rank 0 writes it, and the global random state of torch on each rank.

Exact: a run killed at any moment and resumed ends with the same weights as one left alone, and the same
metrics.jsonl apart from times, if the state holds everything that a step reads and writes.

Files in --out: `step-00000200.pt` (torch.save; read with weights_only=True, so no code runs; every entry has
a checksum) and `metrics.jsonl`: {"step", <metrics>, "train_time_s"} at each log step and {"step", "eval":
true, <values>, "train_time_s"} at each evaluation. `train_time_s` excludes evaluations and checkpoints.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import math
import os
import signal
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from leanstep.files import write_atomically


def start(
    description: str | None,
    settings_class: type,
    presets: Mapping[str, Mapping[str, Any]],
    arguments: Sequence[str] | None = None,
    *,
    log_every: int = 10,
    eval_every: int = 100,
    save_every: int = 100,
) -> tuple[Any, Run]:
    """Read the command line and open the run.

    Args:
        description: for --help; its first paragraph is shown.
        settings_class: a dataclass whose fields have defaults of type bool, int, float or str.
        presets: changed defaults by name.
        arguments: instead of sys.argv[1:].
        log_every, eval_every, save_every: defaults of these options.

    Returns:
        The settings and the run.
    """
    parser = argparse.ArgumentParser(
        description=(description or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="directory of the run")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in --out")
    parser.add_argument(
        "--preset", choices=list(presets), default=next(iter(presets)), help="size of the run"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where it runs")
    parser.add_argument("--log-every", type=_count, default=log_every, help="steps per metrics line")
    parser.add_argument("--eval-every", type=_count, default=eval_every, help="0: only at the end")
    parser.add_argument("--save-every", type=_count, default=save_every, help="0: only at the end")
    parser.add_argument("--stop-after", type=_count, help="save and stop at this step of the schedule")
    parser.add_argument("--keep", type=_count, default=3, help="checkpoints that stay; 0: all")
    fields = parser.add_argument_group(
        "settings", "The help text is the default, unless the preset has another."
    )
    for field in dataclasses.fields(settings_class):
        kind = type(field.default)
        name = "--" + field.name.replace("_", "-")
        kind = {bool: _bool, float: _finite}.get(kind, kind)
        fields.add_argument(
            name, type=kind, default=argparse.SUPPRESS, metavar="VALUE", help=str(field.default)
        )
    options = vars(parser.parse_args(arguments))
    names = [field.name for field in dataclasses.fields(settings_class)]
    chosen = {name: options.pop(name) for name in names if name in options}
    try:
        settings = settings_class(**{**presets[options["preset"]], **chosen})
    except ValueError as error:
        parser.error(str(error))
    if settings.steps < 1:
        parser.error(f"--steps: expected at least 1, got {settings.steps}")
    device = torch.device(options.pop("device"))
    if device.type == "cuda":
        if not torch.cuda.is_available():
            parser.error("--device: got cuda, but this torch sees no CUDA device")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    identity = {"preset": options.pop("preset"), **dataclasses.asdict(settings)}
    return settings, Run(settings=identity, num_steps=settings.steps, device=device, **options)


class Run:
    """The files, the clock and the position of one run; the module's docstring shows its use.

    Args:
        out: directory; one that holds checkpoints needs `resume=True`.
        settings: what identifies the run (JSON); a checkpoint with other settings is refused.
        num_steps: length of the schedule.
        device: where metrics live.
        resume: whether `load` looks for a checkpoint.
        log_every, eval_every, save_every: steps; 0: only at the end.
        stop_after: save and stop at this step.
        keep: checkpoints that stay; 0: all.
    """

    def __init__(
        self,
        out: Path,
        settings: Mapping[str, Any],
        num_steps: int,
        *,
        device: torch.device | str = "cpu",
        resume: bool = False,
        log_every: int = 10,
        eval_every: int = 100,
        save_every: int = 100,
        stop_after: int | None = None,
        keep: int = 3,
    ) -> None:
        self.out, self.device, self.keep = out, torch.device(device), keep
        self.settings = json.loads(json.dumps(settings))
        self.num_steps, self.last_step = num_steps, min(stop_after or num_steps, num_steps)
        self.log_every, self.eval_every, self.save_every = log_every, eval_every, save_every
        grouped = dist.is_available() and dist.is_initialized()
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        self.step = 0
        self.train_time_s = 0.0
        self._sums: dict[str, tuple[Tensor, int]] = {}  # sum and count since the last log line
        self._began = 0.0
        self._signal: int | None = None
        self._stopping = False
        out.mkdir(parents=True, exist_ok=True)
        self._found = list_checkpoints(out) if resume else []
        if not resume and (present := list_checkpoints(out)):
            raise SystemExit(
                f"--out: {out} already holds a run ({present[-1].name}); pass --resume or another --out"
            )
        if self.rank == 0:
            for leftover in out.glob(".*.partial"):  # of a killed process
                leftover.unlink(missing_ok=True)
            if not self._found:
                self._cut_metrics(-1)

    def load(self) -> Any:
        """Return the state of the newest whole checkpoint, or None without one; call it before `steps`."""
        for path in reversed(self._found):
            try:
                saved = read_checkpoint(path)
            except ValueError as error:
                self._say(f"{path.name} skipped: {error}")
                continue
            if saved["settings"] != self.settings:
                names = sorted({*saved["settings"], *self.settings})
                pairs = ((name, saved["settings"].get(name), self.settings.get(name)) for name in names)
                changed = "; ".join(
                    f"{name} was {was!r}, now {now!r}" for name, was, now in pairs if was != now
                )
                raise SystemExit(f"--resume: {path.name} was made with other settings: {changed}")
            self.step, self.train_time_s = saved["step"], saved["train_time_s"]
            if len(saved["ranks"]) == self.world_size:
                mine = saved["ranks"][self.rank]
                self._sums = mine["sums"]
                torch.set_rng_state(mine["random"])
                if mine["cuda_random"] is not None and self.device.type == "cuda":
                    torch.cuda.set_rng_state(mine["cuda_random"])
            self._barrier()  # every rank has read before rank 0 may delete
            if self.rank == 0:
                self._cut_metrics(self.step)
            return saved["state"]
        if self._found:
            # Starting again at step 0 in silence would be worse.
            raise SystemExit(f"--resume: no usable checkpoint in {self.out}")
        return None

    def steps(self) -> Iterator[int]:
        """Yield the index of every step that is left; end early, after a save, on SIGTERM or Ctrl-C."""
        before = {
            number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            while self.step < self.last_step and not self._stopping:
                index = self.step
                self._began = time.perf_counter()
                yield index
                assert self.step == index + 1, "call run.log once per step"
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._stopping:
            self._say(f"stopped by a signal at step {self.step}/{self.num_steps}")
            if self._signal == signal.SIGINT:
                raise SystemExit(130)

    def log(self, **metrics: Tensor | float) -> None:
        """Complete a step: add its metrics to the interval's means; write a line when one is due.

        Tensors of one element stay on the device until then: one host read per line. A `loss` that is not
        finite ends the run before it can be saved.
        """
        for name, value in metrics.items():
            number = (
                value.detach().reshape(())
                if isinstance(value, Tensor)
                else torch.tensor(value, dtype=torch.float64)
            )
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = number.double() + total, count + 1
        self.step += 1
        if self._due(self.log_every) or self.save_due:
            finite = math.isfinite(float(self._sums["loss"][0])) if "loss" in self._sums else True
            if self._any(not finite):
                self._write({"loss": math.nan})
                raise SystemExit(f"loss: not finite at step {self.step}/{self.num_steps}, stopping")
        now = time.perf_counter()  # after the read, which waits for the device
        self.train_time_s += now - self._began
        self._stopping = self._any(self._signal is not None)
        if self._due(self.log_every):
            means = torch.stack([total.to(self.device) / count for total, count in self._sums.values()]).cpu()
            if self.world_size > 1:
                dist.all_reduce(means)
                means /= self.world_size
            self._write(dict(zip(self._sums, means.tolist(), strict=True)))
            self._sums = {}

    @property
    def eval_due(self) -> bool:
        return self._due(self.eval_every)

    @property
    def save_due(self) -> bool:
        return self._due(self.save_every) or self.step == self.last_step or self._stopping

    def evaluation(self, **values: float) -> None:
        """Write one evaluation line, and say it."""
        self._write({"eval": True, **values})
        text = " ".join(f"{name}:{value:.4f}" for name, value in values.items())
        self._say(f"step:{self.step}/{self.num_steps} {text} train_time:{self.train_time_s * 1e3:.0f}ms")

    def save(self, state: Any) -> None:
        """Write the checkpoint of this step, then delete all but the newest `keep`.

        Args:
            state: dicts, lists and tuples of tensors, numbers, strings and None; the same on every rank.
        """
        mine = {
            "sums": {name: (total.cpu(), count) for name, (total, count) in self._sums.items()},
            "random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state() if self.device.type == "cuda" else None,
        }
        ranks: list[Any] = [mine]
        if self.world_size > 1:
            ranks = [None] * self.world_size
            dist.all_gather_object(ranks, mine)
        if self.rank == 0:
            metrics = self.out / "metrics.jsonl"
            if metrics.exists():
                with metrics.open("rb") as file:
                    os.fsync(file.fileno())  # the lines that the checkpoint follows
            data = io.BytesIO()
            torch.save(
                {
                    "step": self.step,
                    "settings": self.settings,
                    "train_time_s": self.train_time_s,
                    "ranks": ranks,
                    "state": state,
                },
                data,
            )
            # A temporary file, fsync, rename, fsync of the directory: the old set of files or the new one.
            write_atomically(self.out / f"step-{self.step:08d}.pt", data.getvalue())
            if self.keep:
                # A damaged file of a later step must not push out the one just written.
                ours = [p for p in list_checkpoints(self.out) if p.name <= f"step-{self.step:08d}.pt"]
                for old in ours[: -self.keep]:
                    old.unlink(missing_ok=True)
        self._barrier()

    def _due(self, every: int) -> bool:
        return self.step == self.num_steps or (every > 0 and self.step % every == 0)

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self._signal == signal.SIGINT == number:
            raise KeyboardInterrupt  # the second Ctrl-C
        self._signal = number

    def _any(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank: all ranks stop at the same step."""
        if self.world_size == 1:
            return flag
        vote = torch.tensor(int(flag))
        dist.all_reduce(vote, op=dist.ReduceOp.MAX)
        return bool(vote)

    def _barrier(self) -> None:
        self._any(False)

    def _say(self, line: str) -> None:
        if self.rank == 0:
            print(line, file=sys.stderr, flush=True)

    def _write(self, values: Mapping[str, Any]) -> None:
        if self.rank == 0:
            values = {
                k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()
            }
            line = {"step": self.step, **values, "train_time_s": round(self.train_time_s, 6)}
            with (self.out / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")

    def _cut_metrics(self, step: int) -> None:
        """Drop the lines after `step`, which this run writes again, and a line that a crash cut short."""
        path = self.out / "metrics.jsonl"
        if path.exists():
            lines = [line for line in read_metrics(path) if line["step"] <= step]
            write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines).encode())


def list_checkpoints(out: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    return sorted(out.glob("step-*.pt"))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return step, settings, train_time_s, ranks and state; ValueError if the file is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load checks no checksums
        if damaged is not None:
            raise ValueError(f"damaged at {damaged}")
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, zipfile.BadZipFile) as error:
        raise ValueError(f"no whole checkpoint ({type(error).__name__})") from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl; what a crash cut short is left out."""
    lines = []
    for raw in path.read_text().splitlines():
        try:
            line = json.loads(raw)
        except ValueError:
            continue
        if isinstance(line, dict) and "step" in line:
            lines.append(line)
    return lines


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, 0 or more, got {text!r}")
    return int(text)


def _finite(text: str) -> float:
    try:
        if math.isfinite(value := float(text)):
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected a finite number, got {text!r}")


def _bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return text.lower() == "true"
