"""Tiles of logits that a forward sweep leaves to the backward: each saves the backward one of its GEMMs.

Three places can hold them. Saved tensors, up to a byte allowance: freed with the graph, seen by
`saved_tensors_hooks` (offloading), never written to. The memory of the weight's gradient, allocated early:
[V, D] has room for [T', V] logits as long as T' <= D, and the backward would allocate it anyway. And a buffer
for one chunk of rows, when the backward of a chunk follows its forward.
"""

# R rows of a chunk · W columns of a tile · T' selected rows · D model · V local vocabulary

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

# Where a tile lies: its first row and its first column.
Place = tuple[int, int]


class Room(Protocol):
    """Memory that holds tiles and outlives the forward sweep."""

    def reserve(self, rows: slice, columns: slice) -> bool: ...

    def tile(self, rows: slice, columns: slice) -> Tensor | None: ...


class KeptLogits:
    """Tiles filled by the forward and read by the backward.

    `reserve` settles which tiles are kept before any is computed: threads finish in any order, and
    activation checkpointing pairs the tensors of a second forward with the places of the first. `room` is
    filled first, then up to `allowed_bytes` of tensors that the autograd graph saves.
    """

    def __init__(
        self, like: Tensor, dtype: torch.dtype, room: Room | None = None, allowed_bytes: int = 0
    ) -> None:
        self.device, self.dtype, self.room, self.left_bytes = like.device, dtype, room, allowed_bytes
        self._tiles: dict[Place, Tensor] = {}

    def restore(self, places: Sequence[Place], tensors: Sequence[Tensor]) -> None:
        self._tiles = dict(zip(places, tensors, strict=True))

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(self._tiles)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The saved tiles; those in `room` are not among them."""
        return tuple(self._tiles.values())

    def reserve(self, tiles: Iterable[tuple[slice, slice]]) -> None:
        """Make room for these tiles, in this order, as long as there is some."""
        for rows, columns in tiles:
            if self.room is not None and self.room.reserve(rows, columns):
                continue
            shape = (rows.stop - rows.start, columns.stop - columns.start)
            num_bytes = shape[0] * shape[1] * self.dtype.itemsize
            if num_bytes <= self.left_bytes:
                self.left_bytes -= num_bytes
                tile = torch.empty(shape, dtype=self.dtype, device=self.device)
                self._tiles[rows.start, columns.start] = tile

    def tile(self, rows: slice, columns: slice) -> Tensor | None:
        """The memory of a kept tile; None when there was no room for it."""
        found = self._tiles.get((rows.start, columns.start))
        if found is None and self.room is not None:
            return self.room.tile(rows, columns)
        return found


class LentGradient:
    """The weight's gradient [V, D], its memory lent to logits until the gradient is written.

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
        self._held.add(columns.start)
        return True

    def tile(self, rows: slice, columns: slice) -> Tensor | None:
        if rows.start or columns.start not in self._held:
            return None
        size, width = rows.stop, columns.stop - columns.start
        lent = self.gradient[columns].view(-1).view(self.dtype)
        return lent[: size * width].view(size, width)


class ChunkBuffer:
    """Room for the logits of one chunk of rows over the whole local vocabulary, used again by the next."""

    def __init__(self, like: Tensor, dtype: torch.dtype, num_rows: int, num_columns: int) -> None:
        self.num_rows = num_rows
        self.logits = torch.empty(num_rows * num_columns, dtype=dtype, device=like.device)

    def reserve(self, rows: slice, columns: slice) -> bool:
        return True

    def tile(self, rows: slice, columns: slice) -> Tensor:
        # Tile after tile, each contiguous: rows of an [R, V] matrix would lie a page or more apart.
        size, width = rows.stop - rows.start, columns.stop - columns.start
        offset = self.num_rows * columns.start + rows.start * width
        return self.logits[offset : offset + size * width].view(size, width)


def checked_allowance(logit_bytes: int) -> int:
    if isinstance(logit_bytes, bool) or not isinstance(logit_bytes, int) or logit_bytes < 0:
        raise ValueError(f"logit_bytes: expected a whole number of bytes >= 0, got {logit_bytes!r}")
    return logit_bytes
