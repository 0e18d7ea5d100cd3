"""What other tools read: SARIF, Markdown, two reports side by side, the hook and the action."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from diagnose.made import held, op, read, steps, tensor, update
from diagnose.trace_maker import TO_HOST, waiting

from leanstep import cli
from leanstep.diagnose.find import find
from leanstep.diagnose.outputs import sarif, screen
from leanstep.diagnose.traces.trace_report import TraceRun
from leanstep.tape.lines import Line, Site

ROOT = Path(__file__).parents[2]
MINE = Line("train.py", 7, "step")
THEIRS = Line("/x/site-packages/net.py", 3, "forward", True)
READS = """\
import torch
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    loss.item()
    optimizer.step()
    optimizer.zero_grad()
"""


def findings():
    reads = [*[read(Site(MINE))] * 2, read(Site(THEIRS, MINE))]
    weight = tensor(512, 512)
    copy = op("copy_", weight, tensor(512, 512, stride=(1, 512)), site=Site(MINE))
    return find(steps([*reads, copy, copy, copy, update(held(weight))]))


def test_sarif_says_what_code_scanning_needs() -> None:
    log = sarif.as_sarif(findings())
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert (log["version"], [rule["id"] for rule in rules]) == ("2.1.0", ["host-sync", "transposed-copy"])
    assert len(run["results"]) == 3
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        (place,) = result["locations"]
        place = place["physicalLocation"]
        # A library's line is not in the repository: the caller's is.
        assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == ("train.py", 7)
        assert re.fullmatch(r"[0-9a-f]{64}", result["partialFingerprints"]["leanstepFinding/v1"])
    assert len({r["partialFingerprints"]["leanstepFinding/v1"] for r in run["results"]}) == 3


@pytest.mark.skipif(
    "SARIF_SCHEMA" not in os.environ,
    reason="SARIF_SCHEMA names no file: sarif-2.1/schema/sarif-schema-2.1.0.json of oasis-tcs/sarif-spec",
)
def test_sarif_validates() -> None:
    import jsonschema

    schema = json.loads(Path(os.environ["SARIF_SCHEMA"]).read_text(encoding="utf-8"))
    jsonschema.validate(sarif.as_sarif(findings()), schema)
    jsonschema.validate(sarif.as_sarif([]), schema)


def test_files_are_written_beside_the_screen(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(READS)
    assert cli.run(["diagnose", "train.py", "--sarif", "out.sarif"]) == 0
    (result,) = json.loads(Path("out.sarif").read_text())["runs"][0]["results"]
    assert result["ruleId"] == "host-sync"
    assert result["locations"][0]["physicalLocation"]["region"]["startLine"] == 7


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.mark.skipif(shutil.which("bash") is None or shutil.which("git") is None, reason="no bash or no git")
def test_hook_and_action_run_in_a_fresh_repository(tmp_path: Path) -> None:
    """The steps of the files are run as they are: neither pre-commit nor a runner is needed."""
    yaml = pytest.importorskip("yaml")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "train.py").write_text(READS)
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    program, *rest = hook["entry"].split()
    command = [sys.executable, "-m", program, *rest, *hook["args"]]
    done = subprocess.run(
        command, cwd=tmp_path, env=_environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, "host-sync" in done.stdout) == (1, True), done.stderr

    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    (step,) = action["runs"]["steps"]
    given = {"script": "train.py", "fail-on": "dead-rows", "python": sys.executable}
    values = {name: given.get(name, entry.get("default", "")) for name, entry in action["inputs"].items()}
    environment = _environment()
    for name, text in step["env"].items():
        match = re.fullmatch(r"\$\{\{ inputs\.([\w-]+) \}\}", text)
        environment[name] = values[match[1]] if match else str(ROOT)
    done = subprocess.run(
        ["bash", "-e", "-c", step["run"]], cwd=tmp_path, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "::warning file=train.py,line=7" in done.stdout
    assert (tmp_path / "leanstep.sarif").is_file()


def test_outputs_are_those_of_a_recording(tmp_path: Path, monkeypatch, capsys) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    monkeypatch.chdir(tmp_path)
    waiting("cuda", "StreamSynchronize", TO_HOST).write(
        Path("t.json"), deviceProperties=[{"name": "Some GPU"}]
    )
    files = ["--json", "out.json", "--sarif", "out.sarif", "--html", "out.html"]
    assert cli.run(["diagnose", "--trace", "t.json", *files, "--annotations", "--explain", "1"]) == 0
    shown = capsys.readouterr().out
    assert "Some GPU · 24 events · 2 steps of 1 ms · device idle 4% (4% host waits)" in shown
    assert "1  host-sync           aten::item > aten::_local_scalar_dense 1 read" in shown
    assert "costs about 43 µs (4% of the step) → keep on the device" in shown
    assert "::warning title=leanstep host-sync::" in shown
    report = json.loads(Path("out.json").read_text())
    jsonschema.validate(report, json.loads(screen.SCHEMA_FILE.read_text()))
    (finding,) = report["findings"]
    assert (finding["line"], finding["cost"]["seconds"]) == (0, pytest.approx(43e-6))
    (result,) = json.loads(Path("out.sarif").read_text())["runs"][0]["results"]
    uri = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert uri == "aten%3A%3Aitem%20%3E%20aten%3A%3A_local_scalar_dense"
    assert "aten::item" in Path("out.html").read_text()


def test_gates_work_on_a_trace(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    waiting("cuda", "StreamSynchronize", TO_HOST).write(Path("t.json"))
    run = ["diagnose", "--trace", "t.json", "--fail-on", "host-sync"]
    assert cli.run(run) == 1
    assert cli.run([*run, "--ignore", "host-sync"]) == 0
    assert cli.run([*run, "--baseline", "known.json", "--write-baseline"]) == 0
    assert cli.run([*run, "--baseline", "known.json"]) == 0
    assert sarif.as_sarif(TraceRun("t.json").findings())["version"] == "2.1.0"
