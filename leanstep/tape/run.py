"""Run a user's script, folder or module exactly as Python would run it.

`sys.path`, `sys.argv`, `__file__` and `__name__` are what `python SCRIPT`, `python FOLDER` or
`python -m MODULE` would set; errors and exit codes are those of the program. Under `torchrun` every rank runs
like this, and rank 0 reports itself.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
import linecache
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from leanstep.escape import printable
from leanstep.files import BadInput
from leanstep.tape.children import Ended, received
from leanstep.tape.lines import (
    LEANSTEP_FOLDER,
    TORCH_FOLDER,
    USER,
    is_program,
    nearest_line,
    traceback_frames,
)

# torch files through which a mode forwards an op; without the mode their frames are not on the stack.
_PASSED_ON = (f"{TORCH_FOLDER}_ops.py", f"{TORCH_FOLDER}overrides.py")
_RUNS_SCRIPTS = (runpy.__file__, contextlib.__file__)


class Stop(BaseException):
    """Raised through the script to end it early; not an error of the script."""


class _Left(BaseException):
    """The script called os._exit or os.exec*, which would end this process without a report."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(call)
        self.call, self.code = call, code


@dataclass(frozen=True)
class Outcome:
    """How the script ended: its exit code and, for an exception, its name, its message in one line, and the
    file and line in the script."""

    code: int = 0
    exception: str | None = None
    said: str = ""
    where: str = ""
    stopped: bool = False


# Globals of a rank's script, held until the process ends: destroying a process group holds Python's lock and
# waits for gloo's thread, which may need that lock to release its last collective (seen with torch 2.13).
_LEFT: list[object] = []


@dataclass(frozen=True)
class Program:
    """The program to run as `__main__`: a file, a folder with a `__main__.py`, or a module."""

    name: str
    module: bool = False

    @staticmethod
    def find(name: str, module: bool = False) -> Program:
        """Return the program of a command-line argument; a folder may have a train.py instead."""
        path = Path(name)
        if module or path.is_file() or (path / "__main__.py").is_file():
            return Program(name, module)
        if not path.is_dir():
            raise BadInput(f"SCRIPT: no such file: {name}")
        if not (path / "train.py").is_file():
            raise BadInput(f"SCRIPT: the folder {name} has no train.py and no __main__.py")
        return Program(str(path / "train.py"))

    def run(self) -> object:
        """Run it and return its global variables."""
        left: object = None
        try:
            if self.module:
                is_program(self._module_file())
                left = runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            elif self.file.suffix in (".pyc", ".pyz", ".zip"):
                left = runpy.run_path(self.name, run_name="__main__")
            else:
                left = _run_file(self.file.absolute())
        except BaseException as ended:
            left = ended
            raise
        finally:
            if os.environ.get("WORLD_SIZE", "1") != "1":
                _LEFT.append(left)
        return left

    def _module_file(self) -> str:
        """Return the file that `python -m` runs; empty if there is none, which runpy explains."""
        with contextlib.suppress(ImportError, ValueError, AttributeError):
            spec = importlib.util.find_spec(self.name)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{self.name}.__main__")
            return spec.origin or "" if spec is not None else ""
        return ""

    @property
    def file(self) -> Path:
        """Return the file that a script or a folder runs first."""
        path = Path(self.name)
        return path / "__main__.py" if path.is_dir() else path

    @property
    def folder(self) -> str:
        """Return what Python puts first on `sys.path`."""
        return str(Path.cwd() if self.module else self.file.resolve().parent)

    def __str__(self) -> str:
        return f"-m {self.name}" if self.module else self.name


def _run_file(path: Path) -> dict[str, Any]:
    """Run a file as `__main__`. `runpy.run_path` would replace `sys.argv[0]` by the absolute path."""
    main = ModuleType("__main__")
    facts = {"__file__": str(path), "__cached__": None, "__builtins__": builtins, "__package__": None}
    vars(main).update(facts)
    before = sys.modules["__main__"]
    sys.modules["__main__"] = main
    try:
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(main))
    finally:
        sys.modules["__main__"] = before
    return vars(main)


@contextlib.contextmanager
def as_main(program: Program, argv: Sequence[str]) -> Iterator[None]:
    """Set `sys.argv` and `sys.path` as Python does for the program."""
    old_argv, old_path = sys.argv, list(sys.path)
    sys.argv = [program.name, *argv]
    # Python's own first entry is this process's script or `-m` folder, and absent under `python -P`.
    own_entries = 0 if getattr(sys.flags, "safe_path", False) else 1
    sys.path[:own_entries] = [program.folder]
    try:
        yield
    finally:
        sys.argv = old_argv
        sys.path[:] = old_path


def run_script(program: Program, argv: Sequence[str], context: AbstractContextManager[object]) -> Outcome:
    """Run a program as `__main__` inside `context`, which exits before anything is printed."""
    with _streams_survive(), _exits_are_seen():
        return _run(program, argv, context)


@contextlib.contextmanager
def _exits_are_seen() -> Iterator[None]:
    """Make `os._exit` and `os.exec*` end only the script in this process, so that a report follows."""
    pid = os.getpid()

    def seen(name: str, original: Any) -> Any:
        def leave(*args: Any, **kwargs: Any) -> Any:
            if os.getpid() != pid:
                return original(*args, **kwargs)
            is_exit = name == "_exit" and bool(args) and isinstance(args[0], int)
            call = f"os._exit({args[0]})" if is_exit else f"os.{name}"
            code = args[0] if is_exit else 1
            if threading.current_thread() is threading.main_thread():
                raise _Left(call, code)
            # An exception would end the thread only.
            print(f"leanstep: the script called {call} in a thread: no step is judged", file=sys.stderr)
            sys.stderr.flush()
            return exits(code or 2)

        return leave

    exits = os._exit
    with contextlib.ExitStack() as stack:
        for name in ("_exit", "execv", "execve"):
            original = getattr(os, name)
            setattr(os, name, seen(name, original))
            stack.callback(setattr, os, name, original)
        yield


@contextlib.contextmanager
def _streams_survive() -> Iterator[None]:
    """Restore standard output and error for the report, whatever the script did to them."""
    streams: list[tuple[str, Any, int | None]] = []
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            copy = os.dup(stream.fileno())
        except (AttributeError, OSError, ValueError):
            copy = None
        streams.append((name, stream, copy))
    try:
        yield
    finally:
        for name, stream, copy in streams:
            _restore(name, stream, copy)


def _restore(name: str, stream: Any, copy: int | None) -> None:
    """Restore `stream` as sys.`name`; if the script closed it, open a copy of its descriptor."""
    current = getattr(sys, name)
    if current is not stream:
        # The replacement that the script installed keeps its contents.
        with contextlib.suppress(Exception):
            current.flush()
    if stream is not None and not stream.closed and _is_open(stream):
        setattr(sys, name, stream)
        if copy is not None:
            os.close(copy)
    elif copy is not None:
        setattr(sys, name, os.fdopen(copy, "w", encoding=getattr(stream, "encoding", None) or "utf-8"))
    elif stream is not None:
        # Only streams without a file descriptor get here; the report then goes to standard error.
        setattr(sys, name, sys.__stderr__)


def _is_open(stream: Any) -> bool:
    try:
        os.fstat(stream.fileno())
    except OSError as error:
        # io.UnsupportedOperation (a stream in memory) is an OSError without a number.
        return error.errno is None
    except (AttributeError, ValueError):
        pass
    return True


def _run(program: Program, argv: Sequence[str], context: AbstractContextManager[object]) -> Outcome:
    linecache.checkcache()
    try:
        with as_main(program, argv), context:
            # Held until the context exits, which may read the parameters again.
            variables = program.run()
        del variables
    except Stop:
        return Outcome(stopped=True)
    except Ended:
        raise
    except SystemExit as error:
        return Outcome(_exit_code(error))
    except _Left as left:
        print(f"leanstep: the script called {left.call}", file=sys.stderr)
        return Outcome(left.code & 0xFF)
    except KeyboardInterrupt as error:
        line = nearest_line(traceback_frames(error.__traceback__), USER)
        if signal.SIGINT in received:
            # Ctrl-C is no error of the script.
            print(f"leanstep: interrupted{f' at {line.place}' if line is not None else ''}", file=sys.stderr)
        else:
            _print_traceback(error)
        return Outcome(130, "KeyboardInterrupt", one_line(error))
    except BaseException as error:
        _print_traceback(error)
        line = nearest_line(traceback_frames(error.__traceback__), USER)
        return Outcome(1, type(error).__name__, one_line(error), where="" if line is None else line.place)
    return Outcome()


def one_line(error: BaseException) -> str:
    """Return the exception's name and first line, plus the second if the first only introduces it.

    The last line of a traceback is not used: a compiler's exception ends with advice on how to report it.
    """
    try:
        text = str(error)
    except Exception:
        text = "(its message cannot be printed)"
    lines = [printable(line.strip()) for line in text.splitlines() if line.strip()]
    shown = lines[: 2 if lines and lines[0].endswith(":") else 1]
    return " ".join([type(error).__name__ + ":" * bool(shown), *shown])


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    print(error.code, file=sys.stderr)
    return 1


def _print_traceback(error: BaseException) -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        link.__traceback__ = users_traceback(link.__traceback__)
        link = link.__cause__ or link.__context__
    # If the script closed standard error, its traceback is lost, as under Python itself.
    with contextlib.suppress(ValueError, OSError, AttributeError):
        traceback.print_exception(error, file=sys.stderr)


def users_traceback(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames that ran or watched the script."""
    frames: list[TracebackType] = []
    watched = False
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        runs_the_script = not frames and (file.startswith("<frozen") or file in _RUNS_SCRIPTS)
        if file.startswith(LEANSTEP_FOLDER):
            watched = True
        elif not runs_the_script and not (watched and file in _PASSED_ON):
            frames.append(trace)
            watched = watched and file.startswith("<")
        trace = trace.tb_next
    result: TracebackType | None = None
    for entry in reversed(frames):
        result = TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result


def is_first_rank() -> bool:
    """Return whether this process reports."""
    return os.environ.get("RANK", "0") == "0"
