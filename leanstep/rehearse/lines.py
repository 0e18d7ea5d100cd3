"""Where a call comes from: the line of the program, forward or backward, and the compiled region."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from leanstep.rehearse.events import Line

# Frames that belong to nobody's program: wrappers that call the function they were given.
WRAPPERS = ("/accelerate/utils/operations.py", "/transformers/utils/generic.py", "/typing_extensions.py")
_OWN = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_sequence_number: Any = torch._C._autograd._get_sequence_nr  # pyright: ignore[reportAttributeAccessIssue]
_STDLIB = sysconfig.get_path("stdlib")


class Place(NamedTuple):
    """Where a call comes from."""

    line: Line | None
    phase: str
    region: int


class Lines:
    """The line of a call: the nearest frame outside torch, in backward that of the forward call."""

    def __init__(self) -> None:
        self.main = threading.get_ident()
        self.started: set[int] = set()  # threads of the program's own
        self.phase = "forward"
        self.region = 0
        self.called: Line | None = None  # where backward was called: sums and hooks have no line of their own
        self.fixed: tuple[Line | None, int] | None = None
        self.nested: Counter[int] = Counter()  # backward passes under way inside a backward thread
        self._foreign: dict[str, bool] = {}
        # Sequence numbers of autograd nodes are counted by each thread on its own.
        self._made: dict[int, dict[int, tuple[Line | None, int]]] = {}
        self._last: dict[int, int] = {}

    def is_foreign(self, name: str) -> bool:
        known = self._foreign.get(name)
        if known is None:
            outside = name.startswith(("<", _OWN + "/", _TORCH + "/")) or name.endswith(WRAPPERS)
            in_stdlib = name.startswith(_STDLIB + "/") and "-packages/" not in name
            known = self._foreign[name] = outside or in_stdlib or "/triton/runtime/" in name
        return known

    def here(self) -> Line | None:
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if not self.is_foreign(code.co_filename):
                return Line(code.co_filename, frame.f_lineno, code.co_name)
            frame = frame.f_back
        return None

    def place(self) -> Place:
        thread = threading.get_ident()
        if self.fixed is not None:  # a captured graph knows its lines
            return Place(self.fixed[0], self.phase if thread == self.main else "backward", self.fixed[1])
        line = self.here()
        node = torch._C._current_autograd_node()
        made = self._made.setdefault(thread, {})
        if torch.is_grad_enabled():
            number = _sequence_number()
            if number != self._last.get(thread):  # a node was made for this call
                made[number - 1] = (line, self.region)
                self._last[thread] = number
        if node is None and (thread == self.main or thread in self.started):
            return Place(line, self.phase, self.region)
        if node is not None:
            table = made if self.nested[thread] else self._made.get(self.main, made)
            forward = table.get(node._sequence_nr())
            # A frame of the user's in a backward thread is a recomputation or a backward function of his own.
            if forward is not None:
                line = forward[0] if line is None or thread == self.main else line
                return Place(line, "backward", forward[1])
        return Place(line or self.called, "backward", self.region)
