"""How large a tile of logits may be, and in which order the backward walks the tiles.

A tile is c rows by w vocabulary columns. Memory is the budget; speed wants tall tiles (each weight tile
and its gradient are then touched once) that stay in the last-level cache on a CPU, where elementwise
passes over a cached tile cost a tenth of the same passes over memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from leanstep.cpu import num_threads

# Logits and work area in fp32, and a 16-bit copy where the weight has 16 bits.
TILE_ELEMENT_BYTES = 10
# Logits and work area then fit a share of the last-level cache that other cores leave; larger is slower.
CPU_TILE_BYTES = 6 << 20
# With kernels a tile costs no vector operations to speak of, and its logits fit a core's own cache. Tall ones
# take twice that: products narrower than this lose more than the cache wins.
KERNEL_TILE_BYTES = 1 << 20
KERNEL_COLUMNS = 512
MAX_BUDGET_BYTES = 512 << 20
CPU_MAX_ROWS = 1024

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

    @property
    def tile_bytes(self) -> int:
        return TILE_ELEMENT_BYTES * self.rows * self.columns

    def row_slices(self, num_rows: int) -> Iterator[slice]:
        return even_slices(num_rows, self.rows)

    def column_slices(self, num_columns: int) -> Iterator[slice]:
        return even_slices(num_columns, self.columns)


def even_slices(length: int, at_most: int) -> Iterator[slice]:
    """Cut `length` into the fewest parts of at most `at_most`, all but equal: no thin remainder."""
    parts = -(-length // at_most)
    size = -(-length // parts) if parts else 1
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def default_budget(device: torch.device | str) -> int:
    """Bytes for tiles: cache-sized on a CPU, else at most 512 MiB and 2 % of the device's memory.

    Never a share of what is free: a recomputation, or a second run, must take the same tiles.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return CPU_TILE_BYTES
    if device.type == "cuda" and torch.cuda.is_available():
        return min(MAX_BUDGET_BYTES, torch.cuda.get_device_properties(device).total_memory // 50)
    return MAX_BUDGET_BYTES


def choose_cores(num_rows: int, vocab: int, width: int, device: torch.device | str = "cpu") -> int:
    """How many parts of the vocabulary to sweep side by side: all of torch's threads on a CPU, or 1."""
    threads = num_threads()
    if torch.device(device).type != "cpu" or num_rows * vocab * width < threads * MIN_CORE_PRODUCTS:
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
) -> Tiles:
    """The tile for `num_rows` x `vocab` logits from hidden rows of `width`, within `budget` bytes.

    On a CPU tiles are tall (up to `max_rows`) and as wide as the budget allows; with `kernels` for the passes
    they need no work area. Elsewhere whole vocabulary rows are taken while at least 256 of them fit, else
    vocabulary tiles of the problem's shape.
    """
    on_cpu, is_given = torch.device(device).type == "cpu", budget is not None
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
        columns = _round_down(elements // rows, narrowest)
        if columns < narrowest:
            columns = narrowest
            rows = max(min(rows, elements // columns), 1)
        return Tiles(rows, min(columns, vocab), order)
    rows = budget // (TILE_ELEMENT_BYTES * vocab + 6 * width)
    rows = _round_down(rows, 128 if rows >= 128 else 8)
    if rows >= min(256, num_rows):
        return Tiles(min(rows, num_rows), vocab, "rows")
    columns = 512 * round(math.sqrt(elements * vocab / num_rows) / 512)
    columns = min(max(columns, 2048), vocab)
    return Tiles(min(max(elements // columns, 1), num_rows), columns, order)


def checked_tile(tile: tuple[int, int] | Tiles, num_rows: int, vocab: int) -> Tiles:
    """A caller's own tile, clipped to the problem."""
    if isinstance(tile, Tiles):
        rows, columns, order = tile.rows, tile.columns, tile.order
    else:
        rows, columns = tile
        order = "vocab" if num_rows <= vocab else "rows"
    if rows <= 0 or columns <= 0:
        raise ValueError(f"tile: expected (rows, columns) > 0, got ({rows}, {columns})")
    return Tiles(min(rows, max(num_rows, 1)), min(columns, max(vocab, 1)), order)


def _round_down(value: int, multiple: int) -> int:
    return max(value // multiple * multiple, multiple if value >= multiple else value)
