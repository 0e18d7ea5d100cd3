"""`prove before.py after.py`: planted mistakes are found and named, honest changes pass."""

from __future__ import annotations

from pathlib import Path

import pytest
from prove.captured_scripts import job, prove_pair

# variant -> (step, what, parameter) of the first failing check besides the loss, and whether the loss differs
MISTAKES = {
    "forgotten-temperature": (1, "gradient", "embed.weight", True),
    "shifted-target": (1, "gradient", "embed.weight", True),
    "mean-of-means": (1, "gradient", "embed.weight", True),
    "dropped-entropy-gradient": (1, "gradient", "embed.weight", False),
    "detached-term": (1, "gradient", "embed.weight", False),
    "lr-twice": (1, "update", "head.weight", False),
}
HONEST = {
    "rows-first": (),
    "cross-entropy": (),
    "fused": (),
    "foreach": (),
    "checkpoint": (),
    "fused-attention": (),
    "compiled": (),
    "rows-first in autocast": ("--autocast",),
    "cross-entropy in autocast": ("--autocast",),
    "rows-first in bf16": ("--dtype", "bfloat16"),
    "checkpoint with dropout": ("--dropout", "0.2"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_named(mistake: str):
    proof = prove_pair(job("policy.py"), job("policy.py", "--variant", mistake))
    step, what, parameter, in_loss = MISTAKES[mistake]
    assert proof.problem is None and not proof.ok
    first = next(row for row in proof.failed if row.what != "loss")
    assert (first.step, first.what, first.parameter) == (step, what, parameter)
    assert any(row.what == "loss" and row.step == 1 for row in proof.failed) == in_loss
    assert f"step {step}" in proof.sentence() and parameter in proof.sentence()


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.filterwarnings("ignore")
def test_an_honest_change_passes(name: str):
    common = HONEST[name]
    variant = name.split(" ")[0]
    proof = prove_pair(job("policy.py", *common), job("policy.py", *common, "--variant", variant))
    assert proof.ok, proof.sentence()
    assert proof.steps == 2 and proof.parameters == 15
    assert not any("random numbers" in note for note in proof.notes)


# In fp32 the gradient of `offset` is almost twice that of fp64: a bound for its rounding accepts zero, too.
CANCELS = """import torch
from torch import nn
torch.manual_seed(0)
layer, offset = nn.Linear(8, 8), nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([*layer.parameters(), offset], lr=0.1)
nearly_one = torch.tensor(1 + 6.5e-8)
used = offset
(2 * layer(torch.ones(2, 8)).square().mean() + (used * nearly_one - used).sum()).backward()
optimizer.step()
"""


def test_an_imprecise_gradient_may_not_vanish(tmp_path: Path):
    paths = [tmp_path / "before.py", tmp_path / "after.py"]
    for path, used in zip(paths, ("offset", "offset.detach() + 0 * offset"), strict=True):
        path.write_text(CANCELS.replace("used = offset", f"used = {used}"), encoding="utf-8")
    before, after = (job(str(path), steps=1) for path in paths)
    assert prove_pair(before, before).ok
    proof = prove_pair(before, after)
    assert [(row.what, row.parameter) for row in proof.failed] == [("gradient", "parameter 2 [1]")]
    assert proof.failed[0].error <= proof.failed[0].bound
