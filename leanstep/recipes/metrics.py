"""Metrics of a run: summed on the device, read once per interval, appended to a JSONL file.

A step hands over device tensors; adding them up costs no synchronisation. `Interval.read` fetches all of
them in one transfer. `MetricsLog` appends one JSON object per line and can be cut back to a step, so a
resumed run neither repeats nor loses lines. `Board` mirrors the lines to TensorBoard where it is installed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leanstep.files import write_atomically

_NOT_FINITE = ("nan", "inf", "-inf")

Metrics = Mapping[str, Tensor | float | int]


class Interval:
    """What the steps since the last log line reported.

    A scalar tensor is averaged over the interval, a plain number is reported as it was last, and the
    plain number called `tokens` is summed.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._last: dict[str, float | int] = {}
        self.tokens = 0
        self.steps = 0
        self.seconds = 0.0

    def add(self, metrics: Metrics, seconds: float) -> None:
        """Take in one step's metrics without reading a device value."""
        self.steps += 1
        self.seconds += seconds
        for name, value in metrics.items():
            if not isinstance(value, int | float):
                if value.numel() != 1:
                    raise ValueError(f"metrics: {name} must be one number, got shape {tuple(value.shape)}")
                precise = torch.float32 if value.device.type == "mps" else torch.float64
                scalar = value.detach().reshape(()).to(precise)
                self._sums[name] = self._sums[name] + scalar if name in self._sums else scalar
                self._counts[name] = self._counts.get(name, 0) + 1
            elif name == "tokens":
                self.tokens += int(value)
            else:
                self._last[name] = value

    def read(self) -> dict[str, float | int]:
        """The interval's metrics as plain numbers: one transfer for all of them."""
        result: dict[str, float | int] = {}
        if self._sums:
            stacked = torch.stack(list(self._sums.values())).cpu()
            for (name, count), total in zip(self._counts.items(), stacked.tolist(), strict=True):
                result[name] = total / count
        result.update(self._last)
        if self.tokens:
            result["tokens"] = self.tokens
            if self.seconds > 0:
                result["tokens_per_s"] = round(self.tokens / self.seconds, 1)
        return result

    def nonfinite_loss(self) -> str | None:
        """`loss`, when one of the interval's losses was NaN or infinite; reads a device value."""
        total = self._sums.get("loss")
        return "loss" if total is not None and not math.isfinite(float(total)) else None

    def state_dict(self) -> dict[str, Any]:
        return {
            "sums": {name: value.cpu() for name, value in self._sums.items()},
            "counts": dict(self._counts),
            "last": dict(self._last),
            "tokens": self.tokens,
            "steps": self.steps,
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        counts, last = dict(state["counts"]), dict(state["last"])
        if counts.keys() != state["sums"].keys():
            raise ValueError(f"interval: expected counts of {sorted(state['sums'])}, got {sorted(counts)}")
        for name, value in (*counts.items(), ("tokens", state["tokens"]), ("steps", state["steps"])):
            if type(value) is not int or value < (name in counts):
                raise ValueError(f"interval: expected a count of {name}, got {value!r}")
        for name, value in (*last.items(), ("seconds", state["seconds"])):
            if not isinstance(value, int | float):
                raise ValueError(f"interval: expected a number for {name}, got {value!r}")
        self._sums = {name: value.to(device) for name, value in state["sums"].items()}
        self._counts, self._last = counts, last
        self.tokens, self.steps, self.seconds = state["tokens"], state["steps"], state["seconds"]


class MetricsLog:
    """A JSONL file; every line has `step`, the number of steps completed when it was written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, line: Mapping[str, Any]) -> None:
        """Add one line. Values that JSON does not know (nan, inf) are written as strings."""
        clean = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        with self.path.open("a") as file:
            file.write(json.dumps(clean) + "\n")

    def sync(self) -> None:
        """Make everything appended so far durable; called before a checkpoint that refers to it."""
        if self.path.exists():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """All metric lines; a last line cut short by a crash and lines of other programs are left out."""
        if not self.path.exists():
            return []
        return [line for line in map(_parse, self.path.read_bytes().splitlines()) if line is not None]

    def truncate_to(self, step: int, say: Callable[[str], None] = lambda line: None) -> None:
        """Drop the lines after `step`: the resumed run will write them again.

        Foreign lines are dropped too, which `say` is told, except for a last line that a crash cut short.
        """
        if not self.path.exists():
            return
        raw = self.path.read_bytes().splitlines()
        foreign = [i for i, line in enumerate(raw, 1) if line.strip() and _parse(line) is None]
        if foreign and foreign != [len(raw)]:
            say(f"{self.path.name}: line {foreign[0]} is no metric line; {len(foreign)} such lines left out")
        earlier = [line for line in self.read() if line["step"] <= step]
        write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in earlier).encode())


def _parse(raw: bytes) -> dict[str, Any] | None:
    """A metric line: an object of numbers (NaN and infinity as text) with a whole number of steps."""
    try:
        line = json.loads(raw.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or type(line.get("step")) is not int or line["step"] < 0:
        return None
    return line if all(isinstance(v, int | float) or v in _NOT_FINITE for v in line.values()) else None


class Board:
    """TensorBoard when it is installed; otherwise nothing."""

    def __init__(self, directory: Path, resumed_at: int) -> None:
        self._writer = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        purge = resumed_at + 1 if resumed_at else None
        self._writer = SummaryWriter(log_dir=str(directory), purge_step=purge)

    @property
    def active(self) -> bool:
        return self._writer is not None

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        if self._writer is None:
            return
        for name, value in values.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
