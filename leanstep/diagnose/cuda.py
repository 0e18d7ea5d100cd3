"""On a GPU: torch's own sync warnings, counted beside the recorder's reads, and CUDA graphs that hide
their kernels.

Without a GPU all of it does nothing. The sync debug setting is process-wide, so it is restored on the
way out.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from leanstep.diagnose import source


@contextmanager
def sync_debug(recorder: Any) -> Iterator[None]:
    """Let torch warn at every synchronising call while recording,
    and compare the number with the counted reads.
    """
    if not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    show = warnings.showwarning
    seen = 0

    def count(
        message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        nonlocal seen
        if "synchronizing CUDA operation" not in str(message):
            show(message, category, filename, lineno, file, line)
        elif recorder.active:
            seen += 1

    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=".*synchronizing CUDA operation.*")
        warnings.showwarning = count
        try:
            yield
        finally:
            warnings.showwarning = show
            torch.cuda.set_sync_debug_mode(before)
            text = disagreement(recorder.total_reads, seen)
            if text is not None:
                recorder.note("dropped", "", text)


def disagreement(counted: int, seen: int) -> str | None:
    """What to say when torch's sync warnings and the counted reads differ by more than a tenth;
    None if they agree.
    """
    if abs(counted - seen) <= 0.1 * max(counted, seen):
        return None
    return f"torch warned of {seen} synchronising calls, {counted} host reads were counted"


@contextmanager
def watch_graphs(on_replay: Callable[[str], None]) -> Iterator[None]:
    """Notice `torch.cuda.CUDAGraph.replay` while watching."""
    graph = getattr(torch.cuda, "CUDAGraph", None)
    original = getattr(graph, "replay", None)
    if graph is None or original is None:
        yield
        return

    def replay(self: Any, *args: Any, **kwargs: Any) -> Any:
        site, _ = source.Stack().locate(sys._getframe(1), False)
        line = site.line if site is not None else source.UNKNOWN_LINE
        on_replay(f"{source.short_path(line.file)}:{line.number}")
        return original(self, *args, **kwargs)

    graph.replay = replay
    try:
        yield
    finally:
        graph.replay = original
