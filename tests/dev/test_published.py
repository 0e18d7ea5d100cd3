"""The open table: rows are read without running them, rehearsed, compared, and shown on a page."""

from __future__ import annotations

import re

import pytest
from rehearse.rehearsed import stub_or_skip
from tool_loader import load_tool

from leanstep.rehearse.time_model import BLIND_WIDTHS

published = load_tool("published")
page = published.published_page

SCRIPT = """
import torch
from halves import half

PUBLISHED = {
    "source": "https://github.com/someone/something/table.md", "date": "2026", "role": "blind",
    "class": "transformer, eager", "device": "a100",
    "rows": {"tiny": {"args": "64", "per_step": 10, "per_s": 1000, "allocated_gib": 0.01, "note": "made up"},
             "tiny-kernels": {"args": "64", "class": "kernels", "kernels_ms": {"product": 0.5},
                              "kernels_extra_mib": {"product": 1.0}, "steps": 2}},
}
weight = torch.zeros(half(2048), half(2048), device="cuda", requires_grad=True)
pace = torch.optim.SGD([torch.zeros(1, device="cuda", requires_grad=True)], lr=0.0)
for _ in range(4):
    pace.step()
    weight @ weight
    pace.step()
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tiny.py").write_text(SCRIPT)
    (tmp_path / "halves.py").write_text("def half(n):\n    return n // 2\n")
    return tmp_path


def test_the_page_and_the_readme_are_those_of_the_results():
    results = published.load_results()
    assert published.PAGE.read_text(encoding="utf-8") == page.page(results)
    for name, link in published.QUOTED.items():
        assert page.quoted(results, link) in (published.ROOT / name).read_text(encoding="utf-8")


def test_intervals_are_those_of_blind_rows():
    widths = page.blind_widths(published.load_results())
    assert {key: width for key, (_, width) in widths.items()} == dict(BLIND_WIDTHS)


def test_a_row_that_sets_a_rate_is_not_blind(folder):
    script = folder / "tiny.py"
    script.write_text(SCRIPT.replace('"role": "blind"', '"role": "blind", "sets": "RATES.stream"'))
    with pytest.raises(published.BadInput, match="a row that sets RATES"):
        published.read_rows(folder)
    script.write_text(script.read_text().replace('"role": "blind"', '"role": "development"'))
    assert published.read_rows(folder)


def test_a_row_is_rehearsed_and_compared(folder):
    stub_or_skip()
    rows = {row.name: row for row in published.read_rows(folder)}
    result = published.rehearse_row(rows["tiny"], folder / "kept", False, None)
    step, memory = result["figures"]
    assert (step["published"], step["unit"], memory["unit"]) == (10.0, "ms", "GiB")
    assert step["ratio"] == pytest.approx(step["predicted"] / 10.0, rel=1e-3)
    assert step["inside"] == (step["interval"][0] <= 10.0 <= step["interval"][1])
    assert memory["predicted"] == pytest.approx((8 * 2**20 + 8_519_680 + 512) / 2**30, rel=0.01)

    kernels = published.rehearse_row(rows["tiny-kernels"], folder / "kept", False, None)["figures"]
    assert [k["label"] for k in kernels] == ["product", "product"]
    # 2 GFLOP of true fp32 on an A100 (19.5 TFLOP/s); the product makes 4 MiB and the library its workspace.
    assert 0.05 < kernels[0]["predicted"] < 0.3
    assert kernels[1]["predicted"] == pytest.approx(4 + 8_519_680 / 2**20, rel=0.01)

    again = published.rehearse_row(rows["tiny"], folder / "kept", True, None)
    assert again["figures"] == result["figures"] and again["seconds"] == result["seconds"]


def result(row: str, ratio: float, inside: bool, role: str = "blind") -> dict:
    figure = {"label": "step", "unit": "ms", "published": 100.0, "predicted": 100 * ratio, "ratio": ratio}
    figure |= {"interval": [90.0, 110.0], "inside": inside}
    facts = {"source": "https://github.com/a/b", "date": "2026", "class": "transformer, eager"}
    made = {"stopped": None, "leanstep": "1", "engine": "e", "recorded_by": "e", "seconds": 60}
    first = {"first": {"figures": [figure], "engine": "e"}} if role == "blind" else {}
    return {"row": row, "role": role, "device": "h100", "figures": [figure], **first, **facts, **made}


def test_the_page_sorts_by_error_and_summarises_first_predictions_of_blind_rows():
    results = [
        result("a", 0.5, False),
        result("b", 1.1, True),
        result("c", 1.2, True),
        result("d", 0.9, True),
    ]
    results.append({**result("e", 1.0, True, "development"), "recorded_by": "older"})
    stopped = {"figures": [], "first": {"figures": [], "engine": "e"}, "stopped": "no such thing"}
    results.append({**result("f", 1.0, True), **stopped})
    results[1]["figures"] = [{**results[1]["figures"][0], "ratio": 1.05}]  # a later version's figure
    text = page.page(results)
    rows = re.findall(r"^\| (\w) \|", text, re.MULTILINE)
    assert rows == ["a", "c", "d", "b", "e"]
    assert "| transformer, eager | 4 | 1.00 | 1.16 | 2.00 | 75% |" in text and "1.05 (first 1.10)" in text
    assert "- f stops: no such thing" in text and "[b, 2026](https://github.com/a/b)" in text
    assert "6 rows, 1 of them recorded by an earlier one and priced again" in text
    quoted = page.quoted(results, "published.md")
    assert quoted.startswith("Accuracy: of 4 published step times")
    assert "half are predicted within 11 %, 90 % within 100 %, and 75 % are inside" in quoted
