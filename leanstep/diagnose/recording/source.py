"""Map backward ops to their forward lines.

This needs three private names of torch, looked up once here. Without them forward findings still
work and backward ops are reported as "line unknown".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from leanstep.tape.lines import UNKNOWN, Site

current_node: Callable[[], Any] | None = getattr(torch._C, "_current_autograd_node", None)
sequence_number: Callable[[], int] | None = getattr(torch.autograd, "_get_sequence_nr", None)
if not hasattr(torch._C, "_FunctionBase") or not hasattr(torch.autograd.graph, "_engine_run_backward"):
    current_node = None
ACCUMULATE_GRAD = 2**64 - 1
MAX_MAP_ENTRIES = 200_000
# A backward with fewer nodes cannot overflow the stack when its graph is freed: see `AutogradLines`.
DEEP_GRAPH = 4_000


def missing_private_names() -> list[str]:
    """Return what this torch lacks, as text for the header; empty if nothing is missing."""
    missing = []
    if current_node is None:
        missing.append("torch._C._current_autograd_node")
    if sequence_number is None:
        missing.append("torch.autograd._get_sequence_nr")
    return missing


class AutogradLines:
    """The forward line of each autograd node: sites by the sequence number of the node they created."""

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

    def site_of(self, node: Any, parameters: Mapping[int, Any]) -> Site:
        """Return the forward line of a built-in node; for a leaf's gradient, the leaf's first use."""
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
        # In-place views create nodes without a dispatch: the nearest earlier node is on their line.
        for candidate in range(number, number - 4, -1):
            site = self._sites.get(candidate) or self._older_sites.get(candidate)
            if site is not None:
                return site
        return UNKNOWN
