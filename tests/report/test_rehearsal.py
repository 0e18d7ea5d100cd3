"""The section of a rehearsal: its charts hold the report's figures, and every caption says predicted."""

from __future__ import annotations

from pathlib import Path

import pytest
from rehearse.test_verdict import recorded

from leanstep.rehearse import verdict
from leanstep.rehearse.devices import DEVICES
from leanstep.report import page, sections


@pytest.fixture(scope="module")
def report() -> dict:
    return verdict.judge(recorded(), [DEVICES["h100"], DEVICES["a100"]])


def test_charts_hold_the_figures_of_the_report(report: dict):
    (run,) = sections.view({"rehearse": sections.prepare("rehearse", report)})["rehearse"]
    shown = {bar["label"]: bar["value"] for bar in run["classes_chart"]["bars"]}
    assert shown == pytest.approx(report["time"]["class_ms"])
    # Areas lie on each other: the last one ends at the sum.
    stacked = [line for line in run["timeline_chart"]["series"] if not line["dash"]]
    assert max(level for _, level in stacked[-1]["points"]) == report["memory"]["allocated_bytes"]
    assert [bar["label"] for bar in run["devices_chart"]["bars"]] == ["h100", "a100"]


def test_a_run_of_the_same_script_and_device_replaces_the_older(report: dict, tmp_path: Path):
    target = tmp_path / "page.html"
    page.add_section(target, "rehearse", report)
    page.add_section(target, "rehearse", {**report, "device": "b200"})
    page.add_section(target, "rehearse", report)
    held = page.read_page(target)["sections"]["rehearse"]["runs"]
    assert sorted(run["device"] for run in held) == ["b200", "h100"]


def test_the_page_says_predicted_and_shows_the_verdict(report: dict, tmp_path: Path):
    target = tmp_path / "page.html"
    page.add_section(
        target,
        "rehearse",
        {
            **report,
            "to_fit": [{"text": "half", "needed_bytes": None, "why": "", "fits": False, "how": "rerun"}],
        },
    )
    text = target.read_text(encoding="utf-8")
    assert report["verdict"] in text and "still too much" in text
    section = text[text.index('id="rehearse"') :]
    assert section[: section.index("</section>")].lower().count("predicted") >= 6
