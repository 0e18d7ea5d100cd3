"""A signal in the middle of a long command: its exit code, one line, no traceback, no half-written file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENDLESS = """
import time
from pathlib import Path

Path("working").touch()
while True:
    time.sleep(0.01)
"""
COMMANDS = {
    "bench": ["bench", "--no-proof", "endless.py", "endless.py"],
    "invariant": ["prove", "endless.py", "--invariant"],
    "rehearse": ["rehearse", "endless.py"],
    "fix": ["fix", "endless.py"],
}
SAID = {
    signal.SIGINT: (130, "leanstep: interrupted\n"),
    signal.SIGTERM: (143, "leanstep: ended by SIGTERM\n"),
    signal.SIGHUP: (129, "leanstep: ended by SIGHUP\n"),
}


def default_signals() -> None:
    """A background shell ignores Ctrl-C, nohup SIGHUP, and their children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("command", "number"),
    [
        ("bench", signal.SIGTERM),
        ("invariant", signal.SIGHUP),
        ("rehearse", signal.SIGINT),
        ("fix", signal.SIGINT),
    ],
)
def test_a_signal_is_one_line_and_leaves_no_file(tmp_path, command, number):
    (tmp_path / "endless.py").write_text(ENDLESS)
    (tmp_path / "temporary").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "leanstep", *COMMANDS[command], "--json", "out.json"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "temporary")},
        preexec_fn=default_signals,
    )
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "working").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(number)
        out, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    # On a busy machine there are progress lines before.
    *_, said = errors.splitlines(keepends=True)
    assert (process.returncode, said) == SAID[number] and "Traceback" not in errors
    assert out == ""
    # torch keeps a cache of its own there.
    assert list((tmp_path / "temporary").glob("leanstep*")) == [] and not (tmp_path / "out.json").exists()


SWALLOWED = """
import os, signal
from leanstep import cli

def body(**options):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except BaseException:
        pass
    raise AttributeError("half imported")

cli.typer.main.get_command = lambda app: type("Command", (), dict(main=staticmethod(body)))
cli.main()
"""


def test_a_signal_that_an_import_swallows_is_named_not_its_consequence():
    command = [sys.executable, "-c", SWALLOWED]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, preexec_fn=default_signals, timeout=120
    )
    assert (done.returncode, done.stderr) == SAID[signal.SIGTERM]
