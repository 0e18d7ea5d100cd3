"""The page: sections accumulate, foreign files are refused, nothing is fetched, no text becomes markup."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from leanstep.files import BadInput
from leanstep.report import page

from . import samples


def data_of(path: Path) -> dict:
    return page.read_page(path)["sections"]


@pytest.fixture
def full_page(tmp_path: Path) -> Path:
    path = tmp_path / "index.html"
    page.add_section(path, "demo", samples.demo_payload(tmp_path))
    page.add_section(path, "diagnose", samples.diagnose_report(tmp_path))
    return path


def test_sections_accumulate(full_page: Path):
    assert set(data_of(full_page)) == {"demo", "diagnose"}
    text = full_page.read_text(encoding="utf-8")
    for anchor in ("lens", "rl", "speedrun", "diagnose", "environment"):
        assert f'id="{anchor}"' in text, anchor


def test_the_same_measurement_again_replaces_its_older_self(tmp_path: Path):
    path = tmp_path / "page.html"
    page.add_section(path, "diagnose", samples.diagnose_report(tmp_path, "a.py"))
    page.add_section(path, "diagnose", samples.diagnose_report(tmp_path, "b.py"))
    page.add_section(path, "diagnose", samples.diagnose_report(tmp_path, "a.py", clean=True))
    scripts = data_of(path)["diagnose"]["scripts"]
    assert [Path(s["script"]).name for s in scripts] == ["a.py", "b.py"] and scripts[0]["findings"] == []


def test_source_lines_are_kept_when_the_script_goes_away(tmp_path: Path):
    path = tmp_path / "page.html"
    page.add_section(path, "diagnose", samples.diagnose_report(tmp_path))
    (tmp_path / "train.py").unlink()
    page.add_section(path, "demo", samples.demo_payload(tmp_path))
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
        page.add_section(path, "demo", samples.demo_payload(tmp_path))
    assert path.read_text() == content


def test_binary_file_folder_and_other_format_are_refused(tmp_path: Path):
    binary = tmp_path / "page.bin"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="not text"):
        page.add_section(binary, "demo", samples.demo_payload(tmp_path))
    with pytest.raises(BadInput, match=r"cannot write .*: Is a directory"):
        page.add_section(tmp_path, "demo", samples.demo_payload(tmp_path))
    other = tmp_path / "other.html"
    page.add_section(other, "demo", samples.demo_payload(tmp_path))
    other.write_text(
        other.read_text(encoding="utf-8").replace('{"format":1', '{"format":99'), encoding="utf-8"
    )
    with pytest.raises(BadInput, match="page format 99, this leanstep writes 1"):
        page.add_section(other, "demo", samples.demo_payload(tmp_path))


def test_nothing_is_fetched(full_page: Path):
    text = full_page.read_text(encoding="utf-8")
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#|data:)""", text)
    assert "@import" not in text and "url(" not in text and "fetch(" not in text


@pytest.mark.parametrize("seconds", [0.004, None])
def test_a_cost_that_is_not_known_is_left_out(tmp_path: Path, seconds: float | None):
    report = samples.diagnose_report(tmp_path)
    for finding in report["findings"]:
        finding["cost"] = {"seconds": seconds, "bytes": None, "share": None, "basis": "assumed"}
    path = tmp_path / "page.html"
    page.add_section(path, "diagnose", report)
    assert ("<dt>Costs about</dt>" in path.read_text(encoding="utf-8")) == (seconds is not None)


def test_texts_cannot_become_markup(tmp_path: Path):
    path = tmp_path / "page.html"
    evil = "</script><script>alert(1)</script><!--"
    report = samples.diagnose_report(tmp_path)
    report["findings"][0] |= {"what": evil, "fix": evil}
    page.add_section(path, "diagnose", report)
    text = path.read_text(encoding="utf-8")
    assert "<script>alert" not in text and "<!--" not in text


def test_json_block_reads_back_and_holds_no_markup():
    value = {"text": "<&>\u2028é</script>", "nan": float("nan"), "inf": [float("inf")], "n": 1.5}
    block = str(page.json_block(value))
    assert not set("<>&\u2028") & set(block)
    assert json.loads(block) == {"text": "<&>\u2028é</script>", "nan": None, "inf": [None], "n": 1.5}
