"""Whole repairs: diagnosed, applied to a copy, proven; only what holds is offered."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("libcst", reason="libcst is not installed")

from leanstep import cli
from leanstep.files import BadInput
from leanstep.fix import Settings, find_fixes, offers
from leanstep.fix.offers import changed_files, is_slower, overlaid
from leanstep.fix.source_edits import Edit
from leanstep.prove.stopwatch import PairBench, SideRow
from leanstep.script.children import call_in_child

STEPS = Path(__file__).parent.parent / "diagnose" / "steps"


def not_timed(before, after, settings) -> PairBench:
    """How long a step takes is the machine's affair: `bench` measures it, not the tests."""
    return PairBench(SideRow(before.label), SideRow(after.label))


def fixes_of(script: Path, *rules: str):
    """Not timed. In a process of its own: forks of a test session are slow and inherit what it left."""
    return call_in_child(find_fixes, script, (), Settings(rules, timing_s=0, fork=True))


def test_a_project_is_repaired_in_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The optimizer is made in a module, a cast is repeated in the script: two offers that hold together."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").write_text("")
    (tmp_path / "parts" / "optim.py").write_text(
        "import torch\n\n\ndef make(model):\n    return torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
    )
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nfrom parts.optim import make\n\ntorch.manual_seed(0)\n"
        "bank = torch.nn.Parameter(torch.randn(12, 64, 64) / 8)\n"
        "model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))\n"
        "optimizer = make(model)\nbanks = torch.optim.SGD([bank], lr=0.1, fused=True)\n"
        "for _ in range(4):\n    optimizer.zero_grad()\n    banks.zero_grad()\n"
        "    h = model(torch.ones(32, 64))\n"
        "    for i in range(12):\n        h = h + torch.tanh(h @ bank[i])\n"
        "    h.square().mean().backward()\n    optimizer.step()\n    banks.step()\n"
    )
    old = {path: path.read_bytes() for path in tmp_path.rglob("*.py")}
    monkeypatch.chdir(tmp_path)
    fixes = fixes_of(script)
    assert sorted(offer.title for offer in fixes.offers) == [
        "fused=True",
        "one bank.unbind before the loop",
    ], fixes.refused
    assert fixes.together is not None and fixes.together.proof.ok
    assert fixes.refused == []
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.py")} == old
    # The diff is one that others' tools take.
    subprocess.run(["git", "apply", "--check", "-"], input=fixes.diff(), text=True, check=True, cwd=tmp_path)
    assert sorted(path.name for path in fixes.write()) == ["optim.py", "train.py"]
    assert "lr=1e-3, fused=True)" in (tmp_path / "parts" / "optim.py").read_text()
    assert "torch.tanh(h @ bank_pieces[i])" in script.read_text()
    again = fixes_of(script)
    assert again.offers == [] and again.refused == []


def test_the_script_itself_never_runs_with_a_repaired_module(tmp_path: Path, monkeypatch):
    """A module on PYTHONPATH: only the copy of the script may see its copy."""
    library, script = tmp_path / "library", tmp_path / "scripts" / "train.py"
    (library / "tools").mkdir(parents=True)
    script.parent.mkdir()
    (library / "tools" / "__init__.py").write_text("NAME = 'old'\n")
    script.write_text("from tools import NAME\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(library)])
    changed = changed_files([Edit(library / "tools" / "__init__.py", 8, 11, "new")])
    with overlaid(script, changed) as (copy, places):
        assert copy.read_text() == script.read_text()
        assert (Path(places[-1]) / "tools" / "__init__.py").read_text() == "NAME = 'new'\n"
        assert sys.path[-1] == str(library) and places[:-1] == tuple(sys.path[:-1])


def test_a_repair_that_changes_the_update_is_not_offered(tmp_path: Path):
    """A parameter without a gradient decays where gradients are zeroed, and stays where they are None."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n\ntorch.manual_seed(0)\n"
        "model = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(80))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)\n"
        "for p in model.parameters():\n    p.grad = torch.zeros_like(p)\n"
        "for step in range(4):\n    optimizer.zero_grad(set_to_none=False)\n"
        "    model[step](torch.ones(4, 16)).square().sum().backward()\n    optimizer.step()\n"
    )
    fixes = fixes_of(script, "unbatched-optimizer")
    assert [offer.title for offer in fixes.offers] == ["fused=True"]
    ((finding, why),) = fixes.refused
    assert "zero_grad" in finding.line.code and "not the same update" in why
    before = script.read_text()
    fixes.write()
    assert script.read_text() == before.replace("weight_decay=0.1)", "weight_decay=0.1, fused=True)")


def test_a_script_that_fails_is_one_line(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(3)\n")
    with pytest.raises(BadInput, match=r"train.py ended with exit code 3"):
        fixes_of(script)


def test_a_file_that_changed_meanwhile_is_not_written(tmp_path: Path):
    from leanstep.fix import Fixes

    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_bytes(b"a\n")
    other.write_bytes(b"edited\n")
    fixes = Fixes("one.py", changed={one: (b"a\n", b"b\n"), other: (b"a\n", b"b\n")})
    with pytest.raises(BadInput, match="has changed in the meantime"):
        fixes.write()
    assert one.read_bytes() == b"a\n" and other.read_bytes() == b"edited\n"


def test_the_copy_differs_in_the_changed_file_only(tmp_path: Path):
    project = tmp_path / "project"
    (project / "pkg" / "deep").mkdir(parents=True)
    files = ["train.py", "other.py", "pkg/__init__.py", "pkg/deep/mod.py", "data.txt"]
    for name in files:
        (project / name).write_text(f"# {name}\n")
    (project / "pkg" / "__pycache__").mkdir()
    changed = changed_files([Edit(project / "pkg/deep/mod.py", 0, 1, "##")])
    with overlaid(project / "train.py", changed) as (copy, _):
        assert {name: (copy.parent / name).read_text() for name in files} == {
            **{name: f"# {name}\n" for name in files},
            "pkg/deep/mod.py": "## pkg/deep/mod.py\n",
        }
        # The script's folder is where Python looks for modules: no link may lead it back.
        assert copy.resolve().parent == copy.parent.resolve()
        assert not (copy.parent / "pkg" / "__pycache__").exists()
        folder = copy.parent
    assert not folder.exists()
    assert (project / "pkg/deep/mod.py").read_text() == "# pkg/deep/mod.py\n"


@pytest.mark.parametrize(
    ("after", "slower"),
    [
        ((1.0, 0.9, 1.1), False),
        ((1.02, 1.01, 1.03), False),
        ((1.2, 0.9, 1.4), False),
        ((1.2, 1.15, 1.3), True),
    ],
)
def test_slower_means_beyond_the_noise(after: tuple[float, float, float], slower: bool):
    bench = PairBench(SideRow("a", 1.0, 0.95, 1.05), SideRow("b", *after))
    assert is_slower(bench) is slower


def test_the_command_prints_a_diff_and_writes_it(tmp_path: Path, capfd, monkeypatch: pytest.MonkeyPatch):
    script = tmp_path / "train.py"
    script.write_text((STEPS / "sync_logged.py").read_text())
    monkeypatch.setattr(offers, "measured", not_timed)
    monkeypatch.chdir(tmp_path)
    old = script.read_text()
    assert cli.run(["fix", "train.py", "--json", "found.json"]) == 0
    printed = capfd.readouterr().out
    assert "host-sync  train.py:14: read value under `if step % 100 == 0`" in printed
    assert "proven: the same update" in printed and "+        value = loss.item()" in printed
    assert script.read_text() == old
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["written"] is False and len(found["offers"]) == 1 and found["diff"] in printed
    assert cli.run(["fix", "train.py", "--write"]) == 0
    assert "    if step % 100 == 0:\n        value = loss.item()\n" in script.read_text()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nowhere.py"], "SCRIPT: no such file"),
        (["train.py", "--rule", "fast"], "--rule: unknown rule 'fast'"),
        (["train.py", "--budget", "0"], "--budget: expected seconds above 0"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, capfd, monkeypatch, words: list[str], line: str):
    (tmp_path / "train.py").write_text("x = 1\n")
    monkeypatch.chdir(tmp_path)
    assert cli.run(["fix", *words]) == 2
    assert line in capfd.readouterr().err


def test_the_budget_ends_a_repair_and_everything_else(tmp_path: Path):
    with pytest.raises(offers._TimeIsUp), offers._until(time.monotonic() + 0.05):
        time.sleep(60)
    with pytest.raises(offers._TimeIsUp), offers._until(time.monotonic()):
        raise AssertionError("no time, no work")
    script = tmp_path / "train.py"
    script.write_text("import time\ntime.sleep(60)\n", encoding="utf-8")
    with pytest.raises(BadInput, match=r"--budget: train.py was not diagnosed within 1 seconds"):
        find_fixes(script, (), Settings(budget_s=1.0, fork=True))
