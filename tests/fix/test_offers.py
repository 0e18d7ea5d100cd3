"""Whole repairs: diagnosed, applied to a copy, proven; only what holds is offered."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("libcst", reason="libcst is not installed")

from leanstep import cli
from leanstep.files import BadInput
from leanstep.fix import offers
from leanstep.fix.offers import (
    Fixes,
    Offer,
    Settings,
    changed_files,
    find_fixes,
    is_slower,
    overlaid,
    users_line,
)
from leanstep.fix.repairs import Project, repairs_of
from leanstep.fix.source_edits import Edit, NotUnderstood
from leanstep.prove.stopwatch import PairBench, SideRow
from leanstep.tape.children import call_in_child
from leanstep.tape.lines import Line

STEPS = Path(__file__).parent.parent / "diagnose" / "steps"


def not_timed(before, after, settings) -> PairBench:
    """How long a step takes is the machine's affair: `bench` measures it, not the tests."""
    return PairBench(SideRow(before.label), SideRow(after.label))


def fixes_of(script: Path, *rules: str):
    """Not timed. In a process of its own: forks of a test session are slow and inherit what it left."""
    return call_in_child(find_fixes, script, (), Settings(rules, timing_s=0, fork=True))


def test_a_project_is_repaired_in_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The optimizer is made in a module, a bank is indexed in the script: two offers that hold together."""
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
    with overlaid(project / "train.py", project, changed) as (copy, _):
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
    script.write_text((STEPS / "unbatched_momentum.py").read_text())
    monkeypatch.setattr(offers, "measured", not_timed)
    monkeypatch.chdir(tmp_path)
    old = script.read_text()
    assert cli.run(["fix", "train.py", "--json", "found.json"]) == 0
    printed = capfd.readouterr().out
    assert "fused=True" in printed and "proven: the same update" in printed
    assert "It does not cover printed and logged values" in printed
    assert script.read_text() == old
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["written"] is False and len(found["offers"]) == 1 and found["diff"] in printed
    assert cli.run(["fix", "train.py", "--write"]) == 0
    assert script.read_text().count("fused=True") == 1


READS = """
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3))).bfloat16()
opt = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
total = 0.0
for step in range(6):
    y = model(torch.ones(4, 16).bfloat16())
    loss, extra = y.square().mean(), y.abs().mean()
    opt.zero_grad()
    loss.backward()
    before = model[0].weight.sum().item()
    opt.step()
    total += (loss + extra).item()
    if step % 10 == 0:
        print("weight sum before the step", before)
print("mean", total / 6)
"""


def test_reads_are_never_moved_or_summed_elsewhere(tmp_path: Path):
    """A sum in bf16 loses its value, a read behind the update shows another one: both were offered once."""
    script = tmp_path / "train.py"
    script.write_text(READS)
    fixes = fixes_of(script)
    assert fixes.offers == [] and script.read_text() == READS
    assert sorted((finding.rule, finding.line.number) for finding, _ in fixes.refused) == [
        ("host-sync", 11),
        ("host-sync", 13),
    ]
    assert all("no edit is safe without you; by hand: " in why for _, why in fixes.refused)


def test_a_project_with_its_model_in_a_folder_beside_the_scripts(tmp_path: Path):
    """The script finds ../model by its own path: so does the copy, and the model's file is edited."""
    for folder in ("model", "trainer"):
        (tmp_path / folder).mkdir()
    (tmp_path / "model" / "net.py").write_text(
        "import torch\nimport torch.nn.functional as F\n\n\nclass Net(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.body, self.lm_head = torch.nn.Linear(16, 16), torch.nn.Linear(16, 512)\n\n"
        "    def forward(self, x, labels):\n        h = self.body(x)\n        logits = self.lm_head(h)\n"
        "        return F.cross_entropy(logits[:, :-1].reshape(-1, 512), labels[:, 1:].reshape(-1))\n"
    )
    script = tmp_path / "trainer" / "train.py"
    script.write_text(
        "import os, sys\nsys.path.append(os.path.join(os.path.dirname(__file__), '..'))\n"
        "import torch\nfrom model.net import Net\n\ntorch.manual_seed(0)\nnet = Net()\n"
        "opt = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)\nlabels = torch.arange(80).view(2, 40)\n"
        "labels[:, :30] = -100\nfor _ in range(4):\n    opt.zero_grad()\n"
        "    net(torch.ones(2, 40, 16), labels).backward()\n    opt.step()\n"
    )
    fixes = fixes_of(script, "dead-rows")
    (offer,) = fixes.offers
    assert offer.title == "select rows before self.lm_head: linear_cross_entropy" and offer.proof.ok
    assert [path.name for path in fixes.changed] == ["net.py"]


def test_a_repair_that_fails_with_those_before_it_is_dropped(tmp_path: Path):
    path = tmp_path / "train.py"
    path.write_text("abc")
    offers_alone = [
        Offer([title], title, (Edit(path, n, n + 1, title.upper()),), None, None)  # type: ignore[arg-type]
        for n, title in enumerate("abc")
    ]

    def attempt_all(tried):
        titles = "".join(offer.title for offer in tried)
        return "no" if "b" in titles else Offer([], titles, (), None, None)  # type: ignore[arg-type]

    fixes = Fixes("train.py", offers=offers_alone)
    offers._join(fixes, SimpleNamespace(say=print, attempt_all=attempt_all))  # type: ignore[arg-type]
    assert [offer.title for offer in fixes.offers] == ["a", "c"] and fixes.together.title == "ac"
    assert fixes.refused == [("b", "fails together with the other fixes: no")]
    assert fixes.changed == {path: (b"abc", b"AbC")}


def test_a_file_outside_the_project_is_never_edited(tmp_path: Path):
    """A module found through sys.path elsewhere, such as an editable install."""
    (tmp_path / "project" / ".git").mkdir(parents=True)
    script, other = tmp_path / "project" / "train.py", tmp_path / "other.py"
    for path in (script, other):
        path.write_text("import torch\nopt = torch.optim.SGD(p, 0.1)\n")
    project = Project(script, [script, other])
    assert project.files == [script]
    line = Line(str(other), 2, "make")
    finding = SimpleNamespace(rule="unbatched-optimizer", line=line, leanstep=None, short_fix="")
    with pytest.raises(NotUnderstood, match="outside the script's project"):
        repairs_of(project, finding)  # type: ignore[arg-type]


def test_a_finding_in_a_library_is_shown_at_the_users_line():
    library, user = Line("site-packages/transformers/loss.py", 42, "loss"), Line("train.py", 7, "main")
    finding = SimpleNamespace(line=SimpleNamespace(library=True), callers=Counter({user: 2}))
    assert users_line(finding) is user  # type: ignore[arg-type]
    finding = SimpleNamespace(line=user, callers=Counter({library: 2}))
    assert users_line(finding) is user  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nowhere.py"], "SCRIPT: no such file"),
        (["train.py", "--select", "fast"], "--select: unknown rule 'fast'"),
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
