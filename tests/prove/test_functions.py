"""`prove FILE.py:before FILE.py:after`: wrong gradients are found, zeros never accepted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from leanstep.cli import run
from leanstep.prove import prove_functions
from leanstep.prove.functions import _set_values

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
    "a row": (lambda h, w, y: plain(torch.cat([h[:1].detach(), h[1:]]), w, y), "in 1 of 24 rows"),
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


class Scaled(torch.nn.Module):
    def __init__(self, detach: bool = False) -> None:
        super().__init__()
        self.weight, self.detach = torch.nn.Parameter(torch.randn(16)), detach

    def forward(self, x):
        return x * (self.weight.detach() if self.detach else self.weight)


def clamped_in_place(x):
    x.clamp_(-1, 1)


def cut_in_place(x, limit=1.0):
    x.copy_(x.clamp(-1, limit))


def with_keywords(x, *, weight):
    return x @ weight.t()


def masked(x, mask):
    return (x * mask[:, None]).sum() / mask.sum()


# Pairs of the same function, with the inputs if the signature does not say them.
SAME = {
    "a dict in another order": (
        lambda x: {"a": x.sin(), "b": x.cos(), "n": 3},
        lambda x: {"n": 3, "b": x.cos(), "a": x.sin()},
        None,
    ),
    "changed in place": (clamped_in_place, cut_in_place, None),
    "keyword-only": (with_keywords, lambda x, *, weight: F.linear(x, weight), None),
    "a list of inputs": (torch.matmul, lambda x, w: F.linear(x, w.t()), lambda: [IDS[None] * 1.0, IDS * 1.0]),
    "infinities": (
        lambda x: x.masked_fill(x < 0, -torch.inf),
        lambda x: torch.where(x < 0, torch.full_like(x, -torch.inf), x),
        None,
    ),
    "a mask without gradient": (masked, lambda x, mask: x[mask.bool()].sum() / mask.sum(), None),
    "ties in bf16": (lambda x: x.amax(-1), lambda x: x.max(-1).values, None),
    "integers": (lambda x: x.argmax(-1), lambda x: x.topk(1).indices[:, 0], None),
    "modules": (Scaled(), Scaled(), None),
    "fused attention with NaN": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        lambda q, k, v: (q @ k.mT / 4).softmax(-1) @ v,
        lambda: tuple(torch.randn(3, 2, 2, 8, 16)),
    ),
    "one-hot": (lambda x, w: w[IDS[:8]], lambda x, w: F.one_hot(IDS[:8], 37).to(w.dtype) @ w,
                lambda: (torch.zeros(2), torch.randn(37, 16))),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_another_way_to_write_it_passes(name: str):
    proof = prove_functions(*SAME[name])
    assert proof.ok, proof.sentence()


OTHER = {
    "a dict": (lambda x: {"a": x.sin(), "b": x.cos()}, lambda x: {"b": x.sin(), "a": x.cos()}, "output a is"),
    "a number": (lambda x: (x, x.sum().item()), lambda x: (x, 2 * x.sum().item()), "output 1 is 2 times"),
    "in place": (clamped_in_place, lambda x: cut_in_place(x, 0.9), "x (changed) is"),
    "not in place": (clamped_in_place, lambda x: None, "x (changed) is"),
    "integers": (lambda x: x.argmax(-1), lambda x: x.argmin(-1), "the output is"),
    "infinities": (
        lambda x: x.masked_fill(x < 0, -torch.inf),
        lambda x: x.masked_fill(x < 0, -1e4),
        "the output is not infinite where it should be on every draw",
    ),
    "a parameter": (Scaled(), Scaled(detach=True), "the gradient of weight is missing on every draw"),
    "dropout": (
        lambda x: F.dropout(x, 0.1).sin(),
        lambda x: F.dropout(x, 0.1).cos(),
        "the output is",
    ),
    "a NaN that the first function handles": (torch.nan_to_num, lambda x: x, "not finite on 1 of 11 draws"),
    "not zero": (lambda x: (x - x * 1).sum(-1), lambda x: 3 + 0 * x.sum(-1), "the output is not zero"),
}


@pytest.mark.parametrize("name", OTHER)
def test_a_wrong_result_of_any_type_is_found(name: str):
    before, after, words = OTHER[name]
    inputs_ = (lambda: (torch.randn(24, 16),)) if name.startswith("a NaN") else None
    proof = prove_functions(before, after, inputs_)
    assert proof.problem is None and not proof.ok
    assert words in proof.sentence(), proof.sentence()


def test_functions_that_draw_other_numbers_are_not_judged():
    proof = prove_functions(lambda x: F.dropout(x, 0.1), lambda x: F.dropout(torch.rand(1) * 0 + x, 0.1))
    assert proof.sentence().startswith("cannot judge: the functions draw random numbers; without dropout")
    proof = prove_functions(lambda x: x + torch.randn(()), lambda x: torch.rand(1) * 0 + x + torch.randn(()))
    assert proof.sentence().startswith("cannot judge") and proof.problem


def test_confident_scores_are_those_of_the_labels():
    scores, ids = torch.randn(6, 5), torch.arange(6) % 5
    _set_values([scores], [ids], "confident")
    assert torch.equal(scores.argmax(-1), ids) and scores.softmax(-1).amax(-1).min() > 0.99


def test_inputs_are_not_changed_by_a_draw():
    mine = torch.randn(24, 16)
    known = mine.clone()
    assert prove_functions(torch.sin, lambda x: x.sin(), lambda: mine).ok
    assert torch.equal(mine, known)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: None, "returns nothing and changes no argument in place"),
        (lambda x: object(), "returns a object; expected tensors"),
        (lambda x: (x, x), "returns output 0, output 1; <lambda> returns one tensor"),
    ],
)
def test_results_that_cannot_be_compared_are_one_line(function, words: str):
    proof = prove_functions(function, lambda x: x if "output" in words else function(x))
    assert proof.problem is not None and words in proof.problem


def test_from_the_command_line(tmp_path: Path, capfd):
    file = tmp_path / "pair.py"
    file.write_text(
        "def a(x, weight):\n    return x @ weight.t()\ndef b(x, weight):\n    return -a(x, weight)\n"
    )
    assert run(["prove", f"{file}:a", f"{file}:a"]) == 0
    assert run(["prove", f"{file}:a", f"{file}:b"]) == 1
    assert "is -1 times the right one on every draw" in capfd.readouterr().out
    assert run(["prove", f"{file}:a", f"{file}:nothing"]) == 2
    assert "has no function nothing" in capfd.readouterr().err


KERNEL = """import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

@triton.jit
def kernel(x_ptr, y_ptr, slope_ptr, factor, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0)
    shared = tl.exp(-(factor.to(x.dtype) * x * x).to(tl.float32)).to(x.dtype)
    tl.store(y_ptr + at, libdevice.tanh(x.to(tl.float32)) + x * shared, mask=at < count)
    slope = 1 - libdevice.pow(libdevice.tanh(x.to(tl.float32)), 2.0) + shared - 2 * factor * x * x * shared
    tl.store(slope_ptr + at, SLOPE, mask=at < count)

class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        y, slope = torch.empty_like(x), torch.empty_like(x)
        kernel[(triton.cdiv(x.numel(), 64),)](x, y, slope, 0.5, x.numel(), BLOCK=64)
        ctx.save_for_backward(slope)
        return y

    @staticmethod
    def backward(ctx, upstream):
        return upstream * ctx.saved_tensors[0]

def plain(x):
    return x.tanh() + x * torch.exp(-0.5 * x * x)

def fused(x):
    return Fused.apply(x)
"""


@pytest.mark.interpreter
def test_triton_kernels_run_without_a_gpu(tmp_path: Path, capfd, monkeypatch):
    pytest.importorskip("triton")
    # As in a user's process: Triton is imported anew, without the suite's own corrections of bf16.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    file = tmp_path / "kernels.py"
    for slope, code, words in (("slope", 0, "over 10 draws hold"), ("-slope", 1, "of x is -1 times")):
        file.write_text(KERNEL.replace("SLOPE", slope))
        assert run(["prove", f"{file}:plain", f"{file}:fused"]) == code
        assert words in capfd.readouterr().out
