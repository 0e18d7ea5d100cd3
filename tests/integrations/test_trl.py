"""The patched GRPO trainer: losses and gradients of the stock one, over several steps."""

from __future__ import annotations

import warnings
from unittest.mock import Mock

import pytest
import torch
from integrations.tiny_models import VOCAB, causal_lm, tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import trl
    from transformers import AutoModelForCausalLM
    from trl import GRPOTrainer

    from leanstep.integrations.trl import LeanGRPOTrainer, apply_leanstep

# TRL and its dependencies warn about their own deprecations; ours stay errors elsewhere.
pytestmark = pytest.mark.filterwarnings("ignore")


def make(trainer_class, tmp_path, family="qwen2", model=None, optimizers=(None, None), **options):
    from datasets import Dataset

    model = model if model is not None else causal_lm(family)
    if options.get("beta"):
        # TRL loads the reference model by name: give it a folder.
        model.save_pretrained(tmp_path / "model")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    prompts = [" ".join(f"w{(7 * i + j) % 200}" for j in range(3 + 4 * i)) for i in range(4)]
    kind = "RLOO" if issubclass(trainer_class, trl.RLOOTrainer) else "GRPO"
    arguments = getattr(trl, f"{kind}Config")(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=9,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        gradient_checkpointing=False,
        learning_rate=1e-2,
        seed=3,
        **options,
    )
    return trainer_class(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(set(c.split()))) for c in completions],
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer(),
        optimizers=optimizers,
    )


def batch(seed=0, masked_sample=False):
    """What `_compute_loss` gets: left-padded prompts, ragged completions."""
    generator = torch.Generator().manual_seed(seed)
    prompt_ids = torch.randint(0, VOCAB - 3, (4, 12), generator=generator)
    completion_ids = torch.randint(0, VOCAB - 3, (4, 7), generator=generator)
    prompt_mask = torch.ones(4, 12, dtype=torch.long)
    prompt_mask[0, :5] = 0
    prompt_mask[3, :9] = 0
    completion_mask = torch.ones(4, 7, dtype=torch.long)
    completion_mask[1, 3:] = 0
    if masked_sample:
        completion_mask[2, :] = 0
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": torch.tensor([0.9, -0.4, 0.3, -1.1]),
        "num_items_in_batch": completion_mask.sum(),
        "ref_per_token_logps": -torch.rand(4, 7, generator=generator) - 4,
        "old_per_token_logps": -torch.rand(4, 7, generator=generator) * 0.2 - 5,
    }


OPTIONS = [
    {"beta": 0.0, "temperature": 0.8},
    {"beta": 0.1, "entropy_coef": 0.05},
    {"loss_type": "grpo", "entropy_coef": 0.02, "temperature": 1.3},
    {"loss_type": "dr_grpo", "top_entropy_quantile": 0.5},
    {"importance_sampling_level": "sequence", "cast_lm_head_to_fp32": True},
    {"router_aux_loss_coef": 0.3, "family": "qwen3_moe"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o))
@pytest.mark.parametrize("masked_sample", [False, True])
def test_loss_and_gradients_equal_the_stock_trainer(tmp_path, options, masked_sample):
    stock = make(GRPOTrainer, tmp_path / "a", **options)
    lean = make(LeanGRPOTrainer, tmp_path / "b", **options)
    for trainer in (stock, lean):
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
    inputs = batch(masked_sample=masked_sample)
    losses = []
    for trainer in (stock, lean):
        trainer.model.zero_grad()
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=2e-4, abs=1e-5)
    for (name, a), (_, b) in zip(lean.model.named_parameters(), stock.model.named_parameters(), strict=True):
        torch.testing.assert_close(
            a.grad, b.grad, rtol=5e-3, atol=5e-4 * b.grad.abs().max().item() + 1e-7, msg=name
        )


def test_trls_luspo_equals_policy_loss(tmp_path):
    from leanstep.heads import policy_loss

    options = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
    trainer = make(LeanGRPOTrainer, tmp_path, loss_type="luspo", **options)
    trainer.current_gradient_accumulation_steps = 1
    inputs, seen = batch(masked_sample=True), []
    scores = trainer._get_per_token_logps_and_entropies
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (
        seen.append(scores(*args, **kwargs)) or seen[-1]
    )
    theirs = trainer._compute_loss(trainer.model, inputs)
    logp = seen[0][0]
    flat = [
        x.reshape(-1)
        for x in (logp, inputs["old_per_token_logps"], inputs["advantages"][:, None].expand(4, 7))
    ]
    ours = policy_loss(
        *flat, objective="gspo", mask=inputs["completion_mask"].reshape(-1), normalizer="sequence_sum",
        sequence_lengths=[7] * 4,
    )  # fmt: skip
    assert ours.loss.item() == pytest.approx(theirs.item(), rel=1e-5)
    expected, found = (torch.autograd.grad(x, logp, retain_graph=True)[0] for x in (theirs, ours.loss))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_five_steps_give_the_stock_losses(tmp_path, kind):
    logs = []
    for lean in (False, True):
        torch.manual_seed(0)
        # RLOO has no trainer class of ours: the verb takes TRL's.
        trainer_class = LeanGRPOTrainer if lean and kind == "GRPO" else getattr(trl, f"{kind}Trainer")
        options = {"entropy_coef": 0.01} if kind == "GRPO" else {}
        trainer = make(
            trainer_class,
            tmp_path / str(lean),
            max_steps=5,
            beta=0.05,
            gradient_accumulation_steps=2,
            **options,
        )
        if lean and kind == "RLOO":
            assert apply_leanstep(trainer) is trainer
        trainer.train()
        logs.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(logs[0]) == 5
    assert logs[1] == pytest.approx(logs[0], rel=2e-3, abs=2e-4)


def test_five_steps_of_distillation_give_the_stock_losses(tmp_path, monkeypatch):
    from datasets import Dataset
    from trl.trainer import distillation_trainer

    from leanstep.integrations import trl_distill

    divergence, stock = Mock(wraps=trl_distill.divergence_loss), distillation_trainer._chunked_divergence_loss
    monkeypatch.setattr(trl_distill, "divergence_loss", divergence)
    found = []
    for lean in (False, True):
        torch.manual_seed(0)
        arguments = trl.DistillationConfig(
            output_dir=str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2,
            max_steps=5, max_completion_length=7, beta=0.5, use_cpu=True, bf16=False, report_to=[],
            save_strategy="no", logging_steps=1, disable_tqdm=True, gradient_checkpointing=False,
            learning_rate=0.05, optim="sgd", seed=3,
        )  # fmt: skip
        trainer = trl.DistillationTrainer(
            model=causal_lm("qwen2"),
            teacher_model=causal_lm("qwen2", seed=4, width=48),
            args=arguments,
            train_dataset=Dataset.from_dict(
                {"prompt": [f"w{i} w{i + 7}" + " w3" * (i % 4) for i in range(20)]}
            ),
            processing_class=tokenizer(),
        )
        if lean:
            apply_leanstep(trainer)
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        found.append((logs, torch.cat([p.detach().flatten() for p in trainer.model.parameters()])))
        # Ours is in place while the trainer computes a loss, and only then.
        assert divergence.call_count == (10 if lean else 0)
        assert distillation_trainer._chunked_divergence_loss is stock
    assert len(found[0][0]) == 5
    for theirs, ours in zip(found[0][0], found[1][0], strict=True):
        for name in ("loss", "grad_norm", "entropy"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
    assert (found[1][1] - found[0][1]).norm() <= 1e-4 * found[0][1].norm()


def test_an_unknown_trl_version_is_refused(tmp_path, monkeypatch):
    from importlib import metadata

    from leanstep.integrations.versions import UnknownVersion

    trainer = make(GRPOTrainer, tmp_path)
    monkeypatch.setattr(metadata, "version", lambda package: "1.99.0")
    with pytest.raises(UnknownVersion, match=r"trl: this adapter was not tested with version 1.99.0"):
        apply_leanstep(trainer)
    assert apply_leanstep(trainer, allow_untested=True) is trainer


def test_something_else_than_a_grpo_trainer_is_refused():
    with pytest.raises(ValueError, match=r"expected TRL's GRPO, RLOO, .*, got object"):
        apply_leanstep(object())
