"""The loop on a toy recipe: exact resuming, signals, logging, targets, several ranks."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from leanstep.recipes import Cadence, current_world, run
from leanstep.recipes.checkpoint import CheckpointError, checkpoint_path, list_checkpoints, load, save
from leanstep.recipes.training_loop import Diverged, describe


class Walk:
    """A random walk that draws from every global generator and holds state of several kinds."""

    name = "walk"

    def __init__(self, steps=20, seed=0, cadence=None, at_step=None):
        self.settings = {"steps": steps, "seed": seed}
        self.num_steps, self.cadence = steps, cadence or Cadence(log=3, evaluate=5, save=4)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.weight, self.velocity, self.calls = torch.randn(5), torch.zeros(5), 0
        self.at_step = at_step or (lambda i: None)

    def step(self, i):
        self.at_step(i)
        assert i == self.calls
        self.calls += 1
        noise = torch.randn(5) * random.random() + float(np.random.rand())
        self.velocity = 0.9 * self.velocity + noise - self.weight
        self.weight = self.weight + 0.1 * self.velocity
        return {"loss": self.weight.square().mean(), "lr": 1 / (i + 1), "tokens": 7}

    def evaluate(self):
        torch.randn(3), random.random(), np.random.rand()  # an evaluation that samples must not disturb
        return {"val_loss": float(self.weight.norm())}

    def state_dict(self):
        return {"weight": self.weight, "velocity": self.velocity, "calls": self.calls}

    def load_state_dict(self, state):
        self.weight, self.velocity, self.calls = state["weight"], state["velocity"], state["calls"]


def metric_lines(out):
    clocks = ("train_time_s", "tokens_per_s")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in clocks} for line in lines]


def test_interruptions_change_neither_weights_nor_metrics(tmp_path):
    whole = Walk()
    outcome = run(whole, tmp_path / "whole", say=lambda line: None)
    assert (outcome.stopped_by, outcome.step) == ("end", 20)
    for stop in (0, 1, 6, 7, 13, None):
        part = Walk()
        outcome = run(part, tmp_path / "parts", resume=True, stop_after=stop, say=lambda line: None)
        torch.manual_seed(99)
    assert torch.equal(part.weight, whole.weight) and torch.equal(part.velocity, whole.velocity)
    assert metric_lines(tmp_path / "parts") == metric_lines(tmp_path / "whole")
    assert [e["step"] for e in outcome.evaluations] == [0, 5, 10, 15, 20]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("dies_at", [0, 3, 4, 9, 19])
def test_a_death_between_checkpoints_repeats_nothing(tmp_path, dies_at):
    def die(i):
        if i == dies_at:
            raise Killed

    whole = Walk()
    run(whole, tmp_path / "whole", say=lambda line: None)
    with pytest.raises(Killed):
        run(Walk(at_step=die), tmp_path / "b", say=lambda line: None)
    again, said = Walk(), []
    outcome = run(again, tmp_path / "b", resume=True, say=said.append)
    assert outcome.resumed_from == (None if dies_at < 4 else dies_at // 4 * 4)
    assert torch.equal(again.weight, whole.weight)
    assert metric_lines(tmp_path / "b") == metric_lines(tmp_path / "whole")


def test_how_often_one_evaluates_does_not_matter(tmp_path):
    often = Walk(cadence=Cadence(evaluate=1))
    run(often, tmp_path / "a", say=lambda line: None)
    never = Walk(cadence=Cadence(evaluate=0))
    run(never, tmp_path / "b", say=lambda line: None)
    assert torch.equal(often.weight, never.weight)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops_after_the_step(tmp_path, number):
    before = signal.getsignal(number)
    walk, said = Walk(at_step=lambda i: os.kill(os.getpid(), number) if i == 6 else None), []
    outcome = run(walk, tmp_path, say=said.append)
    name = signal.Signals(number).name
    assert (outcome.stopped_by, outcome.step) == (name, 7)
    assert outcome.checkpoint.name == "step-00000007.safetensors"
    assert said[-1] == f"{name}: saved step 7/20, stopping"
    assert signal.getsignal(number) is before
    whole, rest = Walk(), Walk()
    run(whole, tmp_path / "whole", say=lambda line: None)
    run(rest, tmp_path, resume=True, say=lambda line: None)
    assert torch.equal(rest.weight, whole.weight)


def test_the_target_ends_the_run_at_an_evaluation(tmp_path):
    free = run(Walk(), tmp_path / "free", say=lambda line: None)
    target = free.evaluations[2]["val_loss"]
    first = next(e for e in free.evaluations if e["val_loss"] <= target)
    outcome = run(Walk(), tmp_path / "t", target_loss=target, say=lambda line: None)
    assert outcome.stopped_by == "target" and outcome.last_evaluation["step"] == first["step"] == outcome.step


def test_logged_means_cover_each_step_once(tmp_path):
    run(Walk(cadence=Cadence(log=1, evaluate=0)), tmp_path / "each", say=lambda line: None)
    run(Walk(cadence=Cadence(log=8, evaluate=0)), tmp_path / "eight", say=lambda line: None)
    each = [line["loss"] for line in metric_lines(tmp_path / "each") if "loss" in line]
    eight = [line for line in metric_lines(tmp_path / "eight") if "loss" in line]
    assert [line["step"] for line in eight] == [8, 16, 20]
    assert [line["tokens"] for line in eight] == [56, 56, 28]
    expected = [np.mean(each[:8]), np.mean(each[8:16]), np.mean(each[16:])]
    assert [line["loss"] for line in eight] == pytest.approx(expected, rel=1e-12)


def test_a_used_directory_needs_resume(tmp_path):
    run(Walk(), tmp_path, say=lambda line: None)
    with pytest.raises(ValueError, match=r"out: .* already holds a run \(step-00000020"):
        run(Walk(), tmp_path)
    with pytest.raises(CheckpointError, match="steps was 20, now 30"):
        run(Walk(steps=30), tmp_path, resume=True, say=lambda line: None)
    finished = run(Walk(), tmp_path, resume=True, say=lambda line: None)
    assert finished.stopped_by == "end" and finished.resumed_from == 20
    assert len(finished.evaluations) == 5


def test_a_torn_checkpoint_costs_time_not_the_run(tmp_path):
    whole = Walk()
    run(whole, tmp_path / "whole", say=lambda line: None)
    run(Walk(), tmp_path / "t", stop_after=9, say=lambda line: None)
    newest = list_checkpoints(tmp_path / "t" / "checkpoints")[-1]
    newest.write_bytes(newest.read_bytes()[:100])
    said, again = [], Walk()
    outcome = run(again, tmp_path / "t", resume=True, say=said.append)
    assert outcome.resumed_from == 8 and "step-00000009.safetensors skipped" in said[0]
    assert torch.equal(again.weight, whole.weight)
    assert metric_lines(tmp_path / "t") == metric_lines(tmp_path / "whole")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda state: state["weight"].fill_(float("nan")), "weights.weight is not finite"),
        (lambda state: state.pop("velocity"), "state.recipe.velocity is missing"),
        (lambda state: state.update(velocity=torch.zeros(1, 5)), "state.recipe.velocity: expected"),
        (lambda state: state.update(calls=None), "state.recipe.calls: expected a number, got None"),
        (lambda state: state.update(weight="lost"), "state.recipe.weight: expected a tensor"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_skipped_with_a_line(tmp_path, spoil, message):
    whole = Walk()
    run(whole, tmp_path / "whole", say=lambda line: None)
    run(Walk(), tmp_path / "t", stop_after=9, say=lambda line: None)
    newest = load(list_checkpoints(tmp_path / "t" / "checkpoints")[-1])
    spoil(newest.state["recipe"])
    settings = {"recipe": "walk", **whole.settings}
    save(tmp_path / "t" / "checkpoints", 9, newest.state, settings=settings, keep=9)
    said, again = [], Walk()
    outcome = run(again, tmp_path / "t", resume=True, say=said.append)
    assert outcome.resumed_from == 8 and message in said[0] and "\n" not in said[0]
    assert torch.equal(again.weight, whole.weight)
    assert metric_lines(tmp_path / "t") == metric_lines(tmp_path / "whole")


def test_a_step_beyond_the_run_and_a_recipe_that_raises_are_refused(tmp_path):
    run(Walk(), tmp_path, stop_after=3, say=lambda line: None)
    only = load(list_checkpoints(tmp_path / "checkpoints")[-1])
    settings = {"recipe": "walk", "steps": 20, "seed": 0}
    save(tmp_path / "checkpoints", 21, only.state, settings=settings, keep=9)
    said = []
    assert run(Walk(), tmp_path, resume=True, stop_after=4, say=said.append).resumed_from == 3
    assert "step 21 is beyond the run's 20 steps" in said[0]

    checkpoint_path(tmp_path / "checkpoints", 21).unlink()

    class Picky(Walk):
        def load_state_dict(self, state):
            raise RuntimeError("Error(s) in loading:\n\tsize mismatch for weight")

    with pytest.raises(CheckpointError, match=r"RuntimeError: Error\(s\) in loading: size mismatch"):
        run(Picky(), tmp_path, resume=True, say=lambda line: None)


def test_foreign_bytes_in_the_metrics_do_not_cost_the_resume(tmp_path):
    run(Walk(), tmp_path / "whole", say=lambda line: None)
    run(Walk(), tmp_path / "t", stop_after=9, say=lambda line: None)
    path = tmp_path / "t" / "metrics.jsonl"
    path.write_bytes(b'\xff\n{"step": "soon"}\n' + path.read_bytes())
    said = []
    outcome = run(Walk(), tmp_path / "t", resume=True, say=said.append)
    assert outcome.resumed_from == 9
    assert "metrics.jsonl: line 1 is no metric line; 2 such lines left out" in said
    assert metric_lines(tmp_path / "t") == metric_lines(tmp_path / "whole")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_ends_the_run_before_it_is_saved(tmp_path, value):
    class Sick(Walk):
        def step(self, i):
            metrics = super().step(i)
            if i == 6:
                self.velocity[0] = value  # the loss of this step is still fine
            return metrics

    with pytest.raises(Diverged, match=r"after step 8/20, stopping; the last good .*step-00000004") as caught:
        run(Sick(cadence=Cadence(log=50, evaluate=50, save=4)), tmp_path / "a", say=lambda line: None)
    assert "not finite" in str(caught.value)
    with pytest.raises(Diverged, match=r"^val_loss: (nan|inf) at step 10/20"):
        run(Sick(cadence=Cadence(log=50, evaluate=5, save=0)), tmp_path / "b", say=lambda line: None)
    with pytest.raises(Diverged, match=r"^loss: (nan|inf) at step 9/20.*no checkpoint yet"):
        run(Sick(cadence=Cadence(log=3, evaluate=0, save=0)), tmp_path / "c", say=lambda line: None)
    assert metric_lines(tmp_path / "c")[-1]["loss"] in ("nan", "inf")


def test_progress_is_reported_after_every_step(tmp_path):
    seen = []
    run(Walk(), tmp_path, say=lambda line: None, report=lambda text, share: seen.append((text, share)))
    assert [share for _, share in seen] == [i / 20 for i in range(1, 21)]
    assert seen[0][0] == "1/20 " and seen[5][0].startswith("6/20 loss ") and seen[5][0].endswith(" tok/s")
    assert describe({"tokens_per_s": 5.0}) == "5 tok/s" and describe({}) == ""
    assert describe({"loss": 1.23456, "tokens_per_s": 12345.6}) == "loss 1.2346 · 12,346 tok/s"


def test_without_a_listener_lines_go_to_standard_error(tmp_path, capsys):
    run(Walk(), tmp_path)
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[-1].startswith("step:20/20 val_loss:")


def test_the_clock_stands_still_during_evaluation(tmp_path):
    class Slow(Walk):
        def evaluate(self):
            import time

            time.sleep(0.05)
            return super().evaluate()

    outcome = run(Slow(), tmp_path, say=lambda line: None)
    assert outcome.train_time_s < 0.1


class Averaged(Walk):
    """Two ranks with random numbers of their own that walk together: the state is the mean over ranks."""

    def step(self, i):
        metrics = super().step(i)
        for state in (self.weight, self.velocity):
            dist.all_reduce(state)
            state /= dist.get_world_size()
        return {**metrics, "rank": torch.tensor(float(dist.get_rank()))}


def walk_on_ranks(rank, world_size, folder):
    """One run left alone; one that gets SIGTERM on rank 1 and is resumed."""
    out, results = Path(folder), []
    for name, signal_at in (("whole", None), ("cut", 5), ("cut", None)):

        def maybe_signal(i, signal_at=signal_at):
            if i == signal_at and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        walk = Averaged(seed=rank, at_step=maybe_signal)
        walk.settings = {"steps": 20}
        outcome = run(walk, out / name, resume=True, world=current_world(), say=lambda line: None)
        results.append((walk.weight.numpy(), outcome.stopped_by, outcome.step))
    return results


def test_ranks_stop_together_save_once_and_resume_exactly(tmp_path, run_ranks):
    ranks = run_ranks(2, walk_on_ranks, str(tmp_path))
    for whole, cut, rest in ranks:
        assert cut[1:] == ("SIGTERM", 6) and rest[1:] == whole[1:] == ("end", 20)
        assert np.array_equal(rest[0], whole[0]) and not np.array_equal(cut[0], whole[0])
    assert metric_lines(tmp_path / "cut") == metric_lines(tmp_path / "whole")
    logged = [line for line in metric_lines(tmp_path / "whole") if "rank" in line]
    assert logged and all(line["rank"] == 0.5 for line in logged)
