"""Symmetric products by panels equal the full product; what lies outside the diagonal blocks is mirrored."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leanstep.muon.products import _bounds, choose_panels, commuting_product, gram_matrix, quadratic


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.integers(1, 40), st.integers(1, 9), st.booleans())
def test_gram_matrix_by_panels(side, length, panels, tall):
    x = torch.randn(length, side).double() if tall else torch.randn(side, length).double()
    out = torch.empty(side, side, dtype=torch.float64)
    gram_matrix(x, out, tall=tall, panels=panels)
    torch.testing.assert_close(out, x.mT @ x if tall else x @ x.mT)
    if panels > 1 and side > 16 * panels:
        assert out[0, -1] == out[-1, 0]


@pytest.mark.parametrize("panels", [1, 2, 3, 6])
def test_quadratic_and_commuting_products(panels):
    x = torch.randn(50, 60, dtype=torch.float64) / 8
    gram = x @ x.mT
    out, other = torch.empty_like(gram), torch.empty_like(gram)
    quadratic(gram, out, 2.0, -1.5, 0.5, panels=panels)
    want = 2.0 * torch.eye(50, dtype=torch.float64) - 1.5 * gram + 0.5 * gram @ gram
    torch.testing.assert_close(out, want)
    commuting_product(out, gram, other, panels=panels)
    torch.testing.assert_close(other, want @ gram)
    if panels > 1:
        assert torch.equal(other[:16, 32:], other[32:, :16].mT) and torch.equal(
            out[:16, 32:], out[32:, :16].mT
        )


@given(st.integers(1, 2000), st.integers(1, 12))
def test_panels_cover_the_side_in_aligned_pieces_of_about_one_size(side, panels):
    bounds = _bounds(side, panels)
    assert bounds[0][0] == 0 and bounds[-1][1] == side
    assert all(a[1] == b[0] and b[0] % 16 == 0 for a, b in itertools.pairwise(bounds))
    assert all(abs((high - low) - side / panels) <= 16 or len(bounds) < panels for low, high in bounds)


def test_small_sides_and_accelerators_compute_all_of_it():
    assert choose_panels(255, torch.device("cpu")) == 1
    assert choose_panels(768, torch.device("cpu")) > 1
    assert choose_panels(768, torch.device("cuda")) == 1
