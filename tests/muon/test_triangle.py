"""SYRK through NumPy: the same product, only where torch and NumPy both work with one thread per job."""

from __future__ import annotations

import pytest
import torch

from leanstep.blas import one_thread_each
from leanstep.muon.products import gram_matrix, quadratic
from leanstep.muon.triangle import can_square, square_into

from ..test_blas import blas_threads


@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(41, 401), (300, 300), (401, 41)])
def test_square_equals_the_full_product(shape, dtype, tall):
    x = torch.randn(shape, dtype=dtype)
    expected = x.double().T @ x.double() if tall else x.double() @ x.double().T
    out = torch.empty(expected.shape, dtype=dtype)
    assert square_into(x, out, tall=tall) is out
    assert torch.equal(out, out.T)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=4e-4 if dtype == torch.float32 else 1e-11)


def test_products_use_it_only_inside_the_block():
    x, before = torch.randn(300, 320) / 18, blas_threads()
    panels = gram_matrix(x, torch.empty(300, 300), panels=4)
    poly = quadratic(panels, torch.empty(300, 300), 3.0, -2.0, 0.5, panels=4)
    assert not can_square(x)
    with one_thread_each():
        assert can_square(x) == bool(before)
        assert not can_square(x.bfloat16()) and not can_square(x[None])
        assert set(blas_threads()) <= {1}
        torch.testing.assert_close(
            gram_matrix(x, torch.empty(300, 300), panels=4), panels, rtol=1e-4, atol=1e-5
        )
        triangle = quadratic(panels, torch.empty(300, 300), 3.0, -2.0, 0.5, panels=4)
        torch.testing.assert_close(triangle, poly, rtol=1e-4, atol=1e-5)
    assert not can_square(x) and blas_threads() == before


def test_threads_come_back_after_an_error():
    before = blas_threads()
    with pytest.raises(ValueError), one_thread_each():
        raise ValueError("broken matrix")
    assert blas_threads() == before and not can_square(torch.zeros(300, 300))
