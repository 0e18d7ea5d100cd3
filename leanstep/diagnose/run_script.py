"""Run a user's script or module, for real or without data.

The script runs the way Python would run it: its errors, its exit code and its arguments stay its own. The
fake run stops where the host wants to look at a value. Under `torchrun` each rank records itself and rank 0
reports, for itself or for all; the reports meet in torch's own TCPStore at MASTER_ADDR:MASTER_PORT, because
the process group may be gone by the time the script has ended.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import linecache
import os
import runpy
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from leanstep.diagnose.recording.source import IN_OPTIM, LIBRARY, USER, Line, judge_code

_LEANSTEP = str(Path(__file__).parents[1]) + os.sep
_TORCH = Path(str(torch.__file__)).parent
_PASSED_ON = (str(_TORCH / "_ops.py"), str(_TORCH / "overrides.py"))
_RUNS_SCRIPTS = (runpy.__file__, contextlib.__file__)


class Stop(BaseException):
    """Raised through the script to end it early; not an error of the script."""


@dataclass(frozen=True)
class Outcome:
    """How the script ended: its exit code, and its exception's name and what it says in one line, if any."""

    code: int = 0
    exception: str | None = None
    said: str = ""
    stopped: bool = False


# What a rank's script left behind, until the process ends: the end of a process group holds Python's lock and
# waits for gloo's thread, which may need that lock to let go of its last collective (seen with torch 2.13).
_LEFT: list[object] = []


@dataclass(frozen=True)
class Program:
    """What is run as `__main__`: a file, or with `module` what `python -m` takes."""

    name: str
    module: bool = False

    def run(self) -> None:
        left: object = None
        try:
            if self.module:
                left = runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            else:
                # Python gives the main script's absolute path to tracebacks and `__file__`.
                left = runpy.run_path(str(Path(self.name).absolute()), run_name="__main__")
        except BaseException as ended:
            left = ended
            raise
        finally:
            if os.environ.get("WORLD_SIZE", "1") != "1":
                _LEFT.append(left)

    @property
    def folder(self) -> str:
        """What Python puts first on the path."""
        return str(Path.cwd() if self.module else Path(self.name).resolve().parent)

    def __str__(self) -> str:
        return f"-m {self.name}" if self.module else self.name


def run_script(
    program: Program | Path, argv: Sequence[str], context: AbstractContextManager[object]
) -> Outcome:
    """Run a program or the file at a path as `__main__` inside `context`, left before anything is printed."""
    if isinstance(program, Path):
        program = Program(str(program))
    with _streams_survive():
        return _run(program, argv, context)


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


def _run(program: Program, argv: Sequence[str], context: AbstractContextManager[object]) -> Outcome:
    linecache.checkcache()
    old_argv, old_path = sys.argv, list(sys.path)
    sys.argv = [program.name, *argv]
    sys.path[:1] = [program.folder]
    try:
        with context:
            program.run()
    except Stop:
        return Outcome(stopped=True)
    except SystemExit as error:
        return Outcome(_exit_code(error))
    except KeyboardInterrupt as error:
        _print_traceback(error)
        return Outcome(130, "KeyboardInterrupt", one_line(error))
    except BaseException as error:
        _print_traceback(error)
        return Outcome(1, type(error).__name__, one_line(error))
    finally:
        sys.argv = old_argv
        sys.path[:] = old_path
    return Outcome()


def one_line(error: BaseException) -> str:
    """The name and the message's first line; the second too where the first only announces it.

    The last line of a traceback is not it: a compiler's exception ends with advice on how to report it.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
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


@dataclass
class FakeVerdict:
    """The first read: its line and the op that asked; `line` is None when the first step ran through."""

    line: Line | None = None
    op: str = ""
    steps: int = 0
    in_optimizer: bool = False


class _FakeRun:
    """Fake CPU tensors around the script: fake CUDA ones abort the process on a CPU build of torch."""

    def __init__(self) -> None:
        self.verdict = FakeVerdict()
        self._stack = ExitStack()
        self._stepped: set[int] = set()

    def __enter__(self) -> _FakeRun:
        self._stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
        self._stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        return self

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """An optimizer comes round again: what stands after its step() has run as well."""
        if id(optimizer) in self._stepped:
            raise Stop

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.verdict.steps += 1
        self._stepped.add(id(optimizer))

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()
        wanted = _wants_a_value(error)
        if wanted is None:
            return
        for frame, number in reversed(list(traceback.walk_tb(trace))):
            code = frame.f_code
            verdict = judge_code(code.co_filename, code.co_name)
            self.verdict.in_optimizer |= bool(verdict & IN_OPTIM)
            if verdict & (LIBRARY | USER):
                self.verdict.line = Line(code.co_filename, number, code.co_name, bool(verdict & LIBRARY))
                self.verdict.op = wanted
                break
        raise Stop from error


def _wants_a_value(error: BaseException | None) -> str | None:
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return str(getattr(error, "func", error))
    if isinstance(error, RuntimeError) and "numpy" in str(error).lower() and "fake" in str(error).lower():
        return "numpy"
    if isinstance(error, RuntimeError) and ".numpy() is not supported" in str(error):
        return "numpy"
    return None


def run_fake(program: Program, argv: Sequence[str]) -> tuple[FakeVerdict, Outcome]:
    """Run the script under fake tensors, until an optimizer comes round for the second time."""
    run = _FakeRun()
    outcome = run_script(program, argv, run)
    return run.verdict, outcome


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_rank() -> bool:
    return rank() == 0


def gather_ranks(report: dict[str, Any], timeout_s: float = 60.0) -> dict[str, Any] | None:
    """On rank 0 the reports of all ranks, merged by line; None on the others."""
    if world_size() == 1:
        return merge_ranks([report])
    deadline = time.monotonic() + timeout_s
    reports, problem = [report] if is_first_rank() else [], f"gave no report within {timeout_s:.0f} s"
    try:
        store = _store(timeout_s)
        store.set(str(rank()), json.dumps(report))
        for number in range(1, world_size()) if is_first_rank() else ():
            left = datetime.timedelta(seconds=max(deadline - time.monotonic(), 0.1))
            # A rank that died leaves the others' findings worth printing.
            with contextlib.suppress(RuntimeError):
                store.wait([str(number)], left)
                reports.append(json.loads(store.get(str(number))))
    except (RuntimeError, ValueError, KeyError) as error:
        # torch's store errors are RuntimeErrors; no address or port in the environment is a KeyError.
        problem = f"could not be asked ({type(error).__name__})"
    if not is_first_rank():
        return None
    merged = merge_ranks(reports)
    if len(reports) < world_size():
        note = f"{world_size() - len(reports)} of {world_size()} ranks {problem}"
        merged["not_seen"].append({"kind": "rank", "where": "", "note": note})
    return merged


def _store(timeout_s: float) -> Any:
    """The store that all ranks of this job reach, under a name that no other user of it has."""
    from torch.distributed import PrefixStore, TCPStore

    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True"
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=is_first_rank() and not has_agent,
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
        # Shares the port with the store of the script's own process group, if that is still there.
        multi_tenant=True,
    )
    return PrefixStore(f"leanstep-diagnose-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def merge_ranks(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """One report of several: a finding per line and rule, the counts of the ranks beside it."""
    merged = dict(reports[0])
    by_id: dict[str, list[dict[str, Any]]] = {}
    for report in reports:
        for finding in report["findings"]:
            by_id.setdefault(finding["id"], []).append(finding)
    findings = []
    for same in by_id.values():
        counts = [finding["count"] for finding in same]
        first = max(same, key=lambda f: f["count"])
        spread = {
            "ranks": len(same),
            "min": min(counts),
            "median": statistics.median_low(counts),
            "max": max(counts),
        }
        findings.append({**first, "evidence": {**first["evidence"], "across_ranks": spread}})
    findings.sort(key=lambda f: (f["compiled"], -(f["cost"]["share"] or 0.0), -f["count"]))
    merged["findings"] = [{**finding, "rank": number} for number, finding in enumerate(findings, 1)]
    notes = {(n["kind"], n["where"], n["note"]): n for report in reports for n in report["not_seen"]}
    merged["not_seen"] = list(notes.values())
    return merged
