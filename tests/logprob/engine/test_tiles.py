"""Tile choice: within the budget, never larger than the problem, and equal to the specified formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leanstep.logprob.engine.gpu.gpu_tiles import product_time, units_of, waves
from leanstep.logprob.engine.tiles import (
    TILE_ELEMENT_BYTES,
    Tiles,
    checked_tile,
    choose_tiles,
    column_parts,
    default_budget,
    even_slices,
    tile_slices,
)

MIB = 1 << 20


@given(length=st.integers(0, 500), at_most=st.integers(1, 600))
def test_even_slices_cover_once_without_a_thin_rest(length, at_most):
    parts = list(even_slices(length, at_most))
    assert [i for p in parts for i in range(p.start, p.stop)] == list(range(length))
    sizes = [p.stop - p.start for p in parts]
    assert len(parts) == -(-length // at_most) and all(0 < s <= at_most for s in sizes)


@pytest.mark.parametrize("cores", [1, 2, 3, 8])
@pytest.mark.parametrize("columns", [0, 5, 401, 32_000, 50_257, 151_936])
def test_parts_of_the_vocabulary_are_even_and_made_of_whole_vectors(columns, cores):
    parts = column_parts(columns, 512, cores, "cpu")
    slices = [c for part in parts for c in part]
    assert [n for c in slices for n in range(c.start, c.stop)] == list(range(columns))
    assert all((c.stop - c.start) % 8 == 0 or c.stop == columns for c in slices)
    assert all(c.stop - c.start <= 512 for c in slices)
    if columns >= 8 * cores:
        sizes = [part[-1].stop - part[0].start for part in parts]
        assert len(sizes) == cores and max(sizes) - min(sizes) <= 8 * cores
    # A caller's own width is kept.
    assert column_parts(20, 7, 1, "cpu") == [even_slices(20, 7)]


@given(
    rows=st.integers(1, 300_000),
    vocab=st.integers(1, 300_000),
    width=st.integers(1, 8192),
    mib=st.integers(8, 1024),
    device=st.sampled_from(["cpu", "meta"]),
)
def test_within_budget_and_problem(rows, vocab, width, mib, device):
    tiles = choose_tiles(rows, vocab, width, budget=mib * MIB, device=device)
    assert 1 <= tiles.rows <= rows and 1 <= tiles.columns <= vocab
    assert TILE_ELEMENT_BYTES * tiles.rows * tiles.columns <= mib * MIB


def test_a_gpu_tile_is_tall_and_wide_enough_for_both_sums():
    tiles = choose_tiles(205280, 76032, 2560, budget=1024 * MIB, device="meta")
    assert 3072 <= tiles.columns <= 5120 and tiles.rows > 4 * tiles.columns and tiles.order == "vocab"


def test_a_small_gpu_tile_is_nearly_square_and_no_slower():
    rows, vocab, width, units = 205280, 76032, 2560, units_of("meta")
    tiles = choose_tiles(rows, vocab, width, budget=64 * MIB, device="meta")
    side = (64 * MIB // 10) ** 0.5
    assert all(0.5 * side < n < 2 * side and n % 128 == 0 for n in (tiles.rows, tiles.columns))
    square = int(side) // 128 * 128
    chosen, equal = (
        product_time((rows, c), (vocab, w), width, units, 10, True)
        for c, w in ((tiles.rows, tiles.columns), (square, square))
    )
    assert chosen <= equal


@pytest.mark.parametrize(("width", "columns"), [(2560, 4992), (4096, 4224)])
def test_the_weights_gradient_of_a_gpu_tile_fills_its_waves(width, columns):
    """All but the last tile have the chosen width; with even tiles, no product would fill its last wave."""
    tiles = choose_tiles(51_320, 76_032, width, device="meta", kernels=True)
    assert tiles.columns == columns
    blocks = columns // 128 * (width // 256)
    assert 0.98 < blocks / units_of("meta") / waves(columns, width, units_of("meta")) <= 1.0
    parts = tile_slices(76_032, columns, "meta")
    assert {part.stop - part.start for part in parts[:-1]} == {columns}
    assert parts[-1].stop - parts[-1].start >= 1024


def test_rounded_logits_leave_room_for_more_rows():
    sizes = [
        choose_tiles(51_320, 76_032, 2_560, device="meta", kernels=True, element_bytes=n).rows for n in (4, 2)
    ]
    assert sizes == [25_728, 51_320]


def test_few_rows_on_a_gpu_take_wide_tiles():
    tiles = choose_tiles(1000, 76032, 2560, budget=128 * MIB, device="meta")
    assert tiles.rows == 1000 and tiles.columns > 5120


def test_the_smaller_gradient_is_the_one_that_accumulates():
    assert choose_tiles(512, 32000, 1024).order == "vocab"
    assert choose_tiles(50000, 32000, 1024).order == "rows"


def test_a_cpu_tile_is_tall_and_fits_the_cache():
    tiles = choose_tiles(512, 32000, 1024)
    assert tiles.rows == 512
    assert TILE_ELEMENT_BYTES * tiles.rows * tiles.columns <= default_budget("cpu") == 6 * MIB


def test_own_tiles():
    assert checked_tile((5, 7), 3, 100) == Tiles(3, 7, "vocab")
    assert checked_tile(Tiles(5, 7, "rows"), 100, 4) == Tiles(5, 4, "rows")
    with pytest.raises(ValueError, match="tile"):
        checked_tile((5, -1), 3, 100)
    with pytest.raises(ValueError, match="budget"):
        choose_tiles(3, 3, 3, budget=0, device=torch.device("cpu"))


@pytest.mark.parametrize(("rows", "columns"), [(64, 4096), (512, 512), (700, 512), (1024, 512), (4096, 128)])
def test_tiles_for_kernels_fit_a_core_and_stay_wide_enough(rows, columns):
    tiles = choose_tiles(rows, 32000, 1024, kernels=True, max_rows=4096)
    assert (tiles.rows, tiles.columns) == (rows, columns)
    assert 4 * rows * columns <= 2 * MIB
    # A caller's budget holds whatever the shape.
    small = choose_tiles(rows, 32000, 1024, kernels=True, max_rows=4096, budget=MIB // 4)
    assert 4 * small.rows * small.columns <= MIB // 4
