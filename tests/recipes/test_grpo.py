"""The GRPO recipe: the task, the rows, learning from the reward, resuming."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from killing import stop_and_resume

from recipes.grpo.train import (
    END,
    FIRST_WORD,
    GPT,
    Settings,
    main,
    policy_loss,
    reward,
    roll_out,
)

SMALL = {
    "vocab": 200, "topics": 3, "words_per_topic": 16, "answer_words": 4, "min_prompt": 20, "max_prompt": 32,
    "purity": 0.7, "width": 32, "heads": 2, "prompts": 3, "group": 4, "demonstrations": 16,
    "evaluation_prompts": 8,
}  # fmt: skip
OPTIONS = [text for name, value in SMALL.items() for text in ("--" + name.replace("_", "-"), str(value))]
S = Settings(**SMALL)


def model_of(seed: int) -> GPT:
    torch.manual_seed(seed)
    model = GPT(S)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape)
    return model


def test_reward_counts_different_words_of_the_topic():
    first = FIRST_WORD + S.words_per_topic
    assert reward(S, [first, first + 1, first + 2, first + 3], 1) == 1.0
    assert reward(S, [first, first, first, first], 1) == 0.25
    assert reward(S, [first, END], 1) == 0.25
    assert reward(S, [first, first + 1, first + 2, first + 3], 0) == 0.0
    assert reward(S, [], 2) == 0.0


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_row_selection_changes_neither_loss_nor_gradients(kl_coef):
    s, model = replace(S, kl_coef=kl_coef, entropy_coef=0.05), model_of(0)
    batch = roll_out(model, model_of(1), s, torch.Generator().manual_seed(3))
    with torch.no_grad():  # ratios and the KL are not trivially 1 and 0
        for p in model.parameters():
            p += 0.02 * torch.randn(p.shape)
    outcomes = []
    for select in ("response", "all"):
        loss, metrics = policy_loss(model, batch, replace(s, select=select))
        outcomes.append((loss, metrics, torch.autograd.grad(loss, list(model.parameters()))))
    (kept, kept_metrics, kept_grads), (every, every_metrics, every_grads) = outcomes
    assert batch.plan.num_rows < batch.plan.T_local / 4
    torch.testing.assert_close(kept, every, rtol=1e-5, atol=1e-7)
    assert float(kept_metrics["entropy"]) == pytest.approx(float(every_metrics["entropy"]), rel=1e-5)
    for a, b in zip(kept_grads, every_grads, strict=True):
        assert float((a - b).abs().max()) <= 1e-5 * float(b.abs().max()) + 1e-8


def test_a_rollout_has_normalized_advantages_and_the_samples_log_probs():
    model = model_of(0)
    batch = roll_out(model, model, S, torch.Generator().manual_seed(0))
    grouped = batch.rewards.view(3, 4)
    expected = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    lengths = torch.tensor(batch.plan.splits)
    torch.testing.assert_close(batch.advantages, expected.flatten().repeat_interleave(lengths))
    tokens, rows = torch.cat(batch.sequences), batch.plan.rows
    log_p = model.head(model.hidden(batch.sequences)).log_softmax(-1)
    torch.testing.assert_close(batch.old_logp, log_p[rows, tokens[rows + 1]].detach(), rtol=1e-5, atol=1e-5)


def test_reward_rises(tmp_path: Path):
    main(["--out", str(tmp_path), *OPTIONS, "--steps", "100", "--warm-fraction", "0.4", "--eval-every", "20"])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rewards = {line["step"]: line["reward"] for line in lines if "eval" in line}
    assert rewards[100] > rewards[40] + 0.1
    last = [line for line in lines if "eval" not in line][-1]
    for name in ("reward", "loss", "entropy", "clip_fraction", "completion_length"):
        assert isinstance(last[name], float), name
    assert last["selected_rows"] < last["rows"] / 4


def test_stopped_and_resumed_ends_with_the_same_bits(tmp_path: Path):
    options = [*OPTIONS, "--kl-coef", "0.05", "--save-every", "3", "--eval-every", "4"]
    stop_and_resume(main, options, 12, (5, 7), tmp_path)


def test_the_row_selection_example_runs(capsys):
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "rl" / "row_selection.py"))
    example["main"](rounds=1)
    lines = capsys.readouterr().out.splitlines()
    assert "rows" in lines[0] and "all:" in lines[1] and "response:" in lines[2]
    assert float(lines[3].split()[-1]) < 1e-5
