"""Charts are valid plotly figures and say what the data say."""

from __future__ import annotations

import math
from pathlib import Path

import plotly.graph_objects as go
import pytest

from leanstep.report import charts, sections

from . import samples


def painted(value):
    """Roles replaced by a colour, as the page's script does."""
    if isinstance(value, str):
        return "#123456" if value.startswith("@") else value
    if isinstance(value, list):
        return [painted(item) for item in value]
    return {key: painted(item) for key, item in value.items()} if isinstance(value, dict) else value


def figures(tmp_path: Path) -> dict[str, charts.Figure]:
    demo = sections.view({"demo": sections.prepare("demo", samples.demo_payload(tmp_path))})["demo"][
        "examples"
    ][0]
    return {
        "bench time": charts.bench_time(samples.bench_result()),
        "bench memory": charts.bench_memory(samples.bench_result()),
        "sweep time": charts.sweep(samples.sweep_results(), "response_frac", "median_s"),
        "sweep memory": charts.sweep(samples.sweep_results(), "response_frac", "extra_bytes"),
        "capacity": charts.capacity(samples.capacity_rows(), {"H200": 141_000_000_000}, x_title="x"),
        "empty sweep": charts.sweep([], "response_frac", "median_s"),
        "no bars": charts.horizontal_bars([], [], [], [], "unit"),
        **{name: figure for name, figure in demo.items() if name.endswith("_chart")},
    }


def test_plotly_accepts_every_figure(tmp_path: Path):
    for name, figure in figures(tmp_path).items():
        go.Figure(painted(figure))  # raises on an unknown or impossible property
        assert figure["layout"]["height"] > 0, name


def test_rows_that_did_not_run_have_no_bar():
    (bars,) = charts.bench_time(samples.bench_result())["data"]
    assert bars["y"] == ["reference", "leanstep", "trl-chunked", "limit"]
    assert bars["x"] == [2.4, 0.45, 1.9, 0.41]
    assert bars["text"][1] == "450 ms · 5.33×"
    assert bars["marker"]["color"] == ["@reference", "@fast", "@peer", "@limit"]


def test_bars_far_apart_are_logarithmic_and_before_after_never():
    far = charts.horizontal_bars(["a", "b"], [1.0, 1000.0], ["@fast"] * 2, ["", ""], "s")
    assert far["layout"]["xaxis"]["type"] == "log"
    low, high = far["layout"]["xaxis"]["range"]
    assert low < 0 < 3 < high
    pair = charts.before_after(1000.0, 1.0, ("", ""), "s")
    assert "type" not in pair["layout"]["xaxis"] and pair["layout"]["xaxis"]["range"][0] == 0


def test_thinned_timeline_keeps_its_peak_and_order():
    timeline = [(i / 1e5, 1000 * math.sin(i / 3000) + (5000 if i == 41_777 else 0)) for i in range(100_000)]
    thinned = charts.thin(timeline)
    assert len(thinned) <= charts.MAX_POINTS + 2
    assert max(level for _, level in thinned) == max(level for _, level in timeline)
    assert [t for t, _ in thinned] == sorted(t for t, _ in thinned)


def test_short_timeline_is_kept_as_it_is():
    assert charts.thin([(0, 1), (1, 2)]) == [[0.0, 1.0], [1.0, 2.0]]


def test_sweep_orders_points_and_leaves_out_zeros():
    figure = charts.sweep(samples.sweep_results(), "response_frac", "extra_bytes")
    lines = {line["name"]: line for line in figure["data"]}
    assert lines["leanstep"]["x"] == [0.1, 0.25, 0.5, 1.0]
    assert "limit" not in lines and "liger" not in lines


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("cpu, response_frac=0.25", 0.25),
        ("cpu", None),
        ("cpu, other=3", None),
        ("cpu, response_frac=x", None),
    ],
)
def test_swept_value(label: str, expected: float | None):
    assert charts.swept_value(label, "response_frac") == expected


def test_capacity_draws_one_line_per_method_and_device():
    figure = charts.capacity(samples.capacity_rows(), {"H200": 141_000_000_000}, x_title="x")
    assert [line["name"] for line in figure["data"]] == [
        "reference",
        "gather-after",
        "leanstep",
        "H200, 131 GiB",
    ]
    assert figure["data"][3]["y"] == [pytest.approx(131.3, abs=0.02)] * 2
