"""Run a script of this folder as a rehearsal and look at its lines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from leanstep.cpu import find_compiler
from leanstep.rehearse.answers.fake_device import library
from leanstep.rehearse.events import Recording, Request
from leanstep.rehearse.stage import rehearse
from leanstep.tape.lines import Line

SCRIPTS = Path(__file__).parent / "scripts"


def stub_or_skip() -> Path:
    """The library that the fake device needs; without a compiler the test is skipped and says so."""
    if find_compiler() is None:
        pytest.skip("no fake device: no C++ compiler")
    return library()


class Rehearsed(NamedTuple):
    recording: Recording
    printed: str
    script: Path

    def marks(self) -> dict[str, int]:
        """Comment after `# MARK` -> its line number."""
        lines = self.script.read_text().splitlines()
        return {text.split("# MARK ")[1]: n for n, text in enumerate(lines, 1) if "# MARK " in text}

    def is_at(self, line: Line | None, mark: str) -> bool:
        return (
            line is not None
            and line.number == self.marks()[mark]
            and Path(line.file).name == self.script.name
        )


def run_script(script: Path, *args: str, capture: Path | None = None, **options: Any) -> Rehearsed:
    """Rehearse a script; its standard output goes to a file, because the child writes to the descriptor."""
    request = Request(str(script), args, **{"device": "a100", "steps": 3, **options})
    if capture is None:
        return Rehearsed(rehearse(request, quiet=True), "", script)
    kept = os.dup(1)
    with (capture / "printed").open("w+b") as file:
        os.dup2(file.fileno(), 1)
        try:
            recording = rehearse(request)
        finally:
            os.dup2(kept, 1)
            os.close(kept)
        return Rehearsed(recording, (capture / "printed").read_text(), script)


def run_text(folder: Path, text: str, **options: Any) -> Rehearsed:
    """Rehearse a program given as text."""
    script = folder / "program.py"
    script.write_text(text)
    return run_script(script, capture=folder, **options)
