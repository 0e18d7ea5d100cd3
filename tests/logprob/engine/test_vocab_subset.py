"""Restricted softmax from hidden states: the dense and the sparse path against plain code."""

from __future__ import annotations

import pytest
import torch
from logprob.flat import linear_logprobs
from logprob.golden import ragged

from leanstep.logprob.reference import reference_linear_logprobs

T, D, V = 9, 6, 120
ROWS = torch.tensor([8, 2, 2, 5])
LISTS = [[3, 3, 100], [], [7, 1], [119, 0, 5]]


def setup(dtype=torch.float64):
    g = torch.Generator().manual_seed(6)
    hidden, weight = (torch.randn(n, D, generator=g, dtype=torch.float64).to(dtype) for n in (T, V))
    bias = torch.randn(V, generator=g, dtype=torch.float64).to(dtype)
    return hidden, weight, bias, torch.randint(0, V, (len(ROWS),), generator=g)


@pytest.mark.parametrize("path", ["sparse", "dense"])
@pytest.mark.parametrize("transform", [{}, {"softcap": 3.0, "scale": 0.5, "temperature": 0.7}])
def test_values_and_gradients(path, transform, monkeypatch):
    if path == "dense":
        monkeypatch.setattr("leanstep.logprob.linear.SPARSE_FRACTION", 0.0)
    given = [x.requires_grad_() for x in setup()[:3]]
    tokens, upstream = setup()[3], torch.randn(len(ROWS), dtype=torch.float64)
    expected, _ = reference_linear_logprobs(
        given[0], given[1], tokens, bias=given[2], rows=ROWS, allowed=LISTS, **transform
    )
    found = linear_logprobs(
        given[0], given[1], tokens, bias=given[2], rows=ROWS, allowed=ragged(LISTS), tile=(2, 50), **transform
    ).logp
    assert (type(found.grad_fn).__name__ == "_SparseBackward") == (path == "sparse")
    torch.testing.assert_close(found, expected)
    for a, b in zip(*(torch.autograd.grad(x, given, upstream) for x in (found, expected)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_entropy_ignores_the_restriction():
    hidden, weight, _, tokens = setup()
    plain = linear_logprobs(hidden, weight, tokens, rows=ROWS, entropy="metric")
    kept = linear_logprobs(hidden, weight, tokens, rows=ROWS, entropy="metric", allowed=ragged(LISTS))
    torch.testing.assert_close(kept.entropy, plain.entropy)
    assert (kept.logp > plain.logp).all()
    # The second row keeps nothing but its target.
    assert float(kept.logp[1]) == 0.0


def test_sparse_chunks_do_not_matter():
    hidden, weight, bias, tokens = setup()
    results = [
        linear_logprobs(hidden, weight, tokens, bias=bias, rows=ROWS, allowed=ragged(LISTS), budget=b).logp
        for b in (None, 1, 400)
    ]
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


def test_allowed_ids_excludes_what_has_no_single_meaning():
    hidden, weight, _, tokens = setup()
    with pytest.raises(ValueError, match="allowed: expected no outputs"):
        linear_logprobs(hidden, weight, tokens, rows=ROWS, allowed=ragged(LISTS), outputs=("lse",))
