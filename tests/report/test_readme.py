"""Every figure in README and docs comes from a committed result file; the blocks are rendered from them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from leanstep.report import readme

from . import samples

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(ROOT.glob("examples/*/README.md")),
]


def results() -> dict:
    return readme.load_results(ROOT)


def test_the_readme_is_what_the_results_say():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.rendered(text, results()) == text, "run `leanstep bench --readme`"


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
            assert held["command"].startswith("leanstep ") and held["date"], name


def test_blocks_are_rendered_from_results():
    held = {"bench-logprob-linear-cpu": {"command": "x", "date": "y", "result": samples.bench_result()}}
    held["diagnose-rl-before"] = {"result": {"screen": "two\nlines\n"}}
    text = (
        "<!-- figures:begin -->\nold\n<!-- figures:end -->\n<!-- screen:begin -->\n<!-- screen:end -->\nc\n"
    )
    shown = readme.rendered(text, held)
    assert (
        "| 2.4 s | 450 ms | **5.33×** | 753 MiB → 20 MiB | 1.9 s (trl-chunked<sup>1</sup>) | 410 ms |"
        in shown
    )
    assert "What the named peers do: <sup>1</sup> trl-chunked: all rows.\n" in shown
    assert "old" not in shown and "```\ntwo\nlines\n```" in shown
    assert readme.rendered(shown, held) == shown
    assert readme.rendered(shown, {}) == text.replace("old\n", "")


def test_a_peer_that_computes_less_says_so_under_the_table():
    held = {}
    for name, note in (
        ("logprob-linear", "same rows; no entropy; first call 9.1 s"),
        ("policy-loss", ""),
        ("logprob-logits", "same rows; no entropy"),
    ):
        result = samples.bench_result(case=name)
        result["rows"][2] |= {"impl": "cut-cross-entropy", "note": note}
        held[f"bench-{name}-cpu"] = {"result": result}
    table = readme.figures_table(held)
    cells = [line.split(" | ")[-2] for line in table.splitlines() if "(results/" in line]
    assert cells == [
        "1.9 s (cut-cross-entropy<sup>1</sup>)",
        "1.9 s (cut-cross-entropy)",
        "1.9 s (cut-cross-entropy<sup>1</sup>)",
    ]
    assert "\nWhat the named peers do: <sup>1</sup> cut-cross-entropy: same rows; no entropy.\n" in table


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
