"""NorMuon against a tuned AdamW: same model, same data, same schedule of batches; who is first at the loss?

    python tools/race.py --out results/gpt-tiny-race.json --svg docs/gpt-tiny-race.svg

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
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import torch

from leanstep.files import write_atomically
from leanstep.measure.timing import environment
from leanstep.recipes import gpt

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


# The drawing: loss over training time as a plain SVG file, readable in a page, in a browser and in a diff.

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 56, 52
COLOURS = {"normuon": "#0b6e4f", "adamw": "#b5532a"}
LABELS = {"normuon": "NorMuon + Adam", "adamw": "AdamW, tuned"}


def nice_ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round numbers from low to high, about that many."""
    span = max(high - low, 1e-9)
    raw = span / about
    magnitude = 10 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def race_svg(body: Mapping[str, Any]) -> str:
    """Both curves of a race file, its target, and when each arrives there."""
    race = body["race"]
    # Processor time with one thread is the quiet machine's time; with several it counts each of them.
    clock = "cpu_s" if body["threads"] == 1 else "time_s"
    curves: Mapping[str, Mapping[str, Sequence[float]]] = race["curves"]
    target = race["target"]
    # The first evaluation is before the first step and would squeeze the rest.
    shown = {
        name: [p for p in zip(c[clock], c["val_loss"], strict=True) if p[0] > 0] for name, c in curves.items()
    }
    right = max(t for points in shown.values() for t, _ in points) * 1.02
    losses = [loss for points in shown.values() for _, loss in points]
    low, high = min(losses), sorted(losses)[int(len(losses) * 0.97)]
    low, high = low - 0.05 * (high - low), high + 0.05 * (high - low)

    def x(seconds: float) -> float:
        return LEFT + seconds / right * (WIDTH - LEFT - RIGHT)

    def y(loss: float) -> float:
        return TOP + (high - min(loss, high)) / (high - low) * (HEIGHT - TOP - BOTTOM)

    title = escape(_title(race[clock]["ratio"]))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="16" font-weight="bold">{title}</text>',
        f'<text x="{LEFT}" y="42" fill="#555">{escape(_subtitle(body))}</text>',
    ]
    for tick in nice_ticks(0, right):
        parts.append(_line(x(tick), TOP, x(tick), HEIGHT - BOTTOM, "#eeeeee"))
        parts.append(_text(x(tick), HEIGHT - BOTTOM + 18, f"{tick:g}", "middle"))
    for tick in nice_ticks(low, high):
        parts.append(_line(LEFT, y(tick), WIDTH - RIGHT, y(tick), "#eeeeee"))
        parts.append(_text(LEFT - 8, y(tick) + 4, f"{tick:g}", "end"))
    parts.append(
        _text(
            (LEFT + WIDTH - RIGHT) / 2,
            HEIGHT - 12,
            "training time, seconds" + (" of one core" if clock == "cpu_s" else ""),
            "middle",
        )
    )
    parts.append(_text(LEFT - 48, TOP - 8, "validation loss", "start"))
    parts.append(_line(LEFT, y(target), WIDTH - RIGHT, y(target), "#888888", dash="4 4"))
    parts.append(_text(LEFT + 6, y(target) + 16, f"target {target:.3f}", "start"))
    for index, (name, points) in enumerate(shown.items()):
        colour = COLOURS.get(name, "#333333")
        path = " ".join(f"{x(t):.1f},{y(loss):.1f}" for t, loss in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.2"/>')
        arrival = next(((t, loss) for t, loss in points if loss <= target), None)
        if arrival:
            parts.append(
                f'<circle cx="{x(arrival[0]):.1f}" cy="{y(arrival[1]):.1f}" r="4.5" fill="{colour}"/>'
            )
            parts.append(_text(x(arrival[0]), y(arrival[1]) - 10, f"{arrival[0]:.0f} s", "end", colour))
        parts.append(_line(WIDTH - 190, TOP + 14 + 20 * index, WIDTH - 166, TOP + 14 + 20 * index, colour, 3))
        parts.append(_text(WIDTH - 158, TOP + 18 + 20 * index, LABELS.get(name, name), "start"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _title(ratio: float | None) -> str:
    if ratio is None:
        return "AdamW did not reach the target"
    return f"AdamW needs {ratio:.2f} times as long to the same loss"


def _subtitle(body: Mapping[str, Any]) -> str:
    options = body["race"]["adamw_options"]
    return (
        f"gpt {body.get('preset', '')}: same model, data and batches; AdamW lr {options['lr']:g}; "
        f"torch {body['torch']}, threads: {body['threads']}"
    )


def _line(
    x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1, dash: str | None = None
) -> str:
    style = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-width="{width}"{style}/>'
    )


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#333333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


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
