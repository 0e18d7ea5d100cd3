"""linear_cross_entropy against torch's own function: values, gradients, reductions, weights, soft targets."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from leanstep.logprob import LMHead, LoRA, Transform
from leanstep.logprob.engine import lm_head
from leanstep.objectives import linear_ahead_cross_entropy, linear_cross_entropy

N, D, V = 11, 5, 23


def tensors(dtype=torch.float64, n=N):
    hidden, weight, bias = (torch.randn(*shape, dtype=dtype) for shape in ((n, D), (V, D), (V,)))
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


def oracle(hidden, weight, bias, labels, **options):
    """Call torch's own function if it exists (2.13), otherwise its documented equivalent."""
    if "class_weights" in options:
        options["weight"] = options.pop("class_weights")
    function = getattr(F, "linear_cross_entropy", None)
    if function is not None:
        return function(hidden, weight, labels, linear_bias=bias, **options)
    return F.cross_entropy(F.linear(hidden, weight, bias), labels, **options)


def assert_same(ours, theirs, inputs):
    torch.testing.assert_close(ours, theirs)
    upstream = torch.randn_like(theirs)
    ours, theirs = (torch.autograd.grad(x, inputs, upstream) for x in (ours, theirs))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize(
    ("reduction", "smoothing", "weighted", "rows"),
    [*itertools.product(["mean", "sum", "none"], [0.0, 0.2], [False, True], [None, "all"])],
)
def test_equals_torch(reduction, smoothing, weighted, rows):
    hidden, weight, bias = tensors()
    labels = torch.randint(0, V, (N,))
    labels[[0, 4, 5, 10]] = -100
    options = {"reduction": reduction, "label_smoothing": smoothing}
    if weighted:
        options["class_weights"] = torch.rand(V, dtype=torch.float64)
    ours = linear_cross_entropy(hidden, LMHead(weight, bias), labels, rows=rows, **options)
    assert_same(ours, oracle(hidden, weight, bias, labels, **options), (hidden, weight, bias))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("smoothing", "weighted"), [(0.0, False), (0.2, False), (0.1, True)])
def test_probability_targets_equal_torch(reduction, smoothing, weighted):
    hidden, weight, bias = tensors()
    labels = torch.rand(N, V, dtype=torch.float64)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    if weighted:
        options["class_weights"] = torch.rand(V, dtype=torch.float64)
    ours = linear_cross_entropy(hidden, LMHead(weight, bias), labels, **options)
    assert_same(ours, oracle(hidden, weight, bias, labels, **options), (hidden, weight, bias))


@pytest.mark.parametrize("soft", [False, True])
def test_lora_with_class_weights_smoothing_and_scale(soft):
    """Sums of logits are also linear in the adapter; [B, T] labels give [B, T] losses."""
    hidden, weight, bias = tensors(n=12)
    lora = LoRA(torch.randn(2, D, dtype=torch.float64), torch.randn(V, 2, dtype=torch.float64), 0.5)
    for x in (lora.down, lora.up):
        x.requires_grad_()
    labels = torch.rand(3, 4, V, dtype=torch.float64) if soft else torch.randint(0, V, (3, 4))
    options = {"reduction": "none", "label_smoothing": 0.2, "class_weights": torch.rand(V).double()}
    ours = linear_cross_entropy(
        hidden.view(3, 4, D), LMHead(weight, bias, lora), labels, shift=0, transform=Transform(0.7), **options
    )
    whole = 0.7 * (weight + 0.5 * lora.up @ lora.down)
    theirs = oracle(hidden, whole, 0.7 * bias, labels.flatten(0, 1), **options)
    assert_same(ours, theirs.view(3, 4), (hidden, weight, bias, lora.down, lora.up))


def test_a_class_that_cannot_occur_and_is_not_wanted_adds_nothing_to_a_row():
    hidden, weight, bias = tensors()
    labels = torch.rand(N, V, dtype=torch.float64)
    labels[:, 3] = 0.0
    with torch.no_grad():
        bias[3] = -torch.inf
    each = linear_cross_entropy(hidden, LMHead(weight, bias), labels, reduction="none")
    total = linear_cross_entropy(hidden, LMHead(weight, bias), labels, reduction="sum")
    assert_same(each.sum(), total, (hidden, weight))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradcheck(reduction, smoothing, weighted):
    """Padding, a sequence without labels, and an id that cannot occur (infinite with smoothing)."""
    hidden, weight, bias = tensors(n=6)
    labels = torch.tensor([[1, 5, 7], [-100, -100, -100]])
    if not smoothing:
        with torch.no_grad():
            bias[3] = -torch.inf
    options = {"reduction": reduction, "label_smoothing": smoothing}
    if weighted:
        options["class_weights"] = torch.rand(V, dtype=torch.float64)

    def loss(h, w):
        return linear_cross_entropy(h.view(2, 3, D), LMHead(w, bias.detach()), labels, **options)

    assert torch.autograd.gradcheck(loss, (hidden, weight))


def test_padded_batch_shifts_as_transformers_does():
    hidden, weight, _ = tensors(n=12)
    batch = hidden.view(3, 4, D)
    labels = torch.randint(0, V, (3, 4))
    labels[0, 2:] = labels[2] = -100
    ours = linear_cross_entropy(batch, weight, labels)
    logits = F.linear(batch, weight)[:, :-1].flatten(0, 1)
    assert_same(ours, F.cross_entropy(logits, labels[:, 1:].flatten()), (hidden, weight))
    each = linear_cross_entropy(batch, weight, labels, reduction="none")
    assert each.shape == (3, 4) and not each[:, -1].any() and not each[2].any()
    torch.testing.assert_close(each.sum() / (labels[:, 1:] != -100).sum(), ours)


def test_heads_that_predict_ahead():
    hidden, weight, _ = tensors(n=12)
    other = torch.randn(V, D, dtype=torch.float64, requires_grad=True)
    batch, labels = hidden.view(2, 6, D), torch.randint(0, V, (2, 6))
    labels[1, :3] = -100
    ours = linear_ahead_cross_entropy(batch, [weight, other], labels, factors=[1.0, 0.3])
    theirs = sum(
        f * F.cross_entropy(F.linear(batch, w)[:, :-k].flatten(0, 1), labels[:, k:].flatten())
        for k, w, f in ((1, weight, 1.0), (2, other, 0.3))
    )
    assert_same(ours, theirs, (hidden, weight, other))


def test_nothing_counts():
    hidden, weight, _ = tensors()
    labels = torch.full((N,), -100)
    total = linear_cross_entropy(hidden, weight, labels, reduction="sum")
    total.backward()
    assert total == 0 and not hidden.grad.any() and not weight.grad.any()
    # torch's mean of nothing.
    assert linear_cross_entropy(hidden, weight, labels).isnan()
    none = linear_cross_entropy(hidden[:0], weight, labels[:0], reduction="none")
    assert none.shape == (0,)


def test_infinite_logits_and_infinite_padding():
    """A class that cannot occur has probability 0; an ignored row may hold any values."""
    hidden, weight, _ = tensors()
    bias = torch.zeros(V, dtype=torch.float64)
    bias[3] = -torch.inf
    labels = torch.tensor([0, 1, 2, 4, 5, 6, 7, 8, 9, 10, -100])
    with torch.no_grad():
        hidden[-1] = torch.inf
    ours = linear_cross_entropy(hidden, LMHead(weight, bias), labels)
    theirs = F.cross_entropy(F.linear(hidden[:-1], weight, bias), labels[:-1])
    torch.testing.assert_close(ours, theirs)
    ours.backward()
    assert hidden.grad.isfinite().all() and not weight.grad[3].any()


def test_master_weights_under_autocast_are_as_near_as_plain_code():
    hidden, weight, _ = tensors(torch.float32)
    labels = torch.randint(0, V, (N,))
    truth = F.cross_entropy(F.linear(hidden.double(), weight.double()), labels)
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_cross_entropy(hidden, weight, labels)
        plain = F.cross_entropy(F.linear(hidden, weight), labels)
    assert (ours - truth).abs() <= 3 * (plain - truth).abs() + 1e-6


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"reduction": "batchmean"}, "reduction: expected one of mean, sum, none"),
        ({"shift": -1}, "shift: expected a number of positions >= 0, got -1"),
        ({"rows": "some"}, "rows: expected row indices"),
        ({"label_smoothing": 1.0}, "label_smoothing: expected 0 <= value < 1"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, r"labels: expected \(11,\), got \(3,\)"),
        ({"labels": [0] * 11}, "labels: expected a tensor, got list"),
        ({"labels": torch.zeros(11)}, r"labels: expected ids, or probabilities \[..., V\], got \(11,\)"),
        ({"class_weights": torch.ones(4)}, r"class_weights: expected \[23\], got \(4,\)"),
        (
            {"class_weights": torch.ones(V), "label_smoothing": 0.1, "transform": Transform(softcap=3.0)},
            "class_weights: expected neither softcap nor shards",
        ),
        (
            {"labels": torch.rand(N, V), "reduction": "none", "transform": Transform(softcap=3.0)},
            "reduction: expected no softcap or shards",
        ),
        ({"labels": torch.rand(N, 4), "reduction": "none"}, r"labels: expected \[..., 23\] probabilities"),
    ],
)
def test_refusals(change, complaint):
    hidden, weight, _ = tensors()
    options = {"labels": torch.zeros(N, dtype=torch.int64), **change}
    with pytest.raises(ValueError, match=complaint):
        linear_cross_entropy(hidden, weight, **options)


class TestCompiled:
    """torch.compile of a model that ends in an objective."""

    def inputs(self):
        generator = torch.Generator().manual_seed(0)
        hidden, weight = (torch.randn(*shape, generator=generator) for shape in ((4, 8, 16), (50, 16)))
        labels = torch.randint(0, 50, (4, 8), generator=generator)
        labels[0, :3] = -100
        return hidden.requires_grad_(), weight.requires_grad_(), labels

    @pytest.mark.parametrize(
        "options",
        [{}, {"reduction": "sum"}, {"class_weights": torch.linspace(0.1, 1.0, 50)}],
        ids=["mean", "sum", "class weights"],
    )
    @pytest.mark.parametrize("rows", ["all", torch.arange(3, 31), None], ids=["all", "given", "found"])
    def test_a_whole_graph_gives_the_numbers_of_eager(self, rows, options):
        hidden, weight, labels = self.inputs()

        def loss(h, w):
            smoothing = {"label_smoothing": 0.1, "transform": Transform(0.5)}
            return linear_cross_entropy(h.tanh(), w, labels, rows=rows, **options, **smoothing)

        torch._dynamo.reset()
        actual, expected = (
            torch.compile(loss, fullgraph=True, backend="aot_eager")(hidden, weight),
            loss(hidden, weight),
        )
        torch.testing.assert_close(actual, expected)
        gradients = (torch.autograd.grad(value, (hidden, weight)) for value in (actual, expected))
        for got, want in zip(*gradients, strict=True):
            torch.testing.assert_close(got, want)

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_only_the_rows_that_count_enter_the_head(self, reduction, monkeypatch):
        """Their number is not in the graph: other labels cause no recompilation."""
        hidden, weight, labels = self.inputs()
        heights, run = [], lm_head.product
        monkeypatch.setattr(
            lm_head, "product", lambda a, *b, **c: (heights.append(a.shape), run(a, *b, **c))[1]
        )

        def loss(h, w, y):
            return linear_cross_entropy(h, w, y, reduction=reduction)

        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        for count in (28, 5, 1, 0):
            labels[1:] = -100
            labels[1:].view(-1)[:count] = 3
            expected = loss(hidden, weight, labels)
            heights.clear()
            actual = compiled(hidden, weight, labels)
            torch.testing.assert_close(actual, expected, equal_nan=True)
            entered = int((labels[:, 1:] != -100).sum())
            assert not entered or {shape[0] for shape in heights} == {entered}
            gradients = [torch.autograd.grad(v.sum(), (hidden, weight)) for v in (actual, expected)]
            for got, want in zip(*gradients, strict=True):
                torch.testing.assert_close(got, want, equal_nan=True)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
