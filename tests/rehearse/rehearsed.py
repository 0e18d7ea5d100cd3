"""Run a script of this folder as a rehearsal and look at its lines."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from leanstep.rehearse.events import Line, Recording, Request
from leanstep.rehearse.stage import rehearse

SCRIPTS = Path(__file__).parent / "scripts"


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
    settings = {"device": "a100", "steps": 3, **options}
    if capture is None:
        return Rehearsed(rehearse(Request(str(script), args, **settings), quiet=True), "", script)
    code = (
        "import pickle, sys; from leanstep.rehearse.stage import rehearse; "
        "request = pickle.load(open(sys.argv[1], 'rb')); "
        "pickle.dump(rehearse(request), open(sys.argv[2], 'wb'))"
    )
    asked, answered = capture / "asked", capture / "answered"
    asked.write_bytes(pickle.dumps(Request(str(script), args, **settings)))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code, str(asked), str(answered)],
        **{"env": environment, "capture_output": True, "text": True, "check": False, "timeout": 300},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return Rehearsed(pickle.loads(answered.read_bytes()), done.stdout, script)
