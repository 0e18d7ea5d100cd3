"""Asynchronous tensor parallelism: Inductor splits a product and its collective into chunks that overlap.

`torch._inductor.config._micro_pipeline_tp` enables it. A product starts with the chunk of a gather that this
rank has; the sum of a product's first chunk is sent while the next chunk is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from leanstep.rehearse.events import Event, Launch, Region, StreamWait


def overlapped(events: Sequence[Event], regions: Mapping[int, Region]) -> list[Event]:
    """Move waits for gathers behind the products that read them, and scatters before the products they send.

    Applies only to regions compiled for it. The cost of chunks (starts, smaller products) is not included.
    """
    if not any(region.pipelined for region in regions.values()):
        return list(events)
    out: list[Event] = []
    gathers: dict[int, StreamWait] = {}  # mark -> its wait, which moves behind the next product
    held: list[StreamWait] = []
    for event in events:
        if isinstance(event, StreamWait) and event.mark in gathers:
            held.append(event)
            continue
        kind = _kind(event, regions)
        if kind != "product" and held and isinstance(event, Launch) and _is_after_a_product(out):
            out += held
            held.clear()
        if kind == "all_gather" and isinstance(event, Launch):
            gathers[event.mark] = StreamWait(event.mark, event.stream)
        if kind == "reduce_scatter":
            out.insert(_before_the_last_product(out, regions), event)
            continue
        out.append(event)
    return [*out, *held]


def _kind(event: Event, regions: Mapping[int, Region]) -> str:
    """Return "product", the name of a collective, or "" outside such regions."""
    if not isinstance(event, Launch) or not event.kernels:
        return ""
    region = regions.get(event.region)
    if region is None or not region.pipelined:
        return ""
    kernel = event.kernels[-1]
    return "product" if kernel.kind == "gemm" else kernel.name


def _is_after_a_product(out: Sequence[Event]) -> bool:
    last = next((event for event in reversed(out) if isinstance(event, Launch) and event.kernels), None)
    return last is not None and last.kernels[-1].kind == "gemm"


def _before_the_last_product(out: Sequence[Event], regions: Mapping[int, Region]) -> int:
    """Return the index of the product whose result is sent.

    A sum of several products (the gradient of an input that several weights read) is not split into chunks.
    """
    for index in range(len(out) - 1, -1, -1):
        kind = _kind(out[index], regions)
        if kind == "product":
            return len(out) if _is_after_a_product(out[:index]) else index
        if kind in ("all_gather", "reduce_scatter"):
            break
    return len(out)
