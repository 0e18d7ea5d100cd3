"""Find the source line of a trace event.

With stacks it is in the user's innermost frame; the line within it is known if the source is available (see
`evaluation_order`). A backward op has the line of its forward. Without stacks the place is the call path.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

from leanstep.diagnose.traces.evaluation_order import MODULE, is_source, slots_of
from leanstep.diagnose.traces.timeline import Timeline, is_accumulate, node_name
from leanstep.diagnose.traces.trace_file import FRAME, NOTE, OP
from leanstep.script.lines import LIBRARY, UNKNOWN, USER, Line, Site, judge_code

_FRAME = re.compile(r"^(.*)\((\d+)\): (.*)$")
_BUILT_IN = re.compile(r"^<built-in (?:method|function) (\w+)")
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

    roots: folders to search for the trace's files. A trace is untrusted: only Python files inside these
    folders and the working directory are shown.
    """

    def __init__(self, timeline: Timeline, roots: tuple[Path, ...] = ()) -> None:
        self.timeline = timeline
        self._roots = (*roots, Path.cwd())
        self._readable: dict[str, bool] = {}
        self._judged: dict[int, tuple[int, str, int, str] | None] = {}
        self._lines: dict[int, int | None] = {}
        self._aligned: set[int] = set()
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
        frames = self._carriers(index, stop=node)
        if frames:
            return self._site_of_frames(frames), True
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
        return bool(self._aligned) or bool(self._judged)

    def _carriers(self, index: int, stop: int) -> list[tuple[int, int]]:
        """(frame that can carry a finding, what it called on the way to the event), innermost first.

        A library's frame is paired with the user's frame that called it.
        """
        candidates: list[tuple[int, int]] = []
        below, above = index, int(self.timeline.parent[index])
        while above >= 0 and above != stop:
            kind = self.timeline.kind[above]
            if kind == FRAME:
                verdict = self._judge(above)
                if verdict is not None and (not candidates or verdict[0] & USER):
                    candidates.append((above, below))
                    if verdict[0] & USER:
                        break
            if kind != NOTE:
                below = above
            above = int(self.timeline.parent[above])
        return candidates

    def _site_of_frames(self, frames: list[tuple[int, int]]) -> Site:
        lines = [self._line(frame, child) for frame, child in frames]
        return self._intern(lines[0], lines[1] if len(lines) > 1 else None)

    def _intern(self, line: Line, caller: Line | None) -> Site:
        return self._sites.setdefault((line, caller), Site(line, caller))

    def _line(self, frame: int, child: int) -> Line:
        verdict = self._judge(frame)
        assert verdict is not None
        flag, file, number, function = verdict
        if frame not in self._aligned:
            self._aligned.add(frame)
            self._align(frame, file, number, function)
        line = self._lines.get(child) or number
        return Line(file, line, function, bool(flag & LIBRARY), self._may_read(file))

    def _may_read(self, file: str) -> bool:
        if file not in self._readable:
            path = _resolved(Path(file))
            inside = path is not None and any(path.is_relative_to(root.resolve()) for root in self._roots)
            self._readable[file] = inside and is_source(str(path))
        return self._readable[file]

    def _align(self, frame: int, file: str, number: int, function: str) -> None:
        aligned = slots_of(file, number, function)
        if aligned is None:
            return
        slots, running = aligned
        children = self._inside(frame)
        names = [self._called(child) for child in children]
        for child, line in zip(children, slots.align(names, running), strict=True):
            self._lines[child] = line

    def _inside(self, frame: int) -> list[int]:
        """Return what a frame called, in order, including calls inside the user's marks."""
        children: list[int] = []
        for child in self._children_of(frame):
            children += self._inside(child) if self.timeline.kind[child] == NOTE else [child]
        return children

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
        below, above = index, int(line.parent[index])
        while above >= 0:
            verdict = self._judge(above) if line.kind[above] == FRAME else None
            if verdict is not None and verdict[0] & USER:
                callers.append(self._line(above, below))
            if line.kind[above] != NOTE:
                below = above
            above = int(line.parent[above])
        if callers or self.has_lines:
            return callers[::-1]
        return [Line(line.text(i), 0) for i in reversed(line.ancestors(index)) if line.kind[i] == NOTE]

    def _called(self, index: int) -> str:
        """Return the word in the source that produces this event."""
        text = self.timeline.text(index)
        if self.timeline.kind[index] == FRAME:
            built_in = _BUILT_IN.match(text)
            if built_in:
                return built_in[1]
            if text.startswith("nn.Module: "):
                return MODULE
            frame = _FRAME.match(text)
            return frame[3] if frame else text
        return "::" + text.rpartition("::")[2]

    def _judge(self, index: int) -> tuple[int, str, int, str] | None:
        """(flag, file, number, function) of a frame that is the user's or a library's."""
        name = int(self.timeline.name[index])
        if name not in self._judged:
            self._judged[name] = self.judge_text(self.timeline.text(index))
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
                flag, file, number, function = verdict
                lines.append(Line(file, number, function, bool(flag & LIBRARY), self._may_read(file)))
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
    return here if slots_of(here, number, function) is not None else file


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
