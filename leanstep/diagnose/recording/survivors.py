"""Objects that outlive their step: buffers by line, and graphs whose backward has run.

A steady training frees in every step what the previous step allocated. Memory that a line allocates in each
step and never frees is a leak.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from leanstep.diagnose.step_records import StepRecord, tally
from leanstep.tape.lines import Site

# Smaller buffers are not tracked: a logged loss is not a leak.
MIN_BYTES = 1024
_KEY = "leanstep"


class _Mark:
    """Stored in the metadata of a graph's last node and freed with the node."""

    __slots__ = ("__weakref__",)


class Survivors:
    """Buffers and graphs of the recorded steps that are still alive. References are weak: nothing is held.

    on: whether enough steps will be recorded for a comparison; otherwise nothing is tracked.
    """

    def __init__(self) -> None:
        self.on = False
        self._buffers: list[tuple[Site, StorageWeakRef, int]] = []
        self._graphs: list[tuple[Site, weakref.ref[_Mark]]] = []
        # Previous steps, each with its objects that are still alive.
        self._steps: list[tuple[StepRecord, list[Any], list[Any]]] = []

    def add(self, outs: Sequence[Tensor], site: Site) -> None:
        """Track the new buffers that an op wrote."""
        for out in outs:
            # Sparse tensors and some subclasses have no storage.
            if out.layout is torch.strided and out.nbytes >= MIN_BYTES:
                with contextlib.suppress(RuntimeError):
                    self._buffers.append((site, StorageWeakRef(out.untyped_storage()), out.nbytes))

    def backward_begins(self, losses: Any, site: Site) -> None:
        """Mark the last node of each graph that a backward is about to traverse."""
        for loss in losses if isinstance(losses, (list, tuple)) else (losses,):
            node = getattr(loss, "grad_fn", None)
            if node is not None:
                mark = node.metadata[_KEY] = _Mark()
                self._graphs.append((site, weakref.ref(mark)))

    def end_step(self, record: StepRecord | None) -> None:
        """End a step and drop freed objects. `record`: the step's, None if the step is dropped."""
        if record is not None:
            self._steps.append((record, self._buffers, self._graphs))
        self._buffers, self._graphs = [], []
        for _, buffers, graphs in self._steps:
            buffers[:] = [entry for entry in buffers if not entry[1].expired()]
            graphs[:] = [entry for entry in graphs if entry[1]() is not None]

    def settle(self) -> None:
        """Store in each record what is still alive of its step after the last one."""
        if self._steps:
            # Reference cycles live until the garbage collector runs.
            gc.collect()
        for record, buffers, graphs in self._steps:
            storages = set()
            for site, storage, num_bytes in buffers:
                if not storage.expired() and storage.cdata not in storages:
                    storages.add(storage.cdata)
                    tally(record.outlived, site, num_bytes)
            for site, mark in graphs:
                if mark() is not None:
                    tally(record.graphs_alive, site)
        self._steps = []
