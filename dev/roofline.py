"""The least time a row could take here: its FLOPs at the fastest product, or its bytes at the fastest copy.

A benchmark's `limit` row says which products (or which bytes) a computation cannot avoid. How fast this
machine's libraries can do them is measured here, in the same run: the same shapes and large square ones, in
every layout, with all threads on one product and with one product per core. The best of all samples counts,
not the median, so that nothing which needs these FLOPs is faster, whatever library or arrangement it uses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness import Row, Workload
from leanstep.cpu import num_threads, run_on_cores

# (rows, inner, columns)
Shape = tuple[int, int, int]
SQUARES: tuple[Shape, ...] = ((1024, 1024, 1024), (2048, 2048, 2048), (768, 3072, 768))
# Of a limit's own products the largest few are tried.
MAX_SHAPES = 4


class _Work(TorchDispatchMode):
    """FLOPs of matrix products by shape and dtype, and the bytes that other ops read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: dict[tuple[Shape, torch.dtype], int] = {}
        self.moved_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        factors = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}.get(name.rstrip("_"))
        if factors is not None:
            a, b = args[factors[0]], args[factors[1]]
            shape = (a.shape[-2], a.shape[-1], b.shape[-1])
            batch = a.shape[0] if a.ndim == 3 else 1
            key = (shape, a.dtype)
            self.flops[key] = self.flops.get(key, 0) + 2 * batch * shape[0] * shape[1] * shape[2]
        elif not getattr(func, "is_view", False) and not name.startswith(("empty", "new_empty", "detach")):
            outs = out if isinstance(out, (tuple, list)) else (out,)
            tensors = [t for t in (*args, *outs) if isinstance(t, Tensor)]
            self.moved_bytes += sum({t.data_ptr(): t.nbytes for t in tensors}.values())
        return out


def roofline_s(
    limit: Row,
    workload: Workload,
    *,
    faster_dtypes: tuple[torch.dtype, ...] = (),
    budget_s: float = 3.0,
) -> float:
    """Seconds below which nothing can do the work of `limit` on this machine.

    `faster_dtypes`: dtypes that the products may be made in instead, if that is faster.
    """
    step = limit.build(workload)
    step()
    with _Work() as work:
        step()
    if not work.flops:
        return limit.time_scale * _copy_s(work.moved_bytes, budget_s)
    seconds = 0.0
    for dtype in {dtype for _, dtype in work.flops}:
        own = {shape: flops for (shape, kind), flops in work.flops.items() if kind == dtype}
        largest = sorted(own, key=lambda shape: -own[shape])[:MAX_SHAPES]
        kinds = dict.fromkeys((dtype, *faster_dtypes))
        rate = max(best_rate((*largest, *SQUARES), kind, budget_s / len(kinds)) for kind in kinds)
        seconds += sum(own.values()) / rate
    return limit.time_scale * seconds


def best_rate(shapes: tuple[Shape, ...], dtype: torch.dtype, budget_s: float) -> float:
    """FLOP/s of the fastest product of these shapes, over layouts and over ways to use the cores."""
    best = 0.0
    trials = [(shape, call) for shape in dict.fromkeys(shapes) for call in _products(shape, dtype)]
    for (rows, inner, columns), (call, products) in trials:
        fastest = _fastest(call, budget_s / len(trials))
        best = max(best, products * 2 * rows * inner * columns / fastest)
    return best


def _products(shape: Shape, dtype: torch.dtype) -> Iterator[tuple[Callable[[], object], int]]:
    """Every way to multiply: (call, products per call)."""
    rows, inner, columns = shape
    a, b = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
    out = torch.empty(rows, columns, dtype=dtype)
    for left in (a, a.T.contiguous().T):
        for right in (b, b.T.contiguous().T):
            yield lambda left=left, right=right: torch.mm(left, right, out=out), 1
    cores = num_threads()
    if cores > 1:
        outs = [torch.empty_like(out) for _ in range(cores)]
        jobs = [lambda worker, own=own: torch.mm(a, b, out=own) for own in outs]
        yield lambda: run_on_cores(jobs, cores), cores


def _copy_s(num_bytes: int, budget_s: float) -> float:
    """Seconds of the fastest way to read half of these bytes and write the other half."""
    count = max(num_bytes // 8, 1)
    source, target = torch.zeros(count), torch.empty(count)
    ways = (lambda: target.copy_(source), lambda: torch.neg(source, out=target), lambda: target.fill_(1.0))
    # A fill writes without reading: its seconds count twice, for as many bytes.
    scales = (1.0, 1.0, 2.0)
    return min(scale * _fastest(way, budget_s / 3) for way, scale in zip(ways, scales, strict=True))


def _fastest(call: Callable[[], object], budget_s: float) -> float:
    """The shortest of many runs; at least three, and as many as the budget holds."""
    best, started, runs = float("inf"), time.perf_counter(), 0
    while runs < 3 or time.perf_counter() - started < budget_s:
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
        runs += 1
    return best
