"""Summarize a tensor in 8 KiB: its norm, its sum and a seeded projection that preserves distances.

The projection is a count sketch: the flat tensor is arranged in rows of `BUCKETS`, every row is multiplied by
a random sign, and the columns are summed in fp64. Signs within a column are independent, so the squared
distance of two sketches is an unbiased estimate of the squared distance of the tensors, with a relative
spread of sqrt(2 / BUCKETS), 4 %. The sketch is linear: sketches of parts add up to the sketch of the whole,
which makes it possible to find the factor between two gradients. A tensor of at most `BUCKETS` elements is
its own sketch.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from leanstep.cpu import num_threads, run_on_cores

# A prime: it shares no factor with a layer's width, so structure along a dimension spreads over all buckets.
BUCKETS = 1021
# Rows converted to fp64 at a time: two mebibytes fit in a cache; a GPU needs more rows to be busy.
CHUNK_ROWS, DEVICE_CHUNK_ROWS = 256, 1 << 14
# Entries whose gradient is below this fraction of the average entry get a small weight: see `sketch`.
SOLID = 1e-2


@dataclass(frozen=True)
class Sketch:
    """Sketch of a tensor. `full`: the tensor itself, if requested.

    `projection`: [BUCKETS] or all values of the tensor, fp64 on the host.
    """

    shape: tuple[int, ...]
    dtype: str
    norm: float
    total: float
    not_finite: int
    projection: Tensor = field(repr=False)
    full: Tensor | None = field(default=None, repr=False, compare=False)

    def minus(self, other: Sketch) -> Sketch:
        """Return the sketch of the difference; its norm is estimated from the projection."""
        projection = self.projection - other.projection
        norm = float(projection.norm())
        bad = self.not_finite + other.not_finite
        return Sketch(self.shape, self.dtype, norm, self.total - other.total, bad, projection)

    def plus(self, other: Sketch) -> Sketch:
        projection = self.projection + other.projection
        bad = self.not_finite + other.not_finite
        norm = float(projection.norm())
        return Sketch(self.shape, self.dtype, norm, self.total + other.total, bad, projection)

    def with_full(self, tensor: Tensor | None) -> Sketch:
        return replace(self, full=tensor)

    # A pickled tensor is a whole archive. A process returns thousands of sketches: store plain bytes.
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "projection": array("d", self.projection.tolist())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        values = torch.tensor(state["projection"].tolist(), dtype=torch.float64)
        self.__dict__.update(state, projection=values)


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """Disable autograd, and the modes of the fp64 run and of other tools, for the recorder's own code."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def whole(tensor: Tensor) -> Tensor:
    """Return the dense tensor of a DTensor (a collective on every rank) or of a sparse gradient."""
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()  # type: ignore[operator]
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor


def each(function: Callable[[Tensor], Any], tensors: Sequence[Tensor]) -> list[Any]:
    """Apply `function` to every tensor and return the results in order; on a CPU, one core per tensor.

    Splitting each operation on a small chunk over threads would spend the time on synchronization.
    """
    if not all(t.device.type == "cpu" and type(t) in (Tensor, torch.nn.Parameter) for t in tensors):
        return [function(tensor) for tensor in tensors]
    results: list[Any] = [None] * len(tensors)

    def job(place: int) -> Callable[[int], None]:
        return lambda _worker: results.__setitem__(place, function(tensors[place]))

    largest_first = sorted(range(len(tensors)), key=lambda place: -tensors[place].numel())
    run_on_cores([job(place) for place in largest_first], num_threads())
    return results


def sketch(tensor: Tensor, weights_of: Tensor | None = None, scale: float = 0.0) -> Sketch:
    """Sketch a tensor of any shape and float dtype; `weights_of` is the gradient that weights its entries.

    Weights are g^2 / (g^2 + (SOLID scale)^2): near one where the gradient is well determined and near zero
    where it is rounding noise. Adam moves an entry by its gradient's sign: without weights, an entry whose
    gradient is zero except for rounding would dominate the result.
    """
    flat = tensor.reshape(-1)
    gradient = None if weights_of is None or scale <= 0 else weights_of.reshape(-1)
    squares, total, projection, bad = _sums(flat, gradient, scale, clean=False)
    if not math.isfinite(squares):
        # Count non-finite entries only if the sum is not finite: isfinite costs more than everything else.
        squares, total, projection, bad = _sums(flat, gradient, scale, clean=True)
    kind = str(tensor.dtype).removeprefix("torch.")
    return Sketch(tuple(tensor.shape), kind, squares**0.5, total, bad, projection.cpu())


def _sums(
    flat: Tensor, gradient: Tensor | None, scale: float, *, clean: bool
) -> tuple[float, float, Tensor, int]:
    """Return the sum of squares, sum, projection and number of non-finite entries (zeroed if `clean`)."""
    count, device = flat.numel(), flat.device
    step = (CHUNK_ROWS if device.type == "cpu" else DEVICE_CHUNK_ROWS) * BUCKETS
    # Read once, at the end: one read per chunk would be one host sync per chunk on a GPU.
    squares, total, bad = torch.zeros(3, dtype=torch.float64, device=device).unbind()
    projection = torch.zeros(min(count, BUCKETS), dtype=torch.float64, device=device)
    memory = torch.empty(min(count, step), dtype=torch.float64, device=device)
    weights = _Weights(gradient, scale, len(memory))
    for start in range(0, count, step):
        some = flat[start : start + step]
        chunk = memory[: len(some)].copy_(some)
        if gradient is not None:
            chunk.mul_(weights.of(gradient[start : start + step]))
        if clean:
            finite = torch.isfinite(chunk)
            bad += (~finite).sum()
            chunk.masked_fill_(~finite, 0.0)
        squares += chunk.dot(chunk)
        total += chunk.sum()
        if count <= BUCKETS:
            projection = chunk.clone()
            continue
        rows = len(chunk) // BUCKETS
        signs = _signs(start // BUCKETS + rows + 1).to(device)[start // BUCKETS :]
        if rows:
            projection += signs[:rows] @ chunk[: rows * BUCKETS].view(rows, BUCKETS)
        rest = chunk[rows * BUCKETS :]
        projection[: len(rest)] += signs[rows] * rest
    return float(squares), float(total), projection, int(bad)


class _Weights:
    """w = u^2 / (u^2 + 1), u = g / (SOLID scale), in fp32 unless the gradient is fp64: half the bytes.

    The weights have the same bits before and after a step, so they add no error to the difference of
    sketches.
    """

    def __init__(self, gradient: Tensor | None, scale: float, size: int) -> None:
        if gradient is None:
            return
        dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32
        self._factor = 1.0 / (SOLID * scale)
        self._squares, self._sums = torch.empty(2, size, dtype=dtype, device=gradient.device).unbind()

    def of(self, gradient: Tensor) -> Tensor:
        squares = self._squares[: len(gradient)].copy_(gradient).mul_(self._factor).square_()
        return squares.div_(torch.add(squares, 1.0, out=self._sums[: len(gradient)]))


@functools.cache
def _sign_table(rows: int) -> Tensor:
    bits = random.Random(17).randbytes(rows)
    return torch.tensor([1.0 if byte & 1 else -1.0 for byte in bits], dtype=torch.float64)


def _signs(rows: int) -> Tensor:
    """Return at least `rows` signs; the same ones for every tensor and in every process."""
    size = 1024
    while size < rows:
        size *= 4
    # Tables of different lengths agree where they overlap: PCG64 draws bounded integers sequentially.
    return _sign_table(size)


def distance(value: Sketch, truth: Sketch) -> float:
    """Estimate |value - truth| in the 2-norm; infinite if shapes or numbers of non-finite entries differ."""
    if value.shape != truth.shape or value.not_finite != truth.not_finite:
        return float("inf")
    return value.minus(truth).norm
