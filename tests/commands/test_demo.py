"""`leanstep demo`: refuses early, leaves nothing half written, and says in one line why."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from leanstep import cli
from leanstep.commands import BadInput, demo, example
from leanstep.report.page import read_page

# One of the examples, timed briefly.
SHORT = (
    "from leanstep.commands import demo, example; from leanstep.cli import main; "
    "example.EXAMPLES = example.EXAMPLES[:1]; demo.BUDGET_S = 0.5; main()"
)
COMMAND = [sys.executable, "-c", SHORT, "demo"]
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.timeout(240)
def test_demo_writes_the_page_and_prints_the_table(tmp_path: Path):
    result = subprocess.run(
        [*COMMAND, "--out", str(tmp_path / "report"), "--json", str(tmp_path / "demo.json")],
        cwd=ROOT, capture_output=True, text=True, timeout=230, env=ENVIRONMENT,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "before → after" in result.stdout and "same update" in result.stdout
    assert "pair_losses.py:" in result.stdout and "host-sync" in result.stdout
    page = tmp_path / "report" / "index.html"
    (found,) = read_page(page)["sections"]["demo"]["examples"]
    assert found["name"] == "lens" and all(row["ok"] for row in found["proof"])
    assert {f["rule"] for f in found["before"]["diagnose"]["findings"]} >= {"host-sync"}
    assert found["after"]["diagnose"]["findings"] == []
    assert found["before"]["losses"] == pytest.approx(found["after"]["losses"], rel=1e-4)
    assert [p.name for p in page.parent.iterdir()] == ["index.html"]
    assert json.loads((tmp_path / "demo.json").read_text())["demo"]["examples"][0]["name"] == "lens"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
@pytest.mark.parametrize(
    ("options", "reason"), [("size=1m", "free in"), ("size=16m,ro", "Read-only file system")]
)
def test_full_disk_and_read_only_folder(tmp_path: Path, capsys, options: str, reason: str):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("this machine does not let tests mount a tmpfs")
    try:
        assert cli.run(["demo", "--out", str(folder)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("leanstep: --out:") and reason in line
        assert list(folder.iterdir()) == []
    finally:
        subprocess.run(["umount", folder], check=True)


def test_interrupt_leaves_no_page(tmp_path: Path):
    process = subprocess.Popen(
        [*COMMAND, "--out", str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**ENVIRONMENT, "PYTHONUNBUFFERED": "1"},
        # A background shell ignores Ctrl-C and its children inherit that: start from the default.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "prove the update" in line:
                break
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert errors.strip().splitlines() == ["leanstep: interrupted; no page was written"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"out": __file__}, r"--out: .* is a file; expected a folder"),
        ({"json": "/nowhere/at/all.json"}, r"--json: the folder /nowhere/at does not exist"),
    ],
)
def test_bad_input_is_named(arguments: dict, message: str, tmp_path: Path):
    defaults = {"out": str(tmp_path), "json": None}
    with pytest.raises(BadInput, match=message):
        demo.demo(**{**defaults, **arguments})


def test_a_foreign_index_is_refused_before_the_work(tmp_path: Path):
    (tmp_path / "index.html").write_text("<html>mine</html>")
    with pytest.raises(BadInput, match="not a page that leanstep wrote"):
        demo._page_path(str(tmp_path))


def test_missing_examples_are_said(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(example.leanstep, "__file__", str(tmp_path / "leanstep" / "__init__.py"))
    with pytest.raises(BadInput, match="bundled examples are missing"):
        example.examples_folder()


def test_an_installed_package_shows_the_user_copies_of_its_examples(monkeypatch, tmp_path: Path):
    assert example.readable_examples(tmp_path) == ROOT / "examples" and list(tmp_path.iterdir()) == []
    package = tmp_path / "site-packages" / "leanstep"
    shutil.copytree(ROOT / "examples", package / "examples")
    monkeypatch.setattr(example.leanstep, "__file__", str(package / "__init__.py"))
    folder = example.readable_examples(tmp_path / "report")
    assert folder == tmp_path / "report" / "examples"
    for name in ("lens/before.py", "rl/policy.py", "speedrun/after.py"):
        assert (folder / name).read_bytes() == (ROOT / "examples" / name).read_bytes()


def test_the_wheel_holds_every_example():
    tomllib = pytest.importorskip("tomllib")
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    included = build["targets"]["wheel"]["force-include"]
    assert included == {f"examples/{e.name}": f"leanstep/examples/{e.name}" for e in example.EXAMPLES}
    assert {f"examples/{p.name}" for p in (ROOT / "examples").iterdir() if p.is_dir()} >= set(included)


def test_a_failing_example_is_one_line(tmp_path: Path):
    script = tmp_path / "broken.py"
    script.write_text("raise RuntimeError('no data')\n")
    with pytest.raises(demo.FellShort, match=r"broken.py failed: RuntimeError: no data"):
        example.diagnose_script(script)
