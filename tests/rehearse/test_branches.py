"""Values that nobody knows keep training going, and the branches that rest on them are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rehearse.rehearsed import SCRIPTS, Rehearsed, run_script, run_text

from leanstep.rehearse import branches
from leanstep.rehearse.branches import Branches, NoUpdate, condition_at
from leanstep.rehearse.devices import device_named
from leanstep.rehearse.verdict import judge, text
from leanstep.tape.lines import Line

SOURCE = """\
for batch in loader:
    loss = model(batch)
    if not loss.isfinite():
        continue
    ok = bool(
        loss < 3
    )
    print(loss.item())
    if verbose and \\
            ok:
        optimizer.step()
    while loss > 1:
        log(loss)
    scheduler.step() if loss else None

def read(loss):
    if loss.isnan():
        return None
    return loss

def train(loss):
    if loss.isnan():
        raise ValueError
    for _ in range(int(loss)):
        loss.backward()
"""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Rehearsed:
    return run_script(SCRIPTS / "assumptions.py", capture=tmp_path_factory.mktemp("assumptions"), steps=3)


def test_unknown_values_are_finite_and_training_goes_on(guarded):
    assert guarded.recording.refused is None and len(guarded.recording.steps) == 3
    seen = json.loads(guarded.printed.splitlines()[-1])[-1]
    assert seen == {
        **{"finite": True, "nan": False, "selected": 0, "self": True, "norm": 1.0},
        # found_inf is 0, so the scale stays; an assumed number prints like any other.
        **{"scale": 65536.0, "text": "2.0 2.0"},
    }


DECIDES = {
    **{"finite": True, "variable": True, "math": True, "gradients": True, "compared": True},
    **{"accumulated": False, "on the host": False},
}


@pytest.mark.parametrize("mark", DECIDES)
def test_a_branch_on_an_assumed_value_is_listed_with_its_line(guarded, mark):
    found = [b for b in guarded.recording.branches if guarded.is_at(b.line, mark)]
    assert {b.decides_update for b in found} == {DECIDES[mark]}, found
    assert found[0].code == found[0].line.statement


def test_the_verdict_says_that_updates_rest_on_assumed_values(guarded):
    report = judge(guarded.recording, [device_named("a100")])
    assert "updates depend on an assumed value at assumptions.py:" in report["verdict"]
    assert report["branches"][0]["decides_update"] and "decides an update" in text(report)
    kinds = {(a["kind"], a["value"]) for a in report["assumed"]}
    assert ("found_inf", "0.0") in kinds and ("item", "True") in kinds


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (2, None),
        (3, (3, True)),
        (6, (9, True)),
        (8, None),
        (12, (12, False)),
        (14, (14, False)),
        (17, (17, False)),
        (22, (22, True)),
        (24, (24, False)),
    ],
)
def test_the_source_shows_which_branch_a_read_decides(tmp_path, number, expected):
    """Also a test over two lines, a variable that is tested later, a `raise` in a function with an update."""
    script = tmp_path / "loop.py"
    script.write_text(SOURCE)
    condition = condition_at(Line(str(script), number))
    got = None if condition is None else (condition.line.number, condition.decides_update)
    assert got == expected


STUCK = """\
import torch
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    loss = model(torch.randn(4, 8, device="cuda")).mean()
    if (loss > 5.0) or loss.isnan():
        loss.backward()
        optimizer.step()
"""


def test_a_program_that_never_updates_stops_at_the_branch_responsible(tmp_path):
    got = run_text(tmp_path, STUCK)
    refused = got.recording.refused
    assert refused.line.number == 6 and got.recording.ended == "refused"
    assert refused.reason == (
        "no update after 100 evaluations of this branch: program.py:6 <module> "
        "`if (loss > 5.0) or loss.isnan():` decides it, from an assumed value (False)"
    )


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_program_without_a_branch_stops_in_the_end(tmp_path, device):
    # The program runs in a process of its own, which keeps the time.
    patience = "from leanstep.rehearse import steps; steps.PATIENCE_S = 0.5"
    forever = f"{patience}\nimport torch\nx = torch.ones(3, device='{device}')\nwhile True:\n    x = x + 1\n"
    got = run_text(tmp_path, forever)
    assert got.recording.refused.line.number == 5
    assert got.recording.refused.reason.startswith("no update in ")


def test_backward_calls_are_progress(tmp_path, monkeypatch):
    """A guard inside gradient accumulation comes many times before one update."""
    monkeypatch.setattr(branches, "MOST_SKIPPED", 3)
    monkeypatch.setattr(branches, "MOST_DECIDED", 6)
    script = tmp_path / "loop.py"
    script.write_text(SOURCE)
    seen, line = Branches(), Line(str(script), 3)
    for _ in range(5):
        seen.read(line, True)
        seen.backward_began()
    with pytest.raises(NoUpdate):
        seen.read(line, True)
    seen.updated()
    seen.read(line, True)
    seen.read(line, True)
    with pytest.raises(NoUpdate):
        seen.read(line, True)
    assert seen.listed()[0].count == 9 and Path(seen.listed()[0].line.file) == script
