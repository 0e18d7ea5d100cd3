"""The reward trainer: losses, weights and logged metrics of the stock one, step by step; ranked groups."""

from __future__ import annotations

import warnings
from itertools import combinations

import pytest
import torch
from integrations.tiny_models import VOCAB, config, tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, TrainerCallback
    from trl import RewardConfig, RewardTrainer

    from leanstep.integrations.trl import GroupCollator, LeanRewardTrainer, reward_loss

# TRL and its dependencies warn about their own deprecations; ours stay errors elsewhere.
pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 4
METRICS = ("loss", "grad_norm", "num_tokens", "min_reward", "mean_reward", "max_reward", "accuracy", "margin")


def reward_model(family="qwen2", seed=0):
    torch.manual_seed(seed)
    settings = config(family)
    settings.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(settings, attn_implementation="eager").float()
    with torch.no_grad():
        # Rewards of order one, so that the logistic is not linear and margins matter.
        model.score.weight.mul_(30.0)
    return model


def token_lists(count, seed=0):
    """Ragged lengths 3 .. 20, so that every batch is padded."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 21, (count,), generator=generator).tolist()
    return [torch.randint(0, VOCAB - 3, (n,), generator=generator).tolist() for n in lengths]


def pairs(count=10, margin=False):
    columns = {"chosen_ids": token_lists(count, 1), "rejected_ids": token_lists(count, 2)}
    if margin:
        columns["margin"] = [0.3 * i - 0.5 for i in range(count)]
    return Dataset.from_dict(columns)


class Watch(TrainerCallback):
    """A copy of the gradients before, and of the weights after, every update."""

    def __init__(self):
        self.gradients, self.weights = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})

    def on_step_end(self, args, state, control, model=None, **_):
        self.weights.append({n: p.detach().clone() for n, p in model.named_parameters()})


def make(trainer_class, tmp_path, data, *, model=None, watch=None, optimizers=(None, None), **options):
    # Plain SGD: Adam would turn the rounding of a gradient near zero into a whole step.
    options = {"max_steps": STEPS, "save_strategy": "no", "learning_rate": 0.1, "optim": "sgd"} | options
    evaluation = options.pop("eval_dataset", None)
    arguments = RewardConfig(
        output_dir=str(tmp_path / trainer_class.__name__),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        use_cpu=True,
        bf16=False,
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        gradient_checkpointing=False,
        seed=3,
        **options,
    )
    return trainer_class(
        model=reward_model() if model is None else model,
        args=arguments,
        train_dataset=data,
        eval_dataset=evaluation,
        processing_class=tokenizer(),
        callbacks=[] if watch is None else [watch],
        optimizers=optimizers,
    )


def run(trainer_class, tmp_path, data, **options):
    watch = Watch()
    trainer = make(trainer_class, tmp_path, data, watch=watch, **options)
    trainer.train()
    return trainer, watch


def logs(trainer, names=METRICS, prefix=""):
    names = [prefix + name for name in names]
    return [[entry[n] for n in names] for entry in trainer.state.log_history if names[0] in entry]


def assert_same_steps(lean, stock, rtol=1e-4):
    assert len(lean) == len(stock) == STEPS
    for step, (ours, theirs) in enumerate(zip(lean, stock, strict=True)):
        for name, expected in theirs.items():
            scale = expected.abs().max().item()
            torch.testing.assert_close(
                ours[name], expected, rtol=rtol, atol=rtol * scale + 1e-9, msg=f"step {step} {name}"
            )


OPTIONS = {
    "pairs": {},
    "margin": {"margin": True},
    "centred": {"center_rewards_coefficient": 0.05},
    "margin and centred": {"margin": True, "center_rewards_coefficient": 0.05},
    "accumulated": {"margin": True, "gradient_accumulation_steps": 2},
    "padded to a multiple": {"pad_to_multiple_of": 16},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_steps_equal_the_stock_trainer(tmp_path, name):
    options = dict(OPTIONS[name])
    # Ten pairs in batches of four: the last batch of an epoch is a short one.
    data = pairs(margin=options.pop("margin", False))
    stock, theirs = run(RewardTrainer, tmp_path, data, **options)
    lean, ours = run(LeanRewardTrainer, tmp_path, data, **options)
    expected, found = logs(stock), logs(lean)
    assert len(expected) == STEPS
    for a, b in zip(found, expected, strict=True):
        assert a == pytest.approx(b, rel=2e-4, abs=2e-5)
    assert_same_steps(ours.gradients, theirs.gradients, rtol=2e-3)
    assert_same_steps(ours.weights, theirs.weights, rtol=2e-3)


def test_evaluation_equals_the_stock_trainer(tmp_path):
    results = []
    for trainer_class in (RewardTrainer, LeanRewardTrainer):
        trainer = make(trainer_class, tmp_path, pairs(), eval_dataset=pairs(7, margin=True))
        metrics = trainer.evaluate()
        results.append([metrics["eval_loss"], *logs(trainer, METRICS[3:], "eval_")[0]])
    assert results[1] == pytest.approx(results[0], rel=1e-5, abs=1e-6)


def test_text_columns_are_tokenised_as_by_the_stock_trainer(tmp_path):
    words = [" ".join(f"w{i}" for i in ids) for ids in token_lists(16, 4)]
    data = Dataset.from_dict({"chosen": words[:8], "rejected": words[8:]})
    stock, lean = (run(c, tmp_path, data)[0] for c in (RewardTrainer, LeanRewardTrainer))
    losses = [[entry[0] for entry in logs(trainer, METRICS[:1])] for trainer in (stock, lean)]
    assert losses[1] == pytest.approx(losses[0], rel=2e-4)
    assert logs(lean, ["num_tokens"]) == logs(stock, ["num_tokens"])


def test_groups_of_two_equal_the_stock_pairs(tmp_path):
    data = pairs(8)
    grouped = Dataset.from_dict(
        {"answer_ids": [[p["rejected_ids"], p["chosen_ids"]] for p in data], "labels": [[0, 1]] * len(data)}
    )
    stock, theirs = run(RewardTrainer, tmp_path, data)
    lean, ours = run(LeanRewardTrainer, tmp_path, grouped)
    shared = METRICS[:6]
    for a, b in zip(logs(lean, shared), logs(stock, shared), strict=True):
        assert a == pytest.approx(b, rel=2e-4, abs=2e-5)
    assert_same_steps(ours.weights, theirs.weights, rtol=2e-3)


def ranked(sizes=(3, 2, 1, 5)):
    answers, groups, first = token_lists(sum(sizes), 6), [], 0
    for size in sizes:
        # Two answers of one prompt may tie: they are no pair.
        groups.append({"answer_ids": answers[first : first + size], "labels": [i // 2 for i in range(size)]})
        first += size
    return groups


def test_ranked_groups_train_on_every_pair_of_a_prompt(tmp_path):
    groups = ranked()
    trainer, watch = run(LeanRewardTrainer, tmp_path, Dataset.from_list(groups), max_steps=1)
    model = reward_model()
    model.config.pad_token_id = tokenizer().pad_token_id
    model.eval()
    losses = []
    for group in groups:
        # One answer at a time: no padding in the plain version.
        rewards = [model(input_ids=torch.tensor([ids])).logits[0, 0] for ids in group["answer_ids"]]
        for i, j in combinations(range(len(rewards)), 2):
            if group["labels"][i] != group["labels"][j]:
                sign = 1 if group["labels"][i] > group["labels"][j] else -1
                losses.append(torch.nn.functional.softplus(-sign * (rewards[i] - rewards[j])))
    assert len(losses) == 2 + 0 + 0 + 8
    expected = torch.stack(losses).mean()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected.item(), rel=1e-4)
    expected.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert trainer.state.log_history[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    for name, parameter in model.named_parameters():
        expected_grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(watch.gradients[0][name], expected_grad, rtol=2e-3, atol=2e-5, msg=name)


def test_a_batch_without_any_preference_has_zero_loss_and_gradient(tmp_path):
    group = {"answer_ids": token_lists(3), "labels": [1, 1, 1]}
    trainer, watch = run(LeanRewardTrainer, tmp_path, Dataset.from_list([group]), max_steps=1)
    assert trainer.state.log_history[0]["loss"] == 0
    assert all(not gradient.any() for gradient in watch.gradients[0].values())


def test_groups_longer_than_max_length_are_left_out(tmp_path):
    groups = [
        {"answer_ids": [[1] * 5, [2] * 30], "labels": [0, 1]},
        {"answer_ids": [[1] * 5, [2] * 6], "labels": [0, 1]},
    ]
    trainer = make(LeanRewardTrainer, tmp_path, Dataset.from_list(groups), max_length=8)
    assert [len(g["answer_ids"][1]) for g in trainer.train_dataset] == [6]


def test_centring_of_groups_is_refused(tmp_path):
    with pytest.raises(ValueError, match="center_rewards_coefficient: expected None with groups"):
        make(LeanRewardTrainer, tmp_path, Dataset.from_list(ranked()), center_rewards_coefficient=0.1)


def test_one_label_per_answer():
    with pytest.raises(ValueError, match="labels: expected one per answer, got 1 for 2 answers"):
        GroupCollator(0)([{"answer_ids": [[1], [2]], "labels": [1]}])


def test_a_margin_with_groups_is_refused():
    with pytest.raises(ValueError, match="margin: expected None with groups"):
        reward_loss(
            torch.zeros(2), margin=torch.ones(1), offsets=torch.tensor([0, 2]), labels=torch.tensor([0, 1])
        )


def norm_muon_run(trainer_class, tmp_path, resume=None):
    from leanstep.muon import NorMuon, split_params

    model = reward_model()
    optimizer = NorMuon(split_params(model), lr=5e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
    trainer = make(
        trainer_class, tmp_path, pairs(margin=True), model=model, optimizers=(optimizer, schedule),
        save_strategy="steps", save_steps=2,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer, {n: p.detach().clone() for n, p in model.named_parameters()}


def test_norm_muon_through_the_optimizers_argument(tmp_path):
    stock, theirs = norm_muon_run(RewardTrainer, tmp_path)
    lean, ours = norm_muon_run(LeanRewardTrainer, tmp_path)
    rates = [rate for (rate,) in logs(lean, ["learning_rate"])]
    assert rates == pytest.approx([5e-3 * 0.8**step for step in range(STEPS)])
    for a, b in zip(logs(lean), logs(stock), strict=True):
        assert a == pytest.approx(b, rel=2e-3, abs=2e-4)
    start = dict(reward_model().named_parameters())
    for name, expected in theirs.items():
        # By norm: single entries whose gradient is rounding noise may step either way.
        moved = (expected - start[name]).norm()
        assert 0 < moved and (ours[name] - expected).norm() < 0.05 * moved, name
    _, resumed = norm_muon_run(
        LeanRewardTrainer, tmp_path, resume=str(tmp_path / "LeanRewardTrainer" / "checkpoint-2")
    )
    for name, expected in ours.items():
        assert torch.equal(resumed[name], expected), name


def test_an_unknown_trl_version_is_refused(tmp_path, monkeypatch):
    from importlib import metadata

    from leanstep.integrations.versions import UnknownVersion

    monkeypatch.setattr(metadata, "version", lambda package: "1.99.0")
    with pytest.raises(UnknownVersion, match=r"trl: this adapter was not tested with version 1.99.0"):
        LeanRewardTrainer(model=None)


@pytest.mark.parametrize("with_margin", [False, True])
def test_reward_loss_equals_trls(with_margin):
    rewards = torch.randn(10, dtype=torch.float64, requires_grad=True)
    margin = torch.rand(5, dtype=torch.float64) if with_margin else None
    ours = reward_loss(rewards, margin=margin)
    chosen, rejected = rewards.chunk(2)
    expected = -torch.nn.functional.logsigmoid(chosen - rejected - (margin if with_margin else 0)).mean()
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    (a,) = torch.autograd.grad(ours, rewards)
    (b,) = torch.autograd.grad(expected, rewards)
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_an_odd_number_of_rewards_is_refused():
    with pytest.raises(ValueError, match=r"rewards: expected an even number in one row, got shape \(3,\)"):
        reward_loss(torch.zeros(3))
