"""A short, seeded run of dev/fuzz.py: no public loss and no step of NorMuon breaks the fp64 rule."""

from __future__ import annotations

import pytest
import torch
from tool_loader import load_tool

fuzz = load_tool("fuzz")


@pytest.mark.parametrize("family", fuzz.FAMILIES)
def test_no_case_breaks_the_rule(family):
    lines = [line for number in range(25) for line in fuzz.fuzz(family, 29, number).lines]
    assert not lines, "\n".join(lines)


def trial(fast):
    """Compare sum(x^2) of small numbers in plain torch and with `fast`."""
    leaves = {"x": torch.linspace(0.1, 1.0, 7, dtype=torch.float64)}
    plain = lambda t: {"loss": t["x"].square().sum()}  # noqa: E731
    return fuzz.Trial(leaves, fast, plain, torch.float32, "squares")


def test_a_wrong_result_breaks_the_rule():
    verdict = trial(lambda t: {"loss": t["x"].square().sum() * (1 + 1e-5)}).judge()
    assert len(verdict.lines) == 2 and not verdict.lucky
    assert trial(lambda t: {"logp": t["x"]}).judge().lines[0] == "loss: missing"


def test_random_roundings_measure_the_condition_of_a_sum():
    # 1e4 + x - 1e4 has an error of 1e4 units, which a lucky x hides.
    leaves = {"x": torch.tensor([0.5], dtype=torch.float64)}
    plain = lambda t: {"y": (t["x"] + 1e4) - 1e4}  # noqa: E731
    off = lambda t: {"y": t["x"] + 4e-4}  # noqa: E731
    assert fuzz.Trial(leaves, off, plain, torch.float32, "").judge() == fuzz.Verdict([], lucky=True)
    worse = lambda t: {"y": t["x"] + 1e-2}  # noqa: E731
    assert fuzz.Trial(leaves, worse, plain, torch.float32, "").judge().lines
