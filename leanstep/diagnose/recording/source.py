"""Which source line an op belongs to: its own frame, or the forward line behind a backward op.

Three private names of torch carry the way back from a backward op to its forward line. They are looked up
once, here; without them forward findings still work and backward ops are reported as "line unknown".
"""

from __future__ import annotations

import linecache
import os
import sysconfig
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

# What a frame tells about an op that runs inside it. Flags of skipped frames are or-ed together.
IN_OPTIM, IN_DATA, IN_CHECKPOINT, IN_ENGINE, IN_COMPILED, IN_TRANSFORM, IN_LEANSTEP = (
    1 << i for i in range(7)
)
LIBRARY, USER = 1 << 8, 1 << 9

current_node: Callable[[], Any] | None = getattr(torch._C, "_current_autograd_node", None)
sequence_number: Callable[[], int] | None = getattr(torch.autograd, "_get_sequence_nr", None)
if not hasattr(torch._C, "_FunctionBase") or not hasattr(torch.autograd.graph, "_engine_run_backward"):
    current_node = None
ACCUMULATE_GRAD = 2**64 - 1
MAX_MAP_ENTRIES = 200_000
# A backward with fewer nodes cannot overflow the stack when its graph is freed: see `AutogradLines`.
DEEP_GRAPH = 4_000

_TORCH = os.path.join(os.path.dirname(str(torch.__file__)), "")  # noqa: PTH118, PTH120  (a prefix for str.startswith)
# As they were imported, not resolved: a frame's file name keeps the links on the way to it.
_LEANSTEP = str(Path(__file__).parents[2]) + os.sep
_OWN = str(Path(__file__).parents[1]) + os.sep
_STDLIB = tuple(sysconfig.get_paths()[key] + os.sep for key in ("stdlib", "platstdlib"))
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_TRANSFORMS = (
    "_functorch/vmap.py",
    "_functorch/eager_transforms.py",
    "_functorch/apis.py",
    "jit/_script.py",
    "jit/_trace.py",
)


def missing_private_names() -> list[str]:
    """What torch no longer offers, in words for the header; empty when all is there."""
    missing = []
    if current_node is None:
        missing.append("torch._C._current_autograd_node")
    if sequence_number is None:
        missing.append("torch.autograd._get_sequence_nr")
    return missing


@dataclass(frozen=True)
class Line:
    """One line of one file. `library`: the file belongs to an installed package."""

    file: str
    number: int
    function: str = "<module>"
    library: bool = False

    @property
    def place(self) -> str:
        """`path:line`, which terminals open; what has no line (a call path, an unknown one) by its name."""
        return f"{short_path(self.file)}:{self.number}" if self.number else self.file

    @property
    def code(self) -> str:
        return linecache.getline(self.file, self.number).strip() if self.number else ""

    @property
    def statement(self) -> str:
        """The code for the eye: a line that opens a bracket is read on until it closes."""
        text = self.code
        for number in range(self.number + 1, self.number + 8):
            if sum(map(text.count, "([{")) <= sum(map(text.count, ")]}")):
                break
            following = linecache.getline(self.file, number).strip()
            text += following if text.endswith(("(", "[", "{")) else " " + following
        return text


UNKNOWN_LINE = Line("<backward, line unknown>", 0, "")


class Site:
    """A line together with the user's line that led there; the unit that everything is counted by.

    `in_leanstep`: what runs there is leanstep's own code, called from the line.
    """

    __slots__ = ("caller", "code_id", "in_leanstep", "line")

    def __init__(
        self, line: Line, caller: Line | None = None, code_id: int = 0, in_leanstep: bool = False
    ) -> None:
        self.line, self.caller, self.code_id, self.in_leanstep = line, caller, code_id, in_leanstep

    def __repr__(self) -> str:
        return f"Site({self.line.file}:{self.line.number})"


UNKNOWN = Site(UNKNOWN_LINE)


# The answer of `Stack.locate`: the site (None: only torch and the engine on the stack) and the flags.
Found = tuple[Site | None, int]


class Stack:
    """Reads Python's stack for one recording; remembers what each code object is."""

    def __init__(self) -> None:
        self._verdicts: dict[int, int] = {}
        # An id is only good while its object lives.
        self._codes: list[CodeType] = []
        self._lines: dict[tuple[str, int], Line] = {}
        self._at: dict[tuple[int, int], Line] = {}
        self._sites: dict[tuple[int, int, int], Site] = {}
        self._compiled: dict[int, int] = {}
        self._chains: dict[tuple[int, ...], tuple[int, ...]] = {}

    def new_step(self) -> None:
        """A function may be compiled from one step to the next: look again."""
        self._compiled.clear()

    def locate(self, frame: FrameType | None, in_engine: bool) -> Found:
        """Walk outwards from `frame` to the first line that is the user's or a library's.

        In the engine the walk stops at `_engine_run_backward`: no line before it means a built-in node.
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
        at = (id(code), frame.f_lasti)
        line = self._at.get(at)
        if line is None:
            line = self._line(frame)
            self._at[at] = line
        caller = None
        if line.library:
            caller = self._caller(frame)
        code_id = at[0]
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

    def chain(self, frame: FrameType | None) -> tuple[int, ...]:
        """The functions on the stack that are not torch's, innermost first, as ids of their code."""
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
        """Whether a frame with this flag is anywhere on the stack."""
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
        outer = frame.f_back
        while outer is not None:
            code = outer.f_code
            verdict = self._verdicts.get(id(code))
            if verdict is None:
                verdict = self._judge(code)
            if verdict & USER:
                at = (id(code), outer.f_lasti)
                line = self._at.get(at)
                if line is None:
                    line = self._at[at] = self._line(outer)
                return line
            outer = outer.f_back
        return None

    def _outer_flags(self, frame: FrameType, in_engine: bool) -> int:
        """Compiled, transformed or recomputed: said by frames further out than the line itself."""
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

    def _line(self, frame: FrameType) -> Line:
        code = frame.f_code
        key = (code.co_filename, frame.f_lineno or code.co_firstlineno)
        line = self._lines.get(key)
        if line is None:
            library = bool(self._verdicts[id(code)] & LIBRARY)
            line = self._lines[key] = Line(key[0], key[1], code.co_name, library)
        return line

    def _judge(self, code: CodeType) -> int:
        self._codes.append(code)
        verdict = self._verdicts[id(code)] = judge_code(code.co_filename, code.co_name)
        return verdict


class AutogradLines:
    """The forward line behind each autograd node: sites by the sequence number of the node they made."""

    def __init__(self) -> None:
        # Two generations: a graph may outlive the step that built it.
        self._sites: dict[int, Site] = {}
        self._older_sites: dict[int, Site] = {}
        # Asking for a node gives it a Python object for life, and torch frees a chain of nodes that have one
        # recursively: tens of thousands overflow the stack. Held here until the step after the next, the
        # graph of a step is gone before its nodes are, one by one: a deque frees its first item first, and
        # the backward came from the loss.
        self._nodes: deque[Any] = deque()
        self._deep_graphs: deque[deque[Any]] = deque()
        self._older_graphs: deque[deque[Any]] = deque()

    def add(self, number: int, site: Site) -> bool:
        """False when the step has more nodes than are remembered."""
        if len(self._sites) >= MAX_MAP_ENTRIES:
            return False
        self._sites.setdefault(number, site)
        return True

    def new_step(self) -> None:
        self._older_sites, self._sites = self._sites, {}
        self._older_graphs, self._deep_graphs = self._deep_graphs, deque()

    def end_backward(self) -> None:
        if len(self._nodes) > DEEP_GRAPH:
            self._deep_graphs.append(self._nodes)
        self._nodes = deque()

    def site_of(self, node: Any, parameters: Mapping[int, Any]) -> Site:
        """The forward line of a built-in node; of a leaf's gradient, the line that first used the leaf."""
        if node is None:
            return UNKNOWN
        if not self._nodes or self._nodes[-1] is not node:
            self._nodes.append(node)
        number = node._sequence_nr()
        if number == ACCUMULATE_GRAD:
            variable: Any = getattr(node, "variable", None)
            if isinstance(variable, torch.Tensor):
                parameter = parameters.get(variable.untyped_storage()._cdata)
                if parameter is not None:
                    return parameter.first_use
            return UNKNOWN
        site = self._sites.get(number)
        if site is not None:
            return site
        # Views made in place create nodes without a dispatch: the nearest earlier node is on their line.
        for candidate in range(number, number - 4, -1):
            site = self._sites.get(candidate) or self._older_sites.get(candidate)
            if site is not None:
                return site
        return UNKNOWN


def judge_code(file: str, function: str) -> int:
    """LIBRARY or USER for a frame that can carry a finding, otherwise the flags of a frame to skip."""
    if file.startswith(_TORCH):
        inner = file[len(_TORCH) :].replace(os.sep, "/")
        if inner.startswith("optim/"):
            return IN_OPTIM
        if inner.startswith("utils/data/"):
            return IN_DATA
        if inner == "utils/checkpoint.py":
            return IN_CHECKPOINT
        if inner == "autograd/graph.py" and function == "_engine_run_backward":
            return IN_ENGINE
        if inner == "_dynamo/eval_frame.py" and function == "compile_wrapper":
            return IN_COMPILED
        return IN_TRANSFORM if inner in _TRANSFORMS else 0
    if file.startswith(_LEANSTEP):
        # The recorder's own frames stand below every call it passes on; they say nothing.
        return 0 if file.startswith(_OWN) else IN_LEANSTEP
    if any(part in file for part in _INSTALLED):
        return LIBRARY
    if file.startswith("<") or file.startswith(_STDLIB):
        return 0
    return USER


def short_path(file: str) -> str:
    """Relative to the working directory where that is shorter to read, else from the package's name on."""
    for part in _INSTALLED:
        if part in file:
            return file.split(part, 1)[1]
    try:
        return str(Path(file).resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file
