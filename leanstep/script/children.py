"""Child processes and temporary folders that never outlive this process.

Every command that runs a script in another process starts it here. Each child leads its own session. When it
ends, processes that it left running are killed too. When this process ends for any reason (SIGTERM, SIGHUP,
SIGKILL, a crash), `guard` kills the children with everything they started and removes the folders.

A child is forked if the caller asks for it: torch is already imported, which saves seconds. Otherwise, and if
this process uses a GPU, a new interpreter is started.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import pickle
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import _exit as leave
from pathlib import Path
from pickle import dumps
from typing import Any

from leanstep.files import BadInput
from leanstep.script import guard

# A script may replace these module attributes, so the original functions are saved here.

# Ranks that wait for one that failed are killed after this many seconds; so is a script that ignores Ctrl-C.
GRACE_S = 20.0


class _Guard:
    """The guard process. It starts with the first child or folder and holds the same list as this process."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._reset()

    def _reset(self) -> None:
        self.lock = threading.Lock()
        self.listed: dict[str, None] = {}

    def add(self, kind: str, value: object) -> None:
        with self.lock:
            entry = f"{kind} {value}"
            self.listed[entry] = None
            if self.process is None or self.process.poll() is not None or not self._write("+", entry):
                self._start()

    def drop(self, kind: str, value: object) -> None:
        with self.lock:
            entry = f"{kind} {value}"
            self.listed.pop(entry, None)
            self._write("-", entry)

    def _start(self) -> None:
        command = [sys.executable, "-I", "-S", str(Path(guard.__file__).resolve())]
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
        silent = subprocess.DEVNULL
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=silent, stderr=silent, start_new_session=True, cwd=os.sep
        )
        atexit.register(self.close)
        for entry in self.listed:
            self._write("+", entry)

    def _write(self, sign: str, entry: str) -> bool:
        if self.process is None or self.process.stdin is None:
            return False
        try:
            os.write(self.process.stdin.fileno(), os.fsencode(f"{sign}{entry}\n"))
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the pipe at the end of this process, so that the guard cleans up."""
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            self.process.wait()
        self.process = None

    def forget(self) -> None:
        """Close a fork's copy of the pipe, which would keep the guard waiting."""
        atexit.unregister(self.close)
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            # Not a child of this process, so nothing here waits for it.
            self.process.returncode = 0
        self.process = None
        self._reset()


_guard = _Guard()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_guard.forget)


@contextlib.contextmanager
def temporary_folder(prefix: str = "leanstep-") -> Iterator[Path]:
    """Create a folder that is removed at the end of the block, or of this process if that comes first."""
    try:
        folder = tempfile.mkdtemp(prefix=prefix)
    except OSError as error:
        place = os.environ.get("TMPDIR") or os.environ.get("TEMP") or "the folder for temporary files"
        raise BadInput(f"TMPDIR: cannot make a folder in {place}: {error.strerror or error}") from None
    _guard.add("folder", folder)
    try:
        yield Path(folder)
    finally:
        guard.remove(folder)
        _guard.drop("folder", folder)


@dataclass
class Child:
    """A process that was forked (`pid`) or newly started (`popen`). `code`: its exit code once it has ended.

    `mark`: the value of `guard.MARK` in its environment.
    """

    pid: int
    mark: str
    popen: subprocess.Popen[Any] | None = None
    code: int | None = None

    def __post_init__(self) -> None:
        _guard.add("process", f"{self.pid} {self.mark}")

    def poll(self) -> int | None:
        if self.code is None:
            if self.popen is not None:
                self.code = self.popen.poll()
            else:
                done, status = os.waitpid(self.pid, os.WNOHANG)
                if done:
                    self.code = os.waitstatus_to_exitcode(status)
            if self.code is not None:
                # Processes that it started and left running.
                guard.end(self.pid, self.mark)
                _guard.drop("process", f"{self.pid} {self.mark}")
        return self.code

    def interrupt(self) -> None:
        """Send SIGINT to its process group, like Ctrl-C."""
        if self.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGINT)

    def kill(self) -> None:
        if self.poll() is None:
            if hasattr(os, "setsid"):
                guard.end(self.pid, self.mark)
            elif self.popen is not None:
                self.popen.kill()
            while self.poll() is None:
                time.sleep(0.01)


def start_program(command: Sequence[str], env: Mapping[str, str], **options: Any) -> Child:
    """Start another program. `options` are those of `subprocess.Popen`."""
    mark = secrets.token_hex(8)
    process = subprocess.Popen(command, env={**env, guard.MARK: mark}, start_new_session=True, **options)
    return Child(process.pid, mark, process)


def start(
    function: Callable[..., None], args: tuple[Any, ...], *, fork: bool, descriptors: Sequence[int] = ()
) -> Child:
    """Call a module-level function in a new process, which receives only its arguments.

    descriptors: files that stay open in the child, under the same numbers.
    """
    if fork and hasattr(os, "fork") and not _uses_cuda():
        return _fork(function, args)
    payload = dumps((function, args)).hex()
    # Without clean-up: objects of a rank's script could block forever (see run_script).
    program = "import os, pickle, sys; f, a = pickle.loads(bytes.fromhex(sys.argv[1])); f(*a)"
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
    with warnings.catch_warnings():
        # Python warns where there are other threads; they take no locks that the child needs.
        warnings.simplefilter("ignore", DeprecationWarning)
        mark = secrets.token_hex(8)
        pid = os.fork()
    if pid:
        return Child(pid, mark)
    code = 1
    try:
        os.setsid()
        os.environ[guard.MARK] = mark
        _default_signals()
        function(*args)
        code = 0
    finally:
        # The child must not run the parent's exit handlers.
        leave(code)


def _default_signals() -> None:
    """Restore Python's default handlers for SIGTERM and SIGHUP instead of the parent's."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


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
