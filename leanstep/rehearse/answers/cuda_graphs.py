"""CUDAGraph, torch.cuda.graph and graphed callables: captured once, replayed as one host call.

A host sync during a capture raises at the line that causes it. A replay reads and writes the memory of the
capture: if a tensor was freed since then, the error names it, where a device would silently read whatever is
there now. Memory allocated by the capture stays with the graph. A captured optimizer update runs at each
replay and ends a step.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from leanstep.rehearse.events import GRAPH_REPLAY, Alloc, Event, HostWait, Launch, StreamMark, StreamWait
from leanstep.rehearse.tape import Tape
from leanstep.rehearse.what_if import fused

_HANDLES = itertools.count(1)


def install(tape: Tape) -> None:
    """Replace the CUDA graph API so that programs can capture and replay."""
    graph_class, capture_class = _graph_class(tape), _capture_class()
    for answer in (graph_class, capture_class):
        answer.__module__ = "torch.cuda"
        for where in (torch.cuda, torch.cuda.graphs):
            setattr(where, answer.__name__, answer)
    modules: tuple[Any, ...] = (torch.cuda, torch.cuda.graphs)
    for module in modules:
        module.is_current_stream_capturing = lambda: tape.capture is not None
        module.graph_pool_handle = _new_handle


def _new_handle() -> Any:
    return (0, next(_HANDLES))


def _graph_class(tape: Tape) -> type:
    class CUDAGraph(_Graph):
        def __init__(self, keep_graph: bool = False) -> None:
            super().__init__(tape)

    return CUDAGraph


def _capture_class() -> type:
    class graph:
        """`with torch.cuda.graph(g):` captures what the body launches."""

        default_capture_stream = None

        def __init__(self, cuda_graph: _Graph, pool: Any = None, stream: Any = None, **_: Any) -> None:
            self.cuda_graph, self.pool = cuda_graph, pool

        def __enter__(self) -> None:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            self.cuda_graph.capture_begin(self.pool)

        def __exit__(self, *_: object) -> None:
            self.cuda_graph.capture_end()

    return graph


class _Pool:
    """Memory of captures: the part that tensors hold, and the rest, which only replays write."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._sizes: dict[int, int] = {}
        self._now = self._peak = 0
        self._rest: int | None = None

    def note(self, event: Event) -> None:
        """Track an allocation during a capture."""
        if isinstance(event, Alloc):
            self._sizes[event.storage] = event.nbytes
            self._tape.pools[event.storage] = weakref.WeakMethod(self._released)
            self._now += event.nbytes
            self._peak = max(self._peak, self._now)

    def _released(self, storage: int) -> None:
        self._now -= self._sizes.pop(storage, 0)
        if self._tape.capture is None:
            self.settle()

    def settle(self) -> None:
        """Hold the memory that tensors have released."""
        rest = self._peak - self._now
        if self._rest is not None and self._tape.recording.storages[self._rest].nbytes == rest:
            return
        self.free()
        if rest:
            place = self._tape.lines.place()
            self._rest = self._tape.allocate(rest, (rest,), "uint8", place, "buffer")

    def free(self) -> None:
        if self._rest is not None:
            self._tape.release(self._rest)
            self._rest = None

    def __del__(self) -> None:
        self.free()


_pools: weakref.WeakValueDictionary[Any, _Pool] = weakref.WeakValueDictionary()


class _Graph:
    """The launches of a capture, and the memory that it allocated."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self.launches: list[Launch] | None = None
        self._played: list[Launch] = []  # the launches, compiled regions fused
        self.updates: list[Any] = []  # parameter groups of each update inside the capture
        self._handle: Any = None
        self._pool: _Pool | None = None
        self._before: frozenset[int] = frozenset()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        tape = self._tape
        if tape.capture is not None:
            raise RuntimeError("CUDA error: this stream is already capturing")
        self.reset()
        launches: list[Launch] = []
        # Memory of earlier captures stays in their pool.
        self.launches, self._before = launches, frozenset(tape.recording.storages) - frozenset(tape.captured)
        self._handle = pool or _new_handle()
        self._pool = held = _pools.setdefault(self._handle, _Pool(tape))
        held.free()  # what earlier captures of the pool have released is used again
        tape.capture = self
        add = tape.add

        def captured(event: Event) -> None:
            if isinstance(event, HostWait):
                raise RuntimeError(
                    "CUDA error: operation not permitted when stream is capturing: "
                    f"{event.kind} at {event.line}"
                )
            if isinstance(event, Launch):
                launches.append(event)
            if isinstance(event, Launch | StreamMark | StreamWait):  # a replay runs them one by one
                return
            add(event)
            held.note(event)
            if isinstance(event, Alloc):
                tape.captured.add(event.storage)

        tape.add = captured  # type: ignore[method-assign]

    def capture_end(self) -> None:
        tape = self._tape
        tape.__dict__.pop("add", None)
        tape.capture = None
        tape.num_captures += 1
        regions = tape.recording.regions
        self._played = [e for e in fused(self.launches or [], regions) if isinstance(e, Launch)]
        assert self._pool is not None
        self._pool.settle()

    def replay(self) -> None:
        if self.launches is None:
            raise RuntimeError("CUDAGraph.replay: expected a captured graph, got one that captured nothing")
        if self._tape.capture is not None:
            raise RuntimeError("CUDA error: a graph cannot be replayed during a capture")
        self._look_for_freed(self.launches)
        self._tape.add(_one_launch(self.launches, self._played, self._tape))
        for groups in self.updates:
            self._tape.update_replayed(groups)

    def _look_for_freed(self, launches: list[Launch]) -> None:
        alive = set(self._tape._numbers.values())
        for launch in launches:
            for number in (*launch.reads, *launch.writes):
                if number in self._before and number not in alive:
                    gone = self._tape.recording.storages[number]
                    raise RuntimeError(
                        f"CUDAGraph.replay: {launch.name} at {launch.line} uses memory that was freed after "
                        f"the capture: {gone.dtype} {list(gone.shape)} allocated at {gone.line}"
                    )

    def reset(self) -> None:
        self.launches = self._pool = None
        self._played, self.updates = [], []

    def pool(self) -> Any:
        return self._handle

    def __del__(self) -> None:
        self.reset()


def _one_launch(launches: list[Launch], played: list[Launch], tape: Tape) -> Launch:
    """Return all launches of a graph as one host call. `played`: the launches with compiled regions fused."""
    reads = [(r, t) for e in launches for r, t in zip(e.reads, e.traffic, strict=False)]
    writes = [(w, t) for e in launches for w, t in zip(e.writes, e.traffic[len(e.reads) :], strict=True)]
    place = tape.lines.place()
    return Launch(
        GRAPH_REPLAY,
        tuple(kernel for e in played for kernel in e.kernels),
        place.line,
        place.phase,
        tape.step,
        reads=tuple(number for number, _ in reads),
        writes=tuple(number for number, _ in writes),
        traffic=tuple(moved for _, moved in (*reads, *writes)),
        region=place.region,
        products=tuple(product for e in launches for product in e.products),
    )
