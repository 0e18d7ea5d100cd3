"""NorMuon against a tuned AdamW: same model, same data, same schedule of batches; who is first at the loss?

    python -m leanstep.recipes.race --out results/gpt-tiny-race.json --svg docs/gpt-tiny-race.svg

1. The gpt recipe once, as `leanstep train gpt` runs it. Its final validation loss is the target.
2. AdamW at the same number of steps, over a grid of learning rates (and a few other settings at the best).
3. AdamW in longer and longer schedules at the best rates, until a run ends at or below the target.
4. The recipe and that AdamW run once more, interleaved in one process so that a busy machine slows both
   alike: these are the times that are compared.

Finished runs are kept in the result file; a second start only does what is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from leanstep.files import write_atomically
from leanstep.measure.environment import environment
from leanstep.recipes import gpt
from leanstep.recipes.curves import race_svg

Curve = dict[str, list[float]]

# What else is tried at AdamW's best rate: another decay, memory, regularisation, faster tables.
EXTRAS: list[dict[str, Any]] = [
    {"decay": "cosine"},
    {"beta2": 0.99},
    {"weight_decay": 0.01},
    {"table_lr_mul": 3.0},
    {"table_lr_mul": 10.0},
    {"table_lr_mul": 30.0},
]


def train_interleaved(
    trainings: Mapping[str, gpt.GPTTraining],
    *,
    evaluations: int = 25,
    rounds: int = 100,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Curve]:
    """Run several trainings to their ends side by side; a curve of step, times and loss for each.

    Each round gives every training its share of its own steps, so all finish in the last round and a
    disturbance of the machine meets all of them. `cpu_s` is the processor time of the same steps: with one
    thread it is what a quiet machine would need. Evaluations are not timed.
    """
    columns = ("step", "time_s", "cpu_s", "val_loss")
    curves: dict[str, Curve] = {name: {column: [] for column in columns} for name in trainings}
    clocks = {name: [0.0, 0.0] for name in trainings}
    for number in range(rounds + 1):
        for name, training in trainings.items():
            until = round(training.num_steps * number / rounds)
            start = time.perf_counter(), time.process_time()
            while training.completed < until:
                training.step(training.completed)
            clocks[name][0] += time.perf_counter() - start[0]
            clocks[name][1] += time.process_time() - start[1]
            if number * evaluations // rounds > (number - 1) * evaluations // rounds or number == rounds:
                curve = curves[name]
                curve["step"].append(training.completed)
                curve["time_s"].append(round(clocks[name][0], 3))
                curve["cpu_s"].append(round(clocks[name][1], 3))
                curve["val_loss"].append(round(training.evaluate()["val_loss"], 5))
                say(f"{name}: step {training.completed} loss {curve['val_loss'][-1]:.4f}")
    return curves


def first_at(curve: Curve, target: float) -> int | None:
    """The index of the first evaluation at or below the target."""
    return next((i for i, loss in enumerate(curve["val_loss"]) if loss <= target), None)


class Race:
    """The result file and the runs that fill it."""

    def __init__(self, path: Path, preset: str, seed: int = 0, tokens: float | None = None) -> None:
        self.path, self.preset, self.seed, self.tokens = path, preset, seed, tokens
        self.body: dict[str, Any] = {"sweep": [], **environment()}
        if path.exists():
            self.body = json.loads(path.read_text())

    def build(self, options: Mapping[str, Any]) -> gpt.GPTTraining:
        return gpt.build(self.preset, seed=self.seed, tokens=self.tokens, **options)

    def write(self) -> None:
        write_atomically(self.path, (json.dumps(self.body, indent=1) + "\n").encode())

    def final_loss(self, options: dict[str, Any]) -> float:
        """The validation loss at the end of a run; looked up when it is already known."""
        for row in self.body["sweep"]:
            if row["options"] == options:
                return row["val_loss"]
        training = self.build(options)
        curve = train_interleaved({"run": training}, evaluations=1)["run"]
        steps = training.num_steps
        self.body["sweep"].append({"options": options, "steps": steps, "val_loss": curve["val_loss"][-1]})
        self.write()
        _say(f"{options or 'normuon'}: {steps} steps, loss {curve['val_loss'][-1]:.4f}")
        return curve["val_loss"][-1]

    def sweep(self, rates: Sequence[float], lengths: Sequence[float]) -> tuple[float, dict[str, Any] | None]:
        """(target, the cheapest AdamW options that reach it)."""
        steps = self.build({}).num_steps
        target = self.final_loss({})
        grid = [{"optimizer": "adamw", "lr": lr, "table_lr_mul": 1.0} for lr in rates]
        best = min(grid, key=self.final_loss)
        # The two best settings of the short runs: longer runs may prefer the second.
        ranked = sorted([{}, *EXTRAS], key=lambda extra: self.final_loss({**best, **extra}))[:2]
        for length in lengths:
            tries = [{**best, **extra, "steps": round(steps * length)} for extra in ranked]
            chosen = min(tries, key=self.final_loss)
            if self.final_loss(chosen) <= target:
                return target, chosen
        return target, None

    def final(self, adamw: dict[str, Any]) -> dict[str, Any]:
        """The timed run of both, interleaved; the target is where NorMuon ends in this very run."""
        trainings = {"normuon": self.build({}), "adamw": self.build(adamw)}
        curves = train_interleaved(trainings, say=_say)
        ours = curves["normuon"]
        target = ours["val_loss"][-1]
        theirs = curves["adamw"]
        arrival = first_at(theirs, target)
        result: dict[str, Any] = {
            "target": target,
            "adamw_options": adamw,
            "curves": curves,
            "seconds_per_step": {n: c["time_s"][-1] / c["step"][-1] for n, c in curves.items()},
        }
        for clock in ("time_s", "cpu_s"):
            mine = max(ours[clock][-1], 1e-3)
            other = None if arrival is None else theirs[clock][arrival]
            result[clock] = {
                "normuon": mine,
                "adamw": other,
                "ratio": None if other is None else round(other / mine, 3),
            }
        self.body.update(environment())
        self.body["race"] = result
        self.body["preset"] = self.preset
        self.write()
        return result


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="NorMuon against a tuned AdamW.")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--rates", default="0.005,0.01,0.02,0.03,0.04")
    parser.add_argument("--lengths", default="1.75,2,2.25,2.5,3,4")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only-sweep", action="store_true")
    chosen = parser.parse_args(arguments)
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    race = Race(chosen.out, chosen.preset)
    rates, lengths = ([float(x) for x in text.split(",")] for text in (chosen.rates, chosen.lengths))
    target, adamw = race.sweep(rates, lengths)
    if adamw is None:
        _say(f"no AdamW run of up to {lengths[-1]} times the length ended at or below {target:.4f}")
        return 1
    if chosen.only_sweep:
        return 0
    result = race.body.get("race") or race.final(adamw)
    _say(f"loss {result['target']:.4f}: wall {result['time_s']}, processor {result['cpu_s']}")
    if chosen.svg:
        write_atomically(chosen.svg, race_svg(race.body).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
