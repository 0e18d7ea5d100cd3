"""Child processes and temporary folders that end with this process.

Every command that runs a script in another process starts it here. Each child leads its own session, so that
its process group can be killed with what it started. On Linux a child also ends if this process is killed by
SIGKILL; folders, and processes that the script started, may then remain.

A child is forked if the caller asks for it: torch is already imported, which saves seconds. Otherwise, and if
this process uses a GPU, a new interpreter is started.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import _exit as leave
from pathlib import Path
from pickle import dumps
from typing import Any

from leanstep.files import BadInput

# `leave` and `dumps` are imported by name: a script may replace the attributes of their modules.

# Ranks that wait for one that failed are killed after this many seconds; so is a script that ignores Ctrl-C.
GRACE_S = 20.0
# Seconds for what a script leaves running: Python's resource tracker removes shared memory and semaphores.
PATIENCE_S = 1.0
_PR_SET_PDEATHSIG = 1


class Ended(SystemExit):
    """SIGTERM or SIGHUP came: `with` and `finally` blocks end the children and remove the folders."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


# Signals that came to this process as exceptions.
received: list[int] = []
# Not empty around a fork, in whose callbacks Python drops exceptions: a signal is then only noted.
forking: list[int] = []


def raise_lost_signal() -> None:
    """Raise a signal's exception again, for a loop that would go on: Python drops it in a callback."""
    if received:
        raise KeyboardInterrupt if received[-1] == signal.SIGINT else Ended(received[-1])


def end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent, with this pid, ends. Does nothing except on Linux.

    Every process that leanstep starts calls this first, because a fork clears the setting.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # It may have ended before the call.
        if os.getppid() != parent:
            leave(1)


@contextlib.contextmanager
def temporary_folder(prefix: str = "leanstep-") -> Iterator[Path]:
    """Create a folder that is removed at the end of the block."""
    try:
        folder = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
    except OSError as error:
        place = os.environ.get("TMPDIR") or os.environ.get("TEMP") or "the folder for temporary files"
        raise BadInput(f"TMPDIR: cannot make a folder in {place}: {error.strerror or error}") from None
    try:
        yield Path(folder.name)
    finally:
        try:
            folder.cleanup()
        finally:
            # Once more if a signal interrupted the first call.
            folder.cleanup()


@dataclass
class Child:
    """A process that was forked (`pid`) or newly started (`popen`). `code`: its exit code after its end."""

    pid: int
    popen: subprocess.Popen[Any] | None = None
    code: int | None = None

    def poll(self) -> int | None:
        if self.code is None:
            if self.popen is not None:
                self.code = self.popen.poll()
            else:
                done, status = os.waitpid(self.pid, os.WNOHANG)
                if done:
                    self.code = os.waitstatus_to_exitcode(status)
            if self.code is not None:
                _end_group(self.pid)
        return self.code

    def interrupt(self) -> None:
        """Send SIGINT to its process group, like Ctrl-C."""
        if self.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGINT)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            while self.poll() is None:
                time.sleep(0.01)


def _end_group(leader: int) -> None:
    """End the processes that a child started and left running."""
    with contextlib.suppress(OSError):
        os.killpg(leader, signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            os.killpg(leader, 0)
            time.sleep(0.01)
        os.killpg(leader, signal.SIGKILL)


def start_program(command: Sequence[str], env: Mapping[str, str], **options: Any) -> Child:
    """Start another program, which must call `end_with`. `options` are those of `subprocess.Popen`."""
    process = subprocess.Popen(command, env=env, start_new_session=True, **options)
    return Child(process.pid, process)


def start(
    function: Callable[..., None], args: tuple[Any, ...], *, fork: bool, descriptors: Sequence[int] = ()
) -> Child:
    """Call a module-level function in a new process, which receives only its arguments.

    descriptors: files that stay open in the child, under the same numbers.
    """
    if fork and not _uses_cuda():
        return _fork(function, args)
    payload = dumps((function, args)).hex()
    program = f"from leanstep.tape.children import end_with; end_with({os.getpid()}); "
    program += "import os, pickle, sys; f, a = pickle.loads(bytes.fromhex(sys.argv[1])); f(*a)"
    # Without clean-up: objects of a rank's script could block forever (see run_script).
    program += "; sys.stdout.flush(); sys.stderr.flush(); os._exit(0)"
    # Not the working directory of `python -c`: Python puts the script's own folder first.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", program, payload]
    return start_program(command, env=environment, pass_fds=descriptors)


def _uses_cuda() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def _fork(function: Callable[..., None], args: tuple[Any, ...]) -> Child:
    # Every optimizer and every mode imports it, which takes seconds: once here or again in each child.
    importlib.import_module("torch._dynamo")
    cpu = importlib.import_module("leanstep.cpu")

    sys.stdout.flush()
    sys.stderr.flush()
    cpu.end_idle_threads()
    parent = os.getpid()
    before = len(received)
    # Signals wait until after the fork; one that another thread takes is noted.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    forking.append(parent)
    try:
        with warnings.catch_warnings():
            # Python warns where there are other threads; they take no locks that the child needs.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
    finally:
        forking.clear()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if pid:
        child = Child(pid)
        if len(received) > before:
            child.kill()
            raise_lost_signal()
        return child
    code = 1
    try:
        end_with(parent)
        os.setsid()
        function(*args)
        code = 0
    finally:
        # The child must not run the parent's exit handlers.
        leave(code)


@contextlib.contextmanager
def ended_afterwards(children: Sequence[Child]) -> Iterator[None]:
    """Kill all children when the block ends; a `start` inside the block may add to the list."""
    try:
        yield
    finally:
        for child in children:
            child.kill()


def wait_all(children: Sequence[Child], limit_s: float | None = None) -> None:
    """Wait for all. After a failure or the time limit the others get a grace period and are then killed."""
    deadline = None if limit_s is None else time.monotonic() + limit_s
    while any(child.poll() is None for child in children):
        if limit_s is None:
            raise_lost_signal()
        if deadline is None and any(child.poll() not in (None, 0) for child in children):
            deadline = time.monotonic() + GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            for child in children:
                child.kill()
            return
        time.sleep(0.01)


def interrupt_all(children: Sequence[Child]) -> None:
    """Forward Ctrl-C, which does not reach their sessions; they may still write their results."""
    for child in children:
        child.interrupt()
    wait_all(children, GRACE_S)


def call_in_child(function: Callable[..., Any], *args: Any, fork: bool = False) -> Any:
    """Return or raise what `function(*args)` does in a separate process."""
    with temporary_folder() as folder:
        target = folder / "result"
        child = start(_answer, (function, args, str(target)), fork=fork)
        with ended_afterwards([child]):
            try:
                wait_all([child])
            except KeyboardInterrupt:
                interrupt_all([child])
                raise
        if not target.exists():
            if child.code == os.EX_IOERR:
                raise BadInput("TMPDIR: the folder for temporary files is full or gone")
            raise RuntimeError(f"{function.__name__}: its process {how_it_ended(child.code)}")
        returned, value = pickle.loads(target.read_bytes())
    if returned:
        return value
    raise value


def how_it_ended(code: int | None) -> str:
    """Describe how a process ended: `ended with exit code 3`, `was ended by SIGKILL`."""
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _answer(function: Callable[..., Any], args: tuple[Any, ...], target: str) -> None:
    try:
        answer = (True, function(*args))
    except BaseException as error:
        answer = (False, error)
    write_result(Path(target), answer)


def write_result(target: Path, result: Any) -> None:
    """Write a complete pickle or nothing; exit with the code of an I/O error if writing fails."""
    part = target.with_suffix(".part")
    try:
        part.write_bytes(dumps(result))
        part.rename(target)
    except OSError:
        leave(os.EX_IOERR)


@contextlib.contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Redirect standard output and error of this process to a file, including those of C++ code."""
    with path.open("w", encoding="utf-8", buffering=1) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        sys.stdout = sys.stderr = log
        yield
        log.flush()
