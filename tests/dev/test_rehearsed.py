"""Predicted figures in results/rehearsed do not grow, and hold what was promised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rehearse.rehearsed import stub_or_skip
from tool_loader import load_tool

KEPT = Path(__file__).parents[2] / "results" / "rehearsed"


def kept(name: str) -> dict:
    return json.loads((KEPT / f"{name}.json").read_text())["predicted"]


@pytest.mark.parametrize("row", ["fp32", "bf16", "banks"])
def test_a_normuon_step_of_124m_is_what_was_promised(row):
    figures = kept(f"normuon-124m-{row}")
    # Compiled by the fusion model: products take 2.5 ms of it. Hand-fused kernels took 4.1 ms in all.
    assert figures["launches"] <= 500 and figures["host_waits"] == 0
    assert figures["step_ms"] <= 7.0 and figures["host_ms"] < figures["device_ms"]


@pytest.mark.parametrize(
    ("row", "bare", "ratio", "extra_gib"),
    [
        ("head-76k", "bare-76k", 1.2, 0.65),
        ("head-152k", "bare-152k", 1.2, 1.2),
        ("head-1024-152k", "bare-1024-152k", 1.35, 1.2),
        ("frozen-76k", "bare-three-76k", 1.25, 0.6),
        # A chunk of logits, and dW in fp32.
        ("policy-76k", "bare-three-76k", 1.35, 1.5),
        # Row functions in plain torch: up to thirty passes over the logits of two heads.
        ("distill-kl-76k", "bare-distill-76k", 7.5, 4.3),
        ("distill-jsd-76k", "bare-distill-76k", 12.0, 4.3),
        *((f"{kind}-76k", "bare-preference-76k", 1.25, 1.0) for kind in ("dpo", "kto")),
        ("cross-entropy-76k", "bare-labels-76k", 1.25, 1.0),
        ("masked-76k", "bare-labels-76k", 1.35, 1.0),
    ],
)
def test_a_path_takes_little_more_than_its_products(row, bare, ratio, extra_gib):
    figures = kept(row)
    # The ratios were set when a pass over memory was priced at 0.91 of its rate; it is 0.83 now.
    assert figures["device_ms"] <= (1 + 1.1 * (ratio - 1)) * kept(bare)["device_ms"]
    assert figures["host_ms"] < figures["device_ms"] and figures["extra_mib"] <= 1024 * extra_gib


@pytest.mark.parametrize(
    "row",
    sorted(
        name for script in ("head", "objectives") for name in load_tool("rehearsed").ROWS[script].values()
    ),
)
def test_no_host_waits_no_slow_products(row):
    figures = kept(row)
    assert figures["host_waits"] == figures["misaligned_products"] == 0
    assert not figures["fp32_products"] or row == "liger-76k"


def test_finishing_logits_takes_no_pass():
    beside = {n: kept(f"{n}-76k")["device_ms"] - kept(f"{n}-76k")["products_ms"] for n in ("head", "finish")}
    # Bias, softcap and a temperature per row; reading every logit once more would be a third on top.
    assert beside["finish"] <= 1.2 * beside["head"]
    assert kept("finish-76k")["device_ms"] <= 1.25 * kept("bare-76k")["device_ms"]


def test_a_master_weight_under_autocast_is_multiplied_in_16_bits():
    assert kept("autocast-152k")["device_ms"] <= 1.25 * kept("head-152k")["device_ms"]


def test_peers_are_slower():
    head, trl = kept("head-76k")["device_ms"], kept("trl-76k")
    assert all(kept(f"{peer}-76k")["device_ms"] > head for peer in ("verl", "liger", "torch"))
    # TRL rounds its logits to 16 bits; fp32 logits are twice the bytes.
    assert head <= 1.03 * trl["device_ms"] and kept("head-76k")["extra_mib"] < trl["extra_mib"]
    assert kept("head-152k")["device_ms"] < kept("verl-152k")["device_ms"]


def record() -> dict:
    return json.loads((KEPT.parent / "record-74.json").read_text())


def test_upstreams_record_is_predicted_within_15_percent():
    assert abs(record()["upstream"]["seconds"] / 88.1 - 1) < 0.15


def test_the_record_is_not_slower_than_upstreams_in_any_stage():
    table = record()
    for stage, row in table["leanstep"]["stages"].items():
        assert row["ms"] <= table["upstream"]["stages"][stage]["ms"]


@pytest.mark.parametrize("who", ["leanstep", "leanstep, one rank"])
def test_the_record_fits_and_waits_for_nothing_inside_a_step(who):
    figures = record()[who]
    assert figures["peak_gib"] * 2**30 <= 80e9 - 500 * 2**20
    for row in figures["stages"].values():
        assert row["without Adam"]["host_waits"] == row["with Adam"]["host_waits"] == 0


@pytest.mark.timeout(240)
@pytest.mark.parametrize("script", sorted(load_tool("rehearsed").ROWS))
def test_predicted_figures_do_not_grow(script):
    pytest.importorskip("triton", reason="Triton is not installed")
    stub_or_skip()
    for name, now in load_tool("rehearsed").figures(script).items():
        for key, value in kept(name).items():
            assert now[key] <= value * 1.02, f"{name}: {key} was {value}, is {now[key]}"
