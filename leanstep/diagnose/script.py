"""Run a user's script the way Python would, so that its errors,
its exit code and its arguments stay its own.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

_LEANSTEP = str(Path(__file__).parents[1]) + os.sep
_TORCH = Path(str(torch.__file__)).parent
_PASSED_ON = (str(_TORCH / "_ops.py"), str(_TORCH / "overrides.py"))
_RUNS_SCRIPTS = (runpy.__file__, contextlib.__file__)


class Stop(BaseException):
    """Raised through the script to end it early; not an error of the script."""


@dataclass(frozen=True)
class Outcome:
    """How the script ended: its exit code, and its exception's name, if any."""

    code: int = 0
    exception: str | None = None
    stopped: bool = False


def run_script(path: Path, argv: Sequence[str], context: AbstractContextManager[object]) -> Outcome:
    """Run `path` as `__main__` inside `context`, which is left before anything is printed."""
    with _streams_survive():
        return _run(path, argv, context)


@contextlib.contextmanager
def _streams_survive() -> Iterator[None]:
    """Standard output and error as they were, whatever the script did to them: a report follows it."""
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
    """Put `stream` back as sys.`name`; where the script closed it, a new one on a copy of its descriptor."""
    current = getattr(sys, name)
    if current is not stream:
        # What the script put in its place keeps what was written to it.
        with contextlib.suppress(Exception):
            current.flush()
    if stream is not None and not stream.closed and _is_open(stream):
        setattr(sys, name, stream)
        if copy is not None:
            os.close(copy)
    elif copy is not None:
        setattr(sys, name, os.fdopen(copy, "w", encoding=getattr(stream, "encoding", None) or "utf-8"))
    elif stream is not None:
        # Only what is no file of the system comes here; the report then goes where errors go.
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


def _run(path: Path, argv: Sequence[str], context: AbstractContextManager[object]) -> Outcome:
    linecache.checkcache()
    old_argv, old_path = sys.argv, list(sys.path)
    sys.argv = [str(path), *argv]
    sys.path[:1] = [str(path.resolve().parent)]
    try:
        with context:
            # Python gives the main script's absolute path to tracebacks and `__file__`.
            runpy.run_path(str(path.absolute()), run_name="__main__")
    except Stop:
        return Outcome(stopped=True)
    except SystemExit as error:
        return Outcome(_exit_code(error))
    except KeyboardInterrupt as error:
        _print_traceback(error)
        return Outcome(130, "KeyboardInterrupt")
    except BaseException as error:
        _print_traceback(error)
        return Outcome(1, type(error).__name__)
    finally:
        sys.argv = old_argv
        sys.path[:] = old_path
    return Outcome()


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
    # A script that closed standard error has nowhere to show its traceback, as under Python itself.
    with contextlib.suppress(ValueError, OSError):
        traceback.print_exception(error, file=sys.stderr)


def users_traceback(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames that ran the script and without those that watched it."""
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    kept: list[TracebackType] = []
    watched = False
    for entry in frames:
        file = entry.tb_frame.f_code.co_filename
        if file.startswith(_LEANSTEP):
            watched = True
        elif not kept and (file.startswith("<frozen") or file in _RUNS_SCRIPTS):
            continue
        elif watched and file in _PASSED_ON:
            # What a mode calls to pass an op on; without the mode these frames are not there.
            continue
        else:
            kept.append(entry)
            watched = watched and bool(file.startswith("<"))
    # torch's detour into the function mode ends with frames of its own: drop those before a watched one.
    result: TracebackType | None = None
    for entry in reversed(kept):
        result = TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result
