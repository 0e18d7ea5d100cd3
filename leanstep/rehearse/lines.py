"""Where a call comes from: the line of the program, forward or backward, and the compiled region."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from typing import Any, NamedTuple

import torch

from leanstep.tape.lines import Line, Stack

_sequence_number: Any = torch._C._autograd._get_sequence_nr  # pyright: ignore[reportAttributeAccessIssue]


class Place(NamedTuple):
    """Where a call comes from."""

    line: Line | None
    phase: str
    region: int


# cuBLAS allocates a workspace at the first product of each thread. Backward has its own thread.
WORKSPACE = Place(Line("cuBLAS workspace", 0, ""), "forward", 0)


class Lines:
    """Finds the line of a call: the nearest frame of the user or a library; in backward, the forward call's.

    own_program: leanstep itself is the program.
    """

    def __init__(self, own_program: bool) -> None:
        self.main = threading.get_ident()
        self.started: set[int] = set()  # threads that the program started
        self.phase = "forward"
        self.region = 0
        self.called: Line | None = None  # where backward was called: for sums and hooks, which have no line
        self.fixed: tuple[Line | None, int] | None = None
        self.nested: Counter[int] = Counter()  # nested backward passes per backward thread
        self._stack = Stack(own_program)
        # Each thread counts the sequence numbers of autograd nodes separately.
        self._node_lines: dict[int, dict[int, tuple[Line | None, int]]] = {}
        self._last: dict[int, int] = {}

    def here(self, in_engine: bool = False) -> Line | None:
        return self._stack.line(sys._getframe(1), in_engine)

    def place(self) -> Place:
        thread = threading.get_ident()
        if self.fixed is not None:  # a captured graph stores its lines
            return Place(self.fixed[0], self.phase if thread == self.main else "backward", self.fixed[1])
        node = torch._C._current_autograd_node()
        line = self.here(in_engine=node is not None)
        node_lines = self._node_lines.setdefault(thread, {})
        if torch.is_grad_enabled():
            number = _sequence_number()
            if number != self._last.get(thread):  # this call created a node
                node_lines[number - 1] = (line, self.region)
                self._last[thread] = number
        if node is None and (thread == self.main or thread in self.started):
            return Place(line, self.phase, self.region)
        if node is not None:
            table = node_lines if self.nested[thread] else self._node_lines.get(self.main, node_lines)
            forward = table.get(node._sequence_nr())
            if forward is not None:
                # A user frame inside the engine is a recomputation or a custom backward function.
                return Place(line or forward[0], "backward", forward[1])
        return Place(line or self.called, "backward", self.region)
