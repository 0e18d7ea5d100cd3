"""The controller recipe: focus at the budget, resuming, and learning from preferences."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from leanstep.recipes.distributed import World
from leanstep.recipes.lens import PRESETS, Lens, LensSettings, build
from leanstep.recipes.tasks import FactTask
from leanstep.recipes.training_loop import Cadence, run

SMALL = {"width": 16, "lens_width": 8, "samples": 4, "evaluation_samples": 8}
TASK = FactTask(tokens=40, block=4, fact_blocks=1, values=2, fillers=8, questions=4)


def recipe(steps=6, **changes):
    settings = LensSettings(**{**SMALL, **changes})
    return Lens(settings, TASK, seed=0, steps=steps, preset="test", world=World())


def weights(r):
    return torch.cat([p.detach().reshape(-1) for m in (r.reader, r.lens) for p in m.parameters()])


def test_task_asks_for_facts_that_it_told():
    task = FactTask()
    tokens, answers = task.draw(5, torch.Generator().manual_seed(0))
    first_question = task.fillers + task.keys * task.values
    for row, mask in zip(tokens, answers, strict=True):
        body = row[: task.body]
        facts = body[body >= task.fillers] - task.fillers
        told = {int(f) // task.values: int(f) % task.values for f in facts}
        assert len(told) == task.keys and int(mask.sum()) == task.questions
        for question, answer in row[task.body :].view(-1, 2).tolist():
            assert told[question - first_question] == answer - first_question - task.keys
    with pytest.raises(ValueError, match="questions"):
        FactTask(tokens=40, fact_blocks=1, questions=5, block=2)


def test_every_focus_has_the_same_length_and_keeps_the_questions():
    r = recipe()
    tokens, _ = TASK.draw(6, torch.Generator().manual_seed(1))
    contexts = [*r.focus(tokens), *r.best_focus(tokens), *[v[-1] for v in r.variants(6, r.generator)]]
    for v in contexts:
        assert len(v.positions) == r.length
        assert v.positions[-8:].tolist() == list(range(32, 40)) and (v.lods[-8:] == 0).all()
    for v, row in zip(r.best_focus(tokens), tokens, strict=True):
        facts = ((row >= TASK.fillers) & (torch.arange(40) < TASK.body)).nonzero()[:, 0]
        raw = set(v.positions[v.lods == 0].tolist())
        assert set(facts.tolist()) <= raw


def test_stopped_and_resumed_equals_one_run(tmp_path: Path):
    cadence = Cadence(log=1, evaluate=3, save=2)
    whole = recipe()
    run(whole, tmp_path / "whole", cadence=cadence, say=lambda line: None)
    for stop in (4, None):
        part = recipe()
        run(
            part,
            tmp_path / "parts",
            resume=True,
            cadence=cadence,
            stop_after=stop,
            say=lambda line: None,
        )
    assert weights(whole).equal(weights(part))


def test_evaluation_leaves_everything_as_it_was():
    r = recipe()
    r.step(0)
    before, state = weights(r), r.generator.get_state()
    values = r.evaluate()
    assert weights(r).equal(before) and r.generator.get_state().equal(state)
    assert values["val_loss"] == values["val_nll_lens_focus"] and 0 <= values["preference_agreement"] <= 1


def test_base_model_learns_first_and_then_the_controller():
    r = recipe(steps=4, warm_fraction=0.5)
    reader, lens = (torch.cat([p.detach().reshape(-1) for p in m.parameters()]) for m in (r.reader, r.lens))
    r.step(0)
    moved = torch.cat([p.detach().reshape(-1) for p in r.reader.parameters()])
    assert not moved.equal(reader) and torch.cat([p.reshape(-1) for p in r.lens.parameters()]).equal(lens)
    r.step(1)
    frozen = torch.cat([p.detach().reshape(-1) for p in r.reader.parameters()])
    assert "lens_loss" in r.step(2)
    assert torch.cat([p.detach().reshape(-1) for p in r.reader.parameters()]).equal(frozen)
    assert not torch.cat([p.detach().reshape(-1) for p in r.lens.parameters()]).equal(lens)


def test_agreement_rises_within_a_few_steps():
    r = recipe(steps=60, warm_fraction=0.0, samples=8, evaluation_samples=24, kl_weight=0.0, lens_lr=0.01)
    for i in range(60):
        r.step(i)
    assert r.evaluate()["preference_agreement"] >= 0.75


def test_bad_options_are_named():
    assert set(PRESETS) == {"tiny", "small"}
    with pytest.raises(ValueError, match="preset"):
        build("huge")
    with pytest.raises(ValueError, match="budget"):
        build("tiny", budget=1.5)
    assert build("tiny", steps=3, samples=2).settings["samples"] == 2
