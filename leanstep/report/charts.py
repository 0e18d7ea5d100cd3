"""Data of the page's charts: bars and lines as plain records, which the template draws in HTML and SVG.

Positions are percentages of the plot, so a chart fits any width without a script. Colours are roles
("fast", "reference", ...), which the style sheet turns into the colours of the light or dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from leanstep import units

Figure = dict[str, Any]
Points = Sequence[tuple[float, float]]
Timeline = Sequence[Sequence[float]]
Show = Callable[[float], str]

# Bars further apart than this are unreadable on a linear axis.
LOG_FROM = 30.0
MAX_POINTS = 400


def horizontal_bars(
    labels: Sequence[str],
    values: Sequence[float],
    roles: Sequence[str],
    texts: Sequence[str],
    unit: str,
    *,
    log_from: float = LOG_FROM,
) -> Figure:
    """Return one bar per label, first on top, each with its text; logarithmic if the values differ a lot."""
    positive = [v for v in values if v > 0]
    top = max(positive, default=1.0)
    is_log = bool(positive) and top / min(positive) > log_from
    if is_log:
        # Bars on a log axis need a start: half a decade below the smallest one.
        low, high = math.log10(min(positive)) - 0.5, math.log10(top)
        percents = [100 * (math.log10(v) - low) / (high - low) if v > 0 else 0.0 for v in values]
    else:
        percents = [100 * max(v, 0.0) / top for v in values]
    rows = zip(labels, values, percents, roles, texts, strict=True)
    return {
        "kind": "bars",
        "unit": f"{unit}, logarithmic" if is_log else unit,
        "bars": [
            {"label": label, "value": value, "percent": round(percent, 2), "role": role, "text": text}
            for label, value, percent, role, text in rows
        ],
    }


def before_after(before: float, after: float, texts: tuple[str, str], unit: str) -> Figure:
    """Return two bars on a linear axis: a large ratio shows as a thin bar beside a full one."""
    return horizontal_bars(
        ["before", "after"], [before, after], ["reference", "fast"], texts, unit, log_from=math.inf
    )


def ranked(
    pairs: Sequence[tuple[str, float]], show: Show, unit: str, *, limit: int = 8, in_order: bool = False
) -> Figure:
    """Return the largest values as bars, each with its text."""
    summed: dict[str, float] = {}
    for name, value in pairs:
        summed[name] = summed.get(name, 0.0) + value
    rows = list(summed.items()) if in_order else sorted(summed.items(), key=lambda row: -row[1])
    rows = [(name, value) for name, value in rows[:limit] if value > 0]
    labels, values = [name for name, _ in rows], [value for _, value in rows]
    return horizontal_bars(labels, values, ["reference"] * len(rows), [show(v) for v in values], unit)


_PART_ROLES = ("reference", "fast", "peer", "limit", "muted")


def shares(pairs: Sequence[tuple[str, float]], show: Show) -> Figure:
    """Return one bar split into parts, such as rollout, scoring and update of an iteration."""
    total = sum(value for _, value in pairs) or 1.0
    return {
        "kind": "shares",
        "parts": [
            {"label": name, "percent": round(100 * value / total, 2), "text": show(value), "role": role}
            for (name, value), role in zip(pairs, _roles(len(pairs)), strict=True)
        ],
    }


def _roles(count: int) -> list[str]:
    return [_PART_ROLES[index % len(_PART_ROLES)] for index in range(count)]


def thin(timeline: Timeline, points: int = MAX_POINTS) -> list[list[float]]:
    """Return about `points` (time, level) pairs: minimum and maximum of each slice, so the peak survives."""
    events = [[float(t), float(level)] for t, level in timeline]
    if len(events) <= points:
        return events
    width = math.ceil(len(events) / (points // 2))
    extremes: list[list[float]] = []
    for start in range(0, len(events), width):
        part = events[start : start + width]
        by_level = sorted(range(len(part)), key=lambda i: part[i][1])
        extremes += [part[i] for i in sorted({by_level[0], by_level[-1]})]
    return extremes


class Axis:
    """Maps values to percentages of the plot and labels a few of them."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high

    def percent(self, value: float) -> float:
        return round(100 * (value - self.low) / (self.high - self.low), 2)

    def ticks(self, values: Sequence[float], show: Show) -> list[Figure]:
        """Return labels at the values inside the plot."""
        places = [(self.percent(value), show(value)) for value in values]
        return [{"percent": place, "text": text} for place, text in places if -0.01 <= place <= 100.01]


def round_steps(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round values from low to high: 1, 2 or 5 times a power of ten."""
    rough = (high - low) / count
    if rough <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _line(name: str, role: str, x: Axis, y: Axis, points: Points, *, stepped: bool = False) -> Figure:
    """One line of a chart; the plot is 100 wide and 100 high, and y grows downwards in SVG."""
    places = [(x.percent(a), round(100 - y.percent(b), 2)) for a, b in points]
    path = ""
    for index, (across, down) in enumerate(places):
        if not index:
            path = f"M{across:g} {down:g}"
        else:
            path += f"H{across:g}V{down:g}" if stepped else f"L{across:g} {down:g}"
    return {
        "name": name,
        "role": role,
        "points": list(points),
        "path": path,
        "dash": False,
        "area": "",
    }


def _area(path: str, floor: str) -> str:
    return f"{path}{floor}Z" if path else ""


def _lines(series: list[Figure], *, x_ticks: Any, y_ticks: Any, x_title: str, height: int = 220) -> Figure:
    return {
        "kind": "lines",
        "series": series,
        "x_ticks": x_ticks,
        "y_ticks": y_ticks,
        "x_title": x_title,
        "height": height,
    }


def memory_timeline(lines: dict[str, Timeline]) -> Figure:
    """Plot bytes above the step's start, from its start (0 %) to its end (100 %), so that both steps fit."""
    courses = {}
    for name, timeline in lines.items():
        points = thin(timeline)
        end = max((t for t, _ in points), default=0.0) or 1.0
        courses[name] = [(100 * t / end, level) for t, level in points]
    top = max((level for points in courses.values() for _, level in points), default=0.0)
    x, y = Axis(0, 100), Axis(0, 1.05 * top or 1.0)
    series = []
    for name, points in courses.items():
        line = _line(name, "fast" if name == "after" else "reference", x, y, points, stepped=True)
        line["area"] = _area(line["path"], "H100V100H0")
        series.append(line)
    return _lines(
        series,
        x_ticks=x.ticks((0, 25, 50, 75, 100), lambda v: f"{v:.0f} %"),
        y_ticks=_size_ticks(y, top),
        x_title="course of one step",
    )


def _size_ticks(axis: Axis, top: float) -> list[Figure]:
    """Return round numbers in the unit that fits the largest value."""
    unit = 1024.0 ** min(max(math.floor(math.log(max(top, 1.0), 1024)), 0), 4)
    return axis.ticks([v * unit for v in round_steps(0, top / unit, 4)], units.size)


def stacked_timeline(samples: Sequence[dict[str, Any]], capacity: float) -> Figure:
    """Plot predicted bytes by purpose over the events of one step, with the device's memory as a line."""
    totals: dict[str, float] = {}
    for sample in samples:
        for name, value in sample.items():
            if name != "event":
                totals[name] = max(totals.get(name, 0.0), value)
    names = sorted(totals, key=lambda name: -totals[name])
    top = max((sum(v for k, v in s.items() if k != "event") for s in samples), default=0.0)
    shows_capacity = 0 < capacity < 1.5 * top
    x = Axis(0, max(len(samples) - 1, 1))
    y = Axis(0, 1.05 * max(top, capacity if shows_capacity else 0.0) or 1.0)
    below = [0.0] * len(samples)
    series = []
    for name, role in zip(names, _roles(len(names)), strict=True):
        above = [level + sample.get(name, 0) for level, sample in zip(below, samples, strict=True)]
        line = _line(name, role, x, y, list(enumerate(above)), stepped=True)
        floor = _line(name, role, x, y, list(enumerate(below)), stepped=True)["path"]
        line["area"] = _between(line["path"], floor)
        series.append(line)
        below = above
    if shows_capacity and series:
        limit = _line(f"device, {units.size(capacity)}", "bad", x, y, [(x.low, capacity), (x.high, capacity)])
        series.append({**limit, "dash": True})
    return _lines(
        series, x_ticks=[], y_ticks=_size_ticks(y, y.high), x_title="events of one step", height=240
    )


def _between(upper: str, lower: str) -> str:
    """Return the area between two stepped paths: SVG's even-odd fill excludes what is inside both."""
    return f"{upper}V100H0Z{lower}V100H0Z" if upper else ""
