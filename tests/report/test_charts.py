"""Charts say what the data say, and draw nothing outside the plot."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from leanstep.report import charts, sections

from . import samples


def figures(tmp_path: Path) -> dict[str, charts.Figure]:
    demo = sections.view({"demo": sections.prepare("demo", samples.demo_payload(tmp_path))})["demo"][
        "examples"
    ][0]
    return {
        "shares": charts.shares([("rollout", 3.0), ("update", 1.0)], str),
        "no bars": charts.horizontal_bars([], [], [], [], "unit"),
        **{name: figure for name, figure in demo.items() if name.endswith("_chart")},
    }


def positions(figure: charts.Figure) -> list[float]:
    """Every percentage of a figure, the coordinates of its paths included."""
    marks = [*figure.get("bars", []), *figure.get("parts", [])]
    marks += [*figure.get("x_ticks", []), *figure.get("y_ticks", [])]
    places = [mark["percent"] for mark in marks]
    for line in figure.get("series", []):
        places += [float(number) for number in re.findall(r"[\d.e-]+", line["path"] + line["area"])]
    return places


def test_nothing_is_drawn_outside_the_plot(tmp_path: Path):
    for name, figure in figures(tmp_path).items():
        assert all(-0.02 <= place <= 100.02 for place in positions(figure)), name
        assert positions(figure) or name == "no bars", name


def test_bars_far_apart_are_logarithmic_and_before_after_never():
    far = charts.horizontal_bars(["a", "b"], [1.0, 1000.0], ["fast"] * 2, ["", ""], "s")
    assert far["unit"] == "s, logarithmic"
    # Half a decade of three and a half.
    assert [bar["percent"] for bar in far["bars"]] == [pytest.approx(100 * 0.5 / 3.5, abs=0.01), 100.0]
    pair = charts.before_after(1000.0, 1.0, ("", ""), "s")
    assert pair["unit"] == "s" and [bar["percent"] for bar in pair["bars"]] == [100.0, 0.1]


def test_stacked_areas_lie_on_each_other():
    samples_of_step = [{"event": 0, "weights": 2.0, "saved": 0.0}, {"event": 1, "weights": 2.0, "saved": 2.0}]
    figure = charts.stacked_timeline(samples_of_step, capacity=5.0)
    assert [line["name"] for line in figure["series"]] == ["weights", "saved", "device, 5 B"]
    weights, saved, device = (line["path"] for line in figure["series"])
    # The axis ends five percent above the device's 5 bytes.
    assert weights == "M0 61.9H100V61.9"
    assert saved == "M0 61.9H100V23.81"
    assert device == "M0 4.76L100 4.76"
    # A capacity far above the peak would press the areas flat.
    far = charts.stacked_timeline(samples_of_step, capacity=50.0)
    assert [line["name"] for line in far["series"]] == ["weights", "saved"]


def test_thinned_timeline_keeps_its_peak_and_order():
    timeline = [(i / 1e5, 1000 * math.sin(i / 3000) + (5000 if i == 41_777 else 0)) for i in range(100_000)]
    thinned = charts.thin(timeline)
    assert len(thinned) <= charts.MAX_POINTS + 2
    assert max(level for _, level in thinned) == max(level for _, level in timeline)
    assert [t for t, _ in thinned] == sorted(t for t, _ in thinned)
