from __future__ import annotations

import pytest
import torch
from gpt.golden import scramble

from leanstep.gpt import GPT, GPTConfig


@pytest.fixture
def model():
    return scramble(GPT(GPTConfig.preset("plain", vocab_size=100)))


def test_greedy_takes_the_most_likely_token(model):
    prompt = torch.tensor([3, 14, 15])
    out = model.generate(prompt, 6, temperature=0)
    assert torch.equal(out[:3], prompt) and out.shape == (9,)
    for t in range(3, 9):
        logits = model.logits(model.hidden(out[:t]))[-1, :100]
        assert out[t] == logits.argmax()


def test_rows_of_a_batch_are_independent(model):
    prompts = torch.randint(0, 100, (4, 5))
    together = model.generate(prompts, 5, temperature=0)
    for row, prompt in zip(together, prompts, strict=True):
        assert torch.equal(row, model.generate(prompt, 5, temperature=0))


def test_sampling_follows_generator_and_distribution(model):
    prompts = torch.full((2000, 1), 7)
    a, b = (
        model.generate(prompts, 1, generator=torch.Generator().manual_seed(s), temperature=2.0)
        for s in (1, 1)
    )
    assert torch.equal(a, b)
    wanted = (model.logits(model.hidden(prompts[0]))[0, :100] / 2.0).softmax(-1)
    counts = torch.bincount(a[:, 1], minlength=100) / 2000
    assert counts.shape == (100,)  # padding ids 100..127 never come
    assert (counts - wanted).abs().max() < 0.05


def test_stop_token_repeats(model):
    prompts = torch.randint(0, 100, (50, 2))
    out = model.generate(prompts, 12, generator=torch.Generator().manual_seed(0), temperature=3.0, stop=5)[
        :, 2:
    ]
    stopped = (out == 5).int().cummax(dim=1).values.bool()
    assert stopped.any() and (out[stopped] == 5).all()


def test_zero_new_tokens_and_bad_input(model):
    prompt = torch.tensor([1, 2])
    assert torch.equal(model.generate(prompt, 0), prompt)
    for bad in (torch.zeros(2), torch.zeros(0, dtype=torch.long), torch.zeros(1, 2, 3, dtype=torch.long)):
        with pytest.raises(ValueError, match="tokens"):
            model.generate(bad, 1)
    with pytest.raises(ValueError, match="temperature"):
        model.generate(prompt, 1, temperature=-1)
    with pytest.raises(ValueError, match="max_new_tokens"):
        model.generate(prompt, -1)
