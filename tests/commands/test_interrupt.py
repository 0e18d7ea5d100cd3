"""Ctrl-C in the middle of a long command: exit code 130, one line, no traceback, no half-written file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# The work never ends by itself: a step (or a rehearsal) that computes for ever, and says that it does.
CHILD = """
import sys
import torch
from leanstep import cli
from leanstep.case import register
from leanstep.rehearse import stage
from toy_case import fast, implementation, toy_case

def endless(*arguments, **options):
    print("working", file=sys.stderr, flush=True)
    while True:
        x = torch.randn(64, 64, requires_grad=True)
        (x @ x).sum().backward()

register(toy_case("endless", implementation("fast", endless)))
stage.rehearse = endless
cli.main()
"""

COMMANDS = {
    "bench": ["bench", "endless"],
    "prove": ["prove", "endless"],
    "sweep": ["rehearse", "logprob-linear", "--sweep", "tokens=64,128"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_interrupt_is_one_line_and_leaves_no_file(tmp_path, command):
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, *COMMANDS[command], "--json", str(tmp_path / "out.json")],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"},
        # A background shell ignores Ctrl-C and its children inherit that: start from the default.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stderr is not None
        assert process.stderr.readline() == "working\n"
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors == "leanstep: interrupted\n" and out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "body",
    [
        """
class Dying:
    def __del__(self):
        interrupt()

def body():
    del [Dying()][0]
    time.sleep(20)
""",
        """
def _releaseLock():  # the name of logging's own hook
    interrupt()

def body():
    os.register_at_fork(after_in_parent=_releaseLock)
    if not os.fork():
        os._exit(0)
    time.sleep(20)
""",
    ],
    ids=["destructor", "fork"],
)
def test_an_interrupt_where_python_drops_it_is_not_lost(body):
    code = (
        """
import os, signal, time
from leanstep import cli

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass
"""
        + body
        + """

cli.run = lambda: body()
try:
    cli.main()
except KeyboardInterrupt:
    print("seen")
"""
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (done.stdout, done.stderr) == ("seen\n", "")
