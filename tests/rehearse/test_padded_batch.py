"""Log-probs of a padded batch on a device: also where the script makes the device its default."""

from __future__ import annotations

from pathlib import Path

import pytest
from rehearse.rehearsed import run_script

SCRIPT = """
import torch
from leanstep import masked_token_logprobs

torch.set_default_device("cuda")
head = torch.nn.Linear(32, 256, bias=False)
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
for _ in range(4):
    tokens = torch.randint(0, 256, (4, 16))
    mask = torch.tensor([[False] * 8 + [True] * 8] * 4)
    hidden = torch.randn(4, 16, 32)
    for chosen in (mask, None):
        log_probs = masked_token_logprobs(hidden, head, tokens, chosen)
        log_probs.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_default_device_is_not_where_the_host_counts(tmp_path: Path):
    pytest.importorskip("triton", reason="Triton is not installed")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    recording = run_script(script, steps=3).recording
    assert recording.refused is None and len(recording.steps) == 3
