"""Ragged pairwise losses against brute force in float64, and their symmetries."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.nn.functional import softplus

from leanstep.objectives import bradley_terry, draw_pairs, hinge, plackett_luce, top_pairs

SIZES = [5, 1, 0, 12, 2, 7]
OFFSETS = [0, 5, 6, 6, 18, 20, 27]


def problem(dtype=torch.float64, levels=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(OFFSETS[-1], generator=g, dtype=torch.float64).to(dtype)
    labels = torch.randint(levels, (OFFSETS[-1],), generator=g)
    labels[18:20] = 1
    return scores, labels


def brute_pairs(labels):
    out = []
    for g, (a, b) in enumerate(itertools.pairwise(OFFSETS)):
        out += [(g, i, j) for i in range(a, b) for j in range(a, b) if labels[i] > labels[j]]
    return out


def brute(scores, labels, cost, reduction, weight=lambda i, j: 1.0):
    groups: dict[int, list] = {}
    for g, i, j in brute_pairs(labels):
        groups.setdefault(g, []).append(cost(scores[i] - scores[j]) * weight(i, j))
    flat = [x for row in groups.values() for x in row]
    if reduction == "sum":
        return torch.stack(flat).sum()
    if reduction == "mean":
        return torch.stack(flat).mean()
    if reduction == "group_mean":
        return torch.stack([torch.stack(row).mean() for row in groups.values()]).mean()
    zero = scores.sum() * 0
    return torch.stack([torch.stack(groups[g]).sum() if g in groups else zero for g in range(len(SIZES))])


def compare(fast, slow, scores, rtol=1e-10, atol=1e-11):
    x, y = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    a, b = fast(x), slow(y)
    torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
    upstream = torch.randn(a.shape, dtype=a.dtype)
    a.backward(upstream)
    b.backward(upstream)
    torch.testing.assert_close(x.grad, y.grad, rtol=rtol, atol=atol)
    return a, x.grad


@pytest.mark.parametrize("reduction", ["sum", "mean", "group_mean", "none"])
@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_bradley_terry_equals_brute_force(reduction, host, smoothing, monkeypatch):
    scores, labels = problem()
    offsets = OFFSETS if host else torch.tensor(OFFSETS)

    def cost(gap):
        z = 1.3 * (gap - 0.2)
        return (1 - smoothing) * softplus(-z) + smoothing * softplus(z)

    for tile in (1, 1 << 18, 90):
        monkeypatch.setattr("leanstep.objectives.ragged.logistic.TILE_ELEMENTS", tile)
        compare(
            lambda s: bradley_terry(
                s, labels, offsets, margin=0.2, scale=1.3, label_smoothing=smoothing, reduction=reduction
            ),
            lambda s: brute(s, labels, cost, reduction),
            scores,
        )


def test_item_weights_multiply():
    scores, labels = problem()
    w = torch.rand(len(scores), dtype=torch.float64)
    compare(
        lambda s: bradley_terry(s, labels, OFFSETS, weights=w, reduction="sum"),
        lambda s: brute(s, labels, lambda gap: softplus(-gap), "sum", lambda i, j: w[i] * w[j]),
        scores,
    )
    a, c = torch.rand(2, len(scores), dtype=torch.float64)
    compare(
        lambda s: hinge(s, labels, OFFSETS, weights=(a, c), squared=True, reduction="sum"),
        lambda s: brute(s, labels, lambda gap: torch.relu(1 - gap) ** 2, "sum", lambda i, j: a[i] * c[j]),
        scores,
    )


@pytest.mark.parametrize("reduction", ["sum", "mean", "group_mean", "none"])
def test_given_pairs_equal_plain_torch(reduction):
    scores, labels = problem()
    triples = brute_pairs(labels)
    i, j = (torch.tensor([t[k] for t in triples]) for k in (1, 2))
    if reduction == "none":
        compare(
            lambda s: bradley_terry(s, pairs=(i, j), reduction="none"),
            lambda s: -torch.nn.functional.logsigmoid(s[i] - s[j]),
            scores,
        )
        return
    compare(
        lambda s: bradley_terry(s, None, OFFSETS, pairs=(i, j), reduction=reduction),
        lambda s: brute(s, labels, lambda gap: softplus(-gap), reduction),
        scores,
    )
    m, w = torch.rand(2, len(i), dtype=torch.float64)
    compare(
        lambda s: bradley_terry(s, pairs=(i, j), margin=m, weights=w, scale=0.7, reduction="sum"),
        lambda s: (w * softplus(-0.7 * (s[i] - s[j] - m))).sum(),
        scores,
    )


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("levels", [2, 4, None])
@pytest.mark.parametrize("reduction", ["sum", "mean", "group_mean", "none"])
def test_sorted_hinge_equals_brute_force(squared, levels, reduction):
    scores, labels = problem(levels=levels or 50)
    # Far from zero and partly equal, with gaps of exactly the margin: the hard cases of prefix sums.
    scores = (scores * 4).round() / 4 + 1000
    compare(
        lambda s: hinge(s, labels, OFFSETS, margin=0.5, squared=squared, levels=levels, reduction=reduction),
        lambda s: brute(s, labels, lambda gap: torch.relu(0.5 - gap) ** (2 if squared else 1), reduction),
        scores,
        atol=1e-9,
    )


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize(
    ("dtype", "step", "margin"),
    [
        (torch.float32, 1.0, 2.0),
        (torch.bfloat16, 0.125, 0.5),
        (torch.float32, 0.1, 0.3),
        (torch.float64, 0.1, 0.3),
        (torch.float32, 1.0, 0.0),
    ],
)
def test_a_gap_of_exactly_the_margin_counts_as_in_the_plain_relu(dtype, step, margin, squared):
    # Means of groups of 3, 7 and 11 items round: activity must not depend on them.
    offsets = [0, 3, 10, 21, 24, 31, 42]
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        scores = (torch.randint(-3, 4, (42,), generator=g) * step + 1).to(dtype)
        labels = torch.randint(3, (42,), generator=g)
        x, y = scores.clone().requires_grad_(), scores.clone().requires_grad_()
        fast = hinge(x, labels, offsets, margin=margin, squared=squared, levels=3, reduction="sum")
        wide = y if dtype == torch.float64 else y.float()
        plain = wide.sum() * 0
        for a, b in itertools.pairwise(offsets):
            short = torch.relu(margin - (wide[a:b, None] - wide[None, a:b]))
            pairs = labels[a:b, None] > labels[None, a:b]
            plain = plain + (short**2 if squared else short)[pairs].sum()
        fast.backward()
        plain.backward()
        torch.testing.assert_close(fast, plain)
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("top_k", [None, 1, 3])
def test_plackett_luce_equals_brute_force(top_k):
    scores, labels = problem(levels=50)
    scores = scores * 30

    def slow(s):
        total = []
        for a, b in itertools.pairwise(OFFSETS):
            order = torch.argsort(labels[a:b], descending=True, stable=True) + a
            z = 0.8 * s[order]
            terms = [torch.logsumexp(z[r:], 0) - z[r] for r in range(len(z))][:top_k]
            total.append(torch.stack(terms).sum() if terms else s.sum() * 0)
        return torch.stack(total)

    for offsets in (OFFSETS, torch.tensor(OFFSETS)):
        compare(
            lambda s, o=offsets: plackett_luce(s, labels, o, scale=0.8, top_k=top_k, reduction="none"),
            slow,
            scores,
            atol=1e-10,
        )


def test_groups_of_two_are_bradley_terry():
    scores = torch.randn(10, dtype=torch.float64)
    labels = torch.tensor([0, 1] * 5)
    offsets = list(range(0, 11, 2))
    a = plackett_luce(scores, labels, offsets, reduction="sum")
    b = bradley_terry(scores, labels, offsets, reduction="sum")
    torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


LOSSES = {
    "bradley_terry": lambda s, y, o: bradley_terry(s, y, o, reduction="none"),
    "hinge": lambda s, y, o: hinge(s, y, o, reduction="none"),
    "squared_hinge": lambda s, y, o: hinge(s, y, o, squared=True, reduction="none"),
    "plackett_luce": lambda s, y, o: plackett_luce(s, y, o, reduction="none"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_symmetries(name):
    loss = LOSSES[name]
    scores, labels = problem()
    labels = torch.randperm(len(labels))
    group = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))
    x = scores.clone().requires_grad_()
    value = loss(x, labels, OFFSETS)
    value.sum().backward()
    shifted = loss(scores + torch.randn(len(SIZES), dtype=torch.float64)[group], labels, OFFSETS)
    torch.testing.assert_close(value, shifted, rtol=1e-9, atol=1e-11)
    per_group = torch.zeros(len(SIZES), dtype=torch.float64).index_add(0, group, x.grad)
    torch.testing.assert_close(per_group, torch.zeros_like(per_group), rtol=0, atol=1e-12)
    shuffle = torch.cat([torch.randperm(n) + a for a, n in zip(OFFSETS[:-1], SIZES, strict=True)])
    torch.testing.assert_close(value, loss(scores[shuffle], labels[shuffle], OFFSETS), rtol=1e-12, atol=1e-12)
    single = loss(scores.float(), labels, OFFSETS)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), value.detach(), rtol=2e-6, atol=2e-6)
    half = loss(scores.bfloat16(), labels, OFFSETS)
    assert half.dtype == torch.float32


@pytest.mark.parametrize("name", LOSSES)
def test_gradcheck_and_repeatability(name):
    scores, labels = problem(levels=1000, seed=3)
    x = scores.requires_grad_()
    assert torch.autograd.gradcheck(lambda s: LOSSES[name](s, labels, OFFSETS), (x,), eps=1e-6, atol=1e-6)
    (a,), (b,) = (torch.autograd.grad(LOSSES[name](x, labels, OFFSETS).sum(), x) for _ in range(2))
    assert a.equal(b)


@pytest.mark.parametrize("name", LOSSES)
def test_no_pair_gives_zero(name):
    x = torch.zeros(0, requires_grad=True)
    assert LOSSES[name](x, torch.zeros(0), [0]).shape == (0,)
    y = torch.randn(3, requires_grad=True)
    if name != "plackett_luce":
        value = LOSSES[name](y, torch.ones(3), [0, 3]).sum()
        value.backward()
        assert value.item() == 0 and (y.grad == 0).all()
    assert bradley_terry(y, torch.ones(3), [0, 3]).item() == 0


@pytest.mark.parametrize("by", ["uniform", "gap"])
@pytest.mark.parametrize("reduction", ["sum", "mean", "group_mean"])
def test_drawn_pairs_are_unbiased(by, reduction):
    scores, labels = problem(levels=5)
    truth = bradley_terry(scores, labels, OFFSETS, reduction=reduction).item()
    generator = torch.Generator().manual_seed(1)
    rounds, draws = 40, 128
    estimates = []
    for _ in range(rounds):
        drawn = draw_pairs(labels, OFFSETS, draws, by=by, reduction=reduction, generator=generator)
        real = drawn.weight > 0
        assert (labels[drawn.i[real]] > labels[drawn.j[real]]).all()
        losses = bradley_terry(scores, pairs=(drawn.i, drawn.j), reduction="none")
        # Each column is one draw per group: 128 * 40 = 5120 independent estimates.
        estimates.append((losses * drawn.weight).view(len(SIZES), draws).sum(0) * draws)
    estimates = torch.cat(estimates)
    error = estimates.std() / math.sqrt(len(estimates))
    assert abs(estimates.mean() - truth) < 4 * error


def test_top_pairs_picks_the_largest():
    scores, labels = problem(levels=1000)
    for by in ("gap", "violation"):
        top = top_pairs(scores, labels, OFFSETS, 3, by=by)
        triples = brute_pairs(labels)
        key = (lambda i, j: labels[i] - labels[j]) if by == "gap" else (lambda i, j: scores[j] - scores[i])
        for g in (0, 3, 5):
            best = sorted((float(key(i, j)) for h, i, j in triples if h == g), reverse=True)[:3]
            mine = [
                float(key(i, j))
                for i, j, w in zip(top.i.tolist(), top.j.tolist(), top.weight.tolist(), strict=True)
                if w > 0 and OFFSETS[g] <= i < OFFSETS[g + 1]
            ]
            assert sorted(mine, reverse=True) == pytest.approx(best)
    assert top.weight.sum().item() == pytest.approx(1)


def test_bad_input_is_named():
    scores, labels = problem()
    with pytest.raises(ValueError, match="labels: expected shape"):
        bradley_terry(scores, labels[:, None], OFFSETS)
    with pytest.raises(ValueError, match="offsets: expected ascending"):
        hinge(scores, labels, [0, 4])
    with pytest.raises(ValueError, match=r"pairs: expected two tensors"):
        bradley_terry(scores, pairs=(labels, labels[:3]))
    with pytest.raises(ValueError, match=r"weights: expected shape"):
        bradley_terry(scores, pairs=(labels, labels), weights=torch.ones(len(labels), 1))
    with pytest.raises(ValueError, match=r"scores: expected a floating tensor of shape"):
        bradley_terry(scores[:, None], labels, OFFSETS)
    with pytest.raises(ValueError, match="reduction"):
        hinge(scores, labels, OFFSETS, reduction="median")
