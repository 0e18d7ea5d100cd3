"""The race: fair turns, known runs looked up, the target's first crossing, a drawing of both curves."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
from tool_loader import load_tool

race = load_tool("race")
nice_ticks, race_svg = race.nice_ticks, race.race_svg


class Counter:
    def __init__(self, steps, log):
        self.num_steps, self.completed, self.log = steps, 0, log

    def step(self, i):
        assert i == self.completed
        self.completed += 1
        self.log.append(self.num_steps)

    def evaluate(self):
        return {"val_loss": 4.0 - 2.0 * self.completed / self.num_steps}


def test_trainings_take_turns_and_end_together():
    log = []
    curves = race.train_interleaved({"a": Counter(20, log), "b": Counter(40, log)}, evaluations=4, rounds=10)
    assert log[:6] == [20, 20, 40, 40, 40, 40] and log[-6:] == log[:6]
    assert curves["a"]["step"] == [0, 6, 10, 16, 20] and curves["b"]["step"] == [0, 12, 20, 32, 40]
    assert curves["a"]["val_loss"][0] == 4.0 and curves["a"]["val_loss"][-1] == 2.0
    assert curves["a"]["time_s"] == sorted(curves["a"]["time_s"])


def test_the_first_crossing_counts():
    curve = {"step": [0, 5, 10], "time_s": [0.0, 1.0, 2.0], "val_loss": [3.0, 2.0, 2.5]}
    assert race.first_at(curve, 2.0) == 1 and race.first_at(curve, 1.9) is None


def test_the_cheapest_run_that_reaches_the_target_is_chosen(tmp_path, monkeypatch):
    trained = []

    def build(preset, *, seed, tokens, **options):
        trained.append(options)
        counter = Counter(options.get("steps", 100), [])
        # NorMuon ends at 2.5; AdamW at 3.0 at the best rate, better when longer.
        if options:
            loss = 3.0 + abs(options["lr"] - 0.01) * 10 - (counter.num_steps - 100) / 200
        else:
            loss = 2.5
        counter.evaluate = lambda: {"val_loss": loss}
        return counter

    monkeypatch.setattr(race.gpt, "build", build)
    runner = race.Race(tmp_path / "r.json", "tiny")
    target, chosen = runner.sweep([0.02, 0.01, 0.05], [1.5, 2, 3])
    assert target == 2.5 and chosen == {"optimizer": "adamw", "lr": 0.01, "table_lr_mul": 1.0, "steps": 200}
    count = len(trained)
    again = race.Race(tmp_path / "r.json", "tiny")
    assert again.sweep([0.02, 0.01, 0.05], [1.5, 2, 3]) == (target, chosen)
    assert len(trained) == count + 1  # only the look at the number of steps
    assert {"lr": 0.05, "optimizer": "adamw", "table_lr_mul": 1.0} in [
        row["options"] for row in again.body["sweep"]
    ]
    assert runner.sweep([0.02, 0.01], [1.5]) == (2.5, None)
    result = again.final(chosen)
    assert result["target"] == 2.5 and result["time_s"]["adamw"] is not None
    assert json.loads((tmp_path / "r.json").read_text())["race"] == result


def test_the_drawing_has_both_curves_and_the_arrivals():
    curve = {"step": [0, 5, 10], "time_s": [0.0, 10.0, 20.0], "val_loss": [6.0, 3.0, 2.5]}
    slow = {"step": [0, 10, 20], "time_s": [0.0, 20.0, 40.0], "val_loss": [6.0, 3.5, 2.5]}
    body = {
        "torch": "2", "threads": 2, "preset": "tiny",
        "race": {
            "target": 2.5, "time_s": {"ratio": 2.0}, "curves": {"normuon": curve, "adamw": slow},
            "adamw_options": {"lr": 0.01},
        },
    }  # fmt: skip
    root = ElementTree.fromstring(race_svg(body))
    name = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{name}polyline")) == 2 and len(root.findall(f"{name}circle")) == 2
    texts = [t.text for t in root.findall(f"{name}text")]
    assert "20 s" in texts and "40 s" in texts and "AdamW needs 2.00 times as long to the same loss" in texts


def test_one_thread_is_drawn_over_its_processor_time():
    curve = {"step": [0, 5], "time_s": [0.0, 90.0], "cpu_s": [0.0, 10.0], "val_loss": [6.0, 2.5]}
    slow = {"step": [0, 9], "time_s": [0.0, 95.0], "cpu_s": [0.0, 30.0], "val_loss": [6.0, 2.4]}
    race_part = {
        "target": 2.5, "time_s": {"ratio": 1.06}, "cpu_s": {"ratio": 3.0},
        "curves": {"normuon": curve, "adamw": slow}, "adamw_options": {"lr": 0.01},
    }  # fmt: skip
    drawing = race_svg({"torch": "2", "threads": 1, "race": race_part})
    assert ">10 s<" in drawing and ">30 s<" in drawing and "3.00 times" in drawing and ">90 s<" not in drawing


@pytest.mark.parametrize(("low", "high"), [(0, 1), (2.4, 6.1), (0, 83.7), (1e-3, 2e-3)])
def test_ticks_are_few_round_and_inside(low, high):
    ticks = nice_ticks(low, high)
    assert 3 <= len(ticks) <= 9 and low <= ticks[0] and ticks[-1] <= high * (1 + 1e-9)
