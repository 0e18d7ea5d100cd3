"""dev/matrix: which runs it would make, without making them."""

from __future__ import annotations

import subprocess
from pathlib import Path

MATRIX = Path(__file__).parents[2] / "dev" / "matrix"


def runs_of(*arguments: str) -> list[str]:
    command = ["bash", str(MATRIX), "--list", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_runs_are_settings_joined():
    assert runs_of("-s", "avx2+threads-3,native-0") == ["avx2+threads-3", "native-0"]
    assert runs_of("-s", "poorest") == ["sse+no-compiler+no-chromium+ordinary-user"]
