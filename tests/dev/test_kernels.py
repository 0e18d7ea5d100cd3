"""`python -m dev.kernels`: real kernels are judged, table and JSON agree, the interpreter is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("triton")

from dev.kernels import run

VERSION = tuple(int(part) for part in metadata.version("triton").split(".")[:2])


@pytest.mark.skipif(VERSION < (3, 7), reason="the gates were set with Triton 3.7")
def test_real_kernels_are_compiled_listed_and_judged():
    """Five small kernels, two of them good: in a process without TRITON_INTERPRET, which the suite sets."""
    code = (
        "import functools, sys; from dev.kernel_checks import aot; "
        "own = ('kernel_checks.gate_kernels',); "
        "aot.compile_all = functools.partial(aot.compile_all, modules=own); "
        "from dev.kernels import run; "
        "sys.exit(run(['--targets', 'sm_90', '--shipped', '--json', '-']))"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    folders = [
        str(Path(__file__).parent),
        str(Path(__file__).parents[2]),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    environment["PYTHONPATH"] = os.pathsep.join(folders)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)
    rows = {row["kernel"]: row for row in result["rows"]}
    assert result["targets"] == ["sm_90"] and len(rows) == 5
    assert all(0 < row["registers"] <= 255 and not row["error"] for row in rows.values())
    # Every figure of the JSON is in the table, and the last line names the first that falls short.
    for name, row in rows.items():
        (line,) = [line for line in done.stderr.splitlines() if f" {name} " in line and " / " in line]
        assert f"{row['registers']} / {row['shared_bytes']}" in line
        assert ("spilled" in line) == (row["spill_bytes"] > 0)
    assert "3 of 5 fall short; narrow pass for sm_90" in done.stderr


def test_interpreter_mode_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run([]) == 2
    assert "TRITON_INTERPRET" in capsys.readouterr().err
