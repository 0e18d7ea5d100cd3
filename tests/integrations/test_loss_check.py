"""`apply_leanstep` compares the loss with the model's own: a family is right, or refused in one line."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from integrations.tiny_models import VOCAB, causal_lm
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from leanstep.integrations.causal_lm import unchanged
from leanstep.integrations.transformers import apply_leanstep

pytestmark = pytest.mark.filterwarnings("ignore")


def batch(length=9):
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, VOCAB - 3, (2, length), generator=generator)
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[0, :4], mask[1, -3:] = -100, 0
    labels[1, -3:] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def assert_right(stock, lean, **options):
    """Loss and gradients of a training forward."""
    found = []
    for model in (stock.train(), lean.train()):
        outputs = model(**batch(), **options)
        outputs[0].backward()
        found.append((outputs[0].item(), {n: p.grad for n, p in model.named_parameters()}))
    assert found[1][0] == pytest.approx(found[0][0], rel=2e-5)
    for name, gradient in found[0][1].items():
        if gradient is not None:
            limit = 1e-4 * gradient.abs().max().item() + 1e-7
            torch.testing.assert_close(found[1][1][name], gradient, rtol=2e-3, atol=limit, msg=name)


class Small(nn.Module):
    """A backbone that counts its calls in every way a module can."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.norm = nn.BatchNorm1d(16, track_running_stats=True)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("routed", torch.zeros(3))
        self.calls, self.lengths, self.plain = 0, [], torch.zeros(2)

    def forward(self, input_ids, attention_mask=None, use_cache=None):
        self.calls += 1
        self.lengths.append(input_ids.shape[1])
        self.plain += 1
        self.routed += 1
        torch.rand(1), np.random.rand(), random.random()
        x = self.embed(input_ids)
        x = self.norm(x.transpose(1, 2)).transpose(1, 2) + 0.1 * x.cumsum(1)
        return self.outputs(self.drop(x))

    def outputs(self, x):
        return (x,)


class Custom(PreTrainedModel):
    """As people write them: the base returns a tuple."""

    config_class, base_model_prefix = LlamaConfig, "backbone"
    backbone_class, shift = Small, 1

    def __init__(self, config=None):
        super().__init__(config or LlamaConfig(vocab_size=VOCAB))
        self.backbone, self.head = self.backbone_class(), nn.Linear(16, VOCAB)
        self.backbone.norm.eval()

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, attention_mask=None, labels=None, use_cache=None, scale=None):
        out = self.backbone(input_ids)
        logits = self.head(out[0] if isinstance(out, tuple) else out)
        loss = None
        if labels is not None:
            kept, labels = logits[:, : logits.shape[1] - self.shift], labels[:, self.shift :]
            loss = nn.functional.cross_entropy(kept.flatten(0, 1), labels.flatten())
        return CausalLMOutputWithPast(loss=loss if scale is None else loss * scale, logits=logits)


class Unshifted(Custom):
    shift = 0


class TensorBase(Custom):
    class backbone_class(Small):
        def outputs(self, x):
            return x


class MoreOutputs(Custom):
    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs["aux_loss"] = torch.zeros(())
        return outputs


def custom(kind=Custom):
    torch.manual_seed(0)
    return kind()


def without_dropout(model):
    model.backbone.drop.p = 0.0
    return model


def test_a_custom_model_whose_base_returns_a_tuple_works():
    stock, lean = (without_dropout(custom()) for _ in range(2))
    assert_right(stock, apply_leanstep(lean))


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        (Unshifted, "the loss of Unshifted is not the shifted cross-entropy of its head, it differs by"),
        (TensorBase, "expected a base model that returns last_hidden_state, backbone_class returns Tensor"),
        (MoreOutputs, "leanstep does not compute aux_loss of MoreOutputs"),
    ],
)
def test_other_custom_models_are_refused_with_what_to_call(kind, complaint):
    with pytest.raises(ValueError, match=f"model: .*{complaint}.*; call linear_cross_entropy") as error:
        apply_leanstep(custom(kind))
    assert "\n" not in str(error.value)


def test_an_argument_that_only_the_models_own_loss_knows_is_refused():
    model = apply_leanstep(custom()).train()
    with pytest.raises(ValueError, match="scale: leanstep's loss does not know this argument of Custom"):
        model(**batch(), scale=2.0)


def test_the_check_leaves_no_trace():
    """Modes of every module, counters, buffers, gradients and three generators."""
    for mode in (True, False):
        model = custom().train(mode)
        model.backbone.norm.train(not mode)
        model.head.weight.grad = torch.ones_like(model.head.weight)
        inner, lists = model.backbone, model.backbone.lengths
        before = [m.training for m in model.modules()]
        state = {name: x.clone() for name, x in model.state_dict().items()}
        torch.manual_seed(7), np.random.seed(7), random.seed(7)
        apply_leanstep(model)
        drawn = (torch.rand(1).item(), np.random.rand(), random.random())
        torch.manual_seed(7), np.random.seed(7), random.seed(7)
        assert drawn == (torch.rand(1).item(), np.random.rand(), random.random())
        assert [m.training for m in model.modules()] == before
        assert (inner.calls, inner.lengths) == (0, []) and inner.lengths is lists
        assert not inner.plain.any() and not inner.routed.any()
        for name, x in model.state_dict().items():
            assert torch.equal(x, state[name]), name
        assert model.head.weight.grad.eq(1).all() and model.backbone.embed.weight.grad is None


def test_unchanged_restores_after_an_error():
    model = custom().train()
    with pytest.raises(RuntimeError, match="stop"), unchanged(model):
        assert not model.training and not torch.is_grad_enabled()
        model(batch()["input_ids"])
        raise RuntimeError("stop")
    assert model.training and model.backbone.calls == 0 and not model.backbone.routed.any()


class Fixed:
    """A loss function of one's own."""

    def __call__(self, logits, labels, vocab_size, **options):
        return logits.float().mean()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_loss_function_of_ones_own_is_refused(when):
    model = causal_lm("llama").train()
    if when == "after":
        apply_leanstep(model)
    model.loss_function = Fixed()
    with pytest.raises(
        ValueError, match="expected ForCausalLMLoss as loss_function of LlamaForCausalLM, got Fixed"
    ):
        apply_leanstep(model)(**batch()) if when == "before" else model(**batch())
    model.eval()(**batch())


def test_hidden_states_attentions_and_cache_are_returned():
    stock, lean = causal_lm("llama").train(), apply_leanstep(causal_lm("llama")).train()
    asked = {"output_hidden_states": True, "output_attentions": True, "use_cache": True}
    a, b = stock(**batch(), **asked), lean(**batch(), **asked)
    for x, y in zip((*a.hidden_states, *a.attentions), (*b.hidden_states, *b.attentions), strict=True):
        assert torch.equal(x, y)
    assert b.past_key_values.get_seq_length() == a.past_key_values.get_seq_length()
    assert lean(**batch()).hidden_states is None


def test_a_tuple_has_the_stock_order():
    stock, lean = causal_lm("llama"), apply_leanstep(causal_lm("llama"))
    options = {"return_dict": False}
    assert_right(stock, lean, **options)
    a = stock(**batch(), output_hidden_states=True, use_cache=False, **options)
    b = lean(**batch(), output_hidden_states=True, **options)
    assert len(a) == len(b) and b[1] is None
    assert torch.equal(a[2][-1], b[2][-1])


@pytest.mark.parametrize("form", ["number", "index"])
def test_logits_to_keep_scores_the_kept_positions(form):
    stock, lean = causal_lm("llama").train(), apply_leanstep(causal_lm("llama")).train()
    inputs = batch()
    inputs["labels"] = inputs["labels"][:, -4:]
    keep = 4 if form == "number" else torch.arange(5, 9)
    a, b = (model(**inputs, logits_to_keep=keep).loss.item() for model in (stock, lean))
    assert b == pytest.approx(a, rel=1e-5)


def test_labels_of_another_length_are_refused():
    lean, inputs = apply_leanstep(causal_lm("llama")).train(), batch()
    inputs["labels"] = inputs["labels"][:, -4:]
    with pytest.raises(ValueError, match=r"labels: expected shape \(2, 9\), one per .*, got \(2, 4\)"):
        lean(**inputs)


def test_another_ignored_label_is_refused():
    with pytest.raises(ValueError, match="ignore_index: expected -100 with leanstep, got 5"):
        apply_leanstep(causal_lm("llama")).train()(**batch(), ignore_index=5)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_positional_arguments_mean_the_same(family):
    stock, lean = causal_lm(family).train(), apply_leanstep(causal_lm(family)).train()
    inputs = batch()
    second = (inputs["attention_mask"],) if family == "llama" else (None, inputs["attention_mask"])
    a, b = (model(inputs["input_ids"], *second, labels=inputs["labels"]).loss for model in (stock, lean))
    assert b.item() == pytest.approx(a.item(), rel=1e-5)


def test_a_model_that_runs_only_under_autocast_is_compared_in_its_first_forward():
    models = [causal_lm("llama").bfloat16() for _ in range(2)]
    for model in models:
        model.lm_head.float()
    stock, lean = models[0].train(), apply_leanstep(models[1]).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a, b = stock(**batch()).loss, lean(**batch()).loss
    assert b.item() == pytest.approx(a.item(), rel=1e-2)


SMALL = {
    "vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
}  # fmt: skip
BART = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "dropout": 0.0,
    "decoder_start_token_id": 2,
}  # fmt: skip
T5 = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
XLNET = {"vocab_size": VOCAB, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, "dropout": 0.0}
ELECTRA = {**SMALL, "embedding_size": 24, "is_decoder": True}
NOT_SHIFTED = "is not the shifted cross-entropy of its head"


@pytest.mark.parametrize(
    ("family", "options", "model_class", "complaint"),
    [
        ("bart", BART, AutoModelForCausalLM, f"the loss of BartForCausalLM {NOT_SHIFTED}"),
        ("bart", BART, AutoModelForSeq2SeqLM, "got BartForConditionalGeneration, an encoder-decoder"),
        (
            "t5",
            T5,
            AutoModelForSeq2SeqLM,
            "expected a transformers causal LM, got T5ForConditionalGeneration",
        ),
        ("xlnet", XLNET, AutoModelForCausalLM, f"the loss of XLNetLMHeadModel {NOT_SHIFTED}"),
        ("electra", ELECTRA, AutoModelForCausalLM, "the loss of ElectraForCausalLM"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_families_with_another_loss_are_refused_in_one_line(family, options, model_class, complaint, dtype):
    torch.manual_seed(0)
    model = model_class.from_config(AutoConfig.for_model(family, **options)).to(dtype)
    with pytest.raises(ValueError, match=f"^model: .*{complaint}") as error:
        apply_leanstep(model)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mamba_is_right_in_both_dtypes(dtype):
    options = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **options)).to(dtype))
    losses = [model.train()(**batch()).loss.item() for model in (models[0], apply_leanstep(models[1]))]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5 if dtype == torch.float32 else 2e-3)
