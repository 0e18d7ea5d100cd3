"""Findings of RL steps: generation without a cache, logits without gradients, a loss without a gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from leanstep import diagnose
from leanstep.diagnose.findings import Finding
from leanstep.diagnose.rules import Limits

WIDTH, WORDS = 16, 512
SMALL = Limits({"no-grad-vocab": {"bytes": 1024}, "full-vocab": {"bytes": 1024}})


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(tokens).cumsum(1))


def findings(*, cached: bool = False, updates: int = 1, advantage: float = 1.0) -> list[Finding]:
    """GRPO in small: a rollout of 10 tokens, old log-probs, an entropy, some updates."""
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    with diagnose.watch(steps=2 * updates, warmup=0, limits=SMALL) as watch:
        for _ in range(2):
            tokens = torch.randint(0, WORDS, (8, 12))
            with torch.no_grad():
                for _ in range(10):
                    logits = policy(tokens[:, -1:] if cached else tokens)
                    tokens = torch.cat([tokens, torch.multinomial(logits[:, -1].softmax(-1), 1)], 1)
                old = policy(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None])
            for _ in range(updates):
                logits = policy(tokens[:, :-1])
                new = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])
                with torch.no_grad():
                    entropy(logits)
                (((new - old).exp() * advantage).mean()).backward()
                optimizer.step()
                optimizer.zero_grad()
    return list(watch.findings())


def entropy(logits: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(logits, -1) - (logits.softmax(-1) * logits).sum(-1)


def of(rule: str, found: list[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.rule == rule]


def test_generation_without_a_cache_is_named_with_the_positions_it_repeats() -> None:
    (finding,) = of("no-kv-cache", findings())
    # Nine calls of the loop and the scoring call, which has one position more as well: 13 to 21, and 21.
    assert finding.line.function == "findings" and "policy(" in finding.line.code
    assert finding.evidence["calls"] == 9
    assert finding.evidence["positions"] == sum(range(13, 22))
    assert finding.evidence["computed_again"] == sum(range(12, 21))
    assert "use_cache=True" in finding.short_fix


def test_generation_with_a_cache_is_not() -> None:
    assert not of("no-kv-cache", findings(cached=True))


def test_heads_of_old_log_probs_and_an_entropy_over_all_rows_are_found() -> None:
    """Lines of the update's own logits, which autograd saves, are full-vocab as before."""
    found = of("no-grad-vocab", findings(cached=True))
    functions = {finding.line.function for finding in found}
    assert {"findings", "entropy"} <= functions
    (softmax,) = [finding for finding in found if finding.line.function == "entropy"]
    assert softmax.evidence["shapes"] == {f"[8, 21, {WORDS}] float32": 2}
    assert all(finding.work.held_bytes == 8 * 21 * WORDS * 4 for finding in found)


def test_what_only_steps_with_a_rollout_show_is_found_per_rollout() -> None:
    found = findings(updates=2)
    (cache,) = of("no-kv-cache", found)
    assert cache.per_rollout and len(cache.counts) == 2
    assert not any(finding.per_rollout for finding in of("full-vocab", found))


@pytest.mark.parametrize(("advantage", "dead"), [(0.0, True), (1.0, False)])
def test_all_rows_dead_means_that_the_loss_has_no_gradient(advantage: float, dead: bool) -> None:
    found = of("dead-rows", findings(cached=True, advantage=advantage))
    assert bool(found) == dead
    for finding in found:
        assert finding.short_fix == "the loss has no gradient (advantages are all zero)"
        assert "linear_logprobs" not in finding.fix and finding.leanstep is None


@pytest.mark.parametrize(("training", "lost"), [(True, True), (False, False)])
def test_generation_with_an_empty_cache_is_found(training: bool, lost: bool) -> None:
    """Checkpointing in training mode keeps no keys and values; generate() passes one token all the same."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=16, vocab_size=64,
    )  # fmt: skip
    policy = transformers.LlamaForCausalLM(config)
    policy.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    with diagnose.watch(steps=2, warmup=0) as watch:
        for _ in range(2):
            policy.train(training)
            tokens = policy.generate(torch.ones(2, 4, dtype=torch.long), max_new_tokens=6, min_new_tokens=6)
            policy.train()
            policy(tokens, use_cache=False).logits.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = of("no-context", list(watch.findings()))
    assert [finding.evidence["calls"] for finding in found] == ([5] if lost else [])


def test_a_custom_autograd_function_is_not_scoring() -> None:
    """Gradients are off inside its forward, but what it makes is for its backward."""

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight):
            ctx.save_for_backward(hidden, weight)
            return (hidden @ weight.T).log_softmax(-1)[:, 0].sum()

        @staticmethod
        def backward(ctx, grad):
            hidden, weight = ctx.saved_tensors
            return grad * hidden, grad * weight

    weight = nn.Parameter(torch.randn(WORDS, WIDTH))
    hidden = nn.Parameter(torch.randn(128, WIDTH))
    optimizer = torch.optim.SGD([weight, hidden], lr=0.1)
    with diagnose.watch(steps=2, warmup=0, limits=SMALL) as watch:
        for _ in range(2):
            Loss.apply(hidden, weight).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not of("no-grad-vocab", list(watch.findings()))


class Rotary(Policy):
    """Reads two entries of buffers in every call, as models with cached angles do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.ones(4))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.angles[0] == 0 or not self.scale:
            raise ValueError("not initialized")
        return super().forward(tokens) * self.angles[1]


@pytest.mark.parametrize("block", [torch.no_grad, torch.inference_mode])
def test_reads_of_buffers_and_of_a_generation_are_counted(block) -> None:
    torch.manual_seed(0)
    policy = Rotary()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    with diagnose.watch(steps=2, warmup=1) as watch:
        for _ in range(4):
            tokens = torch.randint(0, WORDS, (4, 3))
            with block():
                for _ in range(5):
                    drawn = torch.multinomial(policy(tokens)[:, -1].softmax(-1), 1)
                    tokens = torch.cat([tokens, drawn], 1)
                    if drawn.eq(WORDS).all() or drawn[0].item() == WORDS:
                        break
            tokens = tokens.clone()
            loss = nn.functional.cross_entropy(policy(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    reads = {f.line.function: f.counts for f in of("host-sync", list(watch.findings()))}
    # Five calls of the generation and one of the update, two reads each; two reads per token.
    assert reads == {
        "forward": [12, 12],
        "test_reads_of_buffers_and_of_a_generation_are_counted": [10, 10],
    }
