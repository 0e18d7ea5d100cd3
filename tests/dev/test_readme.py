"""Every figure in README and docs comes from a committed result file; the blocks are rendered from them."""

from __future__ import annotations

import html
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


def test_the_rows_of_the_museum_are_those_of_the_museum():
    museum = (ROOT / "docs" / "museum.md").read_text(encoding="utf-8")
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = page.partition("| bug | lived | verdict |\n|---|---|---|\n")[2].partition("\n\n")[0].splitlines()
    assert len(rows) == 2
    for bug, lived, verdict in ([cell.strip() for cell in row.strip("|").split("|")] for row in rows):
        title, project = re.fullmatch(r"(.*) \((.*)\)", bug).groups()
        (line,) = (line for line in museum.splitlines() if title in line)
        assert f"| {project} |" in line and f"| {lived} |" in line and verdict in line


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
