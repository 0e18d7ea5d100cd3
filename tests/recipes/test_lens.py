"""The controller recipe: the task, focus at the budget, learning from preferences, a kill."""

from __future__ import annotations

import json

import pytest
import torch
from killing import kill_and_resume

from recipes.lens.train import Settings, best_focus, lens_focus, main, models, random_contexts, sequences

SMALL = ["--width", "16", "--lens-width", "8", "--samples", "4", "--evaluation-samples", "8"]
SMALL += ["--tokens", "40", "--fact-blocks", "1", "--values", "2", "--fillers", "8"]
SETTINGS = Settings(
    width=16, lens_width=8, samples=4, evaluation_samples=8, tokens=40, fact_blocks=1, values=2, fillers=8
)


def test_task_asks_for_facts_that_it_told():
    s = Settings()
    tokens, answers = sequences(s, 5, torch.Generator().manual_seed(0))
    first_question = s.fillers + s.keys * s.values
    for row, mask in zip(tokens, answers, strict=True):
        body = row[: s.body]
        facts = body[body >= s.fillers] - s.fillers
        told = {int(f) // s.values: int(f) % s.values for f in facts}
        assert len(told) == s.keys and int(mask.sum()) == s.questions
        for question, answer in row[s.body :].view(-1, 2).tolist():
            assert told[question - first_question] == answer - first_question - s.keys
    with pytest.raises(ValueError, match="questions"):
        Settings(tokens=40, fact_blocks=1, questions=5, block=2)


def test_every_focus_has_the_same_length_and_keeps_the_questions():
    s, draw = SETTINGS, torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    reader, lens = models(s, torch.device("cpu"))
    tokens, _ = sequences(s, 6, draw)
    best = best_focus(s, tokens)
    with torch.no_grad():
        chosen = lens_focus(reader, lens, s, tokens)
    for v in [*chosen, *best, *[v[-1] for v in random_contexts(s, 6, draw)]]:
        assert len(v.positions) == s.length
        assert v.positions[-8:].tolist() == list(range(32, 40)) and (v.lods[-8:] == 0).all()
    for v, row in zip(best, tokens, strict=True):
        facts = ((row >= s.fillers) & (torch.arange(40) < s.body)).nonzero()[:, 0]
        assert set(facts.tolist()) <= set(v.positions[v.lods == 0].tolist())


def test_agreement_rises_within_a_few_steps(tmp_path):
    options = ["--steps", "40", "--warm-fraction", "0", "--samples", "8", "--evaluation-samples", "24"]
    main(
        [
            "--out",
            str(tmp_path),
            *SMALL,
            *options,
            "--kl-weight",
            "0",
            "--lens-lr",
            "0.02",
            "--eval-every",
            "0",
        ]
    )
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["eval"] and lines[-1]["preference_agreement"] >= 0.75
    assert lines[1]["lens_loss"] > lines[-2]["lens_loss"] > 0


@pytest.mark.timeout(280)
def test_killed_and_resumed_ends_with_the_same_bits(tmp_path):
    options = [*SMALL, "--save-every", "5", "--eval-every", "4", "--warm-fraction", "0.5"]
    kill_and_resume("recipes.lens.train", options, 12, 6, tmp_path)
