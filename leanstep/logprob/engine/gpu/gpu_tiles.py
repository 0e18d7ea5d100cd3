"""Sides of a tile on a GPU: those whose matrix products keep all units of the device busy.

A product is cut into blocks, and the units take one block after the other: 260 blocks on 132 units take as
long as 264, and 270 half as long again. Which sides are best follows from the shapes and the number of units
alone, so that a recomputation, a second run and another rank of the same kind take the same tiles.
"""

# c rows of a chunk · w columns of a tile · T' selected rows · D model · V local vocabulary

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from leanstep.logprob.engine.tiles import GPU_ALIGNMENT, ROW_ELEMENTS, even_slices, round_down

# Logits of whole rows that wait for their gradient.
GPU_CHUNK_BYTES = 1 << 30
# The least side of a tile where there are more rows and columns: products over so many terms hide that they
# read and write their sums.
GPU_SIDE = 3072
# No last tile narrower than this: its products would be all start and end.
LEAST_REST = 1024
# Blocks of a product, and the units of a device that cannot be asked (an H100's).
BLOCK_ROWS, BLOCK_COLUMNS, UNITS = 128, 256, 132


def gpu_chunk_rows(
    head_shape: tuple[int, int], like: Tensor, itemsize: int, budget: int | None = None
) -> int:
    """Rows whose logits [c, V] wait for their gradient together on a GPU; `head_shape` is (V, D).

    At most as many as the budget has room for and at least half of them: as many as fill the waves of the
    hidden gradient's product [c, D] best.
    """
    columns, width = head_shape
    most = (GPU_CHUNK_BYTES if budget is None else budget) // max(columns * itemsize, 1)
    if most < 2 * GPU_ALIGNMENT:
        return max(most, 1)
    units = units_of(like.device)
    most = round_down(most, GPU_ALIGNMENT)
    return min(range(most, most // 2, -GPU_ALIGNMENT), key=lambda rows: waves(rows, width, units) / rows)


@functools.lru_cache(maxsize=256)
def gpu_tiles(
    num_rows: int, vocab: int, width: int, budget: int, entry_bytes: tuple[int, int], units: int
) -> tuple[int, int]:
    """Rows and columns of tiles in vocabulary order, multiples of 128.

    dW of a tile's columns is summed over its row chunks and written once; the hidden gradient is summed over
    tiles of columns. The products read and write both sums themselves, and over thousands of terms hide it.
    Of the sides that qualify, those whose products take the least time.

    Args:
        entry_bytes: of a logit, and of the fp32 sums for a column of dW, which only several chunks need.
    """
    logit_bytes, sums_bytes = entry_bytes
    elements, step = max(budget // logit_bytes, 1), GPU_ALIGNMENT

    def tallest(columns: int) -> int:
        rows = elements // columns
        if rows < num_rows:
            rows = max((budget - columns * sums_bytes) // (logit_bytes * columns), 1)
        return num_rows if num_rows <= rows else round_down(rows, step)

    fewest = min(num_rows, GPU_SIDE)
    widest = min(elements // fewest, -(-vocab // step) * step)

    def is_even(columns: int) -> bool:
        last = even_slices(vocab, columns, step)[-1]
        return last.stop - last.start >= min(LEAST_REST, vocab)

    widths = range(GPU_SIDE, widest + 1, step)
    fitting = [columns for columns in widths if tallest(columns) >= fewest and is_even(columns)]
    if fitting:

        def time(columns: int) -> float:
            sides = (num_rows, tallest(columns)), (vocab, columns)
            return product_time(*sides, width, units, bool(sums_bytes))

        columns = min(fitting, key=time)
        rows = tallest(columns)
    else:
        columns = max(math.isqrt(elements), elements // num_rows)
        multiple = step if columns >= step else ROW_ELEMENTS
        columns = min(max(round_down(columns, multiple), 1), vocab)
        rows = elements // columns
        rows = num_rows if num_rows <= rows else round_down(rows, step)
    columns = min(columns, vocab)
    sizes = [even_slices(*sides, step)[0].stop for sides in ((num_rows, rows), (vocab, columns))]
    return min(sizes[0], rows), min(sizes[1], columns)


def waves(m: int, n: int, units: int) -> float:
    """How often the units are filled by the blocks of a product [m, n]."""
    blocks = -(-m // BLOCK_ROWS) * -(-n // BLOCK_COLUMNS)
    # A long queue of blocks evens out; in a short one units wait for the last block.
    return blocks / units + 0.5 if blocks > 4 * units else float(-(-blocks // units))


def product_time(
    rows: tuple[int, int], columns: tuple[int, int], width: int, units: int, trained: bool
) -> float:
    """Of all products, two of them for logits, in waves of blocks times the terms that a block sums up.

    Args:
        rows, columns: how many there are, and how many a tile has at most.
        trained: whether there is a gradient of the weight.
    """
    sides = []
    for length, at_most in (rows, columns):
        parts = even_slices(length, at_most, GPU_ALIGNMENT)
        sides.append([(parts[0].stop, len(parts) - 1), (length - parts[-1].start, 1)])
    return sum(
        count * times * (2 * waves(c, w, units) * width + waves(c, width, units) * w)
        + (count * times * waves(w, width, units) * c if trained else 0.0)
        for c, count in sides[0]
        for w, times in sides[1]
    )


def units_of(device: torch.device | str) -> int:
    """Multiprocessors of the device; those of an H100 where no device is there to ask."""
    device = torch.device(device)
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(device).multi_processor_count
    return UNITS
