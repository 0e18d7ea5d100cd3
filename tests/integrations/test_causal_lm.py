"""Heads of the common families, against the models' own logits; adapters on the head; what is refused."""

from __future__ import annotations

import pytest
import torch
from integrations.tiny_models import FAMILIES, VOCAB, causal_lm
from transformers import AutoConfig, AutoModelForCausalLM

from leanstep.heads import logprob, passes
from leanstep.integrations.causal_lm import causal_head, check_head, score_labels


def labelled(batch=3, length=17, seed=1):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB - 3, (batch, length), generator=generator)
    labels = ids.clone()
    labels[:, :6] = -100
    labels[1, :] = -100
    labels[2, 12:] = -100
    return ids, labels


def plain_scores(model, ids, labels, temperature):
    logits = model(input_ids=ids).logits[:, :-1].float() / temperature
    log_p = torch.log_softmax(logits, -1)
    target, mask = labels[:, 1:], labels[:, 1:] != -100
    logp = log_p.gather(-1, target.clamp(min=0)[..., None]).squeeze(-1) * mask
    return logp, -(log_p.exp() * log_p).sum(-1) * mask


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_equal_the_models_own_logits(family):
    ids, labels = labelled()
    model, other = causal_lm(family), causal_lm(family)
    check_head(model)
    hidden = model.base_model(input_ids=ids).last_hidden_state
    scores = score_labels(model, hidden, labels, entropy="grad", temperature=0.7)
    logp, entropy = plain_scores(other, ids, labels, 0.7)
    torch.testing.assert_close(scores.logp, logp, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scores.entropy, entropy, rtol=1e-4, atol=1e-5)
    upstream = torch.randn(logp.shape, generator=torch.Generator().manual_seed(2))
    (scores.logp * upstream - 0.3 * scores.entropy).sum().backward()
    (logp * upstream - 0.3 * entropy).sum().backward()
    for (name, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=2e-3, atol=2e-4, msg=name)


@pytest.mark.parametrize("in_fp32", [False, True])
def test_autocast_around_a_trainer_chooses_the_operands(in_fp32, monkeypatch):
    """fp32 weights under bf16 autocast, TRL's default: on a GPU no product of the head is in fp32."""
    operands, product = set(), logprob.multiply_

    def watched(out, a, b, **options):
        operands.update((a.dtype, b.dtype))
        return product(out, a, b, **options)

    ids, labels = labelled()
    model = causal_lm("llama")
    # CPU tensors take the route of a GPU.
    monkeypatch.setattr(passes, "on_gpu", lambda device: True)
    monkeypatch.setattr(logprob, "multiply_", watched)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.base_model(input_ids=ids).last_hidden_state
        outputs = ("mean_logits", "is_top1", "log_sum_sq_probs")
        scores = score_labels(model, hidden, labels, entropy="grad", outputs=outputs, in_fp32=in_fp32)
    (scores.logp.sum() + scores.entropy.sum()).backward()
    assert operands == {torch.float32 if in_fp32 else torch.bfloat16}
    assert model.lm_head.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "lora"])
def test_what_trainers_log_equals_the_models_own_logits(family):
    from peft import LoraConfig, get_peft_model

    ids, labels = labelled()
    model = causal_lm("llama" if family == "lora" else family)
    if family == "lora":
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["lm_head"])).get_base_model()
        with torch.no_grad():
            model.lm_head.lora_B["default"].weight.normal_(std=0.3)
    logits = model(input_ids=ids).logits[:, :-1] / 0.7
    # Half of the labels are the likeliest token.
    labels[0, 1::2] = torch.where(labels[0, 1::2] == -100, -100, logits.argmax(-1)[0, ::2])
    mask = labels[:, 1:] != -100
    hidden = model.base_model(input_ids=ids).last_hidden_state
    outputs = ("mean_logits", "is_top1", "log_sum_sq_probs")
    scores = score_labels(model, hidden, labels, outputs=outputs, temperature=0.7)
    expected = {
        "mean_logits": logits.mean(-1),
        "is_top1": logits.argmax(-1) == labels[:, 1:],
        "log_sum_sq_probs": (2 * logits.log_softmax(-1)).logsumexp(-1),
    }
    assert 0 < scores.is_top1.sum() < mask.sum()
    for name, values in expected.items():
        found = getattr(scores, name)
        assert not found.requires_grad
        torch.testing.assert_close(
            found, values.masked_fill(~mask, 0).detach(), rtol=1e-4, atol=1e-5, msg=name
        )


def test_dropout_on_the_heads_adapter_is_refused():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(causal_lm("qwen2"), LoraConfig(r=4, lora_dropout=0.1, target_modules=["lm_head"]))
    model.train()
    with pytest.raises(ValueError, match=r"adapter 'default' drops out its input \(p = 0.1\)"):
        causal_head(model.get_base_model())


def test_a_head_with_an_unknown_factor_is_refused():
    model = causal_lm("llama")
    original = model.lm_head.forward
    model.lm_head.forward = lambda x: 1.5 * original(x)
    with pytest.raises(ValueError, match="head of LlamaForCausalLM differs"):
        check_head(model)


@pytest.mark.parametrize(
    ("family", "option", "factor"),
    [
        ("cohere", {"logit_scale": 0.3}, 0.3),
        ("granite", {"logits_scaling": 8.0}, 1 / 8),
        ("hyperclovax", {"logits_scaling": 8.0}, 8.0),
    ],
)
def test_each_familys_factor_on_the_logits(family, option, factor):
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    small |= {"vocab_size": VOCAB, "intermediate_size": 64, "pad_token_id": 0}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **small, **option))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20.0)
    check_head(model)
    assert causal_head(model).head.scale == factor
