from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from leanstep.gpt import GPT, GPTConfig, unbind_bank


def counts(function) -> dict[str, int]:
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        function()
    return {event.key: event.count for event in prof.key_averages()}


def backward_through(take, bank):
    weights = take(bank)
    upstream = [torch.randn_like(w) for w in weights]
    return lambda: torch.autograd.grad(weights, bank, upstream), upstream


def by_index(bank):
    return [bank[i][j] for i in range(12) for j in range(2)]


def by_halves(bank):
    first, second = bank[:, 0].unbind(0), bank[:, 1].unbind(0)
    return [w for pair in zip(first, second, strict=True) for w in pair]


def test_select_backwards_and_zero_fills_of_24_matrices():
    bank = torch.randn(12, 2, 6, 5, requires_grad=True)
    found = {}
    for take in (by_index, by_halves, unbind_bank):
        run, _ = backward_through(take, bank)
        seen = counts(run)
        found[take.__name__] = (seen.get("aten::select_backward", 0), seen.get("aten::zero_", 0))
    assert found == {"by_index": (48, 48), "by_halves": (2, 2), "unbind_bank": (0, 0)}


def test_gradients_have_the_same_bits():
    bank = torch.randn(12, 2, 6, 5, requires_grad=True)
    upstream = [torch.randn(6, 5) for _ in range(24)]
    first, second = (torch.autograd.grad(take(bank), bank, upstream)[0] for take in (by_index, unbind_bank))
    assert torch.equal(first, second) and torch.equal(first, torch.stack(upstream).view_as(bank))


def test_unbind_needs_matrices():
    with pytest.raises(ValueError, match="bank"):
        unbind_bank(torch.zeros(3, 4))


def test_bank_views_are_the_banks():
    model = GPT(
        GPTConfig.preset("record-74", model_dim=48, num_heads=6, head_dim=8, mlp_hidden=96, vocab_size=100)
    )
    views = model.bank_views()
    assert views["attn_bank"].shape == (40, 48, 48) and views["mlp_bank"].shape == (24, 96, 48)
    views["mlp_bank"][3].fill_(7)
    assert (model.mlp_bank[1, 1] == 7).all()


def test_same_generator_same_model():
    made = [GPT(GPTConfig.preset("tiny"), generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    for (name, a), (_, b) in zip(made[0].named_parameters(), made[1].named_parameters(), strict=True):
        assert torch.equal(a, b), name
