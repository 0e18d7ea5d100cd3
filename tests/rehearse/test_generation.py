"""Tokens of a rollout that are not run: their price is that of the tokens that are."""

from __future__ import annotations

from pathlib import Path

import pytest
from rehearse.rehearsed import stub_or_skip

from leanstep.rehearse.answers.repeated_calls import next_value
from leanstep.rehearse.devices import device_named
from leanstep.rehearse.events import Request
from leanstep.rehearse.iterations import Iteration, last_iteration
from leanstep.rehearse.stage import rehearse
from leanstep.rehearse.verdict import judge, text

GENERATE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                     intermediate_size=128, vocab_size=512)
policy = LlamaForCausalLM(config).cuda()
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
prompts = torch.arange(5, 37, device="cuda").view(4, 8)
for _ in range(2):
    tokens = policy.generate(prompts, max_new_tokens=40, do_sample=True, pad_token_id=0, eos_token_id=2)
    assert tokens.shape == (4, 48), tokens.shape
    with torch.no_grad():
        old = policy(tokens).logits.log_softmax(-1)
    (policy(tokens).logits.log_softmax(-1) - old).exp().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def rehearsed(script: Path, every_call: bool) -> tuple[Iteration, tuple[int, int], str]:
    recording = rehearse(Request(str(script), steps=2, every_call=every_call), quiet=True)
    assert recording.refused is None, recording.refused
    device = device_named("h100")
    iteration = last_iteration(recording, device)
    assert iteration is not None
    return iteration, recording.model_calls, text(judge(recording, [device]))


def test_tokens_of_generate_are_extrapolated(tmp_path: Path) -> None:
    stub_or_skip()
    pytest.importorskip("transformers")
    script = tmp_path / "train.py"
    script.write_text(GENERATE)
    whole, (calls, none), _ = rehearsed(script, True)
    short, (recorded, extrapolated), shown = rehearsed(script, False)
    assert (calls, none) == (0, 0) and recorded + extrapolated == 2 * (40 + 1) and extrapolated == 2 * 30
    assert [entry.phase for entry in short.phases] == [entry.phase for entry in whole.phases]
    for every, few in zip(whole.phases, short.phases, strict=True):
        assert few.flops == every.flops
        # The full output is made with two calls more.
        assert every.kernels <= few.kernels <= every.kernels + 4
        assert few.device_s == pytest.approx(every.device_s, rel=0.02)
        assert few.seconds == pytest.approx(every.seconds, rel=0.05)
        assert few.peak_bytes == pytest.approx(every.peak_bytes, rel=0.02)
    assert "60 of 82 model calls without gradients extrapolated" in shown
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
