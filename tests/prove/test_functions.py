"""`prove FILE.py:before FILE.py:after`: wrong gradients are found, zeros never accepted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from leanstep.cli import run
from leanstep.prove import prove_functions

IDS = torch.arange(24) % 37


def inputs():
    return torch.randn(24, 16), torch.randn(37, 16) / 4, IDS


def plain(hidden, weight, labels):
    return F.cross_entropy(hidden @ weight.t(), labels[: len(hidden)], reduction="none")


def gathered(hidden, weight, labels):
    logits = hidden @ weight.t()
    return logits.logsumexp(-1) - logits.gather(-1, labels[: len(hidden), None])[:, 0]


class Lost(torch.autograd.Function):
    """Loses the gradient of a view, and passes the upstream gradient on as if all its entries were equal."""

    @staticmethod
    def forward(ctx, hidden, weight, labels):
        ctx.keeps = hidden.is_contiguous()
        ctx.save_for_backward(hidden, weight, labels)
        return plain(hidden, weight, labels)

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight, labels = ctx.saved_tensors
        errors = (hidden @ weight.t()).softmax(-1) - F.one_hot(labels[: len(hidden)], len(weight))
        errors = gradient[:, None] * errors.to(hidden.dtype)
        return errors @ weight if ctx.keeps else None, errors.t() @ hidden, None


WRONG = {
    "scaled": (lambda h, w, y: 2 * plain(h, w, y), "the output is 2 times the right one on every draw"),
    "detached": (lambda h, w, y: plain(h.detach(), w, y), "the gradient of hidden is missing on every draw"),
    "zero": (lambda h, w, y: plain(h.detach() + 0 * h, w, y), "the gradient of hidden is exactly zero"),
    "strided": (Lost.apply, "the gradient of hidden is missing on 2 of 9 draws (strided; strided, bf16)"),
    "not finite": (
        lambda h, w, y: -(h @ w.t()).softmax(-1).log()[torch.arange(len(h)), y[: len(h)]],
        "not finite",
    ),
}


def test_the_same_function_passes():
    proof = prove_functions(plain, gathered, inputs)
    assert proof.ok, proof.sentence()
    assert len({row.draw for row in proof.rows if row.sure}) >= 8


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_function_is_found(name: str):
    function, words = WRONG[name]
    proof = prove_functions(plain, function, inputs)
    assert proof.problem is None and not proof.ok
    assert words in proof.sentence()


def test_the_given_number_of_rows_is_drawn_and_an_odd_one():
    rows = set()

    def counted(hidden, weight, labels):
        rows.add(len(hidden))
        return gathered(hidden, weight, labels)

    assert prove_functions(plain, counted, inputs).ok
    assert rows == {24, 23}


DEGENERATE = {
    "softmax over one column": (
        lambda x: x[:, :1].softmax(-1),
        lambda x: torch.ones(len(x), 1) + 0 * x[:, :1],
    ),
    "mean of a centred tensor": (lambda x: (x - x.mean()).mean(), lambda x: 0 * x.sum()),
    "a clamp that saturates": (
        lambda x: (x + 1e6).clamp(max=1.0).sum(),
        lambda x: torch.tensor(float(x.numel())),
    ),
    "layer norm before a sum": (lambda x: F.layer_norm(x, x.shape[-1:]).sum(-1), lambda x: 0 * x.sum(-1)),
}


@pytest.mark.parametrize("name", DEGENERATE)
def test_zeros_and_constants_are_never_accepted(name: str):
    function, constant = DEGENERATE[name]
    proof = prove_functions(function, constant)
    assert not proof.ok and proof.sentence().startswith("cannot judge"), proof.sentence()


def test_from_the_command_line(tmp_path: Path, capfd):
    file = tmp_path / "pair.py"
    file.write_text(
        "def a(x, weight):\n    return x @ weight.t()\ndef b(x, weight):\n    return -a(x, weight)\n"
    )
    assert run(["prove", f"{file}:a", f"{file}:a"]) == 0
    assert run(["prove", f"{file}:a", f"{file}:b"]) == 1
    assert "is -1 times the right one on every draw" in capfd.readouterr().err
    assert run(["prove", f"{file}:a", f"{file}:nothing"]) == 2
    assert "has no function nothing" in capfd.readouterr().err
