"""A tensor that a caller supplies to be written is checked before the first write."""

from __future__ import annotations

import pytest
import torch

from leanstep.heads import linear_logprobs
from leanstep.muon import transpose_add, transpose_copy
from leanstep.output_buffers import has_shared_elements, share_memory

ROWS, VOCABULARY, WIDTH = 6, 40, 8


def head() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.randn(ROWS, WIDTH).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH).requires_grad_()
    return hidden, weight, torch.randint(VOCABULARY, (ROWS,))


def score(hidden, weight, targets, main_grad):
    return linear_logprobs(hidden, weight, targets, main_grad=main_grad).logp


WRONG = {
    "a smaller shape": (lambda w: torch.zeros(3, 3), "expected shape (40, 8), got (3, 3)"),
    "a transposed shape": (lambda w: torch.zeros(8, 40), "expected shape (40, 8), got (8, 40)"),
    "integers": (lambda w: torch.zeros(40, 8, dtype=torch.int64), "expected a floating-point tensor"),
    "another device": (lambda w: torch.zeros(40, 8, device="meta"), "expected device cpu, got meta"),
    "an expanded row": (lambda w: torch.zeros(8).expand(40, 8), "separate memory per element"),
    "the weight itself": (lambda w: w.detach(), "overlaps"),
    "sparse": (lambda w: torch.zeros(40, 8).to_sparse(), "expected a dense tensor"),
    "no tensor": (lambda w: [0.0], "expected a dense tensor, got list"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_main_grad_is_refused_in_one_line(wrong):
    make, line = WRONG[wrong]
    hidden, weight, targets = head()
    with pytest.raises(ValueError, match=r"^main_grad: ") as error:
        score(hidden, weight, targets, make(weight))
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_a_slice_of_a_flat_buffer_next_to_the_weight_is_written():
    """Weight and gradient in one storage, as in a flat buffer, do not overlap."""
    flat = torch.randn(2 * VOCABULARY * WIDTH)
    weight = flat[: VOCABULARY * WIDTH].view(VOCABULARY, WIDTH).requires_grad_()
    buffer = flat[VOCABULARY * WIDTH :].view(VOCABULARY, WIDTH).detach().zero_()
    hidden, _, targets = head()
    score(hidden, weight, targets, buffer).sum().backward()
    plain = weight.detach().clone().requires_grad_()
    score(hidden, plain, targets, None).sum().backward()
    torch.testing.assert_close(buffer, plain.grad)


def test_a_strided_main_grad_is_written_in_place():
    hidden, weight, targets = head()
    wide = torch.zeros(VOCABULARY, 2 * WIDTH)
    score(hidden, weight, targets, wide[:, ::2]).sum().backward()
    plain = weight.detach().clone().requires_grad_()
    score(hidden, plain, targets, None).sum().backward()
    torch.testing.assert_close(wide[:, ::2], plain.grad)
    assert weight.grad is None
    assert not wide[:, 1::2].any()


@pytest.mark.parametrize("turn", [transpose_add, transpose_copy])
def test_a_transpose_into_its_own_source_is_refused(turn):
    square = torch.randn(5, 5)
    before = square.clone()
    for dst in (square, square.T, torch.zeros(5).expand(5, 5)):
        with pytest.raises(ValueError, match=r"^dst: "):
            turn(square, dst)
    assert torch.equal(square, before)


def test_which_views_share_memory():
    base = torch.zeros(4, 6)
    assert share_memory(base[:2], base[1:])
    assert not share_memory(base[:2], base[2:])
    assert not share_memory(base, base.clone())
    assert not has_shared_elements(base.T)
    assert not has_shared_elements(base[:, ::2])
    assert has_shared_elements(base[:1].expand(4, 6))
    assert has_shared_elements(base.as_strided((3, 3), (1, 1)))
    assert not has_shared_elements(base[:0].expand(0, 6))
