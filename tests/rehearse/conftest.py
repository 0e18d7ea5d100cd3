"""A rehearsal costs a process and an import of torch: each script runs once for all tests that look at it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from rehearse.rehearsed import SCRIPTS, Rehearsed, run_script, stub_or_skip


@pytest.fixture(scope="session", autouse=True)
def stub() -> Path:
    return stub_or_skip()


@pytest.fixture(scope="session")
def values(tmp_path_factory: pytest.TempPathFactory) -> Rehearsed:
    return run_script(SCRIPTS / "values.py", capture=tmp_path_factory.mktemp("values"), steps=1000)


@pytest.fixture(scope="session")
def seen(values: Rehearsed) -> dict[str, Any]:
    return json.loads(values.printed.splitlines()[-1])


@pytest.fixture(scope="session")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Rehearsed:
    folder = tmp_path_factory.mktemp("lines")
    script = folder / "lines.py"
    script.write_text((SCRIPTS / "lines.py").read_text())
    here = Path.cwd()
    os.chdir(folder)
    try:
        return run_script(script)
    finally:
        os.chdir(here)


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Rehearsed:
    pytest.importorskip("triton", reason="Triton is not installed")
    return run_script(SCRIPTS / "answers.py", capture=tmp_path_factory.mktemp("answers"), steps=1000, ranks=8)
