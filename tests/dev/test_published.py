"""The open table: rows are read without running them, rehearsed, compared, and shown on a page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rehearse.rehearsed import stub_or_skip
from tool_loader import load_tool

from leanstep.files import BadInput

published = load_tool("published")
page = published.published_page
logs = published.speedrun_logs

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


def test_every_row_of_the_repository_has_what_it_needs():
    rows = published.read_rows(published.PUBLICATIONS)
    assert len(rows) >= 20 and {"blind", "development"} >= {row.entries["role"] for row in rows}
    assert all(row.entries["source"].startswith("https://") for row in rows)


def test_the_page_and_the_readme_are_those_of_the_results():
    results = published.load_results()
    assert published.PAGE.read_text(encoding="utf-8") == page.page(results)
    for name, link in published.QUOTED.items():
        assert page.quoted(results, link) in (published.ROOT / name).read_text(encoding="utf-8")


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


def test_a_result_is_current_until_script_row_or_shared_module_changes(folder, monkeypatch):
    monkeypatch.setattr(published, "RESULTS", folder)
    row = published.read_rows(folder)[0]
    stored = {"digest": row.digest, "engine": published.engine()}
    (folder / "tiny.json").write_text(json.dumps(stored))
    assert published.is_current(row)
    for file, before, after in (
        ("tiny.py", '"per_s": 1000', '"per_s": 1001'),
        ("tiny.py", "range(4)", "range(5)"),
        ("halves.py", "// 2", "// 4"),
    ):
        path = folder / file
        text = path.read_text()
        path.write_text(text.replace(before, after))
        assert not published.is_current(published.read_rows(folder)[0]), (before, after)
        path.write_text(text)
    (folder / "tiny.json").write_text(json.dumps({**stored, "engine": "another"}))
    assert not published.is_current(row)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('"role": "blind"', '"role": "seen"', "role: expected development or blind, got 'seen'"),
        ('"date": "2026", ', "", "lacks date"),
        ('"note"', '"remark"', "unknown entry 'remark'"),
        ('"per_step": 10, ', "", "per_s: expected per_step"),
        ('"tiny-kernels"', '"tiny"', None),
        ('"device": "a100"', '"device": "a101"', "a101"),
        ('"2026"', "str(2026)", "expected a literal dict"),
        ('"per_step": 10, "per_s": 1000, "allocated_gib": 0.01, ', "", "expected a published figure"),
    ],
)
def test_a_bad_row_gets_one_line(folder, before, after, words):
    path = folder / "tiny.py"
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    if words is None:  # a dict holds a name once; another file may hold it again
        (folder / "other.py").write_text(SCRIPT)
        words = "expected one row of this name, got 2"
    with pytest.raises((BadInput, ValueError), match=re.escape(words)) as error:
        published.read_rows(folder)
    assert "\n" not in str(error.value)


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


LOG = """import torch
print("train")

{dashes}
# triton_kernels.py
{dashes}

def kernel(): pass
{rule}
Running PyTorch
{rule}
step:0/9 val_loss:10.8 train_time:0ms step_avg:0.03ms
step:1/9 train_time:80ms step_avg:80.00ms
step:2/9 train_time:130ms step_avg:65.00ms
step:3/9 train_time:180ms step_avg:60.00ms
"""


@pytest.mark.parametrize("leading", ["", "=" * 100 + "\n"])
def test_a_log_gives_its_script_its_kernels_and_its_times(leading):
    text = leading + LOG.format(dashes="-" * 40, rule="=" * 100)
    assert logs.files_in(text) == {
        "train_gpt.py": 'import torch\nprint("train")',
        "triton_kernels.py": "def kernel(): pass\n",
    }
    assert logs.logged_ms(text, 1, 3) == 50
    with pytest.raises(BadInput, match="expected logged steps, got 1 and 7"):
        logs.logged_ms(text, 1, 7)


def test_a_script_of_a_log_runs_where_its_tokens_are(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "TRAIN_TOKENS", 3_000)
    monkeypatch.setattr(logs, "VAL_TOKENS", 2_000)
    (tmp_path / "log.txt").write_text(LOG.format(dashes="-" * 40, rule="=" * 100))
    before = Path.cwd()
    with logs.prepared("log.txt", tmp_path) as script:
        assert script.name == "train_gpt.py" and Path.cwd() == script.parent.resolve()
        shard = (script.parent / "data/fineweb10B/fineweb_val_000000.bin").read_bytes()
        assert len(shard) == 4 * 256 + 2 * 2_000
    assert Path.cwd() == before
    with pytest.raises(BadInput, match="--speedrun: expected a clone"), logs.prepared("log.txt", None):
        pass
    with pytest.raises(BadInput, match="--speedrun: expected a clone"), logs.prepared("other.txt", tmp_path):
        pass


def test_a_rehearsal_that_cannot_start_stops_its_row_only(folder):
    row = published.read_rows(folder)[0]
    broken = published.Row(row.name, folder / "gone.py", row.entries, row.digest)
    result = published.rehearse_row(broken, None, False, None)
    assert "gone.py" in result["stopped"] and result["figures"] == []


def test_a_phase_is_left_out_of_the_step(folder):
    stub_or_skip()
    (folder / "tiny.py").write_text(
        SCRIPT.replace(
            "    weight @ weight\n", "    with torch.no_grad():\n        model(weight)\n    weight + 1\n"
        )
        .replace("pace = ", "model = torch.nn.Linear(1024, 1024, device='cuda')\npace = ")
        .replace('"note": "made up"', '"note": "made up", "steps": 6')
    )
    row = published.read_rows(folder)[0]
    recording = published.rehearse(row.request, quiet=True)
    device = published.device_named("a100")
    (whole,), (rest,) = (published.time_steps_of(recording, device, 1, w) for w in (None, "scoring"))
    assert "gemm" in whole.classes and set(rest.classes) == {"pointwise"}
