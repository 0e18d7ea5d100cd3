"""Products through NumPy's BLAS: the same numbers as torch's, only inside the block, fallbacks included."""

from __future__ import annotations

import pytest
import torch

from leanstep import blas
from leanstep.blas import multiply, one_thread_each


@pytest.fixture(params=["numpy", "torch"])
def products(request, monkeypatch):
    """Which BLAS multiplies inside the block, whatever the processor; says how often NumPy's did."""
    calls = []
    monkeypatch.setattr(blas, "_is_amd", lambda: request.param == "numpy")
    blas._sgemm.cache_clear()
    real = blas._sgemm()
    if request.param == "numpy" and real is None:
        pytest.skip("NumPy has no OpenBLAS here")
    counted = None if real is None else lambda *given: calls.append(given) or real(*given)
    monkeypatch.setattr(blas, "_sgemm", lambda: counted)
    yield calls
    monkeypatch.undo()
    blas._sgemm.cache_clear()


def matrices(rows, inner, columns, left, right):
    a, b = torch.randn(rows, inner), torch.randn(inner, columns)
    if left == "transposed":
        a = a.t().contiguous().t()
    if right == "transposed":
        b = b.t().contiguous().t()
    if left == "wide":
        a = torch.randn(rows, inner + 5)[:, :inner]
    return a, b


@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 300, 41), (64, 17, 1), (1, 33, 65)])
@pytest.mark.parametrize("left", ["plain", "transposed", "wide"])
@pytest.mark.parametrize("right", ["plain", "transposed"])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (0.5, 1.0), (-2.0, 0.25)])
def test_equals_the_product_in_double(shape, left, right, alpha, beta, products):
    a, b = matrices(*shape, left, right)
    out = torch.randn(a.shape[0], b.shape[1] + 3)[:, : b.shape[1]]
    expected = alpha * (a.double() @ b.double()) + beta * out.double()
    with one_thread_each():
        assert multiply(a, b, out, alpha=alpha, beta=beta) is out
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


def test_an_unread_result_may_hold_anything(products):
    a, b = torch.randn(5, 6), torch.randn(6, 7)
    out = torch.full((5, 7), torch.nan)
    with one_thread_each():
        multiply(a, b, out)
    torch.testing.assert_close(out, a @ b)


def test_the_block_decides_who_multiplies(products, request):
    a, b, out = torch.randn(5, 6), torch.randn(6, 7), torch.zeros(5, 7)
    multiply(a, b, out)
    assert products == []
    with one_thread_each():
        multiply(a, b, out)
        inside = len(products)
        # Doubles, columns with gaps and matrices without elements are torch's.
        multiply(a.double(), b.double(), out.double())
        multiply(torch.randn(5, 12)[:, ::2], b, out)
        multiply(a[:, :0], b[:0], out)
        multiply(a, b, torch.zeros(7, 5).t())
    assert len(products) == inside == int("numpy" in request.node.name)
    multiply(a, b, out)
    assert len(products) == inside


def test_columns_with_gaps_and_no_columns_give_torchs_numbers(products):
    wide, b = torch.randn(5, 12), torch.randn(6, 7)
    with one_thread_each():
        found = multiply(wide[:, ::2], b, torch.zeros(5, 7))
        nothing = multiply(wide[:, :0], b[:0], torch.ones(5, 7), beta=2.0)
    torch.testing.assert_close(found, wide[:, ::2] @ b)
    assert torch.equal(nothing, torch.full((5, 7), 2.0))


def blas_threads():
    """Of the library that NumPy brings; others may have been loaded since."""
    controller = blas._numpy_blas()
    return [] if controller is None else [pool["num_threads"] for pool in controller.info()]


def test_overlapping_blocks_give_the_threads_back():
    before = blas_threads()
    first, second = one_thread_each(), one_thread_each()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert set(blas_threads()) <= {1}
    second.__exit__(None, None, None)
    assert blas_threads() == before
