"""Further outputs of the tile loop: top-k tokens, log-sum-exp, exact divergences, several targets."""

from __future__ import annotations

import pytest
import torch
from logprob.flat import linear_logprobs

T, D, V = 11, 6, 57


def setup(dtype=torch.float64):
    g = torch.Generator().manual_seed(2)
    hidden, other = (torch.randn(T, D, generator=g, dtype=torch.float64).to(dtype) for _ in range(2))
    weight, reference = (torch.randn(V, D, generator=g, dtype=torch.float64).to(dtype) for _ in range(2))
    return hidden, weight, other, reference, torch.randint(0, V, (T,), generator=g)


@pytest.mark.parametrize("tile", [(4, 10), (T, V)])
def test_values(tile):
    hidden, weight, other, reference, tokens = setup()
    extras = ("lse", "z_loss", "argmax", ("top_k", 5), "kl", "reverse_kl")
    out = linear_logprobs(
        hidden,
        weight,
        tokens,
        outputs=extras,
        ref_weight=reference,
        ref_hidden=other,
        tile=tile,
        temperature=0.8,
    )
    p = torch.log_softmax(hidden @ weight.t() / 0.8, -1)
    q = torch.log_softmax(other @ reference.t() / 0.8, -1)
    lse = torch.logsumexp(hidden @ weight.t() / 0.8, -1)
    torch.testing.assert_close(out.lse, lse)
    torch.testing.assert_close(out.z_loss, lse.square())
    assert torch.equal(out.argmax, p.argmax(-1))
    values, ids = (hidden @ weight.t() / 0.8).topk(5)
    torch.testing.assert_close(out.top_k[0], values)
    assert torch.equal(out.top_k[1], ids)
    torch.testing.assert_close(out.kl, (p.exp() * (p - q)).sum(-1), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(out.reverse_kl, (q.exp() * (q - p)).sum(-1), atol=1e-12, rtol=1e-12)


def test_nothing_unasked_is_returned():
    hidden, weight, _, _, tokens = setup()
    out = linear_logprobs(hidden, weight, tokens)
    assert out[1:] == (None,) * 7


def test_kl_to_itself_is_zero():
    hidden, weight, _, _, tokens = setup(torch.float32)
    out = linear_logprobs(
        hidden, weight, tokens, outputs=("kl", "reverse_kl"), ref_weight=weight, tile=(3, 8)
    )
    torch.testing.assert_close(out.kl, torch.zeros(T), atol=1e-6, rtol=0)
    torch.testing.assert_close(out.reverse_kl, torch.zeros(T), atol=1e-6, rtol=0)


@pytest.mark.parametrize("reference", ["ref_hidden", "ref_weight"])
def test_kl_of_a_head_with_a_bias_to_itself_is_zero(reference):
    """By default the reference head is the head itself, including its bias."""
    hidden, weight, _, _, tokens = setup(torch.float32)
    head = torch.nn.Linear(D, V)
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(torch.linspace(-3, 3, V))
    options = (
        {"ref_hidden": hidden} if reference == "ref_hidden" else {"ref_weight": weight, "ref_bias": head.bias}
    )
    out = linear_logprobs(hidden, head, tokens, outputs=("kl", "reverse_kl"), **options)
    torch.testing.assert_close(out.kl, torch.zeros(T), atol=1e-6, rtol=0)
    torch.testing.assert_close(out.reverse_kl, torch.zeros(T), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        linear_logprobs(hidden, head, tokens, outputs=("kl",), ref_weight=weight).kl,
        (lambda p, q: (p.exp() * (p - q)).sum(-1))(
            torch.log_softmax(head(hidden).detach(), -1), torch.log_softmax(hidden @ weight.t(), -1)
        ),
    )


def test_kl_with_far_apart_maxima_merges_over_tiles():
    """The reference's maximum jumps by more than exp can express between tiles."""
    hidden = torch.ones(1, 1, dtype=torch.float64)
    weight = torch.tensor([[0.0], [1.0], [2.0], [3.0]], dtype=torch.float64)
    reference = torch.tensor([[0.0], [-900.0], [2000.0], [1999.0]], dtype=torch.float64)
    expected = None
    for tile in ((1, 4), (1, 2), (1, 1)):
        out = linear_logprobs(
            hidden, weight, torch.tensor([0]), outputs=("kl",), ref_weight=reference, tile=tile
        )
        p, q = torch.log_softmax(weight[:, 0], 0), torch.log_softmax(reference[:, 0], 0)
        expected = (p.exp() * (p - q)).sum()
        torch.testing.assert_close(out.kl[0], expected)


def test_kl_is_infinite_where_the_reference_excludes_a_token():
    hidden = torch.ones(2, 1)
    weight, bias = torch.zeros(3, 1, requires_grad=True), torch.tensor([0.0, -torch.inf, 0.0])
    out = linear_logprobs(
        hidden, weight, torch.tensor([0, 1]), outputs=("kl", "reverse_kl"), ref_weight=torch.zeros(3, 1),
        ref_bias=bias, tile=(1, 1),
    )  # fmt: skip
    assert torch.equal(out.kl.detach(), torch.full((2,), torch.inf))
    torch.testing.assert_close(out.reverse_kl.detach(), torch.full((2,), 1.5).log())
    (grad,) = torch.autograd.grad(out.kl.sum() + out.reverse_kl.sum(), weight)
    assert grad.isfinite().all()


def test_the_lowest_id_wins_a_tie():
    hidden, weight = torch.ones(1, 1), torch.tensor([[1.0], [2.0], [2.0], [0.0], [2.0]])
    for width in (1, 2, 3, 5):
        out = linear_logprobs(hidden, weight, torch.tensor([0]), outputs=("argmax",), tile=(1, width))
        assert out.argmax.tolist() == [1]


def test_several_targets_per_row():
    hidden, weight, _, _, _ = setup()
    tokens = torch.randint(0, V, (T, 4))
    tokens[0, 1] = tokens[0, 0]
    out = linear_logprobs(hidden, weight, tokens, tile=(4, 9))
    torch.testing.assert_close(out.logp, torch.log_softmax(hidden @ weight.t(), -1).gather(1, tokens))
