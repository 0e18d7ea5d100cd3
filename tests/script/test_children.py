"""Nothing that a command starts outlives it: the script, what the script starts, the temporary folders."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

from leanstep import cli
from leanstep.commands import example
from leanstep.script import children, guard

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")

# Never ends. Starts a program, a program in a session of its own, and a fork; writes down all numbers.
ENDLESS = """
import os, subprocess, sys, time, warnings
from pathlib import Path

# Python 3.12 warns about a fork in a process with threads, which CUDA builds of torch start.
warnings.simplefilter("ignore", DeprecationWarning)
programs = [subprocess.Popen(["sleep", "1000"], start_new_session=own) for own in (False, True)]
fork = os.fork()
if not fork:
    time.sleep(1000)
numbers = [os.getpid(), fork, *(program.pid for program in programs)]
part = Path({target!r} + ".part")
part.write_text(" ".join(map(str, numbers)))
part.rename({target!r})
while True:
    time.sleep(0.01)
"""
PLAIN = """
import torch

model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    optimizer.zero_grad()
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
"""


def wait_until(condition, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def running(pids: list[int]) -> list[int]:
    return sorted(guard.processes().keys() & set(pids))


def command_line(folder: Path, arguments: list[str]) -> int:
    """`leanstep ARGUMENTS` in a fork of this process: torch is imported already. Returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        os.setsid()
        os.chdir(folder)
        with (folder / "stderr").open("w") as log, Path(os.devnull).open("w") as nobody:
            os.dup2(nobody.fileno(), 1)
            os.dup2(log.fileno(), 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
            tempfile.tempdir = os.environ["TMPDIR"] = str(folder / "temporary")
            example.examples_folder = lambda: folder
            signal.signal(signal.SIGINT, signal.default_int_handler)
            # Whoever runs the tests under nohup has it ignored, and so would the command.
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            sys.argv = ["leanstep", *arguments]
            cli.main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 98
    finally:
        children._guard.close()
        os._exit(code)


COMMANDS = {
    "prove": ["prove", "plain.py", "endless.py"],
    "invariant": ["prove", "endless.py", "--invariant"],
    "bench": ["bench", "--no-proof", "endless.py", "plain.py"],
    "fix": ["fix", "endless.py"],
    "rehearse": ["rehearse", "endless.py"],
    "demo": ["demo", "--only", "lens", "--no-peers"],
}


@pytest.mark.parametrize(
    ("command", "number"),
    [
        ("prove", signal.SIGTERM),
        ("prove", signal.SIGKILL),
        ("invariant", signal.SIGINT),
        ("bench", signal.SIGHUP),
        ("bench", signal.SIGKILL),
        ("fix", signal.SIGTERM),
        ("rehearse", signal.SIGTERM),
        ("rehearse", signal.SIGKILL),
        ("demo", signal.SIGTERM),
    ],
)
def test_a_signal_to_the_command_alone_ends_the_script_and_all_it_started(tmp_path, command, number):
    (tmp_path / "temporary").mkdir()
    (tmp_path / "lens").mkdir()
    target = tmp_path / "numbers"
    for name in ("endless.py", "lens/before.py"):
        (tmp_path / name).write_text(ENDLESS.format(target=str(target)))
    (tmp_path / "plain.py").write_text(PLAIN)
    importlib.import_module("torch._dynamo")  # seconds, once for all forks
    leanstep = command_line(tmp_path, COMMANDS[command])
    try:
        assert wait_until(target.exists, 120)
        pids = [int(word) for word in target.read_text().split()]
        assert len(running(pids)) == 4
        os.kill(leanstep, number)
        code = os.waitstatus_to_exitcode(os.waitpid(leanstep, 0)[1])
    except BaseException:
        with contextlib.suppress(OSError):
            os.kill(leanstep, signal.SIGKILL)
        raise

    def left_over() -> list[str]:
        folders = sorted(path.name for path in (tmp_path / "temporary").glob("leanstep*"))
        return [*map(str, running(pids)), *folders]

    # The command itself waits for the end of everything; after SIGKILL its guard does that.
    assert left_over() == [] if number != signal.SIGKILL else wait_until(lambda: not left_over())
    said = {
        signal.SIGTERM: (143, "leanstep: ended by SIGTERM\n"),
        signal.SIGHUP: (129, "leanstep: ended by SIGHUP\n"),
        signal.SIGINT: (130, "leanstep: interrupted\n"),
        signal.SIGKILL: (-9, ""),
    }
    assert (code, (tmp_path / "stderr").read_text()) == said[number]


def _leave_a_daemon(target: str) -> None:
    """In a child: a program in a session of its own, whose parent has ended."""
    if not os.fork():
        os.setsid()
        if not os.fork():
            Path(target).write_text(str(os.getpid()))
            os.execvp("sleep", ["sleep", "1000"])
        os._exit(0)
    wait_until(lambda: Path(target).exists() and bool(Path(target).read_text()))


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds a daemon through /proc")
def test_a_daemon_that_a_script_leaves_is_ended(tmp_path):
    target = tmp_path / "number"
    child = children.start(_leave_a_daemon, (str(target),), fork=True)
    children.wait_all([child], 60)
    assert child.code == 0
    assert running([int(target.read_text())]) == []


def _sleep() -> None:
    time.sleep(1000)


def test_children_of_one_command_do_not_end_each_other():
    first, second = (children.start(_sleep, (), fork=True) for _ in range(2))
    with children.ended_afterwards([first, second]):
        first.kill()
        assert first.code == -signal.SIGKILL
        assert second.poll() is None


def test_a_guard_that_was_killed_is_replaced_with_its_list(tmp_path):
    with children.temporary_folder() as folder:
        old = children._guard.process
        assert old is not None
        old.kill()
        old.wait()
        with children.temporary_folder():
            new = children._guard.process
            assert new is not None and new.pid != old.pid
            assert f"folder {folder}" in children._guard.listed
    assert not folder.exists()


def test_a_full_folder_for_temporary_files_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(children.BadInput, match="TMPDIR: cannot make a folder"):
        with children.temporary_folder():
            pass


def test_the_end_of_a_process_in_words():
    assert children.how_it_ended(3) == "ended with exit code 3"
    assert children.how_it_ended(-9) == "was ended by SIGKILL"
