"""Nothing that a command starts outlives it: the script in its process, and the temporary folders."""

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
from leanstep.tape import children

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG exists only on Linux")

# Never ends. Starts a program and a fork; writes down all numbers, its own first.
ENDLESS = """
import os, subprocess, time, warnings
from pathlib import Path

# Python 3.12 warns about a fork in a process with threads, which CUDA builds of torch start.
warnings.simplefilter("ignore", DeprecationWarning)
program = subprocess.Popen(["sleep", "300"])
fork = os.fork()
if not fork:
    time.sleep(300)
part = Path({target!r} + ".part")
part.write_text(f"{{os.getpid()}} {{fork}} {{program.pid}}")
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


def wait_until(condition, seconds: float = 120.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def is_running(pid: int) -> bool:
    """Zombies do not run; where there is no /proc they count."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return not Path("/proc/self").exists()


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


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
        os._exit(code)


COMMANDS = {
    "prove": ["prove", "plain.py", "endless.py"],
    "ranks": ["prove", "plain.py", "endless.py", "--ranks", "1"],
    "invariant": ["prove", "endless.py", "--invariant"],
    "bench": ["bench", "--no-proof", "endless.py", "plain.py"],
    "fix": ["fix", "endless.py"],
    "rehearse": ["rehearse", "endless.py"],
    "demo": ["demo"],
    "diagnose": ["diagnose", "endless.py"],
}


@pytest.mark.parametrize(
    ("command", "number"),
    [
        ("prove", signal.SIGTERM),
        ("ranks", signal.SIGTERM),
        ("invariant", signal.SIGINT),
        ("bench", signal.SIGHUP),
        ("fix", signal.SIGTERM),
        ("rehearse", signal.SIGTERM),
        pytest.param("rehearse", signal.SIGKILL, marks=on_linux),
        ("demo", signal.SIGTERM),
        ("diagnose", signal.SIGTERM),
    ],
)
def test_a_signal_to_the_command_alone_ends_the_script(tmp_path, command, number):
    (tmp_path / "temporary").mkdir()
    for name in (e.name for e in example.EXAMPLES):
        (tmp_path / name).mkdir()
    target = tmp_path / "numbers"
    for name in ("endless.py", *(f"{e.name}/before.py" for e in example.EXAMPLES)):
        (tmp_path / name).write_text(ENDLESS.format(target=str(target)))
    (tmp_path / "plain.py").write_text(PLAIN)
    importlib.import_module("torch._dynamo")  # seconds, once for all forks
    leanstep = command_line(tmp_path, COMMANDS[command])
    pids: list[int] = []
    try:
        assert wait_until(target.exists)
        pids = [int(word) for word in target.read_text().split()]
        assert all(map(is_running, pids))
        os.kill(leanstep, number)
        code = ended(leanstep)
        if number == signal.SIGKILL:
            assert wait_until(lambda: not is_running(pids[0]))
        elif command != "diagnose":  # which runs the script in its own process
            # The command itself waits for the end of the script's process group.
            assert wait_until(lambda: not any(map(is_running, pids)))
            assert list((tmp_path / "temporary").iterdir()) == []
    finally:
        for pid in (leanstep, *pids):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    said = {
        signal.SIGTERM: (143, "leanstep: ended by SIGTERM\n"),
        signal.SIGHUP: (129, "leanstep: ended by SIGHUP\n"),
        signal.SIGINT: (130, "leanstep: interrupted\n"),
        signal.SIGKILL: (-9, ""),
    }
    assert (code, (tmp_path / "stderr").read_text()) == said[number]


SLEEP = """
import os, time
from pathlib import Path

Path({target!r}).write_text(str(os.getpid()))
time.sleep(300)
"""


def _sleep(target: str) -> None:
    exec(SLEEP.format(target=target))


@on_linux
@pytest.mark.parametrize("fork", [True, False])
def test_a_child_dies_with_its_parent(tmp_path, fork):
    target = tmp_path / "number"
    parent = os.fork()
    if not parent:
        try:
            # A builtin: a new interpreter cannot import a module of the tests.
            children.start(exec, (SLEEP.format(target=str(target)),), fork=fork)
            time.sleep(300)
        finally:
            os._exit(1)
    try:
        assert wait_until(lambda: target.exists() and bool(target.read_text()))
        child = int(target.read_text())
        assert is_running(child)
    finally:
        os.kill(parent, signal.SIGKILL)
        assert ended(parent) == -signal.SIGKILL
    assert wait_until(lambda: not is_running(child))


@on_linux
def test_a_child_whose_parent_has_ended_before_it_starts_leaves_at_once():
    pid = os.fork()
    if not pid:
        try:
            children.end_with(os.getppid() + 1)
        finally:
            os._exit(0)
    assert ended(pid) == 1


def _leave_a_program(target: str) -> None:
    """In a child: a fork that ignores SIGTERM and whose parent ends."""
    if not os.fork():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _sleep(target)
    wait_until(lambda: Path(target).exists() and bool(Path(target).read_text()))


def test_what_a_script_leaves_running_is_ended(tmp_path):
    target = tmp_path / "number"
    child = children.start(_leave_a_program, (str(target),), fork=True)
    children.wait_all([child], 120)
    assert child.code == 0
    assert wait_until(lambda: not is_running(int(target.read_text())))


def test_children_of_one_command_do_not_end_each_other(tmp_path):
    first, second = (children.start(_sleep, (str(tmp_path / name),), fork=True) for name in "ab")
    with children.ended_afterwards([first, second]):
        first.kill()
        assert first.code == -signal.SIGKILL
        assert second.poll() is None
    assert second.code == -signal.SIGKILL


def test_a_folder_goes_even_if_a_signal_interrupts_its_removal(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cleanup, calls = tempfile.TemporaryDirectory.cleanup, []

    def interrupted(self):
        calls.append(self)
        if len(calls) == 1:
            raise children.Ended(signal.SIGTERM)
        cleanup(self)

    monkeypatch.setattr(tempfile.TemporaryDirectory, "cleanup", interrupted)
    with pytest.raises(children.Ended), children.temporary_folder() as folder:
        (folder / "file").touch()
    assert list(tmp_path.iterdir()) == []


def test_a_newline_in_the_name_of_the_folder_for_temporary_files_is_no_separator(tmp_path, monkeypatch):
    precious = tmp_path / "precious"
    odd = tmp_path / "precious\nx"
    precious.mkdir()
    odd.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(odd))
    with children.temporary_folder() as folder:
        assert folder.parent == odd
    assert precious.exists() and list(odd.iterdir()) == []


def test_a_missing_folder_for_temporary_files_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(children.BadInput, match="TMPDIR: cannot make a folder"):
        with children.temporary_folder():
            pass


def test_the_end_of_a_process_in_words():
    assert children.how_it_ended(3) == "ended with exit code 3"
    assert children.how_it_ended(-9) == "was ended by SIGKILL"


def test_a_signal_that_another_thread_takes_during_a_fork_ends_the_command_after_it(monkeypatch, capfd):
    """Python drops what a callback of a fork raises, and prints a traceback."""
    monkeypatch.setattr(children, "received", received := [])
    monkeypatch.setattr(cli, "received", received)
    coming = [signal.SIGTERM]
    os.register_at_fork(before=lambda: cli._end(coming.pop(), None) if coming else None)
    with pytest.raises(children.Ended):
        children.start(time.sleep, (60,), fork=True)
    assert "Traceback" not in capfd.readouterr().err
