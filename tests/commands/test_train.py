"""`leanstep train`: exit codes, one-line errors, records, JSON."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import dataclass
from typing import Literal

import pytest
import torch

from leanstep import cli
from leanstep.commands import train as command
from leanstep.recipes import Cadence, World
from leanstep.recipes.settings import check_settings, setting


class Slope:
    """A recipe whose loss falls along a line that depends on the seed."""

    name = "slope"
    cadence = Cadence(log=2, evaluate=2, save=4)

    def __init__(self, seed, steps, slope, ranks):
        self.settings = {"seed": seed, "steps": steps, "slope": slope}
        self.num_steps, self.seed, self.slope = steps, seed, slope
        self.loss = torch.tensor(5.0 + 0.01 * (seed % 3))

    def step(self, i):
        self.loss = self.loss - self.slope
        return {"loss": self.loss, "tokens": 8}

    def evaluate(self):
        return {"val_loss": float(self.loss)}

    def state_dict(self):
        return {"loss": self.loss}

    def load_state_dict(self, state):
        self.loss = state["loss"]


@dataclass(frozen=True)
class SlopeModel:
    offset: float = 0.0
    layers: tuple[int, ...] = (1,)
    side: Literal["left", "right"] = "left"


@dataclass(frozen=True)
class SlopeSettings:
    slope: float = setting(0.25, above=0)

    def __post_init__(self):
        check_settings(self)


@pytest.fixture(autouse=True)
def slope_recipe(monkeypatch):
    module = types.ModuleType("leanstep.recipes.slope")
    module.PRESETS = {"tiny": "a line"}
    module.SETTINGS = SlopeSettings

    module.MODEL = SlopeModel

    def build(preset, *, seed=0, steps=None, world=None, model=None, **given):
        assert isinstance(world, World)
        built = Slope(seed, steps or 10, SlopeSettings(**given).slope, world.size)
        fields = SlopeModel(**(model or {}))
        # Noise of the seed that the change does not share.
        built.loss += fields.offset * (1 + 0.1 * seed)
        built.settings["model"] = str(fields)
        return built

    module.build = build
    monkeypatch.setitem(sys.modules, "leanstep.recipes.slope", module)
    monkeypatch.setattr(command, "RECIPES", (*command.RECIPES, "slope"))


def train(capsys, *arguments):
    code = cli.run(["train", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_run_writes_its_result_as_one_json_object(tmp_path, capsys):
    code, out, err = train(capsys, "slope", "--out", tmp_path / "r", "--seed", 1, "--json", "-")
    result = json.loads(out)
    assert code == 0 and result["stopped_by"] == "end" and result["step"] == 10
    assert [e["step"] for e in result["evaluations"]] == [0, 2, 4, 6, 8, 10]
    assert result["evaluations"][-1]["val_loss"] == pytest.approx(2.51, abs=1e-4)
    assert "step:10/10 val_loss:2.5100 train_time:" in err


def test_resume_goes_on_where_the_run_stopped(tmp_path, capsys):
    assert train(capsys, "slope", "--out", tmp_path, "--stop-after", 5)[0] == 0
    code, _, err = train(capsys, "slope", "--out", tmp_path)
    assert code == 2 and err.startswith("leanstep: out: ") and "pass --resume" in err and err.count("\n") == 1
    code, out, err = train(capsys, "slope", "--out", tmp_path, "--resume", "--json", "-")
    assert code == 0 and "resumed at step 5/10" in err and json.loads(out)["step"] == 10
    code, _, err = train(capsys, "slope", "--out", tmp_path, "--resume", "--steps", 12)
    assert code == 2 and "steps was 10, now 12" in err


def test_a_target_stops_the_run_or_falls_short(tmp_path, capsys):
    code, out, _ = train(capsys, "slope", "--out", tmp_path / "a", "--target", 4.0, "--json", "-")
    assert code == 0 and json.loads(out)["step"] == 4
    code, _, err = train(capsys, "slope", "--out", tmp_path / "b", "--target", 1.0)
    assert code == 1 and "target: 1.0 not reached" in err.splitlines()[-1]


def test_a_record_counts_seeds_tests_the_mean_and_compares(tmp_path, capsys):
    code, out, _ = train(
        capsys,
        "slope",
        "--out",
        tmp_path / "a",
        "--runs",
        4,
        "--target",
        2.6,
        "--record",
        tmp_path / "old.json",
    )
    assert code == 0 and "target 2.6" in out
    arguments = ["slope", "--out", tmp_path / "b", "--runs", 4, "--target", 2.6, "--set", "slope=0.3"]
    code, out, _ = train(capsys, *arguments, "--against", tmp_path / "old.json", "--json", "-")
    result = json.loads(out)
    assert code == 0 and result["summary"]["n"] == 4 and result["summary"]["significant"]
    assert [run["seed"] for run in result["runs"]] == [0, 1, 2, 3]
    # 5.0x - 0.3 * 8 = 2.6x: exactly at the target after eight steps only without an offset (and rounding).
    assert all(run["reached_step"] in (8, 10) for run in result["runs"])
    assert result["runs"][1]["reached_step"] == result["runs"][2]["reached_step"] == 10
    assert result["comparison"]["loss_delta"] == pytest.approx(-0.5, abs=1e-4)
    assert (tmp_path / "b" / "record.json").exists()
    code, _, err = train(capsys, "slope", "--out", tmp_path / "c", "--runs", 2, "--target", 2.5)
    assert code == 1 and "not below 2.5 with p < 0.01" in err.splitlines()[-1]


def test_fields_of_the_model_can_be_set(tmp_path, capsys):
    arguments = ["slope", "--out", tmp_path / "r", "--json", "-"]
    code, out, _ = train(
        capsys, *arguments, "--set", "model.layers=3,10", "--set", "model.side=right", "--set", "slope=0.2"
    )
    settings = json.loads(out)["settings"]
    assert code == 0 and settings["slope"] == 0.2
    assert settings["model"] == str(SlopeModel(layers=(3, 10), side="right"))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--set", "model.side=up"], "slope: model.side: expected Literal['left', 'right'], got 'up'"),
        (["--set", "model.layers=x"], "slope: model.layers: expected tuple[int, ...], got 'x'"),
        (["--set", "model.width=1"], "slope: the model has no field 'width'; it has offset, layers, side"),
        (["--ablate", "offset"], "--ablate: expected FIELD=VALUE, got 'offset'"),
        (["--ablate", "offset=1", "--seeds", "1"], "--seeds: expected at least 2, got 1"),
        (
            ["--ablate", "offset=1", "--target", "1"],
            "--ablate: expected no --runs and no --target beside it; ",
        ),
    ],
)
def test_bad_fields_get_one_line(tmp_path, capsys, arguments, line):
    code, _, err = train(capsys, "slope", "--out", tmp_path, *arguments)
    assert code == 2 and err.startswith(f"leanstep: {line}") and err.count("\n") == 1


def test_ablations_are_paired_by_seed(tmp_path, capsys):
    arguments = ["slope", "--out", tmp_path, "--ablate", "offset=0.5,layers=3,10,offset=-0.5", "--seeds", 3]
    code, out, _ = train(capsys, *arguments)
    assert code == 0 and "3 paired runs" in out and "could see" in out
    code, out, _ = train(capsys, *arguments, "--resume", "--json", "-")
    rows = {row["variant"]: row for row in json.loads(out)["rows"]}
    assert list(rows) == ["unchanged", "offset=0.5", "layers=3,10", "offset=-0.5"]
    assert rows["offset=0.5"]["shift"] == pytest.approx(0.5 * 1.1, abs=1e-4)
    assert rows["offset=0.5"]["p_value"] < 0.05 < rows["layers=3,10"]["p_value"]
    assert rows["offset=-0.5"]["shift_high"] < 0


def test_a_diverged_seed_is_no_record(tmp_path, capsys):
    code, _, err = train(
        capsys, "slope", "--out", tmp_path, "--runs", 2, "--target", 2.5, "--set", "slope=1e38"
    )
    assert code == 1 and "record: seed 0 diverged: loss: -inf at step 4/10" in err.splitlines()[-1]
    assert not (tmp_path / "record.json").exists()


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_last_good_checkpoint(tmp_path, capsys):
    # 5 - k * 1e38 leaves float32 at the fourth step; the line of steps 3 and 4 is the first that shows it.
    arguments = ["slope", "--out", tmp_path / "r", "--set", "slope=1e38"]
    code, out, err = train(capsys, *arguments, "--save-every", 3)
    last = tmp_path / "r" / "checkpoints" / "step-00000003.safetensors"
    assert code == 1 and out == "" and last.exists()
    assert err.splitlines()[-1] == (
        f"leanstep: loss: -inf at step 4/10, stopping; the last good checkpoint is {last}"
    )
    code, _, err = train(capsys, *arguments[:2], tmp_path / "none", *arguments[3:], "--log-every", 5)
    assert code == 1 and "step 4/10, stopping; there is no checkpoint yet" in err.splitlines()[-1]
    # Saving before the log line is due must not write the weights that are lost already.
    arguments = [*arguments[:2], tmp_path / "s", *arguments[3:], "--log-every", 0, "--eval-every", 0]
    code, _, err = train(capsys, *arguments, "--save-every", 1)
    assert code == 1 and "not finite after step 4/10" in err.splitlines()[-1]
    assert sorted(p.name for p in (tmp_path / "s" / "checkpoints").iterdir())[-1] == last.name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "recipe: expected one of gpt, lens, grpo"),
        (["slope", "--preset", "vast"], "--preset: slope has no 'vast'; it has tiny"),
        (["slope", "--steps", "0"], "--steps: expected at least 1, got 0"),
        (["slope", "--keep", "0"], "--keep: expected at least 1, got 0"),
        (["slope", "--log-every", "-1"], "--log-every: expected at least 0, got -1"),
        (["slope", "--runs", "3"], "--target: expected a validation loss"),
        (["slope", "--record", "x.json"], "--runs: expected a number of seeds"),
        (["slope", "--target", "nan"], "--target: expected a finite loss"),
        (["slope", "--optimizer", "sgd"], "slope: no option 'optimizer'; it has slope"),
        (["slope", "--set", "slope"], "--set: expected KEY=VALUE, got 'slope'"),
        (["slope", "--set", "slope=-1"], "slope: slope: expected a number above 0, got -1"),
        (["slope", "--set", "slope=Infinity"], "slope: slope: expected a finite number, got inf"),
        (["slope", "--out", ""], "--out: expected a path, got ''"),
        (["slope", "--runs", "2", "--target", "1", "--record", ""], "--record: expected a path, got ''"),
        (["slope", "--steps", "100000000"], "--steps: expected at most 99999999, got 100000000"),
        (["slope", "--seed", "4294967296"], "--seed: expected at most 4294967295, got 4294967296"),
        (["gpt", "--set", "tokens=nan"], "gpt: tokens: expected a finite number, got nan"),
        (["gpt", "--set", "vocab_size=abc"], "gpt: vocab_size: expected a whole number, got 'abc'"),
        (
            ["gpt", "--set", "data=5"],
            "data: expected *train*.bin and *val*.bin shards in 5, found 0 and 0",
        ),
        (["gpt", "--set", "table_lr_mul=nan"], "gpt: table_lr_mul: expected a finite number, got nan"),
        (["gpt", "--set", "warmup=-1"], "gpt: warmup: expected at least 0, got -1"),
        (["gpt", "--set", "vocab_size=12"], "vocab_size: expected"),
        (["gpt", "--set", "micro_batches=7"], "gpt: tokens: expected a multiple of 16 x 7"),
        (["gpt", "--lr", "inf"], "gpt: lr: expected a finite number, got inf"),
        (["gpt", "--optimizer", "sgd"], "gpt: optimizer: expected normuon or adamw, got 'sgd'"),
        (["lens", "--set", "samples=1.5"], "lens: samples: expected a whole number, got '1.5'"),
        (["lens", "--set", "random_variants=100000"], "random_variants: expected at most 1024, got 100000"),
        (["grpo", "--set", "kl_coef=abc"], "grpo: kl_coef: expected a number, got 'abc'"),
        (["grpo", "--set", "temperature=0"], "grpo: temperature: expected a number above 0, got 0"),
        (["grpo", "--set", "width=20"], "grpo: "),
        (["slope", "--device", "tpu"], "device: expected cpu or cuda"),
        (
            ["slope", "--runs", "2", "--target", "1", "--against", "absent.json"],
            "--against: record: absent.json",
        ),
        (["slope", "--json", "absent/x.json"], "--json: the folder absent does not exist"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_two(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = train(capsys, *arguments)
    assert code == 2 and out == "" and err.count("\n") == 1 and message in err, err
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    code, _, err = train(capsys, "slope", "--out", tmp_path / "file")
    assert code == 2 and err.startswith("leanstep: --out: cannot work in") and err.count("\n") == 1
