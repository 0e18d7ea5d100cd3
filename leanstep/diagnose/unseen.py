"""What a recording cannot see: other threads, ranks, workers, CUDA graphs, kernels launched directly.

Optimizers, loaders and compiled kernels are found through the garbage collector. On a GPU, torch's own sync
warnings are compared with the recorded reads; otherwise this does nothing.
"""

from __future__ import annotations

import gc
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from leanstep.tape.lines import UNKNOWN_LINE, Stack

# Of torch's warning at a synchronising call under set_sync_debug_mode("warn").
SYNC_WARNING = "synchronizing CUDA operation"


@contextmanager
def sync_debug(recorder: Any) -> Iterator[None]:
    """Let torch warn at every synchronising call, and compare their number with the counted reads."""
    if not torch.cuda.is_available():
        yield
        return
    show = warnings.showwarning
    seen = 0

    def count(
        message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        nonlocal seen
        if SYNC_WARNING not in str(message):
            show(message, category, filename, lineno, file, line)
        elif recorder.active:
            seen += 1

    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=f".*{SYNC_WARNING}.*")
        warnings.showwarning = count
        try:
            with sync_debug_mode("warn"):
                yield
        finally:
            text = disagreement(recorder.reads_on_device, seen)
            if text is not None:
                recorder.tape.note("dropped", "", text)


@contextmanager
def sync_debug_mode(mode: str) -> Iterator[None]:
    """Set torch's sync debugging to `mode` and restore it afterwards.

    The first call in a process warns about a prototype after the mode is set. Where warnings are errors, this
    warning must not leave the mode set.
    """
    before = torch.cuda.get_sync_debug_mode()
    try:
        _set_quietly(mode)
        yield
    finally:
        _set_quietly(before)


def _set_quietly(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)


def disagreement(counted: int, seen: int) -> str | None:
    """Return a note if torch's sync warnings and the counted device reads differ by more than a tenth."""
    if abs(counted - seen) <= 0.1 * max(counted, seen):
        return None
    return f"torch warned of {seen} synchronising calls, {counted} host reads were counted"


@contextmanager
def watch_graphs(on_replay: Callable[[str], None]) -> Iterator[None]:
    """Detect `torch.cuda.CUDAGraph.replay` while watching."""
    graph = getattr(torch.cuda, "CUDAGraph", None)
    original = getattr(graph, "replay", None)
    if graph is None or original is None:
        yield
        return

    def replay(self: Any, *args: Any, **kwargs: Any) -> Any:
        site, _ = Stack().locate(sys._getframe(1), False)
        on_replay((site.line if site is not None else UNKNOWN_LINE).place)
        return original(self, *args, **kwargs)

    graph.replay = replay
    try:
        yield
    finally:
        graph.replay = original


def others_at_work(known_threads: set[str]) -> Iterator[tuple[str, str, str]]:
    """Return notes (kind, where, text) on other threads and ranks."""
    names = {t.name for t in threading.enumerate() if t.is_alive()} - known_threads - _compiler_threads()
    # A progress bar's clock, a queue's feeder and the compiler's workers dispatch nothing.
    quiet = ("tqdm", "QueueFeeder", "TMonitor", "pymp", "InductorSubproc", "subproc_worker_timer")
    if any(not name.startswith(quiet) for name in names):
        yield "thread", "", "other threads ran during the step: their ops are not recorded"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        if world > 1:
            yield "rank", f"rank {rank}", f"each of {world} ranks records itself; this is rank {rank}"


def _compiler_threads() -> set[str]:
    """Return the names of the threads that wait for Inductor's compilers, a pool's default names."""
    compiler = getattr(sys.modules.get("torch._inductor.async_compile"), "AsyncCompile", None)
    pool: Any = getattr(compiler, "pool", None)
    if not hasattr(pool, "cache_info") or not pool.cache_info().currsize:
        return set()
    return {thread.name for thread in getattr(pool(), "_threads", ())}


def scan_objects() -> tuple[list[torch.optim.Optimizer], bool]:
    """Return all optimizers, and whether a DataLoader runs workers."""
    optimizers: list[torch.optim.Optimizer] = []
    has_workers = False
    loader = getattr(sys.modules.get("torch.utils.data.dataloader"), "_MultiProcessingDataLoaderIter", None)
    for obj in gc.get_objects():
        kind = type(obj)
        if issubclass(kind, torch.optim.Optimizer) and hasattr(obj, "param_groups"):
            optimizers.append(obj)
        elif kind is loader:
            has_workers = True
    return optimizers, has_workers


def triton_entries() -> int:
    """Return how many compiled kernels Triton holds; it grows when one is first launched."""
    jit = sys.modules.get("triton.runtime.jit")
    kind = getattr(jit, "JITFunction", None)
    if kind is None:
        return 0
    total = 0
    for obj in gc.get_objects():
        if type(obj) is kind:
            total += sum(
                len(cache[0]) if isinstance(cache, tuple) else 1 for cache in obj.device_caches.values()
            )
    return total
