"""A row's bits whatever rows are beside it: products of fixed shape, sums in a fixed order.

A library chooses how it multiplies by the number of rows, so a row's last bits depend on its company. What is
fixed here, whatever the rows, the threads, the tile and, for the statistics, the ranks:

- the vocabulary is cut into `PARTS` parts and these into tiles by its size alone; every part has statistics
  (and a hidden gradient) of its own, joined in the order of the parts;
- a product or an elementwise operation runs on one thread; operands begin at multiples of 64 bytes;
- the number of rows is filled up to whole blocks, so that no vector loop has a remainder.

What is left is the order in which a product of so many rows adds up, and that is tried: the first time a
height is met, one row (several, where a tile is narrow) is multiplied in all places of a product that high.
Where each gives the bits of place 0 in a product of `BLOCK` rows, the height is used as it is; where not,
products have `BLOCK` rows each; and where even their places differ, every row gets a block to itself, filled
with copies of it. So the bits are always those of place 0 in a block, whichever way was taken. Assumed of a
library, cuBLAS included: one shape is always added up in one order, whatever the numbers are.
"""

# R rows of a block · W columns of a tile · D model · V local vocabulary

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leanstep.cpu import has_memory, num_threads, one_thread_each
from leanstep.logprob.engine.lm_head import Head, product
from leanstep.logprob.engine.passes import NATIVE_LOGITS, kernels_for
from leanstep.logprob.engine.softmax import RowStatistics, merge
from leanstep.logprob.engine.tiles import Arrangement, Tiles, choose_cores, even_slices, on_gpu, row_stride
from leanstep.logprob.parallel import gather_over_ranks

# Rows of a block: twice what the longest vector loops take at a time, and no less than blocks of a GPU.
BLOCK = 128
# The number of rows is a multiple of this where products of any such height agree.
STEP = 64
# Parts of the whole vocabulary: shards of 2, 4, 8 and 16 ranks hold whole ones.
PARTS = 16
COLUMNS, GPU_COLUMNS = 512, 4096
COLUMN_STEP = 16
# Sums whose bits are compared before a shape of product is trusted.
TRIED_SUMS = 128


@dataclass(frozen=True)
class RowBlocks:
    """How the rows of an invariant call are laid out.

    Args:
        num_rows: of the caller.
        copies: places that a row has in its block; 1, or `BLOCK` where places differ.
        block_rows: rows of one product; 0: as many as a tile has.
        part_columns: of the whole vocabulary, one part.
        step: the number of places is a multiple of this.
    """

    num_rows: int
    copies: int
    block_rows: int
    part_columns: int
    step: int = STEP

    def places(self, device: torch.device) -> Tensor:
        """Which of the caller's rows lies at each place; those that fill a block up are copies of row 0."""
        rows = torch.arange(self.num_rows, device=device).repeat_interleave(self.copies)
        return torch.nn.functional.pad(rows, (0, -len(rows) % self.step))

    def picked(self, values: Tensor) -> Tensor:
        """The caller's rows among the places."""
        return values[: self.num_rows * self.copies : self.copies]

    def column_parts(self, columns: int, device: torch.device) -> list[list[slice]]:
        """The tiles of every part of the local columns."""
        return _column_parts(columns, self.part_columns, GPU_COLUMNS if on_gpu(device) else COLUMNS)


def _column_parts(columns: int, part: int, widest: int) -> list[list[slice]]:
    parts = []
    for first in range(0, columns, part):
        tiles = even_slices(min(part, columns - first), widest, COLUMN_STEP)
        parts.append([slice(first + tile.start, first + tile.stop) for tile in tiles])
    return parts or [[]]


def arrange_blocks(
    head: Head,
    hidden: Tensor,
    num_rows: int,
    *,
    ranks: int,
    budget: int | None,
    tile: Any,
    max_rows: int,
) -> tuple[RowBlocks, Arrangement]:
    """The blocks and the tiles of one call; `budget` and `tile` say how many rows a tile has, and no more."""
    device, width = hidden.device, hidden.shape[1]
    part = max(-(-head.weight.shape[0] * ranks // PARTS), COLUMNS)
    if ranks > 1 and head.weight.shape[0] % part:
        raise ValueError(
            f"tuning.invariant: expected shards of whole parts of {part} columns (the vocabulary in {PARTS} "
            f"equal parts), got {head.weight.shape[0]}"
        )
    kernels = kernels_for(hidden, head.dtype, NATIVE_LOGITS)
    rows = _most_rows(head, device, budget, tile, max_rows)

    def settled(copies: int, block_rows: int) -> tuple[RowBlocks, int]:
        step = BLOCK if block_rows or copies > 1 else _height_step(min(num_rows, rows), device)
        return RowBlocks(num_rows, copies, block_rows, part, step), max(rows // step, 1) * step

    blocks, tile_rows = settled(1, 0)
    parts = blocks.column_parts(head.columns, device)
    if num_rows and head.columns and has_memory(hidden):
        shapes = {tile.stop - tile.start for tiles in parts for tile in tiles}
        constants = (width, head.operand_dtype, head.dtype, device, kernels)
        padded = len(blocks.places(torch.device("cpu")))
        heights = {rows.stop - rows.start for rows in even_slices(padded, tile_rows, blocks.step)}
        with one_thread_each():
            if any(row_bits(BLOCK, columns, *constants) is None for columns in shapes):
                blocks, tile_rows = settled(BLOCK, BLOCK)
            elif not all(_agrees(rows, columns, constants) for columns in shapes for rows in heights):
                blocks, tile_rows = settled(1, BLOCK)
    head.block_rows = blocks.block_rows
    columns = max((tile.stop - tile.start for tiles in parts for tile in tiles), default=1)
    cores = min(choose_cores(num_rows, head.columns, width, device), num_threads())
    return blocks, Arrangement(Tiles(tile_rows, columns, "vocab"), cores, kernels)


def _most_rows(head: Head, device: torch.device, budget: int | None, tile: Any, max_rows: int) -> int:
    """Rows of a tile: the caller's, else what the budget has room for."""
    if isinstance(tile, Tiles):
        rows = tile.rows
    elif tile is not None and tile[0] is not None:
        rows = tile[0]
    elif budget is not None:
        widest = GPU_COLUMNS if on_gpu(device) else COLUMNS
        rows = budget // (widest * head.dtype.itemsize)
    else:
        rows = 1 << 15 if on_gpu(device) else max_rows
    if rows <= 0 and tile is not None:
        raise ValueError(f"tile: expected (rows, columns) > 0, got {rows} rows")
    return rows


def _height_step(rows: int, device: torch.device) -> int:
    """What the height of a tile is a multiple of.

    Each new height is tried. On a GPU that is a host sync, so there are eight heights per power of two only,
    at the price of at most an eighth more rows.
    """
    return max(1 << max(rows.bit_length() - 4, 0), STEP) if on_gpu(device) else STEP


def _agrees(rows: int, columns: int, constants: tuple[Any, ...]) -> bool:
    found, base = row_bits(rows, columns, *constants), row_bits(BLOCK, columns, *constants)
    return found is not None and base is not None and torch.equal(found, base)


@functools.lru_cache(maxsize=512)
def row_bits(
    rows: int,
    columns: int,
    width: int,
    operand: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Any,
) -> Tensor | None:
    """What made-up rows give in a tile of this shape: logits, their statistics, a hidden gradient.

    None where that depends on a row's place in the tile. Two orders of addition may round a few sums alike:
    there are as many rows as give `TRIED_SUMS` logits.
    """
    random = torch.Generator(device).manual_seed(columns)
    bits = [
        _one_row_bits(rows, columns, width, operand, dtype, device, kernels, random)
        for _ in range(-(-TRIED_SUMS // columns))
    ]
    return torch.cat(bits) if all(some is not None for some in bits) else None  # type: ignore[arg-type]


def _one_row_bits(
    rows: int,
    columns: int,
    width: int,
    operand: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Any,
    random: torch.Generator,
) -> Tensor | None:
    drawn = {"generator": random, "dtype": torch.float32, "device": device}
    weight = torch.randn(row_stride(columns, device), width, **drawn).to(operand)
    row = torch.randn(width, **drawn).to(operand) / width**0.5
    z = torch.empty(rows, len(weight), dtype=dtype, device=device)
    product(row.expand(rows, width).contiguous(), weight.t(), z)
    stats = RowStatistics.empty(rows, dtype=dtype, device=device, moment=True)
    # Kernels need no scratch.
    scratch = [] if kernels is not None else [torch.empty_like(z)[:, :columns] for _ in range(2)]
    stats.update_(z[:, :columns], scratch, kernels=kernels)
    du = z.to(operand)
    sums = torch.zeros(rows, width, dtype=dtype, device=device)
    product(du, weight, sums, accumulate=True)
    sums_of_rows = torch.stack([stats.max, stats.sum, stats.moment], 1)  # type: ignore[list-item]
    results = (z, sums_of_rows, sums)
    same = torch.stack([(part == part[:1]).all() for part in results]).all()
    return torch.cat([part[0] for part in results]) if bool(same) else None


def merged(found: list[RowStatistics], group: Any, parts_per_rank: int) -> RowStatistics:
    """The statistics of all parts, this rank's and the others', in the order of the vocabulary.

    Collectives: 1 with a group.
    """
    if group is not None:
        maxima = [part.maxima() for part in found]
        packed = torch.stack(
            [torch.cat([m, part.sums_under(m)]) for m, part in zip(maxima, found, strict=True)]
        )
        # A shard may end in padding: parts without columns add nothing.
        missing = packed.new_zeros((parts_per_rank - len(found), *packed.shape[1:]))
        missing[:, : len(maxima[0])] = -torch.inf
        everywhere = gather_over_ranks(torch.cat([packed, missing]), group).flatten(0, 1)
        found = [found[0].replaced(part[: len(maxima[0])], part[len(maxima[0]) :]) for part in everywhere]
    return functools.reduce(merge, found)
