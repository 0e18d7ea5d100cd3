"""rowwise: functions of a row's logits, numerical derivatives, refusals of what it cannot differentiate."""

from __future__ import annotations

import pytest
import torch

from leanstep.heads import Head, LoRA, rowwise

T, D, V = 7, 4, 17
ROWS = torch.tensor([3, 0, 3, 5, 1])


def tensors():
    shapes = ((T, D), (V, D), (V,), (2, D), (V, 2))
    return [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in shapes]


def token_values(z, y, t):
    log_p = torch.log_softmax(z / t[:, None], -1)
    return log_p.gather(1, y[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1), z.argmax(1)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_gradcheck(softcap, tiles):
    inputs, targets = tensors(), torch.randint(0, V, (5,))
    temperature = torch.rand(5, dtype=torch.float64) + 0.5

    def values(h, w, b, down, up):
        head = Head(w, b, LoRA(down, up, 0.5), 1.3, softcap)
        return rowwise(token_values, h, head, targets, temperature, rows=ROWS)[:2]

    assert torch.autograd.gradcheck(values, inputs)


def test_equals_the_function_of_all_logits_and_keeps_its_structure(tiles):
    hidden, weight, *_ = tensors()
    one = rowwise(lambda z: z.square().sum(1), hidden, weight)
    torch.testing.assert_close(one, (hidden @ weight.T).square().sum(1))
    pair = rowwise(lambda z: (z.logsumexp(1), z.topk(3, 1).values), hidden, weight)
    assert isinstance(pair, tuple) and pair[1].shape == (T, 3)
    torch.testing.assert_close(pair[1], (hidden @ weight.T).topk(3, 1).values)


def test_half_precision_heads_get_gradients_in_kind():
    hidden, weight = torch.randn(9, 8).bfloat16(), torch.randn(33, 8).bfloat16()
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    truth = torch.autograd.grad(torch.logsumexp(exact[0] @ exact[1].T, 1).sum(), exact)
    h, w = hidden.requires_grad_(), weight.requires_grad_()
    values = rowwise(lambda z: torch.logsumexp(z, 1), h, w)
    assert values.dtype == torch.float32
    for grad, expected in zip(torch.autograd.grad(values.sum(), (h, w)), truth, strict=True):
        assert grad.dtype == torch.bfloat16
        torch.testing.assert_close(grad.double(), expected, rtol=8e-3, atol=1e-3)


def test_zero_rows_give_attached_empty_tensors():
    hidden, weight, *_ = tensors()
    none = torch.zeros(0, dtype=torch.int64)
    first, _, top = rowwise(token_values, hidden, weight, none, none.double(), rows=none)
    assert first.shape == top.shape == (0,) and first.requires_grad and not top.requires_grad
    first.sum().backward()
    assert not hidden.grad.any() and not weight.grad.any()


def test_gradients_that_would_be_lost_are_refused():
    hidden, weight, *_ = tensors()
    factor = torch.nn.Parameter(torch.ones(V, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"per_row\[0\]: expected a constant"):
        rowwise(lambda z, x: z.sum(1) * x, hidden, weight, torch.ones(T, requires_grad=True))
    for captured in (factor, factor * 2):
        with pytest.raises(ValueError, match=r"fn: it uses a tensor \(17,\) that requires grad"):
            rowwise(lambda z: (z * captured).sum(1), hidden, weight)  # noqa: B023
    with pytest.raises(ValueError, match=r"per_row\[0\]: expected 7 entries"):
        rowwise(lambda z, x: z.sum(1) * x, hidden, weight, torch.ones(3))
    with pytest.raises(ValueError, match="fn: expected 7 entries per result"):
        rowwise(lambda z: z.sum(0), hidden, weight)


def test_the_function_runs_under_the_forwards_autocast_and_random_state(tiles):
    hidden, weight = torch.randn(T, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    seen = set()

    def dropped(z):
        seen.add(torch.is_autocast_enabled("cpu"))
        return torch.nn.functional.dropout(z, 0.5).sum(1)

    with torch.autocast("cpu", torch.bfloat16):
        values = rowwise(dropped, hidden, weight)
    state = torch.get_rng_state()
    first = torch.autograd.grad(values.sum(), weight, retain_graph=True)[0]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(torch.autograd.grad(values.sum(), weight)[0], first) and seen == {True}
    # The value is the gradient's inner product with the weight: the same entries were dropped.
    torch.testing.assert_close((first * weight).sum(), values.sum())


def test_without_gradients_there_is_no_graph():
    hidden, weight, *_ = tensors()
    with torch.no_grad():
        assert not rowwise(lambda z: z.sum(1), hidden, weight).requires_grad
    h = hidden.detach()
    rowwise(lambda z: z.sum(1), h, weight).sum().backward()
    torch.testing.assert_close(weight.grad, h.sum(0).expand(V, D))
