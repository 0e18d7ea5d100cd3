"""Every figure in README and docs comes from a committed result file; the blocks are rendered from them."""

from __future__ import annotations

import html
import re
import sys
from pathlib import Path

import pytest
import torch
from report import samples
from tool_loader import load_tool

from benchmarks.harness import Row, Workload

ROOT = Path(__file__).parents[2]
readme = load_tool("readme")
roofline = sys.modules["roofline"]
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


def test_the_readme_has_at_most_five_lines_and_the_docs_the_others():
    assert len(readme.README_LINES) <= 5
    assert not set(readme.README_LINES) & set(readme.MORE_LINES)


def test_nothing_in_a_result_file_beats_its_roofline():
    for name, held in results().items():
        for impl, seconds in held.get("roofline_s", {}).items() if name.startswith("bench-") else ():
            (row,) = (row for row in held["result"]["rows"] if row["impl"] == impl)
            assert row["p20_s"] >= seconds, (name, impl)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_figure_has_a_result_file(page: Path):
    known = readme.known_figures(results())
    unknown = [
        figure for figure in readme.figures_in(page.read_text(encoding="utf-8")) if figure not in known
    ]
    assert not unknown, f"{page.name}: no file in results/ holds {unknown}"


def test_result_files_say_how_to_repeat_them():
    for name, held in results().items():
        if name.startswith(("bench-", "diagnose-")):
            assert held["command"].startswith(("leanstep ", "python -m benchmarks.")) and held["date"], name


def test_blocks_are_rendered_from_results():
    held = {"bench-logprob-linear-cpu": {"roofline_s": {"leanstep": 0.4}, "result": samples.bench_result()}}
    held["rehearse-rl-before"] = {"result": {"screen": "two\nlines\n"}}
    text = (
        "<!-- figures:begin -->\nold\n<!-- figures:end -->\n<!-- verdict:begin -->\n<!-- verdict:end -->\nc\n"
    )
    shown = readme.rendered(text, held)
    row = "| 2.4 s | 450 ms | **5.33×** | 753 MiB → 20 MiB | 1.9 s (trl-chunked"
    assert f"{row}) |\n" in shown
    whole = readme.figures_table(held, readme.README_LINES, "results")
    assert f"{row}<sup>1</sup>) | 400 ms |\n" in whole
    assert "Other libraries: <sup>1</sup> trl-chunked: all rows.\n" in whole
    assert "old" not in shown and "\ntwo\nlines\n  …\n```" in shown
    assert readme.rendered(shown, held) == shown
    assert readme.rendered(shown, {}) == text.replace("old\n", "")


def test_a_peer_that_computes_less_says_so_under_the_table():
    held = {}
    for name, note in (
        ("logprob-linear", "same rows; no entropy; first call 9.1 s"),
        ("grpo-step", ""),
        ("sft-step", "same rows; no entropy"),
    ):
        result = samples.bench_result(case=name)
        result["rows"][2] |= {"impl": "cut-cross-entropy", "note": note}
        held[f"bench-{name}-cpu"] = {"result": result}
    table = readme.figures_table(held, readme.README_LINES, "results")
    cells = [line.split(" | ")[-2] for line in table.splitlines() if "(results/" in line]
    assert cells == [
        "1.9 s (cut-cross-entropy<sup>1</sup>)",
        "1.9 s (cut-cross-entropy<sup>1</sup>)",
        "1.9 s (cut-cross-entropy)",
    ]
    assert "\nOther libraries: <sup>1</sup> cut-cross-entropy: same rows; no entropy.\n" in table


def test_a_peer_slower_than_the_plain_code_is_no_best_peer():
    result = samples.bench_result()
    result["rows"][2]["median_s"] = 2.5
    table = readme.figures_table(
        {"bench-logprob-linear-cpu": {"result": result}}, readme.README_LINES, "results"
    )
    assert "trl-chunked" not in table and table.splitlines()[2].endswith("| - | - |")


def test_the_controllers_factor_is_also_given_against_eager_autograd():
    result = samples.bench_result(case="lens-loss", size="seed")
    result["rows"][2] |= {"impl": "eager", "kind": "fast"}
    table = readme.figures_table({"bench-lens-loss-seed": {"result": result}}, readme.MORE_LINES, "results")
    assert "| **5.33×**; 4.22× against eager ops |" in table


def test_the_roofline_counts_products_once_and_bytes_where_there_are_none(monkeypatch):
    monkeypatch.setattr(
        roofline, "best_rate", lambda shapes, dtype, budget_s: 1e9 if dtype.itemsize > 2 else 4e9
    )
    monkeypatch.setattr(roofline, "_copy_s", lambda num_bytes, budget_s: num_bytes / 1e6)
    a, b = torch.ones(30, 20), torch.ones(20, 10)

    def of(step, **options):
        limit = Row("limit", "limit", lambda workload: step, time_scale=3.0)
        return roofline.roofline_s(limit, Workload({}), **options)

    assert of(lambda: (a @ b, torch.addmm(b, b, torch.ones(10, 10)))) == pytest.approx(
        3 * (2 * 30 * 20 * 10 + 2 * 20 * 10 * 10) / 1e9
    )
    assert of(lambda: a @ b, faster_dtypes=(torch.bfloat16,)) == pytest.approx(3 * 12000 / 4e9)
    assert of(lambda: a.clone().T) == pytest.approx(3 * 2 * a.nbytes / 1e6)


def test_the_best_rate_is_that_of_the_fastest_arrangement(monkeypatch):
    seconds = iter((8.0, 2.0, 4.0, 9.0, 16.0))
    monkeypatch.setattr(roofline, "num_threads", lambda: 2)
    monkeypatch.setattr(roofline, "_fastest", lambda call, budget_s: next(seconds))
    # Four layouts of one product, then two products at once, one per core.
    assert roofline.best_rate(((3, 4, 5),), torch.float32, 0.1) == 2 * 3 * 4 * 5 / 2.0


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
    for line in results()["diagnose-rl-before"]["result"]["screen"].splitlines():
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
