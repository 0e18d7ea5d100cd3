"""Every figure in README and docs comes from a committed result file; the blocks are rendered from them."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest
from report import samples
from tool_loader import load_tool

ROOT = Path(__file__).parents[2]
readme = load_tool("readme")
PAGES = [
    ROOT / "README.md",
    # published.md is made from results/published as a whole, and test_published.py compares it.
    *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name != "published.md"),
    *sorted(ROOT.glob("examples/*/README.md")),
]


def results() -> dict:
    return readme.load_results(ROOT)


@pytest.mark.parametrize("name", readme.PAGES)
def test_the_tables_are_what_the_results_say(name: str):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert ":begin -->" in text
    assert readme.rendered(text, results()) == text, "run `python dev/readme.py --render`"


def test_every_row_has_five_samples_of_this_version():
    names = [name for name in readme.MEASURED if name in results()]
    assert len(names) >= 4
    for name in names:
        result = results()[name]["result"]
        assert result["leanstep"].startswith("0.4."), name
        assert all(row["samples"] >= 5 for row in result["rows"]), name


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_figure_has_a_result_file(page: Path):
    known = readme.known_figures(results())
    unknown = [
        figure for figure in readme.figures_in(page.read_text(encoding="utf-8")) if figure not in known
    ]
    assert not unknown, f"{page.name}: no file in results/ holds {unknown}"


def test_result_files_say_how_to_repeat_them():
    for name, held in results().items():
        if name.startswith("bench-"):
            assert "python -m benchmarks." in held["command"] and held["date"], name
    assert all(s["command"].startswith("leanstep ") for s in results()["screens"].values())
    rows = results()[readme.PREDICTED]["rows"].values()
    assert all(row["command"].startswith("leanstep rehearse ") and row["leanstep"] for row in rows)


def held_rows(before_s: float, after_s: float) -> dict:
    """Result files of every line of the README, with two times."""
    held: dict = {readme.PREDICTED: {"rows": {}}}
    for line in readme.README_LINES:
        result = samples.bench_result(case="x")
        rows = [
            {**result["rows"][0], "impl": name, "median_s": seconds, "peak_bytes": 3 * 2**20}
            for name, seconds in ((line.before, before_s), (line.after, after_s))
        ]
        others = held.get(line.measured, {"result": {"rows": []}})["result"]["rows"]
        held[line.measured] = {"result": {**result, "rows": [*others, *rows]}}
        for name, seconds in ((line.before, before_s), (line.after, after_s)):
            row = {"peak_bytes": 2**30, "step_s": seconds, "interval_s": [seconds, seconds]}
            key = f"{line.predicted.format(name)} on h100"
            held[readme.PREDICTED]["rows"][key] = {**row, "fits": True, "bound_by": "device"}
    return held


def test_a_row_without_a_gain_is_printed_like_one_with_a_gain():
    table = readme.readme_table(held_rows(1.0, 1.25))
    assert table.count("\n") == 2 + len(readme.README_LINES)
    assert "3 MiB → 3 MiB; 1 s → 1.25 s (**0.80×**)" in table
    assert "1 GiB → 1 GiB; 1 s → 1.25 s (**0.80×**)" in table


def test_a_result_with_few_samples_is_refused(tmp_path: Path):
    result = samples.bench_result()
    result["rows"] = [{**row, "samples": 4} for row in result["rows"]]
    file = tmp_path / "muon_step.json"
    file.write_text(json.dumps(result), encoding="utf-8")
    with pytest.raises(readme.BadInput, match="fewer than five samples"):
        readme.take(tmp_path, file)


def test_a_screen_is_clipped_to_its_lines():
    long = "\n".join(f"line {number}" for number in range(9))
    held = {"screens": {"rehearse-before": {"command": "leanstep rehearse x", "screen": long}}}
    shown = readme.screen_block(held, "rehearse-before")
    assert shown.splitlines()[:2] == ["```", "$ leanstep rehearse x"]
    assert "line 5" in shown and "line 6" not in shown and "  …" in shown


def test_the_rows_of_the_museum_are_those_of_the_museum():
    museum = (ROOT / "docs" / "museum.md").read_text(encoding="utf-8")
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = page.partition("| bug | lived | verdict |\n|---|---|---|\n")[2].partition("\n\n")[0].splitlines()
    assert len(rows) == 2
    for bug, lived, verdict in ([cell.strip() for cell in row.strip("|").split("|")] for row in rows):
        title, project = re.fullmatch(r"(.*) \((.*)\)", bug).groups()
        (line,) = (line for line in museum.splitlines() if title in line)
        assert f"| {project} |" in line and f"| {lived} |" in line and verdict in line


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        ("is 5.33× faster and takes 450 ms", ["5.33 ×", "450 ms"]),
        ("58.14 GiB, 12 MiB", ["58.14 GiB", "12 MiB"]),
        ("a 768 × 3072 matrix, `3.5 s` in code\n```\n9 ms\n```", []),
        ("version 2.13.0, page 3 and x1.5 s", []),
    ],
)
def test_figures_are_found_outside_code(text: str, figures: list[str]):
    assert readme.figures_in(text) == figures


def test_the_picture_shows_what_diagnose_printed():
    svg = (ROOT / readme.PICTURE).read_text(encoding="utf-8")
    drawn = html.unescape(re.sub(r"<[^>]+>", "", svg)).replace("\xa0", " ")
    for line in results()["screens"][readme.PICTURED]["screen"].splitlines():
        for word in line.split():
            assert word in drawn, f"{word!r}: run `python dev/readme.py --render`"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


def test_a_made_up_figure_is_noticed():
    known = readme.known_figures({"bench-x-cpu": {"result": samples.bench_result()}})
    assert {"5.33 ×", "450 ms"} <= known
    assert "6.33 ×" not in known and "451 ms" not in known


LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    links = LINK.findall(page.read_text(encoding="utf-8"))
    broken = [link for link in links if not (page.parent / link).exists()]
    assert not broken, f"{page.name}: {broken}"
