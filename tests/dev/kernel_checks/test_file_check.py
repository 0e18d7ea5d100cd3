"""`python -m dev.kernels FILE.py`: launches are compiled and checked; other files give a one-line error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

from dev.kernels import run

FILE = Path(__file__).with_name("own_file.py")


@pytest.fixture(autouse=True)
def compiled_kernels(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.timeout(600)
def test_what_a_file_launches_is_compiled_and_checked(capsys):
    assert run([str(FILE), "--targets", "sm_89,gfx942", "--json", "-"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    for target in ("sm_89", "gfx942"):
        rows = [row for row in result["rows"] if row["target"] == target]
        # Two types of one kernel, two configurations of the other.
        assert (
            sorted(row["kernel"].split()[0] for row in rows) == ["add_one_kernel"] * 2 + ["scale_kernel"] * 2
        )
        assert {row["num_warps"] for row in rows} == {4, 8}
        assert all(row["registers"] > 0 and row["spill_bytes"] == 0 and not row["error"] for row in rows)
    assert result["problems"] == [] and result["launches"] == {"add_one_kernel": 2, "scale_kernel": 1}
    assert result["not_launched"] == ["forgotten_kernel"]
    assert "3 launches in the interpreter: no problem" in captured.err
    assert [(row["result"], row["error"]) for row in result["parity"]] == [("x", 0.0), ("y", 0.0)]
    assert "not launched, so not checked: forgotten_kernel" in captured.err


@pytest.mark.timeout(600)
def test_a_step_out_of_bounds_fails_and_names_the_line(capsys):
    launch = f"{FILE}:launch_with_a_step_too_far"
    assert run([str(FILE), "--targets", "sm_90", "--launch", launch]) == 1
    captured = capsys.readouterr()
    said = captured.out + captured.err
    (number,) = [
        n
        for n, line in enumerate(FILE.read_text().splitlines(), 1)
        if "tl.load(x_ptr + at, mask=inside)" in line
    ]
    assert f"add_one_kernel, line {number}: load out of bounds" in said
    assert f"add_one_kernel, line {number}: store out of bounds" in said


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["missing.py"], "FILE.py: expected a Python file, got missing.py"),
        ([str(FILE.parent)], "FILE.py: expected a Python file"),
        ([str(FILE), "--launch", "missing.py:go"], "--launch: expected a Python file, got missing.py"),
        ([str(FILE), "--shipped"], "--shipped: expected no FILE.py"),
        (["--launch", str(FILE)], "--launch: expected FILE.py with it"),
        (["--skip-memory"], "--skip-memory: expected FILE.py with it"),
        (["--plain", "go"], "--plain: expected FILE.py with it"),
        ([str(FILE), "--targets", "hopper"], "--targets: expected names like"),
        (["--targets", "hopper"], "--targets: expected names like"),
        (["--targets", "sm_90,,gfx942"], "--targets: expected"),
        (["--targets", ""], "--targets: expected"),
    ],
)
def test_bad_input_is_one_line(arguments, line, capsys):
    assert run([*arguments]) == 2
    said = capsys.readouterr().err.strip()
    assert line in said and len(said.splitlines()) == 1


@pytest.mark.timeout(600)
def test_results_that_differ_from_the_plain_function_fail(capsys):
    assert run([str(FILE), "--targets", "sm_90", "--plain", "plain_that_differs"]) == 1
    captured = capsys.readouterr()
    said = captured.out + captured.err
    assert "result x DIFFERS with plain_that_differs(): relative error 3.3e-01" in said
    assert "result y agrees with plain_that_differs()" in said
    assert run([str(FILE), "--targets", "sm_90", "--plain", "plain_of_something_else"]) == 2
    assert "to return the same tensors, got ['x', 'y'] and ['0']" in capsys.readouterr().err
