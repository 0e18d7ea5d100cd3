"""docs/published.md from results/published: published against predicted, sorted by error, with summaries."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from leanstep.rehearse.time_model import CHIPS

Data = dict[str, Any]

TEMPLATE = Path(__file__).with_name("published_template.md")


def kind_of(result: Data, figure: Data) -> str:
    """The class that a figure is summarised in."""
    if figure["unit"] in ("GiB", "MiB"):
        return "memory, compiled" if "compiled" in result["class"] else "memory, eager"
    if result["class"] == "kernels":
        return "kernels, 1 ms and more" if figure["published"] >= 1 else "kernels below 1 ms"
    return result["class"]


def factor_of(ratio: float) -> float:
    return max(ratio, 1 / ratio)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def blind_figures(results: Sequence[Data]) -> list[tuple[Data, Data]]:
    """The first predictions of the blind rows: (result, figure)."""
    return [(r, f) for r in results if r["role"] == "blind" for f in r["first"]["figures"]]


def interval_class(result: Data) -> str:
    """The class of `time_model.WIDTHS` that a step of this row has."""
    return next((name for name in ("compiled", "convolutions") if name in result["class"]), "eager")


def blind_widths(results: Sequence[Data]) -> dict[tuple[str, str], tuple[int, float]]:
    """(device, class) -> blind steps and the factor that contains 80% of their first predictions.

    Devices with the same chip share their rows; fewer than three rows give no factor.
    """
    factors: dict[tuple[tuple[str, ...], str], list[float]] = defaultdict(list)
    for result, figure in blind_figures(results):
        if figure["unit"] == "ms" and result["class"] != "kernels":
            chip = next((chip for chip in CHIPS if result["device"] in chip), (result["device"],))
            factors[chip, interval_class(result)].append(factor_of(figure["ratio"]))
    return {
        (device, kind): (len(group), math.ceil(100 * percentile(group, 0.8) - 1e-9) / 100)
        for (chip, kind), group in factors.items()
        if len(group) >= 3
        for device in chip
    }


def summary_lines(results: Sequence[Data]) -> list[str]:
    figures: dict[str, list[Data]] = defaultdict(list)
    for result, figure in blind_figures(results):
        figures[kind_of(result, figure)].append(figure)
    lines = ["| class, blind rows | figures | median ratio | median factor | p90 | inside the interval |"]
    lines.append("|---|---|---|---|---|---|")
    for kind, group in sorted(figures.items()):
        ratio = statistics.median(figure["ratio"] for figure in group)
        factors = [factor_of(figure["ratio"]) for figure in group]
        middle, most = statistics.median(factors), percentile(factors, 0.9)
        inside = [figure["inside"] for figure in group if "inside" in figure]
        share = f"{100 * sum(inside) / len(inside):.0f}%" if inside else "–"
        lines.append(f"| {kind} | {len(group)} | {ratio:.2f} | {middle:.2f} | {most:.2f} | {share} |")
    return lines


def interval_lines(results: Sequence[Data]) -> list[str]:
    lines = ["| device | class | blind steps | factor |", "|---|---|---|---|"]
    for (device, kind), (count, width) in sorted(blind_widths(results).items()):
        lines.append(f"| {device} | {kind} | {count} | {width:.2f} |")
    return lines


def number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def figure_line(result: Data, figure: Data) -> str:
    inside = {True: "yes", False: "**no**", None: ""}[figure.get("inside")]
    span = "–".join(number(v) for v in figure["interval"]) if "interval" in figure else ""
    ranks = f"{result['ranks']} × " if result.get("ranks", 1) > 1 else ""
    unit, label = figure["unit"], figure["label"]
    name = result["row"] if label == "step" else f"{result['row']}: {label}"
    ratio = f"{figure['ratio']:.2f}{_first_ratio(result, label)}"
    return (
        f"| {name} | {ranks}{result['device']} | {number(figure['published'])} {unit} "
        f"| {number(figure['predicted'])} {unit} | {ratio} "
        f"| {span} | {inside} "
        f"| {result['role']} | {_source(result)} |"
    )


def _first_ratio(result: Data, label: str) -> str:
    firsts = [f["ratio"] for f in result.get("first", {}).get("figures", ()) if f["label"] == label]
    return f" (first {firsts[0]:.2f})" if firsts else ""


def _source(result: Data) -> str:
    link = result.get("url", result["source"])
    if "/" in result.get("log", ""):
        link = f"{link}/blob/master/records/track_1_short/{result['log']}"
    note = f"; {result['note']}" if "note" in result else ""
    parts = urlsplit(link)
    folders = parts.path.strip("/").split("/")
    publisher = folders[1] if parts.netloc == "github.com" and len(folders) > 1 else parts.netloc
    return f"[{publisher}, {result['date']}]({link}){note}"


def figure_table(results: Sequence[Data]) -> list[str]:
    pairs = [(result, figure) for result in results for figure in result["figures"]]
    pairs.sort(key=lambda pair: (-factor_of(pair[1]["ratio"]), pair[0]["row"], pair[1]["label"]))
    head = "| row | device | published | predicted | ratio | interval | in | role | source |"
    return [head, "|---|---|---|---|---|---|---|---|---|", *(figure_line(*pair) for pair in pairs)]


def stopped_lines(results: Sequence[Data]) -> list[str]:
    stopped = [result for result in results if result["stopped"]]
    return ["", *(f"- {r['row']} stops: {r['stopped']}" for r in stopped)] if stopped else []


def engine_lines(results: Sequence[Data]) -> list[str]:
    """Which versions made the results."""
    by_engine: dict[tuple[str, str], list[Data]] = defaultdict(list)
    for result in results:
        by_engine[result["leanstep"], result["engine"]].append(result)
    ordered = sorted(by_engine.items(), key=lambda item: -len(item[1]))
    lines = []
    for (version, engine), group in ordered:
        replayed = sum(result["recorded_by"] != result["engine"] for result in group)
        again = f", {replayed} of them recorded by an earlier one and priced again" if replayed else ""
        names = "" if group is ordered[0][1] else f": {', '.join(r['row'] for r in group)}"
        lines.append(f"- leanstep {version}, rehearse code {engine}: {len(group)} rows{again}{names}")
    return lines


def page(results: Sequence[Data]) -> str:
    logs = [result for result in results if "log" in result]
    rows = [result for result in results if "log" not in result]
    kernels = [result for result in rows if result["class"] == "kernels"]
    steps = [result for result in rows if result["class"] != "kernels"]
    minutes = sum(result["seconds"] for result in rows) / 60
    return TEMPLATE.read_text(encoding="utf-8").format(
        summary="\n".join(summary_lines(results)),
        intervals="\n".join(interval_lines(results)),
        steps=section(steps),
        speedrun=section(logs),
        kernels=section(kernels),
        engines="\n".join(engine_lines(results)),
        minutes=f"{minutes:.0f}",
    )


def section(results: Sequence[Data]) -> str:
    return "\n".join([*figure_table(results), *stopped_lines(results)])


def quoted(results: Sequence[Data], page: str) -> str:
    """The sentence of README and docs: first predictions of blind rows only. page: link to the table."""
    figures = [
        figure
        for result, figure in blind_figures(results)
        if result["class"].startswith(("transformer", "convolutions", "speedrun")) and figure["unit"] == "ms"
    ]
    factors = [factor_of(figure["ratio"]) for figure in figures]
    half, most = (100 * (percentile(factors, share) - 1) for share in (0.5, 0.9))
    inside = 100 * sum(figure["inside"] for figure in figures) / len(figures)
    short = sum(figure["ratio"] < 1 for figure in figures)
    return (
        f"Accuracy: of {len(figures)} published step times that were compared only after the prediction was "
        f"recorded, half are predicted within {half:.0f} %, 90 % within {most:.0f} %, and {inside:.0f} % are "
        f"inside the stated interval; {short} predictions are too short ([every row]({page}))."
    )
