"""The bundled examples: both sides run, few lines differ, they make the same update."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from leanstep.commands import example
from leanstep.prove.compare import prove_scripts
from leanstep.prove.script_jobs import Job
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
@pytest.mark.timeout(240)
def test_both_make_the_same_update(name: str):
    proof = prove_scripts(*[Job(str(FOLDER / name / f"{side}.py")) for side in example.SIDES], fork=True)
    assert proof.ok, proof.sentence()
    assert proof.steps == 2 and proof.losses["after"] == pytest.approx(proof.losses["before"], rel=2e-3)


def test_a_wrong_gradient_fails_the_proof(tmp_path: Path):
    shutil.copytree(FOLDER / "lens", tmp_path / "lens")
    after = tmp_path / "lens" / "after.py"
    after.write_text(after.read_text().replace(".loss\n", ".loss * 1.0001\n"))
    proof = prove_scripts(*[Job(str(tmp_path / "lens" / f"{s}.py")) for s in example.SIDES], fork=True)
    assert proof.problem is None and proof.first is not None and proof.first.step == 1


@pytest.mark.parametrize("side", example.SIDES)
def test_a_script_runs_by_itself(side: str):
    script = FOLDER / "lens" / f"{side}.py"
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=280, check=True
    )
    assert len(result.stdout.splitlines()) == 5 and result.stdout.startswith("step 1  loss ")
