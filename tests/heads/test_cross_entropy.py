"""linear_cross_entropy against torch's own function: values, gradients, reductions, smoothing, z-loss."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from leanstep.heads import Head, LoRA, linear_cross_entropy

N, D, V = 11, 5, 23


def tensors(dtype=torch.float64, n=N):
    hidden, weight, bias = (torch.randn(*shape, dtype=dtype) for shape in ((n, D), (V, D), (V,)))
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


def assert_same(ours, theirs, inputs):
    torch.testing.assert_close(ours, theirs)
    upstream = torch.randn_like(theirs)
    ours, theirs = (torch.autograd.grad(x, inputs, upstream) for x in (ours, theirs))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize(
    ("reduction", "smoothing", "rows"),
    [*itertools.product(["mean", "sum", "none"], [0.0, 0.2], [None, torch.arange(N)])],
)
def test_equals_torch(reduction, smoothing, rows, tiles):
    hidden, weight, bias = tensors()
    labels = torch.randint(0, V, (N,))
    labels[[0, 4, 5, 10]] = -100
    options = {"reduction": reduction, "label_smoothing": smoothing}
    ours = linear_cross_entropy(hidden, Head(weight, bias), labels, rows=rows, **options)
    theirs = F.cross_entropy(F.linear(hidden, weight, bias), labels, **options)
    assert_same(ours, theirs, (hidden, weight, bias))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_lora_softcap_scale_padding_and_z_loss(smoothing, tiles):
    hidden, weight, bias = tensors(n=12)
    lora = LoRA(*(torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((2, D), (V, 2))), 0.5)
    labels = torch.randint(0, 20, (3, 4))
    ours = linear_cross_entropy(
        hidden.view(3, 4, D), Head(weight, bias, lora, 0.7, 3.0), labels, shift=0, reduction="none",
        label_smoothing=smoothing, z_loss=0.01, vocab_total=20,
    )  # fmt: skip
    logits = 0.7 * F.linear(hidden, weight + 0.5 * lora.up @ lora.down, bias)
    logits = (3.0 * torch.tanh(logits / 3.0))[:, :20]
    theirs = F.cross_entropy(logits, labels.flatten(), reduction="none", label_smoothing=smoothing)
    theirs = theirs + 0.01 * torch.logsumexp(logits, -1).square()
    assert_same(ours, theirs.view(3, 4), (hidden, weight, bias, lora.down, lora.up))


def test_padded_batch_shifts_as_transformers_does():
    hidden, weight, _ = tensors(n=12)
    labels = torch.randint(0, V, (3, 4))
    labels[1, 2:] = -100
    for shift in (None, 1, 2):
        s = 1 if shift is None else shift
        logits = (hidden @ weight.T).view(3, 4, V)
        theirs = F.cross_entropy(logits[:, :-s].flatten(0, 1), labels[:, s:].flatten())
        ours = linear_cross_entropy(hidden.view(3, 4, D), weight, labels, shift=shift)
        assert_same(ours, theirs, (hidden, weight))


def test_nothing_counts():
    hidden, weight, _ = tensors()
    labels = torch.full((N,), -100)
    assert linear_cross_entropy(hidden, weight, labels).isnan()
    for reduction in ("sum", "none"):
        loss = linear_cross_entropy(hidden, weight, labels, reduction=reduction)
        loss.sum().backward()
        assert not loss.any() and not weight.grad.any() and not hidden.grad.any()


def test_ignored_rows_may_hold_anything():
    hidden, weight, _ = tensors(torch.float32)
    labels = torch.randint(0, V, (N,))
    labels[3] = -100
    expected = linear_cross_entropy(hidden, weight, labels).detach()
    with torch.no_grad():
        hidden[3] = torch.nan
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward()
    assert torch.equal(loss.detach(), expected)
    assert weight.grad.isfinite().all() and hidden.grad.isfinite().all() and not hidden.grad[3].any()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"reduction": "max"}, "reduction: expected mean, sum or none"),
        ({"label_smoothing": 1.0}, "label_smoothing: expected 0 <= value < 1"),
        ({"labels": torch.zeros(4, dtype=torch.int64)}, r"labels: expected ids \(11,\)"),
        ({"labels": torch.zeros(11)}, r"labels: expected ids \(11,\)"),
        ({"labels": torch.full((11,), V)}, r"targets: expected ids in \[0, 23\)"),
        ({"labels": torch.full((11,), V), "label_smoothing": 0.1}, r"targets: expected ids in \[0, 23\)"),
        ({"hidden": torch.zeros(4)}, r"hidden: expected \[B, T, D\] or \[N, D\]"),
        ({"shift": -1}, "shift: expected a number of positions"),
    ],
)
def test_refusals(change, complaint):
    hidden, weight, _ = tensors(torch.float32)
    arguments = {"hidden": hidden, "labels": torch.zeros(N, dtype=torch.int64), **change}
    with pytest.raises(ValueError, match=complaint):
        linear_cross_entropy(arguments.pop("hidden"), weight, arguments.pop("labels"), **arguments)
