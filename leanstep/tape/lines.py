"""Which source line runs an op: one type for a line, one classification of frames, one search.

A frame belongs to the user, to a library (an installed package), or is skipped (torch, the standard library,
leanstep, wrappers). An op belongs to the nearest frame of the user or a library. For a line in a library, the
caller is the user's line that led there.
"""

from __future__ import annotations

import importlib.util
import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import NamedTuple

# Facts about an op from the frames around it. Flags of skipped frames are or-ed together.
IN_OPTIM, IN_DATA, IN_CHECKPOINT, IN_ENGINE, IN_COMPILED, IN_TRANSFORM, IN_LEANSTEP = (
    1 << i for i in range(7)
)
# Torch's reads of step counters, which its optimizers keep on the host, and of overflows of gradients.
IN_COUNTER, IN_SCALER = 1 << 7, 1 << 8
LIBRARY, USER = 1 << 9, 1 << 10
# A large op without gradients in the forward of a `torch.autograd.Function`: set by the recorder.
IN_FUNCTION = 1 << 11

# Not resolved, because the file name of a frame contains symbolic links. torch itself is not imported here: a
# rehearsal loads its simulated device first.
_TORCH = importlib.util.find_spec("torch")
TORCH_FOLDER = str(Path(_TORCH.origin).parent) + os.sep if _TORCH is not None and _TORCH.origin else "<torch>"
LEANSTEP_FOLDER = str(Path(__file__).parents[1]) + os.sep
# The code that watches a script. Its frames are below every call that it forwards, so they are skipped.
_WATCHING = tuple(
    f"{LEANSTEP_FOLDER}{name}{os.sep}" for name in ("tape", "diagnose", "prove", "rehearse", "fix")
)
_STDLIB = tuple(sysconfig.get_paths()[key] + os.sep for key in ("stdlib", "platstdlib"))
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
# Wrappers that only call another function.
_WRAPPERS = ("/accelerate/utils/operations.py", "/transformers/utils/generic.py", "/typing_extensions.py")
_TRITON = f"{os.sep}triton{os.sep}runtime{os.sep}"
_TRANSFORMS = (
    "_functorch/vmap.py",
    "_functorch/eager_transforms.py",
    "_functorch/apis.py",
    "jit/_script.py",
    "jit/_trace.py",
)


# What pip installs as the command: its frames are below everything that it runs.
_LAUNCHERS = ("leanstep", "leanstep.exe", "leanstep-script.py")
# Files that run as `__main__` by `-m`: the user's, also where they are installed.
_PROGRAMS: set[str] = set()


class Line(NamedTuple):
    """One line of one file. `number` 0: no line; `file` then says what it is.

    `library`: the file belongs to an installed package. `readable`: its text may be shown; not if the
    file name comes from a trace.
    """

    file: str
    number: int
    function: str = "<module>"
    library: bool = False
    readable: bool = True

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.number} {self.function}" if self.number else self.file

    @property
    def place(self) -> str:
        """`path:line`, which terminals can open; the name if there is no line."""
        return f"{short_path(self.file)}:{self.number}" if self.number else self.file

    @property
    def code(self) -> str:
        return self.text(self.number).strip() if self.number else ""

    def text(self, number: int) -> str:
        """Return a line of the file without its newline; empty if it does not exist or may not be read."""
        return linecache.getline(self.file, number).rstrip("\n") if self.readable else ""

    @property
    def passes_on(self) -> bool:
        """Return whether the line is `return inner(*args, **kwargs)`, as in a wrapper."""
        return re.fullmatch(r"(.*:\s*)?return [\w.]+\(\*\w+,\s*\*\*\w+\)", self.code) is not None

    @property
    def statement(self) -> str:
        """The code to show: a line that opens a bracket continues until it closes."""
        text = self.code
        for number in range(self.number + 1, self.number + 8):
            if sum(map(text.count, "([{")) <= sum(map(text.count, ")]}")):
                break
            following = self.text(number).strip()
            text += following if text.endswith(("(", "[", "{")) else " " + following
        return text


UNKNOWN_LINE = Line("<backward, line unknown>", 0, "")


class Site:
    """A line together with the user's line that led there. Everything is counted per site.

    `in_leanstep`: what runs there is leanstep's own code, called from the line.
    """

    __slots__ = ("caller", "code_id", "in_leanstep", "line")

    def __init__(
        self, line: Line, caller: Line | None = None, code_id: int = 0, in_leanstep: bool = False
    ) -> None:
        self.line, self.caller, self.code_id, self.in_leanstep = line, caller, code_id, in_leanstep


UNKNOWN = Site(UNKNOWN_LINE)


# The result of `Stack.locate`: the site (None: only torch and the engine on the stack) and the flags.
Found = tuple[Site | None, int]


class Stack:
    """Reads Python's stack for one recording and caches the classification of code objects.

    own_program: leanstep itself is the program (a case, `-m leanstep train`), so its lines are the user's.
    """

    def __init__(self, own_program: bool = False) -> None:
        self._own_program = own_program
        self._verdicts: dict[int, int] = {}
        # An id is valid only while its object is alive.
        self._codes: list[CodeType] = []
        self._lines: dict[tuple[str, int], Line] = {}
        self._at: dict[tuple[int, int], Line] = {}
        self._sites: dict[tuple[int, int, int], Site] = {}
        self._compiled: dict[int, int] = {}
        self._passing: dict[int, bool] = {}
        self._chains: dict[tuple[int, ...], tuple[int, ...]] = {}

    def new_step(self) -> None:
        """Clear the cache: a function may be compiled between two steps."""
        self._compiled.clear()

    def locate(self, frame: FrameType | None, in_engine: bool) -> Found:
        """Search outwards from `frame` for the first line of the user or a library.

        In the engine the search stops at `_engine_run_backward`: no line before it means a built-in node.
        """
        verdicts = self._verdicts
        flags = 0
        while frame is not None:
            code = frame.f_code
            verdict = verdicts.get(id(code))
            if verdict is None:
                verdict = self._judge(code)
            if verdict >= LIBRARY:
                break
            flags |= verdict
            if in_engine and verdict & IN_ENGINE:
                return None, flags
            frame = frame.f_back
        if frame is None:
            return None, flags
        line = self._line_at(frame)
        caller = self._caller(frame) if line.library else None
        code_id = id(code)
        known = self._compiled.get(code_id)
        if known is None or in_engine:
            known = self._outer_flags(frame, in_engine)
            if not in_engine:
                self._compiled[code_id] = known
        flags |= known
        key = (id(line), id(caller), flags & IN_LEANSTEP)
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = Site(line, caller, code_id, bool(flags & IN_LEANSTEP))
        return site, flags

    def line(self, frame: FrameType | None, in_engine: bool) -> Line | None:
        """Return only the line of `locate`."""
        while frame is not None:
            code = frame.f_code
            verdict = self._verdicts.get(id(code))
            if verdict is None:
                verdict = self._judge(code)
            if verdict >= LIBRARY:
                return self._line_at(frame)
            if in_engine and verdict & IN_ENGINE:
                return None
            frame = frame.f_back
        return None

    def chain(self, frame: FrameType | None) -> tuple[int, ...]:
        """Return ids of the code objects on the stack that are not torch's, innermost first."""
        ids = []
        verdicts = self._verdicts
        while frame is not None:
            code = frame.f_code
            verdict = verdicts.get(id(code))
            if verdict is None:
                verdict = self._judge(code)
            if verdict >= LIBRARY:
                ids.append(id(code))
            frame = frame.f_back
        key = tuple(ids)
        return self._chains.setdefault(key, key)

    def inside(self, frame: FrameType | None, flag: int) -> bool:
        """Return whether any frame on the stack has this flag."""
        verdicts = self._verdicts
        while frame is not None:
            code = frame.f_code
            verdict = verdicts.get(id(code))
            if verdict is None:
                verdict = self._judge(code)
            if verdict & flag:
                return True
            frame = frame.f_back
        return False

    def _caller(self, frame: FrameType) -> Line | None:
        """Return the user's line that led to a library frame, skipping wrappers that forward arguments."""
        outer, passed_on = frame.f_back, None
        while outer is not None:
            code = outer.f_code
            verdict = self._verdicts.get(id(code))
            if verdict is None:
                verdict = self._judge(code)
            if verdict & USER:
                line = self._line_at(outer)
                passes_on = self._passing.get(id(line))
                if passes_on is None:
                    passes_on = self._passing[id(line)] = line.passes_on
                if not passes_on:
                    return line
                passed_on = passed_on or line
            outer = outer.f_back
        return passed_on

    def _outer_flags(self, frame: FrameType, in_engine: bool) -> int:
        """Return flags such as compiled, transformed or recomputed, which come from outer frames."""
        flags = 0
        outer = frame.f_back
        while outer is not None:
            code = outer.f_code
            verdict = self._verdicts.get(id(code))
            if verdict is None:
                verdict = self._judge(code)
            flags |= verdict & (IN_COMPILED | IN_TRANSFORM)
            if in_engine:
                if verdict & IN_ENGINE:
                    in_engine = False
                flags |= verdict & IN_CHECKPOINT
            outer = outer.f_back
        return flags

    def _line_at(self, frame: FrameType) -> Line:
        code = frame.f_code
        at = (id(code), frame.f_lasti)
        line = self._at.get(at)
        if line is None:
            key = (code.co_filename, frame.f_lineno or code.co_firstlineno)
            library = bool(self._verdicts[id(code)] & LIBRARY)
            line = self._at[at] = self._lines.setdefault(key, Line(*key, code.co_name, library))
        return line

    def _judge(self, code: CodeType) -> int:
        self._codes.append(code)
        verdict = judge_code(code.co_filename, code.co_name)
        if self._own_program and verdict & IN_LEANSTEP:
            verdict = USER
        self._verdicts[id(code)] = verdict
        return verdict


def judge_code(file: str, function: str) -> int:
    """Return LIBRARY or USER for a frame that can have findings, otherwise the flags of a skipped frame."""
    if file.startswith(TORCH_FOLDER):
        inner = file[len(TORCH_FOLDER) :].replace(os.sep, "/")
        if inner.startswith("optim/"):
            return IN_OPTIM | IN_COUNTER if function == "_get_value" else IN_OPTIM
        if inner.startswith("utils/data/"):
            return IN_DATA
        if inner == "amp/grad_scaler.py":
            return IN_SCALER
        if inner == "utils/checkpoint.py":
            return IN_CHECKPOINT
        if inner == "autograd/graph.py" and function == "_engine_run_backward":
            return IN_ENGINE
        if inner == "_dynamo/eval_frame.py" and function == "compile_wrapper":
            return IN_COMPILED
        return IN_TRANSFORM if inner in _TRANSFORMS else 0
    if file.startswith(LEANSTEP_FOLDER):
        return 0 if file.startswith(_WATCHING) else IN_LEANSTEP
    if file in _PROGRAMS:
        return USER
    if file.endswith(_WRAPPERS) or _TRITON in file or Path(file).name in _LAUNCHERS:
        return 0
    if any(part in file for part in _INSTALLED):
        return LIBRARY
    if file.startswith("<") or file.startswith(_STDLIB):
        return 0
    return USER


def is_program(file: str) -> None:
    """From now on the lines of this file are the user's, although it belongs to an installed package."""
    _PROGRAMS.add(file)


def nearest_line(frames: Iterable[tuple[str, int, str]], kinds: int = USER | LIBRARY) -> Line | None:
    """Return the last (file, number, function) whose frame is of one of these kinds."""
    nearest = None
    for file, number, function in frames:
        verdict = judge_code(file, function)
        if verdict & kinds:
            nearest = Line(file, number, function, bool(verdict & LIBRARY))
    return nearest


def traceback_frames(trace: TracebackType | None) -> list[tuple[str, int, str]]:
    """Return (file, number, function) of each frame, innermost last."""
    return [(f.f_code.co_filename, number, f.f_code.co_name) for f, number in traceback.walk_tb(trace)]


def reads_host_data(frame: FrameType | None) -> bool:
    """Return whether the code keeps its values on the host: step counters, data samplers."""
    while frame is not None:
        verdict = judge_code(frame.f_code.co_filename, frame.f_code.co_name)
        if verdict >= LIBRARY:
            return False
        if verdict & (IN_COUNTER | IN_DATA):
            return True
        frame = frame.f_back
    return False


def short_path(file: str) -> str:
    """Shorten a path: from the package name on if installed, else relative to the working directory."""
    for part in _INSTALLED:
        if part in file:
            return file.split(part, 1)[1]
    try:
        return str(Path(file).resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file
