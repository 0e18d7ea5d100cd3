"""The page: sections accumulate, foreign files are refused, nothing is fetched, no text becomes markup."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from leanstep.files import BadInput
from leanstep.report import page, sections

from . import samples


def data_of(path: Path) -> dict:
    return page.read_page(path)["sections"]


@pytest.fixture
def full_page(tmp_path: Path) -> Path:
    path = tmp_path / "index.html"
    page.add_section(path, "demo", samples.demo_payload(tmp_path))
    page.add_section(path, "diagnose", samples.diagnose_report(tmp_path))
    page.add_section(path, "sweep", samples.sweep_report())
    page.add_section(path, "bench", {"results": [samples.bench_result(), *samples.sweep_results()]})
    page.add_section(path, "prove", samples.prove_result())
    return path


def test_sections_accumulate(full_page: Path):
    assert set(data_of(full_page)) == {"demo", "diagnose", "sweep", "bench", "prove"}
    text = full_page.read_text(encoding="utf-8")
    for anchor in ("lens", "rl", "speedrun", "diagnose", "rows", "bench", "prove", "environment"):
        assert f'id="{anchor}"' in text, anchor


def test_the_same_measurement_again_replaces_its_older_self(tmp_path: Path):
    path = tmp_path / "page.html"
    page.add_section(
        path, "bench", {"results": [samples.bench_result("polar"), samples.bench_result("muon-step")]}
    )
    newer = samples.bench_result("polar")
    newer["rows"][0]["median_s"] = 99.0
    page.add_section(path, "bench", {"results": [newer]})
    results = data_of(path)["bench"]["results"]
    assert [r["case"] for r in results] == ["polar", "muon-step"]
    assert results[0]["rows"][0]["median_s"] == 99.0

    page.add_section(path, "prove", samples.prove_result("polar"))
    page.add_section(path, "prove", samples.prove_result("muon-step"))
    page.add_section(path, "prove", samples.prove_result("polar", ok=False))
    rows = data_of(path)["prove"]["rows"]
    assert [row["case"] for row in rows].count("polar") == 8 and len(rows) == 16
    assert sum(not row["ok"] for row in rows) == 1

    page.add_section(path, "diagnose", samples.diagnose_report(tmp_path, "a.py"))
    page.add_section(path, "diagnose", samples.diagnose_report(tmp_path, "b.py"))
    page.add_section(path, "diagnose", samples.diagnose_report(tmp_path, "a.py", clean=True))
    scripts = data_of(path)["diagnose"]["scripts"]
    assert [Path(s["script"]).name for s in scripts] == ["a.py", "b.py"] and scripts[0]["findings"] == []


def test_source_lines_are_kept_when_the_script_goes_away(tmp_path: Path):
    path = tmp_path / "page.html"
    page.add_section(path, "diagnose", samples.diagnose_report(tmp_path))
    (tmp_path / "train.py").unlink()
    page.add_section(path, "prove", samples.prove_result())
    (finding, *_) = data_of(path)["diagnose"]["scripts"][0]["findings"]
    assert (
        finding["source"]["lines"][finding["source"]["line"] - finding["source"]["start"]]
        == "    logits = head(hidden)"
    )


@pytest.mark.parametrize(
    "content",
    [
        "<html><body>my own page</body></html>",
        "plain text",
        '<script type="application/json" id="leanstep-data">{</script>',
        '<script type="application/json" id="leanstep-data">[1]</script>',
    ],
)
def test_a_foreign_file_is_refused_and_untouched(tmp_path: Path, content: str):
    path = tmp_path / "page.html"
    path.write_text(content)
    with pytest.raises(BadInput, match=r"--html: .*page.html is not a page that leanstep wrote"):
        page.add_section(path, "prove", samples.prove_result())
    assert path.read_text() == content


def test_binary_file_folder_and_other_format_are_refused(tmp_path: Path):
    binary = tmp_path / "page.bin"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="not text"):
        page.add_section(binary, "prove", samples.prove_result())
    with pytest.raises(BadInput, match=r"cannot write .*: Is a directory"):
        page.add_section(tmp_path, "prove", samples.prove_result())
    other = tmp_path / "other.html"
    page.add_section(other, "prove", samples.prove_result())
    other.write_text(
        other.read_text(encoding="utf-8").replace('{"format":1', '{"format":99'), encoding="utf-8"
    )
    with pytest.raises(BadInput, match="page format 99, this leanstep writes 1"):
        page.add_section(other, "prove", samples.prove_result())


def test_an_empty_file_is_filled(tmp_path: Path):
    path = tmp_path / "page.html"
    path.touch()
    page.add_section(path, "prove", samples.prove_result())
    assert set(data_of(path)) == {"prove"}


def test_nothing_is_fetched(full_page: Path):
    text = full_page.read_text(encoding="utf-8")
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#|data:)""", text)
    assert "@import" not in text and "url(" not in text and "fetch(" not in text


def test_texts_cannot_become_markup(tmp_path: Path):
    path = tmp_path / "page.html"
    evil = "</script><script>alert(1)</script><!--"
    report = samples.diagnose_report(tmp_path)
    report["findings"][0] |= {"what": evil, "fix": evil}
    bench = samples.bench_result(case=evil)
    bench["rows"][0]["note"] = evil
    page.add_section(path, "diagnose", report)
    page.add_section(path, "bench", {"results": [bench]})
    text = path.read_text(encoding="utf-8")
    assert "<script>alert" not in text and "<!--" not in text
    assert data_of(path)["bench"]["results"][0]["case"] == evil


def test_json_block_reads_back_and_holds_no_markup():
    value = {"text": "<&>\u2028é</script>", "nan": float("nan"), "inf": [float("inf")], "n": 1.5}
    block = str(page.json_block(value))
    assert not set("<>&\u2028") & set(block)
    assert json.loads(block) == {"text": "<&>\u2028é</script>", "nan": None, "inf": [None], "n": 1.5}


def test_failed_proof_is_said_aloud(tmp_path: Path):
    path = tmp_path / "page.html"
    page.add_section(path, "prove", samples.prove_result(ok=False))
    assert "FAILED" in path.read_text(encoding="utf-8")


def test_unknown_kinds_become_tables(tmp_path: Path):
    path = tmp_path / "page.html"
    page.add_section(
        path, "kernels", {"rows": [{"name": "xxt", "shared_bytes": 131072, "ok": True}], "targets": ["sm_90"]}
    )
    text = path.read_text(encoding="utf-8")
    assert "128 KiB" in text and "sm_90" in text and "shared bytes" in text


def test_a_search_for_what_fits_is_a_table(tmp_path: Path):
    path = tmp_path / "page.html"
    report = samples.sweep_report()
    row = report["rows"][2]
    cell = {**row["cells"][0], "device": "h200", "value": 6_890_000}
    page.add_section(
        path, "sweep", {**report, "sweep": "tokens", "values": "fit", "rows": [{**row, "cells": [cell]}]}
    )
    text = path.read_text(encoding="utf-8")
    assert "<h3>logprob-linear: predicted peak by tokens</h3>" in text and "6,890,000" in text


def test_two_environments_are_told_apart():
    other = samples.prove_result() | {"torch": "2.14.0"}
    shown = sections.view({"bench": {"results": [samples.bench_result()]}, "prove": other})["environments"]
    assert [e["parts"] for e in shown] == ["bench", "prove"]


def test_a_sweep_is_drawn_against_what_the_device_has_room_for():
    sweep = samples.sweep_report()
    (shown,) = sections.view({"sweep": sections.prepare("sweep", sweep)})["predicted_sweeps"]
    reference, _, fast, device = shown["chart"]["series"]
    assert shown["title"] == "logprob-linear: predicted peak by response frac"
    assert [x for x, _ in reference["points"]] == [x for x, _ in fast["points"]] == [0.1, 0.25, 0.5, 1.0]
    assert [peak / 2**30 for _, peak in reference["points"]] == pytest.approx([176.2] * 4)
    assert device["name"] == "H200, 139 GiB"
    (table,) = shown["tables"]
    assert table["columns"][:4] == ["implementation", "response frac", "peak bytes", "h200 fits"]
    assert table["rows"][0][:5] == ["reference", "1", "176 GiB", "no", "-"]
    assert table["rows"][-1][-1] == "trl is not installed"


def test_a_page_is_small(full_page: Path, tmp_path: Path):
    """Charts are HTML and SVG: a page opens at once."""
    path = tmp_path / "small.html"
    page.add_section(path, "prove", samples.prove_result(ok=False))
    assert path.stat().st_size < 60_000
    assert full_page.stat().st_size < 300_000


def test_published_rows_come_worst_first_and_ratios_have_a_place(tmp_path: Path):
    path = tmp_path / "page.html"
    page.add_section(path, "published", samples.published_rows())
    page.add_section(path, "published", {"rows": samples.published_rows()["rows"][:1]})
    shown = sections.view(data_of(path))["published"]
    assert [(row["name"], row["ratio"]) for row in shown] == [("lora-7b", 0.5), ("resnet50", 1.1)]
    assert [row["place"] for row in shown] == [0.0, pytest.approx(50 + 50 * math.log2(1.1), abs=0.01)]
    text = path.read_text(encoding="utf-8")
    assert 'id="published"' in text and 'style="left: 0.0%"' in text and "110 ms" in text


def test_ablations_share_one_scale(tmp_path: Path):
    path = tmp_path / "page.html"
    page.add_section(path, "ablations", samples.ablation_run())
    (run,) = sections.view(data_of(path))["ablations"]
    assert run["unchanged"] == 3.0
    # The widest interval ends at +0.04: the scale is from -0.04 to 0.04.
    places = [(row["variant"], row["left"], row["right"]) for row in run["rows"]]
    assert places == [
        ("smear=False", pytest.approx(75.0), pytest.approx(100.0)),
        ("tied=True", pytest.approx(12.5), pytest.approx(62.5)),
    ]
    assert "smear=False" in path.read_text(encoding="utf-8")


def test_phases_of_an_iteration_are_parts_of_one_bar(tmp_path: Path):
    report = samples.diagnose_report(tmp_path)
    report["steps"]["phases"] = [
        {"phase": name, "seconds": seconds, "ops": 10, "flops": 0, "written_bytes": 0}
        for name, seconds in (("rollout", 3.0), ("scoring", 0.5), ("update", 0.5))
    ]
    path = tmp_path / "page.html"
    page.add_section(path, "diagnose", report)
    (shown,) = sections.view(data_of(path))["diagnose"]
    assert [part["percent"] for part in shown["phase_shares"]["parts"]] == [75.0, 12.5, 12.5]
    assert "rollout 3 s (75 %)" in path.read_text(encoding="utf-8")
