"""The objectives against the table of their derivatives, and at the clip boundaries."""

from __future__ import annotations

import math

import pytest
import torch

from leanstep.heads import policy_loss

LOW, HIGH = 0.2, 0.3


def derivative(ratio, advantage, **options):
    """(f, df/dlogp, df/dH) of one row with the given ratio."""
    logp = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    entropy = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    old, advantages = logp.detach() - math.log(ratio), torch.tensor([advantage], dtype=torch.float64)
    options = {"normalizer": "sum", "sequence_lengths": [1], **options}
    loss = policy_loss(logp, old, advantages, entropy=entropy, **options).loss
    grads = torch.autograd.grad(loss, [logp, entropy], allow_unused=True)
    return float(loss.detach()), *(0.0 if g is None else float(g) for g in grads)


@pytest.mark.parametrize("kind", ["clip", "gspo"])
@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("ratio", [0.5, 0.79, 0.81, 1.0, 1.29, 1.31, 2.0, 6.0])
def test_clip(kind, advantage, ratio):
    objective = "grpo" if kind == "clip" else kind
    loss, slope, _ = derivative(ratio, advantage, objective=objective, clip_low=LOW, clip_high=HIGH)
    bounded = min(max(ratio, 1 - LOW), 1 + HIGH)
    assert loss == pytest.approx(max(-ratio * advantage, -bounded * advantage), abs=1e-12)
    stopped = (advantage > 0 and ratio > 1 + HIGH) or (advantage < 0 and ratio < 1 - LOW)
    assert slope == pytest.approx(0.0 if stopped else -ratio * advantage, abs=1e-12)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.9, 3.1])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_dual_clip(ratio, advantage):
    loss, slope, _ = derivative(ratio, advantage, dual_clip=3.0)
    plain, plain_slope, _ = derivative(ratio, advantage)
    if advantage < 0:
        assert loss == pytest.approx(min(plain, -3.0 * advantage), abs=1e-12)
        assert slope == pytest.approx(0.0 if ratio > 3.0 else plain_slope, abs=1e-12)
    else:
        assert (loss, slope) == (plain, plain_slope)


@pytest.mark.parametrize(("ratio", "advantage"), [(1.25, 1.0), (0.75, -1.0)])
def test_gradient_flows_at_the_exact_boundary(ratio, advantage):
    # 1.25 and 0.75 are exact in binary, and so is the logarithm's round trip with old chosen by search.
    logp = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-math.log(ratio)], dtype=torch.float64)
    assert float((logp.detach() - old).exp()) == ratio
    advantages = torch.tensor([advantage], dtype=torch.float64)
    result = policy_loss(logp, old, advantages, clip_low=0.25, clip_high=0.25)
    (slope,) = torch.autograd.grad(result.loss, logp)
    assert float(slope) == pytest.approx(-ratio * advantage) and result.metrics["clip_fraction"] == 0


@pytest.mark.parametrize("ratio", [0.1, 1.0, 5.0])
def test_cispo(ratio):
    loss, slope, _ = derivative(ratio, 1.5, objective="cispo", clip_low=0.5, clip_high=1.0)
    bounded = min(max(ratio, 0.5), 2.0)
    assert loss == pytest.approx(-bounded * 1.5 * -1.0) and slope == pytest.approx(-bounded * 1.5)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
@pytest.mark.parametrize("d", [-0.7, 0.0, 0.4])
def test_kl_estimators(name, d):
    reference = torch.tensor([-1.0 + d], dtype=torch.float64)
    with_kl = derivative(1.0, 1.0, kl=name, kl_coef=0.5, ref_logp=reference)
    without = derivative(1.0, 1.0)
    value = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[name]
    slope = {"k1": 1.0, "k2": -d, "k3": 1 - math.exp(d)}[name]
    assert with_kl[0] - without[0] == pytest.approx(0.5 * value, abs=1e-12)
    assert with_kl[1] - without[1] == pytest.approx(0.5 * slope, abs=1e-12)


def test_entropy_bonus():
    loss, _, slope = derivative(1.0, 0.0, entropy_coef=0.1)
    assert loss == pytest.approx(-0.2) and slope == pytest.approx(-0.1)


def test_gspo_ratio_is_the_masked_sequence_mean():
    logp = torch.tensor([-1.0, -2.0, -3.0, -4.0, -1.0], dtype=torch.float64)
    old = torch.tensor([-1.1, -2.3, -9.0, -4.2, -1.3], dtype=torch.float64)
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    options = {"objective": "gspo", "mask": mask, "normalizer": "sum", "sequence_lengths": [3, 2]}
    # A row with advantage -1 alone: the loss is its ratio.
    losses = [policy_loss(logp, old, a, **options).loss.item() for a in -torch.eye(5, dtype=torch.float64)]
    first, second = math.exp((0.1 + 0.3) / 2), math.exp((0.2 + 0.3) / 2)
    assert losses == pytest.approx([first, first, 0.0, second, second])


def test_normalizers():
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])

    def weights(normalizer):
        logp = torch.zeros(5, requires_grad=True)
        options = {"normalizer": normalizer, "sequence_lengths": [2, 2, 1]}
        loss = policy_loss(logp, torch.zeros(5), -torch.ones(5), mask=mask, **options).loss
        return torch.autograd.grad(loss, logp)[0].tolist()

    assert weights("sum") == mask.tolist()
    assert weights("token_mean") == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3, 0])
    assert weights("sequence_mean") == pytest.approx([1 / 3, 0, 1 / 6, 1 / 6, 0])
    assert weights("sequence_sum") == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3, 0])
    assert weights(4) == pytest.approx([0.25, 0, 0.25, 0.25, 0])
    assert weights(torch.tensor(2.0)) == pytest.approx([0.5, 0, 0.5, 0.5, 0])


def test_metrics():
    logp, old = torch.tensor([0.0, -1.0, -3.0]), torch.tensor([-0.5, -1.0, 0.0])
    result = policy_loss(
        logp,
        old,
        torch.tensor([1.0, 1.0, 1.0]),
        mask=torch.tensor([1, 1, 0]),
        entropy=torch.tensor([1.0, 3.0, 9.0]),
    )
    assert float(result.metrics["clip_fraction"]) == 0.5
    assert float(result.metrics["mean_ratio"]) == pytest.approx((math.exp(0.5) + 1) / 2)
    assert float(result.metrics["approx_kl"]) == pytest.approx((math.exp(0.5) - 1.5) / 2)
    assert float(result.metrics["entropy"]) == pytest.approx(2.0)
