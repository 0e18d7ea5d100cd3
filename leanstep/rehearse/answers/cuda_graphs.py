"""torch.cuda.CUDAGraph and torch.cuda.graph: captured once, replayed as one call of the host.

What a capture forbids is refused where it happens: anything that makes the host wait. A replay reads and
writes the memory that was there at the capture: a tensor that was freed since then is named, where a device
would silently read whatever is there now. Memory that the capture itself took stays with the graph.
"""

from __future__ import annotations

from typing import Any

import torch

from leanstep.rehearse.events import GRAPH_REPLAY, Alloc, Event, Free, HostWait, Launch
from leanstep.rehearse.tape import Tape


def install(tape: Tape) -> None:
    """Let programs capture and replay."""
    graph_class, capture_class = _graph_class(tape), _capture_class()
    for answer in (graph_class, capture_class):
        answer.__module__ = "torch.cuda"
        for where in (torch.cuda, torch.cuda.graphs):
            setattr(where, answer.__name__, answer)
    torch.cuda.is_current_stream_capturing = lambda: _is_capturing(tape)
    torch.cuda.graph_pool_handle = lambda: (0, 1)  # type: ignore[assignment, return-value]


def _is_capturing(tape: Tape) -> bool:
    return "add" in tape.__dict__


def _graph_class(tape: Tape) -> type:
    class CUDAGraph(_Graph):
        def __init__(self, keep_graph: bool = False) -> None:
            super().__init__(tape)

    return CUDAGraph


def _capture_class() -> type:
    class graph:
        """`with torch.cuda.graph(g):` captures what the body launches."""

        def __init__(self, cuda_graph: _Graph, pool: Any = None, stream: Any = None, **_: Any) -> None:
            self.cuda_graph = cuda_graph

        def __enter__(self) -> None:
            torch.cuda.synchronize()
            self.cuda_graph.capture_begin()

        def __exit__(self, *_: object) -> None:
            self.cuda_graph.capture_end()

    return graph


class _Graph:
    """The launches of a capture, and the memory it took."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self.launches: list[Launch] | None = None
        self._pool: int | None = None
        self._before: frozenset[int] = frozenset()
        self._taken: list[Event] = []

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        tape = self._tape
        if _is_capturing(tape):
            raise RuntimeError("CUDA error: a capture is under way on this stream already")
        self.reset()
        launches: list[Launch] = []
        self.launches, self._taken, self._before = launches, [], frozenset(tape.recording.storages)
        add = tape.add

        def captured(event: Event) -> None:
            if isinstance(event, HostWait):
                raise RuntimeError(
                    "CUDA error: operation not permitted when stream is capturing: "
                    f"{event.kind} at {event.line}"
                )
            if isinstance(event, Launch):
                launches.append(event)
                return
            self._taken.append(event)
            add(event)

        tape.add = captured  # type: ignore[method-assign]

    def capture_end(self) -> None:
        tape = self._tape
        tape.__dict__.pop("add", None)
        nbytes = _freed_peak(self._taken)
        if nbytes:
            self._pool = tape.allocate(nbytes, (nbytes,), "uint8", tape.lines.place(), "buffer")

    def replay(self) -> None:
        if self.launches is None:
            raise RuntimeError("CUDAGraph.replay: expected a captured graph, got one without a capture")
        if _is_capturing(self._tape):
            raise RuntimeError("CUDA error: a graph cannot be replayed while a capture is under way")
        self._look_for_freed(self.launches)
        self._tape.add(_one_launch(self.launches, self._tape))

    def _look_for_freed(self, launches: list[Launch]) -> None:
        alive = set(self._tape._numbers.values())
        for launch in launches:
            for number in (*launch.reads, *launch.writes):
                if number in self._before and number not in alive:
                    gone = self._tape.recording.storages[number]
                    raise RuntimeError(
                        f"CUDAGraph.replay: {launch.name} at {launch.line} was captured on memory "
                        f"that is free now: {gone.dtype} {list(gone.shape)} made at {gone.line}"
                    )

    def reset(self) -> None:
        tape = self._tape
        if self._pool is not None:
            tape.live_bytes -= tape.recording.storages[self._pool].nbytes
            tape.add(Free(self._pool, tape.step))
        self.launches = self._pool = None

    def pool(self) -> tuple[int, int]:
        return (0, 1)

    def __del__(self) -> None:
        self.reset()


def _one_launch(launches: list[Launch], tape: Tape) -> Launch:
    """All launches of a graph as one call of the host."""
    reads = [(r, t) for e in launches for r, t in zip(e.reads, e.traffic, strict=False)]
    writes = [(w, t) for e in launches for w, t in zip(e.writes, e.traffic[len(e.reads) :], strict=True)]
    place = tape.lines.place()
    return Launch(
        GRAPH_REPLAY,
        tuple(kernel for e in launches for kernel in e.kernels),
        place.line,
        place.phase,
        tape.step,
        reads=tuple(number for number, _ in reads),
        writes=tuple(number for number, _ in writes),
        traffic=tuple(moved for _, moved in (*reads, *writes)),
        region=place.region,
        products=tuple(product for e in launches for product in e.products),
    )


def _freed_peak(taken: list[Event]) -> int:
    """Bytes that the graph keeps: the peak of what its capture took, without what is still in use."""
    sizes: dict[int, int] = {}
    now = peak = 0
    for event in taken:
        if isinstance(event, Alloc):
            sizes[event.storage] = event.nbytes
            now += event.nbytes
        elif isinstance(event, Free):
            # What was there before the capture is not the graph's.
            now -= sizes.pop(event.storage, 0)
        peak = max(peak, now)
    return peak - now
