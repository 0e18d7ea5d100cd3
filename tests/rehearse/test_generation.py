"""Tokens of a rollout that are not run: their price is that of the tokens that are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rehearse.rehearsed import stub_or_skip

from leanstep.rehearse.answers.repeats import next_value
from leanstep.rehearse.devices import device_named
from leanstep.rehearse.events import Request
from leanstep.rehearse.iterations import Iteration, last_iteration
from leanstep.rehearse.stage import rehearse
from leanstep.rehearse.verdict import judge, text
from leanstep.report import page

GENERATE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                     intermediate_size=128, vocab_size=512)
policy = LlamaForCausalLM(config).cuda()
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
prompts = torch.arange(5, 37, device="cuda").view(4, 8)
for length in (8, 5):
    tokens = policy.generate(
        prompts[:, :length], max_new_tokens=40, do_sample=True, pad_token_id=0, eos_token_id=2
    )
    assert tokens.shape == (4, length + 40), tokens.shape
    with torch.no_grad():
        old = policy(tokens).logits.log_softmax(-1)
    (policy(tokens).logits.log_softmax(-1) - old).exp().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def rehearsed(script: Path, every_call: bool) -> tuple[Iteration, tuple[int, int], dict[str, Any]]:
    recording = rehearse(Request(str(script), steps=2, every_call=every_call), quiet=True)
    assert recording.refused is None, recording.refused
    device = device_named("h100")
    iteration = last_iteration(recording, device)
    assert iteration is not None
    return iteration, recording.model_calls, judge(recording, [device])


def test_tokens_of_generate_are_extrapolated(tmp_path: Path) -> None:
    """Ten tokens of the first call are run; the second one continues their series with shorter prompts."""
    stub_or_skip()
    pytest.importorskip("transformers")
    script = tmp_path / "train.py"
    script.write_text(GENERATE)
    whole, (calls, none), _ = rehearsed(script, True)
    short, (recorded, extrapolated), report = rehearsed(script, False)
    shown = text(report)
    assert (calls, none) == (0, 0) and recorded + extrapolated == 2 * (40 + 1) and extrapolated == 30 + 38
    assert [entry.phase for entry in short.phases] == [entry.phase for entry in whole.phases]
    for every, few in zip(whole.phases, short.phases, strict=True):
        # Sixteen tokens share the price of the one in the middle.
        assert few.flops == pytest.approx(every.flops, rel=0.001)
        # The full output is made with two calls more.
        assert every.kernels <= few.kernels <= every.kernels + 4
        assert few.device_s == pytest.approx(every.device_s, rel=0.02)
        assert few.seconds == pytest.approx(every.seconds, rel=0.05)
        assert few.peak_bytes == pytest.approx(every.peak_bytes, rel=0.02)
    assert "68 of 82 model calls without gradients extrapolated" in shown
    page.add_section(str(tmp_path / "report.html"), "rehearse", report)
    assert "<td>rollout</td>" in (tmp_path / "report.html").read_text()
    assert "rollout" in shown.splitlines()[0] and "scoring" in shown.splitlines()[0]


@pytest.mark.parametrize(
    ("values", "position", "expected"),
    [
        ([5, 5, 5, 5], 7, 5),
        ([2, 4, 6, 8], 3, 14),
        ([1, 4, 9, 16], 2, 36),
        # Rounded sizes do not make a parabola: a line through the ends.
        ([0, 8, 8, 16, 16, 24], 5, 48),
    ],
)
def test_a_series_goes_on_as_it_began(values: list[float], position: int, expected: float) -> None:
    assert next_value(values, position) == expected


ENGINE = """
import sys, types
import torch
vllm = types.ModuleType("vllm")
class LLM:
    def generate(self, prompts):
        return prompts
vllm.LLM = LLM
sys.modules["vllm"] = vllm
policy = torch.nn.Sequential(torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64)).cuda()
optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
for _ in range(3):
    tokens = torch.tensor(LLM().generate([[1, 2, 3]])).cuda()
    with torch.no_grad():
        old = policy(tokens)
    (policy(tokens) - old).exp().mean().backward()
    optimizer.step()
"""


def test_a_rollout_of_an_engine_is_said_to_be_left_out(tmp_path: Path) -> None:
    stub_or_skip()
    script = tmp_path / "train.py"
    script.write_text(ENGINE)
    iteration, _, report = rehearsed(script, False)
    assert [entry.phase for entry in iteration.phases][:2] == ["scoring", "update"] and len(
        iteration.steps
    ) == 1
    first = text(report).splitlines()[0]
    assert "excluding the rollout, which runs in a separate engine" in first and "no rollout" not in first


COLLECTS = """
import torch
class Policy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64)
        self.calls, self.seen = 0, []
    def forward(self, tokens):
        self.calls += 1
        if COLLECT:
            self.seen.append(tokens.shape)
        return self.head(self.words(tokens))
policy = Policy().cuda()
optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
for step in range(1, 3):
    tokens = torch.zeros(2, 4, dtype=torch.long, device="cuda")
    with torch.inference_mode():
        for _ in range(20):
            tokens = torch.cat([tokens, torch.multinomial(policy(tokens)[:, -1].softmax(-1), 1)], 1)
    policy(tokens.clone()).sum().backward()
    optimizer.step()
    assert policy.calls == 21 * step and len(policy.seen) == 21 * step * COLLECT, (policy.calls, policy.seen)
"""


@pytest.mark.parametrize("collects", [False, True])
def test_what_a_model_keeps_of_its_calls_is_right(collects: bool, tmp_path: Path) -> None:
    """A counter goes on in calls that are not run; a model that collects something in a list is run."""
    stub_or_skip()
    script = tmp_path / "train.py"
    script.write_text(f"COLLECT = {collects}\n{COLLECTS}")
    recording = rehearse(Request(str(script), steps=3), quiet=True)
    assert recording.refused is None and len(recording.steps) == 2, recording.refused
    assert (recording.model_calls[1] == 0) == collects
