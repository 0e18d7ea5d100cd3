"""Charts as plain plotly figures (dicts): built here, drawn by the page's inlined plotly.

Colours are roles ("@fast", "@text", ...): the page replaces them by the values of its light or dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from leanstep import units

Figure = dict[str, Any]
Timeline = Sequence[Sequence[float]]

KIND_ROLE = {"reference": "@reference", "fast": "@fast", "peer": "@peer", "limit": "@limit"}
# Bars further apart than this are unreadable on a linear axis.
LOG_FROM = 30.0
MAX_POINTS = 400


def layout(height: int, **more: Any) -> Figure:
    """Transparent, small margins, no title (the page has its own)."""
    base: Figure = {
        "height": height,
        "margin": {"l": 8, "r": 16, "t": 8, "b": 40},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "inherit", "size": 13, "color": "@text"},
        "xaxis": axis(),
        "yaxis": axis(),
        "showlegend": False,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 13}},
        "hoverlabel": {
            "bgcolor": "@surface",
            "bordercolor": "@grid",
            "font": {"color": "@text", "family": "inherit", "size": 13},
        },
    }
    for key, value in more.items():
        base[key] = {**base[key], **value} if isinstance(base.get(key), dict) else value
    return base


def axis(**more: Any) -> Figure:
    return {
        "gridcolor": "@grid",
        "linecolor": "@grid",
        "zerolinecolor": "@grid",
        "tickfont": {"color": "@muted", "size": 12},
        "automargin": True,
        "fixedrange": True,
        **more,
    }


def horizontal_bars(
    labels: Sequence[str],
    values: Sequence[float],
    roles: Sequence[str],
    texts: Sequence[str],
    unit: str,
    *,
    log_from: float = LOG_FROM,
) -> Figure:
    """One bar per label, first on top, each with its own text; logarithmic when they lie far apart."""
    positive = [v for v in values if v > 0]
    spread = max(positive) / min(positive) if positive else 1.0
    title = {"text": unit, "font": {"size": 12, "color": "@muted"}}
    axes = axis(title=title, showticklabels=False, showgrid=False)
    if spread > log_from:
        low, high = math.log10(min(positive)), math.log10(max(positive))
        # Bars on a log axis start somewhere: half a decade below the smallest one.
        axes |= {"type": "log", "range": [low - 0.5, high + 0.28 * (high - low + 0.5)]}
        axes["title"]["text"] = f"{unit}, logarithmic"
    else:
        axes |= {"range": [0, 1.3 * max(positive, default=1.0)]}
    figure_height = 64 + 36 * len(labels)
    return {
        "data": [
            {
                "type": "bar",
                "orientation": "h",
                "y": list(labels),
                "x": list(values),
                "text": list(texts),
                "textposition": "outside",
                "cliponaxis": False,
                "textfont": {"color": "@text", "size": 13},
                "marker": {"color": list(roles), "cornerradius": 4},
                "hovertemplate": "%{y}: %{text}<extra></extra>",
            }
        ],
        "layout": layout(
            figure_height,
            xaxis=axes,
            yaxis={"autorange": "reversed", "tickfont": {"color": "@text", "size": 13}, "showgrid": False},
            bargap=0.32,
        ),
    }


def bench_time(result: dict[str, Any]) -> Figure:
    """Median time of every row that ran, with its ratio to the reference."""
    rows = [row for row in result["rows"] if row["available"] and row["median_s"]]
    texts = [f"{units.seconds(r['median_s'])} · {units.ratio(r['time_ratio'])}" for r in rows]
    return _rows_chart(rows, "median_s", texts, "time per step")


def bench_memory(result: dict[str, Any]) -> Figure:
    """Memory above inputs and results, where it was measured."""
    rows = [row for row in result["rows"] if row["available"] and row["extra_bytes"] is not None]
    texts = [units.size(r["extra_bytes"]) for r in rows]
    return _rows_chart(rows, "extra_bytes", texts, "extra memory")


def _rows_chart(rows: list[dict[str, Any]], field: str, texts: list[str], unit: str) -> Figure:
    return horizontal_bars(
        [r["impl"] for r in rows], [r[field] for r in rows], [KIND_ROLE[r["kind"]] for r in rows], texts, unit
    )


def before_after(before: float, after: float, texts: tuple[str, str], unit: str) -> Figure:
    """Two bars, always linear: a sliver beside a full bar is the truth about a large ratio."""
    return horizontal_bars(
        ["before", "after"], [before, after], ["@reference", "@fast"], texts, unit, log_from=math.inf
    )


def finding_costs(findings: list[dict[str, Any]], *, limit: int = 8) -> Figure:
    """Share of the step that the findings cost, the dearest first."""
    dearest = sorted(findings, key=lambda f: f["share"], reverse=True)[:limit]
    return horizontal_bars(
        [f"{f['rule']} {f['place']}" for f in dearest],
        [f["share"] for f in dearest],
        ["@reference"] * len(dearest),
        [f["cost"] for f in dearest],
        "share of the step's time or memory",
    )


def thin(timeline: Timeline, points: int = MAX_POINTS) -> list[list[float]]:
    """At most about `points` (time, level) pairs: lowest and highest of each slice, so the peak survives."""
    events = [[float(t), float(level)] for t, level in timeline]
    if len(events) <= points:
        return events
    width = math.ceil(len(events) / (points // 2))
    kept: list[list[float]] = []
    for start in range(0, len(events), width):
        part = events[start : start + width]
        by_level = sorted(range(len(part)), key=lambda i: part[i][1])
        kept += [part[i] for i in sorted({by_level[0], by_level[-1]})]
    return kept


def memory_timeline(lines: dict[str, Timeline]) -> Figure:
    """Bytes above the start of the step over its course; the course is 0 to 100 %, so both fit."""
    data = []
    for name, timeline in lines.items():
        points = thin(timeline)
        end = max((t for t, _ in points), default=0.0) or 1.0
        role = "@fast" if name == "after" else "@reference"
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": name,
                "x": [round(100 * t / end, 3) for t, _ in points],
                "y": [round(level / 2**20, 4) for _, level in points],
                "line": {"shape": "hv", "width": 2, "color": role},
                "fill": "tozeroy",
                "fillcolor": role + "-soft",
                "hovertemplate": "%{y:.3g} MiB at %{x:.0f} %<extra>" + name + "</extra>",
            }
        )
    return {
        "data": data,
        "layout": layout(
            280,
            margin={"t": 32},
            showlegend=True,
            xaxis={"ticksuffix": " %", "title": _title("course of one step"), "range": [0, 100]},
            yaxis={"ticksuffix": " MiB", "rangemode": "tozero"},
        ),
    }


_CATEGORY_ROLES = ("@reference", "@fast", "@peer", "@limit", "@muted")


def stacked_timeline(samples: Sequence[dict[str, Any]], capacity: float) -> Figure:
    """Predicted bytes by what they are for, over the events of one step; the device's memory as a line."""
    totals: dict[str, float] = {}
    for sample in samples:
        for name, value in sample.items():
            if name != "event":
                totals[name] = max(totals.get(name, 0.0), value)
    names = sorted(totals, key=lambda name: -totals[name])
    x = [sample["event"] for sample in samples]
    data: list[Figure] = []
    for index, name in enumerate(names):
        role = _CATEGORY_ROLES[index % len(_CATEGORY_ROLES)]
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": name,
                "stackgroup": "memory",
                "x": x,
                "y": [round(sample.get(name, 0) / 2**30, 4) for sample in samples],
                "line": {"shape": "hv", "width": 1, "color": role},
                "hovertemplate": "%{y:.3g} GiB<extra>" + name + "</extra>",
            }
        )
    top = max((sum(v for k, v in s.items() if k != "event") for s in samples), default=0.0)
    shapes = []
    if capacity < 1.5 * top:
        line = {"color": "@text", "width": 1, "dash": "dot"}
        shapes = [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": capacity / 2**30, "line": line}]
        shapes[0]["y1"] = shapes[0]["y0"]
    return {
        "data": data,
        "layout": layout(
            300,
            margin={"t": 48},
            showlegend=True,
            shapes=shapes,
            xaxis={"title": _title("events of one step"), "showticklabels": False},
            yaxis={"ticksuffix": " GiB", "rangemode": "tozero"},
        ),
    }


def ranked(
    pairs: Sequence[tuple[str, float]], show: Any, unit: str, *, limit: int = 8, in_order: bool = False
) -> Figure:
    """The largest values as bars, each with its text."""
    summed: dict[str, float] = {}
    for name, value in pairs:
        summed[name] = summed.get(name, 0.0) + value
    rows = list(summed.items()) if in_order else sorted(summed.items(), key=lambda row: -row[1])
    rows = [(name, value) for name, value in rows[:limit] if value > 0]
    labels, values = [name for name, _ in rows], [value for _, value in rows]
    return horizontal_bars(labels, values, ["@reference"] * len(rows), [show(v) for v in values], unit)


def loss_curves(curves: dict[str, Sequence[float]]) -> Figure:
    """Loss of the first steps; equal runs lie on top of each other, so the second is dotted."""
    styles = {"before": ("@reference", "solid", 5), "after": ("@fast", "dot", 2.5)}
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": list(range(1, len(values) + 1)),
            "y": list(values),
            "line": {"color": styles[name][0], "dash": styles[name][1], "width": styles[name][2]},
            "marker": {"size": 5},
            "hovertemplate": "step %{x}: %{y:.6f}<extra>" + name + "</extra>",
        }
        for name, values in curves.items()
    ]
    return {
        "data": data,
        "layout": layout(
            280,
            margin={"t": 32},
            showlegend=True,
            xaxis={"title": _title("step"), "dtick": 1},
            yaxis={"title": _title("loss")},
        ),
    }


def sweep(results: list[dict[str, Any]], key: str, field: str) -> Figure:
    """One line per implementation over the swept parameter."""
    series: dict[str, tuple[str, list[float], list[float], list[str]]] = {}
    show = units.seconds if field == "median_s" else units.size
    for result in results:
        value = swept_value(result["size"], key)
        for row in result["rows"]:
            # A logarithmic axis has no zero: a limit that needs no extra bytes has no line.
            if value is None or not row["available"] or not row[field]:
                continue
            _, xs, ys, texts = series.setdefault(row["impl"], (row["kind"], [], [], []))
            xs.append(value)
            ys.append(row[field])
            texts.append(show(row[field]))
    data = []
    for name, (kind, xs, ys, texts) in series.items():
        order = sorted(range(len(xs)), key=lambda i: xs[i])
        strong = kind in ("fast", "reference")
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": [xs[i] for i in order],
                "y": [ys[i] for i in order],
                "text": [texts[i] for i in order],
                "line": {
                    "color": KIND_ROLE[kind],
                    **({"width": 2.5} if strong else {"width": 1.5, "dash": "dot"}),
                },
                "marker": {"size": 8 if strong else 6},
                "hovertemplate": f"{key} %{{x}}: %{{text}}<extra>{name}</extra>",
            }
        )
    ticks = sorted({x for line in data for x in line["x"]})
    highest = max((y for line in data for y in line["y"]), default=1.0)
    lowest = min((y for line in data for y in line["y"]), default=1.0)
    return {
        "data": data,
        "layout": layout(
            320,
            margin={"t": 56},
            showlegend=True,
            xaxis={"title": _title(key.replace("_", " ")), **_ticks(ticks)},
            yaxis={"type": "log", **_log_ticks(lowest, highest, show)},
        ),
    }


def capacity(rows: list[dict[str, Any]], devices: dict[str, int], *, x_title: str) -> Figure:
    """Predicted peaks of several methods over a swept value against the capacity of devices.

    `rows`: `{"method", "kind", "x", "peak_bytes"}`; `devices`: name -> bytes.
    """
    data = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = sorted((row for row in rows if row["method"] == method), key=lambda row: row["x"])
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": method,
                "x": [row["x"] for row in own],
                "y": [row["peak_bytes"] / 2**30 for row in own],
                "text": [units.size(row["peak_bytes"]) for row in own],
                "line": {"color": KIND_ROLE[own[0]["kind"]], "width": 2.5},
                "marker": {"size": 8},
                "hovertemplate": "%{x:g}: %{text}<extra>" + method + "</extra>",
            }
        )
    ticks = sorted({row["x"] for row in rows})
    edge = [ticks[0], ticks[-1]] if ticks else [0, 1]
    for name, num_bytes in devices.items():
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"{name}, {units.size(num_bytes)}",
                "x": edge,
                "y": [num_bytes / 2**30] * 2,
                "line": {"color": "@bad", "width": 1.5, "dash": "dash"},
                "hovertemplate": f"{name}: {units.size(num_bytes)}<extra></extra>",
            }
        )
    return {
        "data": data,
        "layout": layout(
            340,
            margin={"t": 56},
            showlegend=True,
            xaxis={"title": _title(x_title), **_ticks(ticks)},
            yaxis={"ticksuffix": " GiB", "rangemode": "tozero"},
        ),
    }


def swept_value(size_label: str, key: str) -> float | None:
    """`cpu, response_frac=0.25` -> 0.25."""
    for part in size_label.split(", ")[1:]:
        name, equals, value = part.partition("=")
        if equals and name == key:
            try:
                return float(value)
            except ValueError:
                return None
    return None


def _ticks(values: list[float]) -> Figure:
    return {"tickvals": values, "ticktext": [f"{v:g}" for v in values]}


def _title(text: str) -> Figure:
    return {"text": text, "font": {"size": 12, "color": "@muted"}, "standoff": 8}


def _log_ticks(lowest: float, highest: float, show: Any) -> Figure:
    """Decade ticks with units in words; plotly's own would print 10M for bytes."""
    first, last = math.floor(math.log10(lowest)), math.ceil(math.log10(highest))
    base = 10.0
    if show is units.size:
        first, last, base = math.floor(math.log(lowest, 4)), math.ceil(math.log(highest, 4)), 4.0
    step = max(1, math.ceil((last - first) / 6))
    values = [base**e for e in range(first, last + 1, step)]
    return {
        "tickvals": values,
        "ticktext": [show(v) for v in values],
        "range": [math.log10(lowest) - 0.15, math.log10(highest) + 0.15],
    }
