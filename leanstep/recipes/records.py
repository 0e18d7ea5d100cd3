"""The record protocol: several seeds, time and steps to a target loss, a t-test, and a file to compare with.

A record claim is "the mean final validation loss is at or below the target", tested with a one-sided
one-sample t-test over seeds (p < 0.01). Every run goes through its whole schedule: stopping each run at
the moment it dips under the target would make every loss a lucky one. The time to the target is the
training time at the first evaluation at or below it.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from leanstep.extras import require
from leanstep.files import write_output

FORMAT = "leanstep-record-1"
SIGNIFICANCE = 0.01


@dataclass(frozen=True)
class Test:
    """A one-sided one-sample t-test of mean(losses) < target."""

    __test__ = False  # not a test class for pytest

    n: int
    mean: float
    sd: float | None
    t: float | None
    p: float | None

    @property
    def significant(self) -> bool:
        return self.p is not None and self.p < SIGNIFICANCE


def loss_test(losses: Sequence[float], target: float) -> Test:
    """Test whether the mean loss is below the target.

    Equivalent to:
        scipy.stats.ttest_1samp(losses, target, alternative="less")

    With one run there is no spread to judge by and p is None. Without any spread p is 0 below the
    target, 1 above it and 0.5 at it.
    """
    if not losses:
        raise ValueError("losses: expected at least one, got none")
    if not all(math.isfinite(x) for x in losses):
        raise ValueError(f"losses: expected finite numbers, got {list(losses)}")
    n, mean = len(losses), statistics.fmean(losses)
    if n == 1:
        return Test(1, mean, None, None, None)
    sd = statistics.stdev(losses)
    if sd == 0:
        return Test(n, mean, 0.0, None, 0.5 if mean == target else float(mean > target))
    require("a comparison of runs", "stats", "scipy")
    from scipy import stats

    t = (mean - target) / (sd / math.sqrt(n))
    return Test(n, mean, sd, t, float(stats.t.cdf(t, n - 1)))


def resolvable_shift(sd: float, n: int, confidence: float = 0.95, power: float = 0.8) -> float:
    """The smallest difference of means that n runs per side can be expected to show."""
    normal = statistics.NormalDist()
    return (normal.inv_cdf((1 + confidence) / 2) + normal.inv_cdf(power)) * sd * math.sqrt(2 / n)


@dataclass(frozen=True)
class Run:
    """One seed of a record. The `reached_*` fields are None when the target was never met."""

    seed: int
    steps: int
    train_time_s: float
    val_loss: float
    reached_step: int | None
    reached_time_s: float | None

    @classmethod
    def from_evaluations(cls, seed: int, evaluations: Sequence[Mapping[str, Any]], target: float) -> Run:
        """Read a run's outcome from its evaluation lines (`step`, `val_loss`, `train_time_s`)."""
        if not evaluations:
            raise ValueError("evaluations: expected at least one line, got none")
        last = evaluations[-1]
        # A diverged run logs its losses as "nan"; it reached nothing.
        reached = next((e for e in evaluations if float(e["val_loss"]) <= target), None)
        return cls(
            seed=seed,
            steps=int(last["step"]),
            train_time_s=float(last["train_time_s"]),
            val_loss=float(last["val_loss"]),
            reached_step=None if reached is None else int(reached["step"]),
            reached_time_s=None if reached is None else float(reached["train_time_s"]),
        )


@dataclass(frozen=True)
class Record:
    """Several runs of one recipe against one target, with the machine they ran on."""

    recipe: str
    settings: dict[str, Any]
    target: float
    runs: tuple[Run, ...]
    machine: dict[str, Any] = field(default_factory=dict)

    @property
    def losses(self) -> list[float]:
        return [run.val_loss for run in self.runs]

    @property
    def times_s(self) -> list[float]:
        """Times to the target of the runs that met it."""
        return [run.reached_time_s for run in self.runs if run.reached_time_s is not None]

    @property
    def steps(self) -> list[int]:
        return [run.reached_step for run in self.runs if run.reached_step is not None]

    def test(self) -> Test:
        return loss_test(self.losses, self.target)

    def write(self, path: Path) -> None:
        """Save as JSON, the derived figures beside the runs."""
        body = {"format": FORMAT, **asdict(self), "summary": self.summary()}
        write_output(path, (json.dumps(body, indent=2) + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> Record:
        """Load a record; `ValueError` names the file and what is wrong with it."""
        try:
            body = json.loads(path.read_text())
            if body["format"] != FORMAT:
                raise ValueError(f"format is {body['format']!r}, expected {FORMAT!r}")
            runs = tuple(Run(**run) for run in body["runs"])
            if not runs:
                raise ValueError("it has no runs")
            return cls(body["recipe"], body["settings"], float(body["target"]), runs, body["machine"])
        except (OSError, KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise ValueError(f"record: {path} is no record file: {error}") from error
        except RecursionError:
            raise ValueError(f"record: {path} is no record file: it is nested too deeply") from None

    def summary(self) -> dict[str, Any]:
        test = self.test()
        return {
            "n": len(self.runs),
            "reached": len(self.times_s),
            "loss": _spread(self.losses),
            "time_to_target_s": _spread(self.times_s),
            "steps_to_target": _spread(self.steps),
            "t": test.t,
            "p": test.p,
            "significant": test.significant,
        }


def compare(new: Record, old: Record) -> dict[str, Any]:
    """What changed from an older record to a newer one.

    `time_p` and `loss_p` are one-sided Welch tests that the new mean is lower; None with fewer than two
    runs on a side. `warnings` names what makes the two hard to compare.
    """
    warnings = []
    if new.recipe != old.recipe:
        warnings.append(f"recipes differ: {old.recipe}, now {new.recipe}")
    if new.target != old.target:
        warnings.append(f"targets differ: {old.target}, now {new.target}")
    for key in sorted(set(old.machine) | set(new.machine)):
        if old.machine.get(key) != new.machine.get(key):
            warnings.append(f"{key} differs: {old.machine.get(key)}, now {new.machine.get(key)}")
    for which, record in (("old", old), ("new", new)):
        missed = len(record.runs) - len(record.times_s)
        if missed:
            warnings.append(f"{missed} of {len(record.runs)} {which} runs never met the target")
    sds = [statistics.stdev(r.losses) for r in (new, old) if len(r.losses) > 1]
    if sds:
        shift = resolvable_shift(max(sds), min(len(new.runs), len(old.runs)))
        warnings.append(f"these runs can show a loss shift of about {shift:.2g}, no smaller one")
    return {
        "time_delta_s": _delta(new.times_s, old.times_s),
        "time_ratio": _ratio(old.times_s, new.times_s),
        "time_p": _welch(new.times_s, old.times_s),
        "loss_delta": _delta(new.losses, old.losses),
        "loss_p": _welch(new.losses, old.losses),
        "warnings": warnings,
    }


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    return {
        "mean": statistics.fmean(values) if values else None,
        "sd": statistics.stdev(values) if len(values) > 1 else None,
    }


def _delta(new: Sequence[float], old: Sequence[float]) -> float | None:
    return statistics.fmean(new) - statistics.fmean(old) if new and old else None


def _ratio(over: Sequence[float], under: Sequence[float]) -> float | None:
    return statistics.fmean(over) / statistics.fmean(under) if over and under and any(under) else None


def _welch(new: Sequence[float], old: Sequence[float]) -> float | None:
    if len(new) < 2 or len(old) < 2 or (statistics.stdev(new) == 0 and statistics.stdev(old) == 0):
        return None
    require("a comparison of runs", "stats", "scipy")
    from scipy import stats

    result: Any = stats.ttest_ind(new, old, equal_var=False, alternative="less")
    return float(result.pvalue)
