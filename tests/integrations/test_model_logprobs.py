"""model_logprobs: a transformers model on a padded batch against its own logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from docstring_code import python_blocks
from integrations.tiny_models import FAMILIES, VOCAB, causal_lm
from torch import nn

from leanstep import model_logprobs

B, T = 3, 17


def padded(side: str = "left"):
    """ids, attention mask and response mask [B, T]."""
    g = torch.Generator().manual_seed(3)
    ids, attention = torch.randint(VOCAB - 3, (B, T), generator=g), torch.zeros(B, T, dtype=torch.int64)
    response = torch.zeros(B, T, dtype=torch.bool)
    for row, (prompt, length) in enumerate([(4, 6), (9, 8), (2, 3)]):
        start = T - prompt - length if side == "left" else 0
        attention[row, start : start + prompt + length] = 1
        response[row, start + prompt : start + prompt + length] = True
    return ids.where(attention.bool(), torch.tensor(VOCAB - 3)), attention, response


def plain(model, ids, mask, temperature=1.0, **inputs):
    """Log-prob and entropy from the model's own logits."""
    logits = model(input_ids=ids, **inputs).logits[:, :-1].float() / temperature
    log_p = torch.log_softmax(logits, -1)
    logp = log_p.gather(-1, ids[:, 1:, None])[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    return logp * mask[:, 1:], entropy * mask[:, 1:]


def gradients(model, logp, entropy):
    parameters = [p for p in model.parameters() if p.requires_grad]
    upstream = torch.linspace(-1, 1, logp.numel()).view(logp.shape)
    return torch.autograd.grad((logp * upstream + 0.2 * entropy).sum(), parameters)


def assert_same(model, ids, mask, **inputs):
    """Values and gradients of both."""
    ours = model_logprobs(model, ids, mask, temperature=0.8, entropy="grad", **inputs)
    theirs = plain(model, ids, mask, 0.8, **inputs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for a, b in zip(gradients(model, *ours), gradients(model, *theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=1e-3 * (1 + b.abs().max().item()))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_values_and_gradients_are_those_of_the_models_logits(family, side):
    """Softcap (gemma2), tied heads (qwen3, gpt2) and heads of their own."""
    ids, attention, mask = padded(side)
    assert_same(causal_lm(family), ids, mask, attention_mask=attention, use_cache=False)


def test_the_model_has_its_own_head_again_afterwards():
    model, (ids, attention, mask) = causal_lm("llama"), padded()
    before = model(input_ids=ids, attention_mask=attention).logits
    model_logprobs(model, ids, mask, attention_mask=attention)
    assert model(input_ids=ids, attention_mask=attention).logits.equal(before)
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        model_logprobs(model, ids, mask, inputs_embeds=torch.zeros(B, T, 32))
    assert model(input_ids=ids, attention_mask=attention).logits.equal(before)


def test_gradient_checkpointing_recomputes_the_same():
    ids, attention, mask = padded()
    model = causal_lm("llama").train()
    without = model_logprobs(model, ids, mask, attention_mask=attention)
    expected = gradients(model, without, without)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ours = model_logprobs(model, ids, mask, attention_mask=attention, use_cache=False)
    torch.testing.assert_close(ours, without)
    for a, b in zip(gradients(model, ours, ours), expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("keep", [0, 1, 2, 7])
def test_logits_to_keep_scores_what_the_models_logits_score(keep):
    model, (ids, attention, _) = causal_lm("llama"), padded()
    logits = model(input_ids=ids, attention_mask=attention, logits_to_keep=keep).logits[:, :-1]
    scored = logits.shape[1]
    expected = logits.log_softmax(-1).gather(-1, ids[:, T - scored :, None])[..., 0]
    # The last sequence begins within the last six tokens.
    for mask in (None, attention, attention[:, 1:], attention[:, T - scored :]):
        ours, entropy = model_logprobs(
            model, ids, mask, attention_mask=attention, logits_to_keep=keep, entropy="metric"
        )
        kept = torch.ones_like(ids) if mask is None else attention
        torch.testing.assert_close(ours, expected * kept[:, T - scored :], rtol=1e-4, atol=1e-5)
        assert entropy.shape == ours.shape


def test_labels_may_differ_from_the_tokens():
    model, (ids, attention, mask) = causal_lm("llama"), padded()
    labels = torch.where(mask, ids.flip(1), -100)
    ours = model_logprobs(model, ids, mask, targets=labels, attention_mask=attention)
    log_p = model(input_ids=ids, attention_mask=attention).logits[:, :-1].log_softmax(-1)
    theirs = log_p.gather(-1, labels[:, 1:, None].clamp(min=0))[..., 0] * mask[:, 1:]
    torch.testing.assert_close(ours, theirs)


def test_autocast_around_the_call_chooses_the_operands():
    model, (ids, attention, mask) = causal_lm("qwen2"), padded()
    inputs = {"attention_mask": attention}
    with torch.no_grad():
        truth, _ = plain(model, ids, mask, **inputs)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            theirs, _ = plain(model, ids, mask, **inputs)
            ours = model_logprobs(model, ids, mask, **inputs)
    assert 0 < (ours - truth).abs().max() <= 2 * (theirs - truth).abs().max()


def test_a_16_bit_model_rounds_no_more_than_its_own_logits():
    model, (ids, attention, mask) = causal_lm("qwen2"), padded()
    with torch.no_grad():
        truth, _ = plain(model.bfloat16().float(), ids, mask, attention_mask=attention)
        model.bfloat16()
        theirs, _ = plain(model, ids, mask, attention_mask=attention)
        ours = model_logprobs(model, ids, mask, attention_mask=attention)
    assert ours.dtype == torch.float32
    assert (ours - truth).abs().max() <= 2 * (theirs - truth).abs().max()


def test_an_fp32_head_under_autocast_is_rounded_as_the_models_own():
    model, (ids, attention, mask) = causal_lm("llama").bfloat16(), padded()
    model.lm_head.float()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        theirs, _ = plain(model, ids, mask, attention_mask=attention)
        ours = model_logprobs(model, ids, mask, attention_mask=attention)
        hidden = model.model(input_ids=ids, attention_mask=attention).last_hidden_state
    logits = hidden.double()[:, :-1] @ model.lm_head.weight.detach().double().T
    truth = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0] * mask[:, 1:]
    assert 0 < (ours - truth).abs().max() <= 2 * (theirs - truth).abs().max()


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
    ids=["lora head", "trained head"],
)
def test_a_peft_model_is_unwrapped(options):
    from peft import LoraConfig, get_peft_model

    ids, attention, mask = padded()
    model = get_peft_model(causal_lm("qwen2"), LoraConfig(r=4, **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.normal_(std=0.3)
    assert_same(model, ids, mask, attention_mask=attention)


def test_wrappers_run_around_the_model():
    """As DeepSpeed's engine: a module that hands on attributes and must see the call."""

    class Engine(nn.Module):
        calls = 0

        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *args, **kwargs):
            Engine.calls += 1
            return self.module(*args, **kwargs)

    model, (ids, attention, mask) = causal_lm("llama"), padded()
    expected = model_logprobs(model, ids, mask, attention_mask=attention)
    ours = model_logprobs(Engine(model), ids, mask, attention_mask=attention)
    assert Engine.calls == 1
    torch.testing.assert_close(ours, expected)
    with pytest.raises(ValueError, match="model: expected a transformers causal LM, got Linear"):
        model_logprobs(nn.Linear(2, 2), ids)


# torch's own, where a graph begins with a tensor that another one made.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiled_model_gives_the_same():
    model, (ids, attention, mask) = causal_lm("llama"), padded()
    expected = model_logprobs(model, ids, mask, attention_mask=attention)
    compiled = torch.compile(model, backend="aot_eager")
    ours = model_logprobs(compiled, ids, mask, attention_mask=attention)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(gradients(model, ours, ours), gradients(model, expected, expected))


def test_before_and_after_of_the_page_are_the_same():
    """docs/rl.md: the code that is replaced, and what replaces it."""
    blocks = python_blocks(Path(__file__).parents[2] / "docs" / "rl.md")
    before, after, own = blocks[:3]
    model, (tokens, attention_mask, mask) = causal_lm("llama"), padded()
    space = {"model": model, "tokens": tokens, "mask": mask, "attention_mask": attention_mask}
    space |= {"F": torch.nn.functional, "head": model.lm_head}
    space["hidden"] = model.model(input_ids=tokens, attention_mask=attention_mask).last_hidden_state
    exec(before, space)
    expected = space["log_probs"] * mask[:, 1:]
    for code in (after, own):
        exec(code, space)
        torch.testing.assert_close(space["log_probs"], expected, rtol=1e-4, atol=1e-5)
    assert space["entropy"].shape == expected.shape
