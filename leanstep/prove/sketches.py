"""A tensor in 8 KiB: its norm, its sum and a seeded projection, from which distances follow.

The projection is a count sketch: a flat tensor is laid out in rows of `BUCKETS`, every row gets a random
sign, and the columns are added up in fp64. Signs within a column are independent, so for two tensors the
squared distance of their sketches is an unbiased estimate of their own squared distance, with a relative
spread of sqrt(2 / BUCKETS), 4 %. It is linear: sketches of parts add up to the sketch of the whole, which is
what finds the factor between two gradients. A tensor of at most `BUCKETS` elements is its own sketch.
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

# A prime: no layer's width divides it, so structure along a dimension is spread over all buckets.
BUCKETS = 1021
# Rows brought to fp64 at a time: two mebibytes, which stay in a cache; on a GPU as many as keep it busy.
CHUNK_ROWS, DEVICE_CHUNK_ROWS = 256, 1 << 14
# An entry whose gradient is this small beside the tensor's own counts little: see `weights`.
SOLID = 1e-2


@dataclass(frozen=True)
class Sketch:
    """One tensor. `projection`: [BUCKETS] or the tensor's own values, fp64 on the host; `full`: the tensor,
    where asked for."""

    shape: tuple[int, ...]
    dtype: str
    norm: float
    total: float
    not_finite: int
    projection: Tensor = field(repr=False)
    full: Tensor | None = field(default=None, repr=False, compare=False)

    def minus(self, other: Sketch) -> Sketch:
        """The sketch of the difference; its norm is the estimate."""
        projection = self.projection - other.projection
        norm = float(projection.norm())
        bad = self.not_finite + other.not_finite
        return Sketch(self.shape, self.dtype, norm, self.total - other.total, bad, projection)

    def with_full(self, tensor: Tensor | None) -> Sketch:
        return replace(self, full=tensor)

    # A pickled tensor is an archive of its own. A process hands over thousands of sketches: as plain bytes.
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "projection": array("d", self.projection.tolist())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        values = torch.tensor(state["projection"].tolist(), dtype=torch.float64)
        self.__dict__.update(state, projection=values)


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """What the recorder itself computes: no autograd, no modes of a twin or of another tool."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def whole(tensor: Tensor) -> Tensor:
    """The plain dense tensor behind a DTensor (a collective, on every rank) or a sparse gradient."""
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()  # type: ignore[operator]
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor


def each(function: Callable[[Tensor], Any], tensors: Sequence[Tensor]) -> list[Any]:
    """`function` of every tensor, in order; plain tensors on a CPU side by side, one core each.

    Threads that share every operation on a small chunk spend their time waiting for each other.
    """
    if not all(t.device.type == "cpu" and type(t) in (Tensor, torch.nn.Parameter) for t in tensors):
        return [function(tensor) for tensor in tensors]
    found: list[Any] = [None] * len(tensors)

    def job(place: int) -> Callable[[int], None]:
        return lambda _worker: found.__setitem__(place, function(tensors[place]))

    largest_first = sorted(range(len(tensors)), key=lambda place: -tensors[place].numel())
    run_on_cores([job(place) for place in largest_first], num_threads())
    return found


def sketch(tensor: Tensor, weights_of: Tensor | None = None, scale: float = 0.0) -> Sketch:
    """Sketch a tensor of any shape and float dtype; `weights_of` is the gradient that weighs its entries.

    Weights are g^2 / (g^2 + (SOLID scale)^2), near one where the gradient is well determined and near zero
    where it is rounding noise. Adam moves an entry by its gradient's sign: without weights, one entry whose
    gradient is zero but for rounding would outweigh everything else.
    """
    flat = tensor.reshape(-1)
    gradient = None if weights_of is None or scale <= 0 else weights_of.reshape(-1)
    squares, total, projection, bad = _sums(flat, gradient, scale, clean=False)
    if not math.isfinite(squares):
        # Looked for only where the cheap sum says so: isfinite costs more than all the rest.
        squares, total, projection, bad = _sums(flat, gradient, scale, clean=True)
    kind = str(tensor.dtype).removeprefix("torch.")
    return Sketch(tuple(tensor.shape), kind, squares**0.5, total, bad, projection.cpu())


def _sums(
    flat: Tensor, gradient: Tensor | None, scale: float, *, clean: bool
) -> tuple[float, float, Tensor, int]:
    """Sum of squares, sum, projection, entries that are not finite (0 in the sums, where `clean`)."""
    count, device = flat.numel(), flat.device
    step = (CHUNK_ROWS if device.type == "cpu" else DEVICE_CHUNK_ROWS) * BUCKETS
    # Read once, at the end: a read per chunk would make a GPU wait.
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

    Before and after a step they are the same bits, so the difference of two sketches has no error of theirs.
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
    """At least `rows` signs; the same ones for every tensor and in every process."""
    size = 1024
    while size < rows:
        size *= 4
    # Tables of different length must agree where they overlap: a bounded draw of PCG64 is sequential.
    return _sign_table(size)


def distance(value: Sketch, truth: Sketch) -> float:
    """|value - truth| in the 2-norm, estimated; infinite where shapes differ or one is not finite."""
    if value.shape != truth.shape or value.not_finite != truth.not_finite:
        return float("inf")
    return value.minus(truth).norm
