"""Tiles of logits that a forward sweep leaves to the backward: each saves the backward one of its GEMMs.

Two places can hold them. Saved tensors, up to a byte allowance: freed with the graph, seen by
`saved_tensors_hooks` (offloading), never written to. And the memory of the weight's gradient, allocated
early: [V, D] has room for [T', V] logits as long as T' <= D, and the backward would allocate it anyway. Those
logits are overwritten by the gradient, so a second backward recomputes them: the same bits.
"""

# R rows of a chunk · W columns of a tile · T' selected rows · D model · V local vocabulary

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

# Where a tile lies: its first row and its first column.
Place = tuple[int, int]

ALIGNMENT_BYTES = 64


class KeptLogits:
    """Filled by the forward with `new_tile`, in the order of its walk; read by the backward with `tile`."""

    def __init__(self, allowed_bytes: int = 0, lent: LentGradient | None = None) -> None:
        self.left_bytes, self.lent = allowed_bytes, lent
        self._tiles: dict[Place, Tensor] = {}
        self._lock = threading.Lock()

    @classmethod
    def restored(
        cls, places: Sequence[Place], tensors: Sequence[Tensor], lent: LentGradient | None
    ) -> KeptLogits:
        kept = cls(0, lent)
        kept._tiles = dict(zip(places, tensors, strict=True))
        return kept

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(self._tiles)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The saved tiles; those in the lent gradient are not among them."""
        return tuple(self._tiles.values())

    def new_tile(self, rows: slice, columns: slice, like: Tensor) -> Tensor | None:
        """A tile to be filled, shaped as `like` [R, W]; None when there is no room for it."""
        if self.lent is not None:
            tile = self.lent.new_tile(rows, columns, like)
            if tile is not None:
                return tile
        num_bytes = like.numel() * like.element_size()
        with self._lock:
            if num_bytes > self.left_bytes:
                return None
            self.left_bytes -= num_bytes
        tile = torch.empty_like(like)
        self._tiles[rows.start, columns.start] = tile
        return tile

    def tile(self, rows: slice, columns: slice) -> Tensor | None:
        found = self._tiles.get((rows.start, columns.start))
        if found is None and self.lent is not None:
            return self.lent.tile(rows, columns)
        return found


class LentGradient:
    """The weight's gradient [V, D], its memory lent to logits until the gradient is written.

    The backward walks vocabulary tiles outermost and writes the rows of the gradient that belong to one tile
    while it reads that tile's logits. One row chunk: they are read before the write, and may lie in those
    very rows. Several: they lie in the rows of the next tile, and the last tile finds no room.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype, num_columns: int, single_chunk: bool) -> None:
        self.gradient = torch.empty_like(weight, memory_format=torch.contiguous_format)
        self.dtype, self.num_columns, self.single_chunk = dtype, num_columns, single_chunk
        self._offsets: dict[Place, int] = {}
        self._ends: dict[int, int] = {}

    @staticmethod
    def possible(weight: Tensor, dtype: torch.dtype) -> bool:
        """Whether a row of the gradient is a whole number of logits long."""
        return weight.shape[1] * weight.element_size() % dtype.itemsize == 0

    def new_tile(self, rows: slice, columns: slice, like: Tensor) -> Tensor | None:
        row_elements = self.gradient.shape[1] * self.gradient.element_size() // self.dtype.itemsize
        first = columns.start if self.single_chunk else columns.stop
        # Tiles are equally wide, but for the last.
        last = min(first + like.shape[1], self.num_columns)
        step = ALIGNMENT_BYTES // self.dtype.itemsize
        end = self._ends[columns.start] if columns.start in self._ends else first * row_elements
        offset = -(-end // step) * step
        if offset + like.numel() > last * row_elements:
            return None
        self._ends[columns.start] = offset + like.numel()
        self._offsets[rows.start, columns.start] = offset
        return self.tile(rows, columns)

    def tile(self, rows: slice, columns: slice) -> Tensor | None:
        offset = self._offsets.get((rows.start, columns.start))
        if offset is None:
            return None
        size, width = rows.stop - rows.start, columns.stop - columns.start
        return self.gradient.view(-1).view(self.dtype)[offset : offset + size * width].view(size, width)


def checked_allowance(logit_bytes: int) -> int:
    if isinstance(logit_bytes, bool) or not isinstance(logit_bytes, int) or logit_bytes < 0:
        raise ValueError(f"logit_bytes: expected a whole number of bytes >= 0, got {logit_bytes!r}")
    return logit_bytes
