"""Tiles of logits: their size, order and number of cores, and where they are saved for the backward pass.

A tile is c rows by w vocabulary columns. Memory is bounded by the budget. For speed, tiles should be tall, so
that each weight tile and its gradient are read and written once, and should fit the cache of a CPU or fill
the matrix units of a GPU. Only `arrange` chooses a call's tiles, and its result does not depend on timing or
free memory: a recomputation uses the same tiles.

A saved tile saves one GEMM in the backward pass. There are three places for it. Saved tensors, up to a number
of bytes: they are freed with the graph, visible to `saved_tensors_hooks` (offloading) and never written to.
The memory of the weight's gradient, allocated early: [V, D] fits [T', V] logits if T' <= D, and the backward
pass would allocate it anyway. And a buffer for one chunk of rows, if the backward pass of a chunk directly
follows its forward pass.
"""

# R = c rows of a chunk · W = w columns of a tile · T' selected rows · D model · V local vocabulary

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from leanstep.cpu import num_threads
from leanstep.logprob.engine.gpu.gpu_tiles import ROW_ELEMENTS, gpu_tiles, round_down, units_of
from leanstep.logprob.engine.passes import suited

# Device types that `on_gpu` treats as a CPU. Tests empty it, so that CPU tensors use GPU tiles.
CPU_TYPES = ("cpu",)
# Logits and work area in fp32, plus a 16-bit copy if the weight has 16 bits.
TILE_ELEMENT_BYTES = 10
# Logits and work area fit the part of the last-level cache that other cores leave; larger tiles are slower.
CPU_TILE_BYTES = 6 << 20
# With kernels, a tile needs few vector operations and its logits fit a core's own cache. Tall tiles take
# twice as much, because narrower products lose more time than the cache saves.
KERNEL_TILE_BYTES = 1 << 20
KERNEL_COLUMNS = 512
CPU_MAX_ROWS = 1024

# On a GPU, a fixed number of bytes: results must not depend on free memory. The 16-bit gradient of an fp32
# logit overwrites it.
GPU_TILE_BYTES = 544 << 20
GPU_ELEMENT_BYTES = 4

# Several cores are faster from this many multiply-adds per core on, and while the hidden gradients of the
# other parts of the vocabulary stay small.
MIN_CORE_PRODUCTS = 1 << 28
MAX_CORE_BYTES = 64 << 20


@dataclass(frozen=True)
class Tiles:
    """`rows` x `columns` per tile; `order` names the outer loop of the backward pass.

    "vocab": each weight tile is visited once; gradients of all hidden rows are accumulated (T' D).
    "rows": each row chunk is visited once; the gradient of the whole weight is accumulated (V D).
    """

    rows: int
    columns: int
    order: Literal["rows", "vocab"] = "vocab"


def on_gpu(device: torch.device | str) -> bool:
    """Whether a call uses the tiles and products of a GPU: on every device that is not a CPU."""
    return torch.device(device).type not in CPU_TYPES


def even_slices(length: int, at_most: int, multiple: int = 1) -> list[slice]:
    """Split `length` into the fewest parts of at most `at_most`, almost equal: no small remainder.

    If `at_most` is a multiple of `multiple`, all parts but the last are multiples of it too.
    """
    parts = -(-length // at_most)
    size = -(-length // parts) if parts else 1
    if at_most % multiple == 0:
        size = -(-size // multiple) * multiple
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def tile_slices(length: int, size: int, device: torch.device | str, multiple: int = 1) -> list[slice]:
    """Return the sides of tiles: even on a CPU; on a GPU exactly `size`, which is chosen to fill it."""
    if on_gpu(device):
        return [slice(start, min(start + size, length)) for start in range(0, length, size)]
    return even_slices(length, size, multiple)


def column_parts(columns: int, widest: int, cores: int, device: torch.device | str) -> list[list[slice]]:
    """Return column slices of at most `widest`, almost equal, one list per core's part of the vocabulary.

    Sides are whole vectors: a CPU computes tiles of 508 columns a twelfth slower than tiles of 504 or 512.
    """
    share = max(-(-columns // (cores * ROW_ELEMENTS)), 1) * ROW_ELEMENTS
    parts = even_slices(columns, share, ROW_ELEMENTS) if cores > 1 else [slice(0, columns)]
    return [
        [
            slice(part.start + side.start, part.start + side.stop)
            for side in tile_slices(part.stop - part.start, widest, device, ROW_ELEMENTS)
        ]
        for part in parts
    ] or [[]]


def row_stride(columns: int, device: torch.device | str) -> int:
    """Return the row stride of a tile: on a GPU, rows are padded, so that e.g. 50,257 columns are aligned."""
    return -(-columns // ROW_ELEMENTS) * ROW_ELEMENTS if on_gpu(device) else columns


def default_budget(device: torch.device | str) -> int:
    """Return the bytes for tiles: cache-sized on a CPU, otherwise 544 MiB.

    It does not depend on free memory: a recomputation or a second run must use the same tiles.
    """
    return GPU_TILE_BYTES if on_gpu(device) else CPU_TILE_BYTES


def choose_cores(num_rows: int, vocab: int, width: int, device: torch.device | str = "cpu") -> int:
    """Return how many parts of the vocabulary run in parallel: one per torch thread on a CPU, or 1."""
    threads = num_threads()
    if on_gpu(device) or num_rows * vocab * width < threads * MIN_CORE_PRODUCTS:
        return 1
    return threads if threads * num_rows * width * 4 <= MAX_CORE_BYTES else 1


def choose_tiles(
    num_rows: int,
    vocab: int,
    width: int,
    *,
    budget: int | None = None,
    device: torch.device | str = "cpu",
    kernels: bool = False,
    max_rows: int = CPU_MAX_ROWS,
    element_bytes: int = GPU_ELEMENT_BYTES,
    trained: bool = True,
) -> Tiles:
    """Return the tile for `num_rows` x `vocab` logits from hidden rows of `width`, within `budget` bytes.

    On a CPU, tiles are tall (up to `max_rows`) and as wide as the budget allows; with `kernels` for the
    passes they need no work area. On a GPU, they are as large as the budget allows, with `element_bytes` per
    logit and fp32 sums for the gradient rows of a `trained` weight, in the order "vocab".
    """
    on_cpu, has_budget = not on_gpu(device), budget is not None
    if budget is None:
        budget = KERNEL_TILE_BYTES if on_cpu and kernels else default_budget(device)
    if budget <= 0:
        raise ValueError(f"budget: expected a positive number of bytes, got {budget}")
    num_rows, vocab = max(num_rows, 1), max(vocab, 1)
    # Choose the smaller accumulator: T' D for "vocab", V D for "rows".
    order: Literal["rows", "vocab"] = "vocab" if num_rows <= vocab else "rows"
    elements = max(budget // (4 if on_cpu and kernels else TILE_ELEMENT_BYTES), 1)
    if on_cpu:
        narrowest = 128 if kernels else 512
        rows = min(num_rows, max_rows)
        if kernels and not has_budget:
            elements = max(elements, min(2 * elements, rows * KERNEL_COLUMNS))
        columns = round_down(elements // rows, narrowest)
        if columns < narrowest:
            columns = narrowest
            rows = max(min(rows, elements // columns), 1)
        return Tiles(rows, min(columns, vocab), order)
    element_bytes = element_bytes if kernels else TILE_ELEMENT_BYTES
    sums_bytes = 4 * width if trained else 0
    return Tiles(*gpu_tiles(num_rows, vocab, width, budget, (element_bytes, sums_bytes), units_of(device)))


def checked_tile(tile: tuple[int | None, int | None] | Tiles, num_rows: int, vocab: int) -> Tiles:
    """Return the caller's tile, clipped to the shapes; None means all rows or all columns."""
    if isinstance(tile, Tiles):
        rows, columns, order = tile.rows, tile.columns, tile.order
    else:
        rows, columns = (
            whole if n is None else n
            for n, whole in zip(tile, (max(num_rows, 1), max(vocab, 1)), strict=True)
        )
        order = "vocab" if num_rows <= vocab else "rows"
    if rows <= 0 or columns <= 0:
        raise ValueError(f"tile: expected (rows, columns) > 0, got ({rows}, {columns})")
    return Tiles(min(rows, max(num_rows, 1)), min(columns, max(vocab, 1)), order)


class Arrangement(NamedTuple):
    """How a call runs: its tile, the number of vocabulary parts that run in parallel, and the passes."""

    tiles: Tiles
    cores: int
    kernels: Any


def arrange(
    num_rows: int,
    vocab: int,
    width: int,
    device: torch.device,
    kernels: Any,
    *,
    budget: int | None = None,
    tile: tuple[int | None, int | None] | Tiles | None = None,
    max_rows: int = CPU_MAX_ROWS,
    chunk_rows: int | None = None,
    cores: int | None = None,
    element_bytes: int = GPU_ELEMENT_BYTES,
    trained: bool = True,
) -> Arrangement:
    """Choose the tile, the cores and the passes of one call.

    Args:
        kernels: from `kernels_for`.
        budget: bytes for the tiles of all cores; None gives every core the default.
        tile: the caller's tile, on one core.
        max_rows: the tallest tile on a CPU.
        chunk_rows: rows in the loop at a time, if not all of them.
        cores: None: as many as are useful; 0: one core with tiles that fit the torch passes, for calls with
            more than the two passes per tile (top-k, KL, a vocabulary subset).
        element_bytes: bytes of a logit and its gradient in a GPU tile.
        trained: whether the weight gets a gradient.
    """
    if tile is not None:
        return Arrangement(checked_tile(tile, num_rows, vocab), 1, suited(kernels, 1))
    if cores == 0:
        return Arrangement(
            choose_tiles(num_rows, vocab, width, budget=budget, device=device), 1, suited(kernels, 1)
        )
    if cores is None:
        cores = choose_cores(num_rows, vocab, width, device)
    kernels = suited(kernels, cores)
    tiles = choose_tiles(
        num_rows if chunk_rows is None else chunk_rows,
        vocab,
        width,
        budget=None if budget is None else max(budget // cores, 1),
        device=device,
        kernels=kernels is not None,
        max_rows=max_rows,
        element_bytes=element_bytes,
        trained=trained,
    )
    return Arrangement(tiles, cores, kernels)


class Scratch:
    """Tiles for one worker, each allocated on first use and then reused."""

    def __init__(self, like: Tensor, dtype: torch.dtype, rows: int, columns: int) -> None:
        self._device, self._dtype = like.device, dtype
        self._size = rows * row_stride(columns, like.device)
        self._storage: dict[tuple[int, torch.dtype], Tensor] = {}

    def tile(self, number: int, rows: int, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return tile `number` [rows, columns] in `dtype`, by default the accumulation dtype."""
        dtype = self._dtype if dtype is None else dtype
        storage = self._storage.get((number, dtype))
        if storage is None:
            storage = torch.empty(self._size, dtype=dtype, device=self._device)
            self._storage[number, dtype] = storage
        return placed_tile(storage, 0, rows, columns)

    def tiles(self, count: int, rows: int, columns: int) -> list[Tensor]:
        return [self.tile(number, rows, columns) for number in range(count)]


def placed_tile(storage: Tensor, offset: int, rows: int, columns: int) -> Tensor:
    """Return the tile [rows, columns] that begins at element `offset`; its row stride is `row_stride`."""
    stride = row_stride(columns, storage.device)
    tile = storage[offset : offset + rows * stride].view(rows, stride)
    return tile if stride == columns else tile[:, :columns]


def laid_over(tile: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [R, W] in a dtype of at most the same size, in the memory of a tile, with its row starts."""
    return tile if tile.dtype == dtype else tile.view(dtype)[:, : tile.shape[1]]


# The position of a tile: its first row and its first column.
Place = tuple[int, int]


class TileMemory(Protocol):
    """Memory that holds tiles and outlives the forward loop."""

    def reserve(self, rows: slice, columns: slice) -> bool: ...

    def tile(self, rows: slice, columns: slice) -> Tensor | None: ...


class SavedLogits:
    """Tiles that the forward pass writes and the backward pass reads.

    `reserve` decides which tiles are saved before any is computed: threads finish in any order, and
    activation checkpointing pairs the tensors of a second forward pass with the places of the first. `memory`
    is filled first, then up to `allowed_bytes` of tensors that the autograd graph saves.
    """

    def __init__(
        self, like: Tensor, dtype: torch.dtype, memory: TileMemory | None = None, allowed_bytes: int = 0
    ) -> None:
        self.device, self.dtype, self.memory, self.left_bytes = like.device, dtype, memory, allowed_bytes
        self._tiles: dict[Place, Tensor] = {}

    def restore(self, places: Sequence[Place], tensors: Sequence[Tensor]) -> None:
        self._tiles = dict(zip(places, tensors, strict=True))

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(self._tiles)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The saved tiles, without those in `memory`."""
        return tuple(self._tiles.values())

    def reserve(self, tiles: Iterable[tuple[slice, slice]]) -> None:
        """Reserve memory for these tiles, in this order, as far as it suffices."""
        for rows, columns in tiles:
            if self.memory is not None and self.memory.reserve(rows, columns):
                continue
            size, width = rows.stop - rows.start, columns.stop - columns.start
            num_elements = size * row_stride(width, self.device)
            num_bytes = num_elements * self.dtype.itemsize
            if num_bytes <= self.left_bytes:
                self.left_bytes -= num_bytes
                storage = torch.empty(num_elements, dtype=self.dtype, device=self.device)
                self._tiles[rows.start, columns.start] = placed_tile(storage, 0, size, width)

    @property
    def is_read_once(self) -> bool:
        """Whether the backward pass may overwrite the tile that it reads, because it is not read again."""
        return isinstance(self.memory, ChunkBuffer) and not self._tiles

    def tile(self, rows: slice, columns: slice) -> Tensor | None:
        """Return the memory of a saved tile; None if the tile is not saved."""
        tile = self._tiles.get((rows.start, columns.start))
        if tile is None and self.memory is not None:
            return self.memory.tile(rows, columns)
        return tile


class LogitsInGradient:
    """The weight's gradient [V, D], whose memory holds logits until the gradient is written.

    The outer loop of the backward pass runs over vocabulary tiles. The first row chunk reads a tile of logits
    before it writes that tile's rows of the gradient, so the logits can be stored in those rows. A second
    backward pass recomputes them, with the same bits. Later chunks add to the gradient, so their logits
    cannot be stored here.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.gradient = torch.empty_like(weight, memory_format=torch.contiguous_format)
        self.dtype = dtype
        self._held: set[int] = set()

    @staticmethod
    def rows_that_fit(weight: Tensor, dtype: torch.dtype) -> int:
        """Return how many rows of logits fit: D, or half of it with 16-bit weights."""
        row_bytes = weight.shape[1] * weight.element_size()
        return row_bytes // dtype.itemsize if row_bytes % dtype.itemsize == 0 else 0

    def reserve(self, rows: slice, columns: slice) -> bool:
        if rows.start or rows.stop > self.rows_that_fit(self.gradient, self.dtype):
            return False
        width = columns.stop - columns.start
        available = width * self.gradient.shape[1] * self.gradient.element_size()
        if rows.stop * row_stride(width, self.gradient.device) * self.dtype.itemsize > available:
            return False
        self._held.add(columns.start)
        return True

    def tile(self, rows: slice, columns: slice) -> Tensor | None:
        if rows.start or columns.start not in self._held:
            return None
        size, width = rows.stop, columns.stop - columns.start
        rows_of_gradient = self.gradient[columns].view(-1).view(self.dtype)
        return placed_tile(rows_of_gradient, 0, size, width)


class ChunkBuffer:
    """A buffer for the logits of one chunk of rows over the whole local vocabulary, reused by all chunks."""

    def __init__(self, like: Tensor, dtype: torch.dtype, num_rows: int, num_columns: int) -> None:
        self.num_rows = num_rows
        num_elements = num_rows * row_stride(num_columns, like.device)
        self.logits = torch.empty(num_elements, dtype=dtype, device=like.device)

    def reserve(self, rows: slice, columns: slice) -> bool:
        return True

    def tile(self, rows: slice, columns: slice) -> Tensor:
        # Each tile is contiguous: rows of an [R, V] matrix would be a page or more apart.
        size, width = rows.stop - rows.start, columns.stop - columns.start
        offset = self.num_rows * columns.start + rows.start * row_stride(width, self.logits.device)
        return placed_tile(self.logits, offset, size, width)
