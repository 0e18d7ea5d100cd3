"""dev/matrix: which runs it would make, without making them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

MATRIX = Path(__file__).parents[2] / "dev" / "matrix"


def listed(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(MATRIX), "--list", *arguments], capture_output=True, text=True, timeout=60
    )


def runs_of(*arguments: str) -> list[str]:
    done = listed(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_few_has_every_setting_in_one_of_four_runs():
    # The words of the `case`: a setting that is added there needs a run.
    cases = set(re.findall(r"^    ([\w\[\]-]+)\)", MATRIX.read_text(), flags=re.MULTILINE))
    each = {setting for run in runs_of() for setting in run.split("+")}
    assert {re.sub(r"\d$", "[1-9]", name) if "threads" in name else name for name in each} == cases
    few = runs_of("-s", "few")
    assert len(few) == 4
    assert {setting for run in few for setting in run.split("+")} == each


def test_runs_are_settings_joined():
    assert runs_of("-s", "avx2+threads-3,native-0") == ["avx2+threads-3", "native-0"]
    assert runs_of("-s", "poorest") == ["sse+no-compiler+no-chromium+ordinary-user"]


@pytest.mark.parametrize(
    ("wrong", "named"), [("default,avx3", "avx3"), ("sse+thread-2", "thread-2"), ("", "nothing")]
)
def test_a_misspelt_setting_is_one_line_before_the_first_run(wrong: str, named: str):
    done = listed("-s", wrong)
    assert done.returncode != 0 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.endswith(f"-s: expected few, poorest or settings, got {named}")
