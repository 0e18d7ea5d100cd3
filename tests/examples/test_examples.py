"""The bundled examples: both sides run, few lines differ, loss and gradients agree with fp64."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from leanstep.commands import example
from leanstep.report.excerpts import changed_lines, difference

FOLDER = Path(__file__).parents[2] / "examples"
NAMES = [e.name for e in example.EXAMPLES]


@pytest.mark.parametrize("name", NAMES)
def test_before_and_after_differ_in_a_handful_of_lines(name: str):
    texts = [(FOLDER / name / f"{side}.py").read_text() for side in example.SIDES]
    gone, came = changed_lines(difference(*texts))
    assert 1 <= gone <= 10 and 1 <= came <= 12, (gone, came)


@pytest.mark.parametrize("name", NAMES)
def test_before_is_plain_torch(name: str):
    before = (FOLDER / name / "before.py").read_text()
    siblings = [path for path in (FOLDER / name).glob("*.py") if f"from {path.stem} import" in before]
    assert siblings and not any("leanstep" in text for text in (before, *(p.read_text() for p in siblings)))


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_are_as_close_to_fp64_as_before(name: str):
    modules = [example.load(FOLDER / name, side) for side in example.SIDES]
    rows = example.prove(name, *modules)
    assert len(rows) > 3 and not [row for row in rows if not row["ok"]]


def test_a_wrong_gradient_fails_the_proof():
    before, after = (example.load(FOLDER / "lens", side) for side in example.SIDES)
    right = after.loss_fn
    after.loss_fn = lambda model, batch: 1.0001 * right(model, batch)
    assert [row["tensor"] for row in example.prove("lens", before, after) if not row["ok"]]


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_of_a_short_training_run_is_the_same(name: str):
    before, after = (example.losses(example.load(FOLDER / name, side), 2) for side in example.SIDES)
    assert after == pytest.approx(before, rel=2e-3)


def test_loading_leaves_no_sibling_module_behind():
    known = set(sys.modules)
    example.load(FOLDER / "lens", "before")
    assert not {"controller", "pair_losses"} & (set(sys.modules) - known)


@pytest.mark.parametrize("side", example.SIDES)
def test_a_script_runs_by_itself(side: str):
    script = FOLDER / "lens" / f"{side}.py"
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True
    )
    assert len(result.stdout.splitlines()) == 5 and result.stdout.startswith("step 1  loss ")
