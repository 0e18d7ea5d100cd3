"""Batch-invariant results: a row's bits do not depend on the other rows.

A BLAS library chooses its algorithm by the number of rows, so the last bits of a row depend on the rest of
the batch. The following is fixed here, independent of the rows, the threads, the tile and, for the
statistics, the ranks:

- the vocabulary is split into `PARTS` parts, and these into tiles, by its size alone; every part has its own
  statistics (and hidden gradient), which are joined in the order of the parts;
- a product or an elementwise operation runs on one thread; operands begin at multiples of 64 bytes;
- the number of rows is padded to whole blocks, so that no vector loop has a remainder.

What remains is the summation order within a product of a given height (number of rows), which is tested: when
a height occurs for the first time, one row (several, if a tile is narrow) is multiplied at every position of
a product of that height. If each position gives the bits of position 0 in a product of `BLOCK` rows, the
height is used as it is. If not, products have `BLOCK` rows each. If even their positions differ, every row
gets its own block, filled with copies of it. So the bits are always those of position 0 in a block. This
assumes that a library, including cuBLAS, sums one shape always in the same order, independent of the values.
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

# Rows of a block: twice the step of the longest vector loops, and at least the blocks of a GPU.
BLOCK = 128
# If products of any such height agree, the number of rows is a multiple of this.
STEP = 64
# Parts of the whole vocabulary: the shards of 2, 4, 8 and 16 ranks hold whole parts.
PARTS = 16
COLUMNS, GPU_COLUMNS = 512, 4096
COLUMN_STEP = 16
# Number of sums whose bits are compared before the shape of a product is trusted.
TRIED_SUMS = 128


@dataclass(frozen=True)
class RowBlocks:
    """How the rows of an invariant call are laid out.

    Args:
        num_rows: number of the caller's rows.
        copies: copies of each row in its block; 1, or `BLOCK` if positions differ.
        block_rows: rows of one product; 0: all rows of a tile.
        part_columns: columns of one part of the whole vocabulary.
        step: the number of positions is a multiple of this.
    """

    num_rows: int
    copies: int
    block_rows: int
    part_columns: int
    step: int = STEP

    def places(self, device: torch.device) -> Tensor:
        """Return the caller's row at each position; rows that pad a block are copies of row 0."""
        rows = torch.arange(self.num_rows, device=device).repeat_interleave(self.copies)
        return torch.nn.functional.pad(rows, (0, -len(rows) % self.step))

    def picked(self, values: Tensor) -> Tensor:
        """Select the caller's rows from the positions."""
        return values[: self.num_rows * self.copies : self.copies]

    def column_parts(self, columns: int, device: torch.device) -> list[list[slice]]:
        """Return the tiles of every part of the local columns."""
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
    """Choose the blocks and the tiles of one call; `budget` and `tile` only set the rows of a tile."""
    device, width = hidden.device, hidden.shape[1]
    part = max(-(-head.weight.shape[0] * ranks // PARTS), COLUMNS)
    if ranks > 1 and head.weight.shape[0] % part:
        raise ValueError(
            f"tuning.invariant: expected shards of whole parts of {part} columns (the vocabulary split into "
            f"{PARTS} equal parts), got {head.weight.shape[0]}"
        )
    kernels = kernels_for(hidden, head.dtype, NATIVE_LOGITS)
    rows = _most_rows(head, device, budget, tile, max_rows)

    def layout(copies: int, block_rows: int) -> tuple[RowBlocks, int]:
        step = BLOCK if block_rows or copies > 1 else _height_step(min(num_rows, rows), device)
        return RowBlocks(num_rows, copies, block_rows, part, step), max(rows // step, 1) * step

    blocks, tile_rows = layout(1, 0)
    parts = blocks.column_parts(head.columns, device)
    if num_rows and head.columns and has_memory(hidden):
        shapes = {tile.stop - tile.start for tiles in parts for tile in tiles}
        constants = (width, head.operand_dtype, head.dtype, device, kernels)
        padded = len(blocks.places(torch.device("cpu")))
        heights = {rows.stop - rows.start for rows in even_slices(padded, tile_rows, blocks.step)}
        with one_thread_each():
            if any(row_bits(BLOCK, columns, *constants) is None for columns in shapes):
                blocks, tile_rows = layout(BLOCK, BLOCK)
            elif not all(_agrees(rows, columns, constants) for columns in shapes for rows in heights):
                blocks, tile_rows = layout(1, BLOCK)
    head.block_rows = blocks.block_rows
    columns = max((tile.stop - tile.start for tiles in parts for tile in tiles), default=1)
    cores = min(choose_cores(num_rows, head.columns, width, device), num_threads())
    return blocks, Arrangement(Tiles(tile_rows, columns, "vocab"), cores, kernels)


def _most_rows(head: Head, device: torch.device, budget: int | None, tile: Any, max_rows: int) -> int:
    """Return the rows of a tile: the caller's choice, otherwise as many as fit the budget."""
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
    """Return the step of the tile heights.

    Each new height is tested, which is a host sync on a GPU. So there are only eight heights per power of two
    there, which costs at most an eighth more rows.
    """
    return max(1 << max(rows.bit_length() - 4, 0), STEP) if on_gpu(device) else STEP


def _agrees(rows: int, columns: int, constants: tuple[Any, ...]) -> bool:
    bits, base = row_bits(rows, columns, *constants), row_bits(BLOCK, columns, *constants)
    return bits is not None and base is not None and torch.equal(bits, base)


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
    """Return the results of random rows in a tile of this shape: logits, their statistics, a hidden gradient.

    Returns None if they depend on a row's position in the tile. Two summation orders may round a few sums
    alike, so there are enough rows for `TRIED_SUMS` logits.
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


def merged(parts: list[RowStatistics], group: Any, parts_per_rank: int) -> RowStatistics:
    """Merge the statistics of all parts on all ranks in the order of the vocabulary.

    Collectives: 1 with a group.
    """
    if group is not None:
        maxima = [part.maxima() for part in parts]
        packed = torch.stack(
            [torch.cat([m, part.sums_under(m)]) for m, part in zip(maxima, parts, strict=True)]
        )
        # A shard may end in padding: parts without columns add nothing.
        missing = packed.new_zeros((parts_per_rank - len(parts), *packed.shape[1:]))
        missing[:, : len(maxima[0])] = -torch.inf
        all_packed = gather_over_ranks(torch.cat([packed, missing]), group).flatten(0, 1)
        parts = [parts[0].replaced(part[: len(maxima[0])], part[len(maxima[0]) :]) for part in all_packed]
    return functools.reduce(merge, parts)
