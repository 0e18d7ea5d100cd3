"""Predicted figures in results/rehearsed do not grow, and hold what was promised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tool_loader import load_tool

from leanstep.rehearse.answers.fake_device import RehearsalError, library

KEPT = Path(__file__).parents[2] / "results" / "rehearsed"


def kept(name: str) -> dict:
    return json.loads((KEPT / f"{name}.json").read_text())["predicted"]


@pytest.mark.parametrize("row", ["fp32", "bf16", "banks"])
def test_a_normuon_step_of_124m_is_what_was_promised(row):
    figures = kept(f"normuon-124m-{row}")
    assert figures["launches"] <= 200 and figures["host_waits"] == 0
    assert figures["device_ms"] + figures["host_ms"] <= 5.0


@pytest.mark.timeout(240)
@pytest.mark.parametrize("script", sorted(load_tool("rehearsed").ROWS))
def test_predicted_figures_do_not_grow(script):
    pytest.importorskip("triton", reason="Triton is not installed")
    try:
        library()
    except RehearsalError as reason:
        pytest.skip(f"no fake device: {reason}")
    for name, now in load_tool("rehearsed").figures(script).items():
        for key, value in kept(name).items():
            assert now[key] <= value * 1.02, f"{name}: {key} was {value}, is {now[key]}"
