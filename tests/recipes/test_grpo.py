"""The GRPO recipe: the task, the rows, and a run that learns and resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from leanstep.measure.peaks import measure_peak
from leanstep.recipes.distributed import World
from leanstep.recipes.grpo import PRESETS, Grpo, GrpoSettings, build, sample
from leanstep.recipes.tasks import ASK, END, FIRST_WORD, TopicTask
from leanstep.recipes.training_loop import Cadence, run

SMALL_TASK = TopicTask(
    vocab=200, topics=3, words_per_topic=16, answer_words=4, min_prompt=20, max_prompt=32, purity=0.7
)
SMALL = GrpoSettings(width=32, heads=2, prompts=3, group=4, demonstrations=16, evaluation_prompts=8)


def small_recipe(seed: int = 0, steps: int = 12, **changes) -> Grpo:
    settings = GrpoSettings(**{**SMALL.__dict__, **changes})
    return Grpo(settings, SMALL_TASK, seed=seed, steps=steps, preset="test", world=World())


def test_reward_counts_different_words_of_the_topic():
    first = FIRST_WORD + SMALL_TASK.words_per_topic
    assert SMALL_TASK.reward([first, first + 1, first + 2, first + 3], 1) == 1.0
    assert SMALL_TASK.reward([first, first, first, first], 1) == 0.25
    assert SMALL_TASK.reward([first, END], 1) == 0.25
    assert SMALL_TASK.reward([first, first + 1, first + 2, first + 3], 0) == 0.0
    assert SMALL_TASK.reward([ASK, END, 199, first + 15], 1) == 0.25
    assert SMALL_TASK.reward([], 2) == 0.0


def test_texts_are_ragged_long_and_about_their_topic():
    prompts, topics = SMALL_TASK.prompts(50, torch.Generator().manual_seed(0))
    assert {len(p) for p in prompts} <= set(range(20, 33)) and len({len(p) for p in prompts}) > 3
    for prompt, topic in zip(prompts, topics, strict=True):
        assert prompt[-1] == ASK
        words = prompt[:-1] - FIRST_WORD
        share = float((words.div(16, rounding_mode="floor") == topic).float().mean())
        assert share > 0.4
    shown = SMALL_TASK.demonstrations(5, torch.Generator().manual_seed(1))
    assert all(s[-1] == END and s[-6] == ASK for s in shown)


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_row_selection_changes_neither_loss_nor_gradients(kl_coef):
    recipe = small_recipe(kl_coef=kl_coef, entropy_coef=0.05)
    for i in range(3):
        recipe.step(i)
    rollout = recipe.roll_out()
    # Move the weights, so that ratios and the KL are not trivially 1 and 0.
    with torch.no_grad():
        generator = torch.Generator().manual_seed(2)
        for p in recipe.model.parameters():
            p += 0.02 * torch.randn(p.shape, generator=generator)
    results = []
    for select in ("response", "all"):
        metrics = recipe.loss_and_gradients(rollout, select)
        results.append((metrics, [p.grad.clone() for p in recipe.model.parameters()]))
        recipe.optimizer.zero_grad()
    (kept, kept_grads), (every, every_grads) = results
    assert rollout.plan.num_rows < rollout.plan.T_local / 4
    for name in ("loss", "entropy", "mean_ratio", "approx_kl", "clip_fraction"):
        assert float(kept[name]) == pytest.approx(float(every[name]), rel=1e-5, abs=1e-7), name
    for a, b in zip(kept_grads, every_grads, strict=True):
        assert float((a - b).abs().max()) <= 1e-5 * float(b.abs().max()) + 1e-8


def test_row_selection_needs_less_memory():
    recipe = small_recipe()
    rollout = recipe.roll_out()

    def update(select: str):
        def step():
            recipe.loss_and_gradients(rollout, select)
            grads = {str(i): p.grad for i, p in enumerate(recipe.model.parameters())}
            recipe.optimizer.zero_grad()
            return grads

        return step

    kept, every = (measure_peak(update(select), {}).peak_bytes for select in ("response", "all"))
    logits_bytes = (rollout.plan.T_local - rollout.plan.num_rows) * SMALL_TASK.vocab * 4
    assert every - kept > logits_bytes / 2


def test_advantages_are_normalised_within_groups():
    recipe = small_recipe()
    recipe.step(0)
    rollout = recipe.roll_out()
    grouped = rollout.advantages.view(3, 4)
    assert torch.allclose(grouped.mean(1), torch.zeros(3), atol=1e-5)
    rewards = rollout.rewards.view(3, 4)
    for advantage, reward in zip(grouped, rewards, strict=True):
        spread = reward.std()
        expected = (reward - reward.mean()) / (spread + 1e-4)
        assert torch.allclose(advantage, expected, atol=1e-5)
    assert torch.equal(rollout.lengths, torch.tensor(rollout.plan.splits))
    # Old log-probs are those of the tokens that were sampled.
    hidden = recipe.model.hidden(rollout.tokens, rollout.bounds)
    log_p = recipe.model.logits(hidden)[:, : SMALL_TASK.vocab].log_softmax(-1)
    rows = rollout.plan.rows
    assert rows is not None
    expected = log_p[rows, rollout.tokens[rows + 1]]
    assert torch.allclose(rollout.old_logp, expected, atol=1e-5)


def test_greedy_samples_are_the_likeliest_tokens():
    recipe = small_recipe()
    prompts, _ = SMALL_TASK.prompts(3, torch.Generator().manual_seed(4))
    tokens = sample(recipe.model, prompts, 3, torch.Generator(), temperature=0.0)
    for prompt, new in zip(prompts, tokens, strict=True):
        sequence = prompt
        for token in new:
            logits = recipe.model.logits(recipe.model.hidden(sequence))[-1, : SMALL_TASK.vocab]
            assert int(logits.argmax()) == int(token)
            if int(token) == END:
                break
            sequence = torch.cat((sequence, token[None]))


def test_reward_rises(tmp_path: Path):
    recipe = small_recipe(steps=100, warm_fraction=0.4)
    outcome = run(recipe, tmp_path, cadence=Cadence(log=20, evaluate=20, save=0))
    rewards = {line["step"]: line["reward"] for line in outcome.evaluations}
    assert rewards[100] > rewards[40] + 0.1
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "eval" not in line][-1]
    for name in ("reward", "loss", "entropy", "clip_fraction", "kept_rows", "rows", "completion_length"):
        assert isinstance(last[name], float), name
    assert last["kept_rows"] < last["rows"] / 4


@pytest.mark.parametrize("kl_coef", [0.0, 0.05])
def test_resumed_run_ends_with_the_same_weights(tmp_path: Path, kl_coef: float):
    def weights(recipe: Grpo) -> list[torch.Tensor]:
        return [p.detach().clone() for p in recipe.model.parameters()]

    straight = small_recipe(steps=8, kl_coef=kl_coef)
    run(straight, tmp_path / "a")
    first = small_recipe(steps=8, kl_coef=kl_coef)
    run(first, tmp_path / "b", stop_after=5)
    second = small_recipe(steps=8, kl_coef=kl_coef)
    outcome = run(second, tmp_path / "b", resume=True)
    assert outcome.resumed_from == 5
    assert all(torch.equal(a, b) for a, b in zip(weights(straight), weights(second), strict=True))


def test_presets_and_options():
    assert set(PRESETS) == {"tiny", "small"}
    recipe = build("tiny", seed=3, steps=10, select="all", lr=0.5)
    assert recipe.settings["select"] == "all" and recipe.settings["lr"] == 0.5
    assert recipe.num_steps == 10 and recipe.warm_steps == 5
    with pytest.raises(ValueError, match="preset: expected one of tiny, small"):
        build("huge")
    with pytest.raises(ValueError, match="select: expected all or response"):
        build("tiny", select="loss_mask")
    with pytest.raises(ValueError, match="group: expected at least 2"):
        build("tiny", group=1)
    with pytest.raises(ValueError, match="prompts: expected at least 1"):
        build("tiny", prompts=0)
    for bad in ({"vocab": 10}, {"min_prompt": 1}, {"answer_words": 99}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            TopicTask(**bad)


def test_the_row_selection_example_runs(capsys):
    import runpy

    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "rl" / "row_selection.py"))
    example["main"](rounds=1)
    lines = capsys.readouterr().out.splitlines()
    assert "rows" in lines[0] and "all:" in lines[1] and "response:" in lines[2]
    assert float(lines[3].split()[-1]) < 1e-5
