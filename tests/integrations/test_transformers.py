"""Losses, gradients and whole training runs equal to the stock Trainer's; NorMuon through `optimizers=`."""

from __future__ import annotations

import pytest
import torch
from integrations.tiny_models import FAMILIES, VOCAB, causal_lm
from transformers import Trainer, TrainingArguments

from leanstep.integrations.transformers import LeanTrainer, apply_leanstep, norm_muon

# transformers and accelerate warn about their own deprecations; ours stay errors elsewhere.
pytestmark = pytest.mark.filterwarnings("ignore")


class Rows(torch.utils.data.Dataset):
    """Padded sequences: a prompt without labels, a labelled answer, one sample without any label."""

    def __init__(self, size: int = 16, length: int = 20) -> None:
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(0, VOCAB - 3, (size, length), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.ids[index]
        labels = ids.clone()
        labels[:12] = -100
        end = 20 - index % 5
        labels[end:] = -100
        if index == 3:
            labels[:] = -100
        mask = torch.ones_like(ids)
        mask[end:] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def train(trainer_class, tmp_path, model, steps=4, resume=None, optimizer=None, **options):
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        max_steps=steps,
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        save_strategy=options.pop("save_strategy", "no"),
        learning_rate=1e-2,
        max_grad_norm=1.0,
        seed=3,
        lr_scheduler_type="linear",
        **options,
    )
    trainer = trainer_class(model, arguments, train_dataset=Rows(), optimizers=(optimizer, None))
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_the_stock_forward(family):
    stock, lean = causal_lm(family), apply_leanstep(causal_lm(family))
    batch = torch.utils.data.default_collate([Rows()[i] for i in range(5)])
    for model in (stock, lean):
        model.train()
    a, b = stock(**batch).loss, lean(**batch).loss
    assert b.item() == pytest.approx(a.item(), rel=1e-5)
    a.backward(), b.backward()
    for (name, p), (_, q) in zip(stock.named_parameters(), lean.named_parameters(), strict=True):
        scale = p.grad.abs().max().item()
        torch.testing.assert_close(q.grad, p.grad, rtol=2e-3, atol=1e-5 * scale + 1e-8, msg=name)


@pytest.mark.parametrize("asked", ["config", "call"])
def test_the_routers_auxiliary_loss_is_added(asked):
    models = [causal_lm("qwen3_moe").train() for _ in range(2)]
    for model in models:
        model.config.output_router_logits = asked == "config"
    stock, lean = models[0], apply_leanstep(models[1])
    batch = torch.utils.data.default_collate([Rows()[i] for i in range(5)])
    batch |= {"output_router_logits": True} if asked == "call" else {}
    a, b = stock(**batch), lean(**batch)
    assert b.aux_loss.item() == pytest.approx(a.aux_loss.item(), rel=1e-6) and a.aux_loss > 0
    assert b.loss.item() == pytest.approx(a.loss.item(), rel=1e-5)
    a.loss.backward(), b.loss.backward()
    for (name, p), (_, q) in zip(stock.named_parameters(), lean.named_parameters(), strict=True):
        scale = p.grad.abs().max().item()
        torch.testing.assert_close(q.grad, p.grad, rtol=2e-3, atol=1e-5 * scale + 1e-8, msg=name)


def test_a_router_that_is_weighted_in_another_way_is_refused():
    model = causal_lm("qwen3_moe")
    model.config.output_router_logits = True
    stock = type(model).forward

    def doubled(self, *args, **kwargs):
        outputs = stock(self, *args, **kwargs)
        outputs.loss = (
            None if outputs.loss is None else outputs.loss + self.router_aux_loss_coef * outputs.aux_loss
        )
        return outputs

    model.forward = doubled.__get__(model)
    with pytest.raises(ValueError, match="not support the auxiliary loss of Qwen3MoeForCausalLM's router"):
        apply_leanstep(model)


def test_training_gives_the_stock_losses_and_weights_with_accumulation(tmp_path):
    (stock, theirs), (lean, ours) = (
        train(kind, tmp_path / kind.__name__, causal_lm("qwen2"), gradient_accumulation_steps=2, optim="sgd")
        for kind in (Trainer, LeanTrainer)
    )
    assert len(stock) == 4
    assert lean == pytest.approx(stock, rel=1e-3)
    for (name, p), (_, q) in zip(theirs.model.named_parameters(), ours.model.named_parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=5e-3, atol=2e-3 * p.abs().max().item(), msg=name)


def test_norm_muon_with_clipping_schedule_checkpoint_and_resume(tmp_path):
    def run(folder, steps, resume=None):
        model = causal_lm("llama")
        return train(
            LeanTrainer, folder, model, steps=6, resume=resume, optimizer=norm_muon(model, lr=5e-3),
            save_strategy="steps", save_steps=3,
        )  # fmt: skip

    whole, trainer = run(tmp_path, 6)
    assert whole[-1] < whole[0]
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates[0] > rates[-1]
    expected = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    _, trainer = run(tmp_path, 6, resume=str(tmp_path / "checkpoint-3"))
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_label_smoothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="label_smoothing_factor: expected 0 with LeanTrainer"):
        train(LeanTrainer, tmp_path, causal_lm("llama"), label_smoothing_factor=0.1)


def test_a_model_without_a_causal_head_is_refused():
    with pytest.raises(ValueError, match="model: expected a transformers causal LM, got Linear"):
        apply_leanstep(torch.nn.Linear(2, 2))


def test_an_unknown_version_is_refused(monkeypatch):
    from importlib import metadata

    from leanstep.integrations.versions import UnknownVersion

    monkeypatch.setattr(metadata, "version", lambda package: "6.1.0")
    with pytest.raises(UnknownVersion, match=r"transformers: this adapter was not tested with version 6.1.0"):
        apply_leanstep(causal_lm("llama"))
