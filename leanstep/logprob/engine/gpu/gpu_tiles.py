"""Tile sizes on a GPU whose matrix products keep all multiprocessors (units) of the device busy.

A product is split into blocks that the units process in waves: 260 blocks on 132 units take as long as 264,
and 270 take half as long again. The best size depends only on the shapes and the number of units, so that a
recomputation, a second run and another rank with the same device use the same tiles.
"""

# c rows of a chunk · w columns of a tile · T' selected rows · D model · V local vocabulary

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

# Sides of tiles are multiples of this, like the blocks of matrix products. A row of logits begins at a
# multiple of `ROW_ELEMENTS`, so that every operand is aligned to 16 bytes.
GPU_ALIGNMENT = 128
ROW_ELEMENTS = 8
# Bytes for the logits of whole rows that are stored until their gradient is computed.
GPU_CHUNK_BYTES = 1 << 30
# Minimum width of the last tile: in narrower ones, the launch cost would dominate the products.
LEAST_REST = 1024
# Blocks of a product, and the number of units if there is no device to query (an H100's).
BLOCK_ROWS, BLOCK_COLUMNS, UNITS = 128, 256, 132
# Times are counted in steps along a product's inner dimension k: one step multiplies one column of A with one
# row of B, in the blocks of all units at once. Bytes that an H100 moves per step (published rates), and the
# steps that launching a product takes (fitted, leanstep/rehearse).
BYTES_PER_K_STEP, START_K_STEPS = 35_000, 460
# Time that each additional MiB of memory must save: a third of a microsecond.
K_STEPS_PER_MIB = 30
# Rows and vocabulary are split into at most this many equal parts to find candidate sizes.
MOST_PARTS = 32


def gpu_chunk_rows(
    head_shape: tuple[int, int], like: Tensor, itemsize: int, budget: int | None = None
) -> int:
    """Return the number of rows whose logits [c, V] are stored together on a GPU; `head_shape` is (V, D).

    Between half of the rows that fit the budget and all of them: the number that fills the waves of the
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
    """Return rows and columns of tiles in vocabulary order, multiples of 128; the last tiles may be smaller.

    dW of a tile's columns is summed over its row chunks and written once; the hidden gradient is summed over
    tiles of columns. The products read and write both sums themselves, and thousands of k-steps hide that
    traffic. Of the sizes that fit, choose the one whose products take the least time, weighed against memory.

    Args:
        entry_bytes: bytes of a logit, and of the fp32 sums for a column of dW, which only several chunks
            need.
    """
    logit_bytes, sums_bytes = entry_bytes
    elements, step = max(budget // logit_bytes, 1), GPU_ALIGNMENT

    def tallest(columns: int) -> int:
        rows = elements // columns
        if rows < num_rows:
            rows = (budget - columns * sums_bytes) // (logit_bytes * columns)
        return even_size(num_rows, max(rows, 1))

    def price(columns: int) -> float:
        rows = tallest(columns)
        time = product_time((num_rows, rows), (vocab, columns), width, units, logit_bytes, bool(sums_bytes))
        return time + K_STEPS_PER_MIB * (logit_bytes * rows * columns >> 20)

    def fits(columns: int) -> bool:
        rest = (vocab - 1) % columns + 1
        return tallest(columns) >= min(step, num_rows) and rest >= min(LEAST_REST, vocab)

    # Widths whose dW fills its waves completely, widths that use up the budget, equal widths.
    row_blocks, parts = -(-width // BLOCK_COLUMNS), range(1, MOST_PARTS + 1)
    widths = {
        *(count * units // row_blocks * step for count in parts),
        *(elements // -(-num_rows // count) // step * step for count in parts),
        *(even_size(vocab, -(-vocab // count)) for count in parts),
    }
    fitting = [columns for columns in widths if 0 < columns <= vocab and fits(columns)]
    if fitting:
        columns = min(sorted(fitting), key=price)
        return tallest(columns), columns
    columns = max(math.isqrt(elements), elements // num_rows)
    multiple = step if columns >= step else ROW_ELEMENTS
    columns = min(max(round_down(columns, multiple), 1), vocab)
    return even_size(num_rows, max(elements // columns, 1)), even_size(vocab, columns)


def even_size(length: int, at_most: int) -> int:
    """Return the size of the first of the equal parts of `length`, a multiple of 128 if `at_most` allows."""
    if at_most >= length:
        return length
    at_most = round_down(at_most, GPU_ALIGNMENT)
    size = -(-length // -(-length // at_most))
    return size if at_most < GPU_ALIGNMENT else -(-size // GPU_ALIGNMENT) * GPU_ALIGNMENT


def round_down(value: int, multiple: int) -> int:
    return max(value // multiple * multiple, multiple if value >= multiple else value)


def waves(m: int, n: int, units: int) -> float:
    """Return how many waves of units the blocks of a product [m, n] take."""
    # Blocks may have either orientation.
    orientations = ((BLOCK_ROWS, BLOCK_COLUMNS), (BLOCK_COLUMNS, BLOCK_ROWS))
    blocks = min(-(-m // high) * -(-n // wide) for high, wide in orientations)
    # Many blocks average out; with few, units idle until the last block is done.
    return blocks / units + 0.5 if blocks > 4 * units else float(-(-blocks // units))


def product_time(
    rows: tuple[int, int],
    columns: tuple[int, int],
    width: int,
    units: int,
    logit_bytes: int,
    trained: bool,
) -> float:
    """Return the time of all products, two of them for logits, in k-steps of a product that fills all units.

    Args:
        rows, columns: the total number, and the largest number per tile.
        trained: whether there is a gradient of the weight.
    """

    def product(m: int, n: int, k: int, moved: int) -> float:
        steps = waves(m, n, units) * k
        transfer_steps = (moved + 2 * (m + n) * k) / BYTES_PER_K_STEP
        return (steps**3 + transfer_steps**3) ** (1 / 3) + START_K_STEPS

    whole = rows[0] <= rows[1]
    splits = [[(size, length // size), (length % size, 1)] for length, size in (rows, columns)]
    total = 0.0
    for c, count in splits[0]:
        for w, times in splits[1]:
            if c and w and count and times:
                time = 2 * product(c, w, width, logit_bytes * c * w) + product(c, width, w, 8 * c * width)
                if trained:
                    time += product(w, width, c, (2 if whole else 8) * w * width)
                total += count * times * time
    return total


def units_of(device: torch.device | str) -> int:
    """Return the number of multiprocessors of the device; an H100's if no device can be queried."""
    device = torch.device(device)
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(device).multi_processor_count
    return UNITS
