"""Restricted softmax from hidden states: the dense and the sparse path against plain code."""

from __future__ import annotations

import pytest
import torch
from logprob.flat import linear_logprobs
from logprob.golden import ragged

from leanstep.logprob import Allowed
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
@pytest.mark.parametrize("whole_entropy", [False, True])
@pytest.mark.parametrize("transform", [{}, {"softcap": 3.0, "scale": 0.5, "temperature": 0.7}])
def test_values_and_gradients(path, transform, whole_entropy, monkeypatch):
    if path == "dense":
        monkeypatch.setattr("leanstep.logprob.linear.SPARSE_FRACTION", 0.0)
    inputs = [x.requires_grad_() for x in setup()[:3]]
    tokens, upstream = setup()[3], torch.randn(2, len(ROWS), dtype=torch.float64)
    transform = {"bias": inputs[2], "rows": ROWS, **transform}
    expected = reference_linear_logprobs(
        inputs[0], inputs[1], tokens, allowed=LISTS, whole_entropy=whole_entropy, **transform
    )
    sets = Allowed(*ragged(LISTS), whole_entropy=whole_entropy)
    # The entropy of the whole vocabulary needs all columns.
    for entropy, is_sparse in (("none", path == "sparse"), ("grad", path == "sparse" and not whole_entropy)):
        actual = linear_logprobs(
            inputs[0], inputs[1], tokens, entropy=entropy, allowed=sets, tile=(2, 50), **transform
        )
        assert (type(actual.logp.grad_fn).__name__ == "_SparseBackward") == is_sparse
        outputs = 1 if entropy == "none" else 2
        for roots in {(0,), (outputs - 1,), tuple(range(outputs))}:
            grads = [
                torch.autograd.grad(
                    [x[i] for i in roots], inputs, list(upstream[list(roots)]), retain_graph=True
                )
                for x in (actual, expected)
            ]
            for a, b in zip(*grads, strict=True):
                torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(actual[:outputs], expected[:outputs])


def test_whole_entropy_is_the_unrestricted_one():
    hidden, weight, _, tokens = setup()
    plain = linear_logprobs(hidden, weight, tokens, rows=ROWS, entropy="metric")
    sets = Allowed(*ragged(LISTS))
    restricted = linear_logprobs(hidden, weight, tokens, rows=ROWS, entropy="metric", allowed=sets)
    torch.testing.assert_close(restricted.entropy, plain.entropy)
    assert (restricted.logp > plain.logp).all()
    # The second row allows nothing but its target.
    assert float(restricted.logp[1]) == 0.0


def test_the_sparse_head_adds_to_main_grad():
    hidden, weight, _, tokens = setup()
    weight.requires_grad_()
    main_grad = torch.ones_like(weight)
    options = {"rows": ROWS, "entropy": "grad", "allowed": Allowed(*ragged(LISTS), whole_entropy=False)}
    for more in ({"main_grad": main_grad}, {}):
        out = linear_logprobs(hidden, weight, tokens, **options, **more)
        (out.logp.sum() + out.entropy.sum()).backward()
        assert (weight.grad is None) == bool(more)
    torch.testing.assert_close(main_grad - 1.0, weight.grad)


def test_a_row_of_infinite_logits_has_no_gradient():
    hidden, weight, _, tokens = setup()
    hidden.requires_grad_()
    bias = torch.full((V,), -torch.inf, dtype=torch.float64)
    out = linear_logprobs(hidden, weight, tokens, bias=bias, rows=ROWS, allowed=ragged(LISTS))
    assert (out.logp == -torch.inf).all()
    (grad,) = torch.autograd.grad(out.logp.sum(), hidden)
    assert not grad.any()


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
