"""The forward line of each autograd node.

This needs private names of torch, looked up once here. Without them forward events are still right, and the
lines of backward ops are unknown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from leanstep.tape.lines import UNKNOWN, Site

current_node: Callable[[], Any] | None = getattr(torch._C, "_current_autograd_node", None)
sequence_number: Callable[[], int] | None = getattr(torch.autograd, "_get_sequence_nr", None)
if not hasattr(torch._C, "_FunctionBase") or not hasattr(torch.autograd.graph, "_engine_run_backward"):
    current_node = None
ACCUMULATE_GRAD = 2**64 - 1
MAX_MAP_ENTRIES = 200_000
# A backward with fewer nodes cannot overflow the stack when its graph is freed: see `NodeLines`.
DEEP_GRAPH = 4_000


def missing_private_names() -> list[str]:
    """Return what this torch lacks, as text for the header; empty if nothing is missing."""
    missing = []
    if current_node is None:
        missing.append("torch._C._current_autograd_node")
    if sequence_number is None:
        missing.append("torch.autograd._get_sequence_nr")
    return missing


class NodeLines:
    """Sites by the sequence number of the node that was created there."""

    def __init__(self) -> None:
        # Two generations: a graph may outlive the step that built it.
        self._sites: dict[int, Site] = {}
        self._older_sites: dict[int, Site] = {}
        # Accessing a node creates a Python object that lives as long as the node, and torch frees a chain of
        # such nodes recursively: tens of thousands overflow the stack. They are held here until the step
        # after the next, so that the graph is freed before its nodes, which are then freed one by one: a
        # deque frees its first item first, and the backward starts at the loss.
        self._nodes: deque[Any] = deque()
        self._deep_graphs: deque[deque[Any]] = deque()
        self._older_graphs: deque[deque[Any]] = deque()

    def add(self, number: int, site: Site) -> bool:
        """Return False if the step has more nodes than the map may hold."""
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

    def hold(self, node: Any) -> None:
        if not self._nodes or self._nodes[-1] is not node:
            self._nodes.append(node)

    def site_of(self, number: int) -> Site:
        """Return the line that created a node.

        In-place views create nodes without a dispatch: the nearest earlier node is on their line.
        """
        site = self._sites.get(number)
        if site is not None:
            return site
        for candidate in range(number, number - 4, -1):
            site = self._sites.get(candidate) or self._older_sites.get(candidate)
            if site is not None:
                return site
        return UNKNOWN
