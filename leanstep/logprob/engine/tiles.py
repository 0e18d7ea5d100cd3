"""Tiles of logits: how large, in which order, on how many cores, and where some wait for the backward.

A tile is c rows by w vocabulary columns. Memory is the budget; speed wants tall tiles (each weight tile and
its gradient are then touched once) that stay in a cache on a CPU and fill the matrix units of a GPU.
`arrange` is the one place where a call's tiles are chosen, and nothing in it depends on timing or free
memory: a recomputation takes the same tiles.

A saved tile spares the backward one of its GEMMs. Three places can hold it. Saved tensors, up to a byte
allowance: freed with the graph, seen by `saved_tensors_hooks` (offloading), never written to. The memory of
the weight's gradient, allocated early: [V, D] has room for [T', V] logits as long as T' <= D, and the
backward would allocate it anyway. And a buffer for one chunk of rows, when the backward of a chunk follows
its forward.
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

# Types of device that `on_gpu` takes for a CPU. Without any, CPU tensors take a GPU's tiles: tests do that.
CPU_TYPES = ("cpu",)
# Logits and work area in fp32, and a 16-bit copy where the weight has 16 bits.
TILE_ELEMENT_BYTES = 10
# Logits and work area then fit a share of the last-level cache that other cores leave; larger is slower.
CPU_TILE_BYTES = 6 << 20
# With kernels a tile costs no vector operations to speak of, and its logits fit a core's own cache. Tall ones
# take twice that: products narrower than this lose more than the cache wins.
KERNEL_TILE_BYTES = 1 << 20
KERNEL_COLUMNS = 512
CPU_MAX_ROWS = 1024

# On a GPU a fixed number of bytes, whatever is free: bits must not depend on it. A logit in fp32 has its
# gradient in 16 bits written over it.
GPU_TILE_BYTES = 544 << 20
GPU_ELEMENT_BYTES = 4

# Tiles side by side pay from this many multiply-adds per core on, and while the hidden gradients of the other
# parts of the vocabulary stay small.
MIN_CORE_PRODUCTS = 1 << 28
MAX_CORE_BYTES = 64 << 20


@dataclass(frozen=True)
class Tiles:
    """`rows` x `columns` per tile; `order` names the outer loop of the backward.

    "vocab": each weight tile is visited once, gradients of all hidden rows accumulate (T' D).
    "rows": each row chunk is visited once, the gradient of the whole weight accumulates (V D).
    """

    rows: int
    columns: int
    order: Literal["rows", "vocab"] = "vocab"


def on_gpu(device: torch.device | str) -> bool:
    """Whether a call takes the tiles and products of a GPU: on everything that is not a CPU."""
    return torch.device(device).type not in CPU_TYPES


def even_slices(length: int, at_most: int, multiple: int = 1) -> list[slice]:
    """Cut `length` into the fewest parts of at most `at_most`, all but equal: no thin remainder.

    Where `at_most` is a multiple of `multiple`, so are all parts but the last.
    """
    parts = -(-length // at_most)
    size = -(-length // parts) if parts else 1
    if at_most % multiple == 0:
        size = -(-size // multiple) * multiple
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def tile_slices(length: int, size: int, device: torch.device | str, multiple: int = 1) -> list[slice]:
    """Sides of tiles: equal on a CPU; a GPU's sizes are chosen to fill its units, and stay as they are."""
    if on_gpu(device):
        return [slice(start, min(start + size, length)) for start in range(0, length, size)]
    return even_slices(length, size, multiple)


def column_parts(columns: int, widest: int, cores: int, device: torch.device | str) -> list[list[slice]]:
    """Column slices of at most `widest`, one list for each core's part of the vocabulary, all but equal.

    Sides are whole vectors: of 508 columns a CPU makes logits a twelfth slower than of 504 or 512.
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
    """Elements from one row of a tile to the next: on a GPU rows are padded, and 50,257 columns aligned."""
    return -(-columns // ROW_ELEMENTS) * ROW_ELEMENTS if on_gpu(device) else columns


def default_budget(device: torch.device | str) -> int:
    """Bytes for tiles: cache-sized on a CPU, else 544 MiB.

    Never a share of what is free: a recomputation, or a second run, must take the same tiles.
    """
    return GPU_TILE_BYTES if on_gpu(device) else CPU_TILE_BYTES


def choose_cores(num_rows: int, vocab: int, width: int, device: torch.device | str = "cpu") -> int:
    """How many parts of the vocabulary run side by side: all of torch's threads on a CPU, or 1."""
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
    """The tile for `num_rows` x `vocab` logits from hidden rows of `width`, within `budget` bytes.

    On a CPU tiles are tall (up to `max_rows`) and as wide as the budget allows; with `kernels` for the passes
    they need no work area. On a GPU they are as large as the budget allows, `element_bytes` a logit and fp32
    sums for the gradient of a `trained` weight's rows, in the order "vocab".
    """
    on_cpu, is_given = not on_gpu(device), budget is not None
    if budget is None:
        budget = KERNEL_TILE_BYTES if on_cpu and kernels else default_budget(device)
    if budget <= 0:
        raise ValueError(f"budget: expected a positive number of bytes, got {budget}")
    num_rows, vocab = max(num_rows, 1), max(vocab, 1)
    # The smaller accumulator wins: T' D for "vocab", V D for "rows".
    order: Literal["rows", "vocab"] = "vocab" if num_rows <= vocab else "rows"
    elements = max(budget // (4 if on_cpu and kernels else TILE_ELEMENT_BYTES), 1)
    if on_cpu:
        narrowest = 128 if kernels else 512
        rows = min(num_rows, max_rows)
        if kernels and not is_given:
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
    """A caller's own tile, clipped to the problem; None stands for all rows or all columns."""
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
    """How a call runs: its tile, how many parts of the vocabulary run side by side, and the passes."""

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
    """Choose the tile, the cores and the passes of one call: here, and nowhere else.

    Args:
        kernels: from `kernels_for`.
        budget: bytes for the tiles of all cores; None gives every core the default.
        tile: the caller's own, on one core.
        max_rows: the tallest tile on a CPU.
        chunk_rows: rows that are in the loop at a time, where that is not all of them.
        cores: None for as many as pay; 0 where each tile sees more than the two passes (top-k, KL, a
            vocabulary subset): one core, and tiles with room for torch's own passes.
        element_bytes: of a logit and its gradient in a GPU's tile; trained: whether the weight gets one.
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
    """Tiles for one worker, each allocated when it is first asked for and then used again."""

    def __init__(self, like: Tensor, dtype: torch.dtype, rows: int, columns: int) -> None:
        self._device, self._dtype = like.device, dtype
        self._size = rows * row_stride(columns, like.device)
        self._storage: dict[tuple[int, torch.dtype], Tensor] = {}

    def tile(self, number: int, rows: int, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        """Tile `number` [rows, columns], in the accumulation dtype or one of its own."""
        dtype = self._dtype if dtype is None else dtype
        storage = self._storage.get((number, dtype))
        if storage is None:
            storage = torch.empty(self._size, dtype=dtype, device=self._device)
            self._storage[number, dtype] = storage
        return placed_tile(storage, 0, rows, columns)

    def tiles(self, count: int, rows: int, columns: int) -> list[Tensor]:
        return [self.tile(number, rows, columns) for number in range(count)]


def placed_tile(storage: Tensor, offset: int, rows: int, columns: int) -> Tensor:
    """The tile [rows, columns] that begins at element `offset`; its rows are `row_stride` apart."""
    stride = row_stride(columns, storage.device)
    tile = storage[offset : offset + rows * stride].view(rows, stride)
    return tile if stride == columns else tile[:, :columns]


def laid_over(tile: Tensor, dtype: torch.dtype) -> Tensor:
    """[R, W] in a dtype that is no wider, in the memory of a tile [R, W]; rows begin where the tile's do."""
    return tile if tile.dtype == dtype else tile.view(dtype)[:, : tile.shape[1]]


# Where a tile lies: its first row and its first column.
Place = tuple[int, int]


class TileMemory(Protocol):
    """Memory that holds tiles and outlives the forward loop."""

    def reserve(self, rows: slice, columns: slice) -> bool: ...

    def tile(self, rows: slice, columns: slice) -> Tensor | None: ...


class SavedLogits:
    """Tiles filled by the forward and read by the backward.

    `reserve` settles which tiles are kept before any is computed: threads finish in any order, and
    activation checkpointing pairs the tensors of a second forward with the places of the first. `memory` is
    filled first, then up to `allowed_bytes` of tensors that the autograd graph saves.
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
        """The saved tiles; those in `memory` are not among them."""
        return tuple(self._tiles.values())

    def reserve(self, tiles: Iterable[tuple[slice, slice]]) -> None:
        """Make room for these tiles, in this order, as long as there is some."""
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
        """Whether a tile may be overwritten by the backward that reads it: nobody reads it again."""
        return isinstance(self.memory, ChunkBuffer) and not self._tiles

    def tile(self, rows: slice, columns: slice) -> Tensor | None:
        """The memory of a kept tile; None when there was no room for it."""
        found = self._tiles.get((rows.start, columns.start))
        if found is None and self.memory is not None:
            return self.memory.tile(rows, columns)
        return found


class LogitsInGradient:
    """The weight's gradient [V, D], whose memory holds logits until the gradient is written.

    The backward walks vocabulary tiles outermost. Its first row chunk reads a tile of logits before it writes
    that tile's rows of the gradient, so the logits may lie in those very rows; a second backward, which finds
    them overwritten, recomputes: the same bits. Later chunks add to the gradient and cannot be kept here.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.gradient = torch.empty_like(weight, memory_format=torch.contiguous_format)
        self.dtype = dtype
        self._held: set[int] = set()

    @staticmethod
    def rows_that_fit(weight: Tensor, dtype: torch.dtype) -> int:
        """How many rows of logits every column has room for: D, or half of it under 16-bit weights."""
        row_bytes = weight.shape[1] * weight.element_size()
        return row_bytes // dtype.itemsize if row_bytes % dtype.itemsize == 0 else 0

    def reserve(self, rows: slice, columns: slice) -> bool:
        if rows.start or rows.stop > self.rows_that_fit(self.gradient, self.dtype):
            return False
        width = columns.stop - columns.start
        room = width * self.gradient.shape[1] * self.gradient.element_size()
        if rows.stop * row_stride(width, self.gradient.device) * self.dtype.itemsize > room:
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
    """Room for the logits of one chunk of rows over the whole local vocabulary, used again by the next."""

    def __init__(self, like: Tensor, dtype: torch.dtype, num_rows: int, num_columns: int) -> None:
        self.num_rows = num_rows
        num_elements = num_rows * row_stride(num_columns, like.device)
        self.logits = torch.empty(num_elements, dtype=dtype, device=like.device)

    def reserve(self, rows: slice, columns: slice) -> bool:
        return True

    def tile(self, rows: slice, columns: slice) -> Tensor:
        # Tile after tile, each contiguous: rows of an [R, V] matrix would lie a page or more apart.
        size, width = rows.stop - rows.start, columns.stop - columns.start
        offset = self.num_rows * columns.start + rows.start * row_stride(width, self.logits.device)
        return placed_tile(self.logits, offset, size, width)
