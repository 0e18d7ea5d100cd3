"""Find the source line of a trace event.

With stacks it is the user's innermost frame. The profiler records functions: the line is the function's
first, and a module has none. A backward op has the place of its forward. Without stacks the place is the
call path.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

from leanstep.diagnose.traces.timeline import Timeline, is_accumulate, node_name
from leanstep.diagnose.traces.trace_file import FRAME, NOTE, OP
from leanstep.tape.lines import LIBRARY, UNKNOWN, USER, Line, Site, judge_code, short_path

_FRAME = re.compile(r"^(.*)\((\d+)\): (.*)$")
# Installed packages by name, for traces of a machine whose packages are not here.
_KNOWN = (
    "transformers",
    "trl",
    "accelerate",
    "peft",
    "deepspeed",
    "lightning",
    "pytorch_lightning",
    "megatron",
)


class Places:
    """Sites of a trace's events.

    folder: where the trace is. A trace is untrusted: only Python files inside this folder and the working
    directory are shown.
    """

    def __init__(self, timeline: Timeline, folder: Path) -> None:
        self.timeline = timeline
        self._roots = (folder, Path.cwd())
        self._readable: dict[str, bool] = {}
        self._judged: dict[int, tuple[int, str, int, str] | None] = {}
        self._sites: dict[tuple[Line, Line | None], Site] = {}
        self._children: tuple[np.ndarray, np.ndarray] | None = None
        self._forward = self._forward_ops()
        self._paths: dict[tuple[str, ...], Line] = {}

    def _forward_ops(self) -> dict[int, int]:
        """Sequence number -> the forward op that created the node: the last one to start with that number."""
        line = self.timeline
        ops = np.flatnonzero((line.kind == OP) & (line.link >= 0) & (line.node < 0))
        ops = ops[np.argsort(line.start[ops], kind="stable")]
        threads = Counter(line.trace.forward_thread.values())
        self._main = threads.most_common(1)[0][0] if threads else -1
        return dict(zip(line.link[ops].tolist(), ops.tolist(), strict=True))

    def forward_op(self, node: int) -> int:
        """Return the forward op of an autograd node, -1 if unknown."""
        line = self.timeline
        if line.trace.forward_thread.get(node, self._main) != self._main:
            return -1
        return self._forward.get(int(line.link[node]), -1)

    def site(self, index: int) -> tuple[Site, bool]:
        """Return the site of an event, and whether its line called it directly (not through the backward)."""
        line = self.timeline
        node = int(line.node[index])
        lines = self._carriers(index, stop=node)
        if lines:
            return self._intern(lines[0], lines[1] if len(lines) > 1 else None), True
        if node >= 0:
            forward = self.forward_op(node)
            if forward >= 0:
                return self.site(forward)[0], False
            if self.has_lines:
                return UNKNOWN, False
        if index in line.trace.stack_of:
            stack_site = self._site_of_stack(line.trace.stacks.texts[line.trace.stack_of[index]])
            if stack_site is not None:
                return stack_site, True
        return self._intern(self._path(index), None), node < 0

    @property
    def has_lines(self) -> bool:
        return bool(self._judged)

    def _carriers(self, index: int, stop: int) -> list[Line]:
        """Lines of the frames that can carry a finding, innermost first: the user's, or a library's and the
        user's that called it.
        """
        candidates: list[Line] = []
        above = int(self.timeline.parent[index])
        while above >= 0 and above != stop:
            verdict = self._judge(above) if self.timeline.kind[above] == FRAME else None
            if verdict is not None and (not candidates or verdict[0] & USER):
                candidates.append(self._line(verdict))
                if verdict[0] & USER:
                    break
            above = int(self.timeline.parent[above])
        return candidates

    def _intern(self, line: Line, caller: Line | None) -> Site:
        return self._sites.setdefault((line, caller), Site(line, caller))

    def _line(self, verdict: tuple[int, str, int, str]) -> Line:
        flag, file, number, function = verdict
        if not number:
            return Line(short_path(file), 0, function, bool(flag & LIBRARY), readable=False)
        return Line(file, number, function, bool(flag & LIBRARY), self._may_read(file))

    def _may_read(self, file: str) -> bool:
        if file not in self._readable:
            path = _resolved(Path(file))
            inside = path is not None and any(path.is_relative_to(root.resolve()) for root in self._roots)
            self._readable[file] = inside and _is_source(str(path))
        return self._readable[file]

    def below(self, index: int) -> Iterator[int]:
        """Return all events inside an event."""
        for child in self._children_of(index):
            yield child
            yield from self.below(child)

    def _children_of(self, index: int) -> list[int]:
        line = self.timeline
        if self._children is None:
            by_parent = line.order[np.argsort(line.parent[line.order], kind="stable")]
            self._children = by_parent, line.parent[by_parent]
        events, parents = self._children
        first, last = np.searchsorted(parents, [index, index + 1])
        return events[first:last].tolist()

    def path_of(self, index: int) -> list[Line]:
        """Return the user's lines that lead to an event, outermost first, or its marks and ops."""
        line = self.timeline
        callers: list[Line] = []
        above = int(line.parent[index])
        while above >= 0:
            verdict = self._judge(above) if line.kind[above] == FRAME else None
            if verdict is not None and verdict[0] & USER:
                callers.append(self._line(verdict))
            above = int(line.parent[above])
        if callers or self.has_lines:
            return callers[::-1]
        return [Line(line.text(i), 0) for i in reversed(line.ancestors(index)) if line.kind[i] == NOTE]

    def _judge(self, index: int) -> tuple[int, str, int, str] | None:
        """(flag, file, number, function) of a frame that is the user's or a library's."""
        name = int(self.timeline.name[index])
        if name not in self._judged:
            verdict = self.judge_text(self.timeline.text(index))
            if verdict is not None:
                # A frame that was running when the profiler started has the line of that moment.
                flag, file, number, function = verdict
                first = _first_line(file, number, function) if self._may_read(file) else None
                if function == "<module>":
                    first = 0
                verdict = flag, file, number if first is None else first, function
            self._judged[name] = verdict
        return self._judged[name]

    def judge_text(self, text: str) -> tuple[int, str, int, str] | None:
        frame = _FRAME.match(text)
        if frame is None or frame[1].startswith("<") or not frame[1]:
            return None
        file, number, function = frame[1], int(frame[2]), frame[3]
        parts = file.replace("\\", "/").split("/")
        if "torch" in parts[:1] or "site-packages/torch/" in file or parts[0] == "leanstep":
            return None
        if Path(file).is_absolute():
            flag = judge_code(file, function)
            own = flag & (USER | LIBRARY) and not re.search(r"/lib/python3[^/]*/(?!site-|dist-)", file)
            return (flag, file, number, function) if own else None
        # The profiler strips prefixes on Python's path.
        for root in self._roots:
            path = _resolved(root / file)
            if path is not None and path.is_file():
                return USER, _same_source(str(path), file, number, function), number, function
        package = parts[0].removesuffix(".py")
        if package in sys.stdlib_module_names:
            return None
        installed = _installed(package) if len(parts) > 1 else None
        if installed is not None:
            here = str(Path(installed) / "/".join(parts[1:]))
            # Another version's file must not show this one's code: linecache finds relative paths by itself.
            elsewhere = f"/site-packages/{file}"
            return LIBRARY, _same_source(here, elsewhere, number, function), number, function
        return (LIBRARY if package in _KNOWN else USER), file, number, function

    def _site_of_stack(self, stack: str) -> Site | None:
        """Parse the `Call stack` of older traces, innermost first; it contains the running lines."""
        lines: list[Line] = []
        for text in stack.split(";"):
            verdict = self.judge_text(text.strip())
            if verdict is not None and (not lines or verdict[0] & USER):
                lines.append(self._line(verdict))
                if verdict[0] & USER:
                    break
        return self._intern(lines[0], lines[1] if len(lines) > 1 else None) if lines else None

    def _path(self, index: int) -> Line:
        """Return the op's call path: the user's mark or autograd node, the outermost op, the op itself."""
        line = self.timeline
        chain = [i for i in (index, *line.ancestors(index)) if line.kind[i] in (OP, NOTE)]
        names = [node_name(line.text(i)) for i in chain if not is_accumulate(line.text(i))]
        notes = [line.text(i) for i in chain if line.kind[i] == NOTE]
        ops = [name for name in names if name not in notes]
        parts = [*notes[-1:], *(ops[-1:] if ops else []), *(ops[:1] if len(set(ops)) > 1 else [])]
        key = tuple(dict.fromkeys(parts)) or (line.text(index),)
        return self._paths.setdefault(key, Line(" > ".join(key), 0, key[-1]))


# PATH_MAX of Linux; others allow less.
_LONGEST_PATH = 4096


def _resolved(path: Path) -> Path | None:
    """Return the file that a trace names, or None if the name is not a possible file name."""
    if len(str(path)) > _LONGEST_PATH:
        return None
    try:
        path = path.resolve()
        path.exists()
    except (OSError, ValueError):
        return None
    return path


def _same_source(here: str, file: str, number: int, function: str) -> str:
    """Return the local file if it has the function where the trace says, else the trace's own name."""
    return here if _first_line(here, number, function) is not None else file


def _first_line(file: str, number: int, function: str) -> int | None:
    """Return where the function around a line is defined; None if the file has no such function there."""
    spans = [first for name, first, last in _functions(file) if name == function and first <= number <= last]
    return max(spans, default=None)


# Bytes of a source file.
_MAX_SOURCE = 4_000_000


def _is_source(file: str) -> bool:
    """Return whether a file named in a trace is a Python file of plausible size."""
    try:
        return file.endswith(".py") and Path(file).is_file() and Path(file).stat().st_size <= _MAX_SOURCE
    except (OSError, ValueError):
        return False


_COMPREHENSIONS = {
    ast.ListComp: "<listcomp>", ast.SetComp: "<setcomp>", ast.DictComp: "<dictcomp>",
    ast.GeneratorExp: "<genexpr>",
}  # fmt: skip


@cache
def _functions(file: str) -> tuple[tuple[str, int, int], ...]:
    """(name, first line with decorators, last line) of the module and of each function in a file."""
    if not _is_source(file):
        return ()
    try:
        text = Path(file).read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ()
    functions = [("<module>", 0, text.count("\n") + 1)]
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            functions.append((node.name, first, node.end_lineno or first))
        elif isinstance(node, ast.expr) and type(node) in _COMPREHENSIONS:
            functions.append((_COMPREHENSIONS[type(node)], node.lineno, node.end_lineno or node.lineno))
    return tuple(functions)


@cache
def _installed(package: str) -> str | None:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError, AttributeError):
        return None
    origin = spec.origin if spec else None
    return (
        str(Path(origin).parent)
        if origin and ("site-packages" in origin or "dist-packages" in origin)
        else None
    )
