"""The objectives against the table of their derivatives, and at the clip boundaries."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch

from leanstep.heads import policy_loss
from leanstep.heads.losses import check_objective, policy_rows, row_weights

LOW, HIGH = 0.2, 0.3


def settings(
    objective="grpo", clip_low=None, clip_high=None, dual_clip=None, kl="k3", kl_coef=0.0, entropy_coef=0.0
):
    return check_objective(objective, clip_low, clip_high, dual_clip, kl, kl_coef, entropy_coef, 0)


def policy_losses(
    objective, logp, old, advantages, entropy=None, ref_logp=None, mask=None, sequence_lengths=None
):
    return RowLosses(
        *policy_rows(objective, logp, old, advantages, entropy, ref_logp, mask, sequence_lengths)
    )


class RowLosses(NamedTuple):
    losses: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor


def derivative(objective, ratio, advantage, **extra):
    """(f, df/dlogp, df/dH) of one row with the given ratio."""
    logp = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    entropy = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    old = logp.detach() - math.log(ratio)
    rows = policy_losses(
        objective, logp, old, torch.tensor([advantage], dtype=torch.float64), entropy=entropy,
        sequence_lengths=[1], **extra,
    )  # fmt: skip
    grads = torch.autograd.grad(rows.losses.sum(), [logp, entropy], allow_unused=True)
    return float(rows.losses.detach()), *(0.0 if g is None else float(g) for g in grads)


@pytest.mark.parametrize("kind", ["clip", "gspo"])
@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("ratio", [0.5, 0.79, 0.81, 1.0, 1.29, 1.31, 2.0, 6.0])
def test_clip(kind, advantage, ratio):
    loss, slope, _ = derivative(
        settings("grpo" if kind == "clip" else kind, clip_low=LOW, clip_high=HIGH), ratio, advantage
    )
    bounded = min(max(ratio, 1 - LOW), 1 + HIGH)
    assert loss == pytest.approx(max(-ratio * advantage, -bounded * advantage), abs=1e-12)
    stopped = (advantage > 0 and ratio > 1 + HIGH) or (advantage < 0 and ratio < 1 - LOW)
    assert slope == pytest.approx(0.0 if stopped else -ratio * advantage, abs=1e-12)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.9, 3.1])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_dual_clip(ratio, advantage):
    loss, slope, _ = derivative(settings(dual_clip=3.0), ratio, advantage)
    plain, plain_slope, _ = derivative(settings(), ratio, advantage)
    if advantage < 0:
        assert loss == pytest.approx(min(plain, -3.0 * advantage), abs=1e-12)
        assert slope == pytest.approx(0.0 if ratio > 3.0 else plain_slope, abs=1e-12)
    else:
        assert (loss, slope) == (plain, plain_slope)


@pytest.mark.parametrize(("ratio", "advantage"), [(1.25, 1.0), (0.75, -1.0)])
def test_gradient_flows_at_the_exact_boundary(ratio, advantage):
    # 1.25 and 0.75 are exact in binary, and so is the logarithm's round trip with old chosen by search.
    objective = settings(clip_low=0.25, clip_high=0.25)
    logp = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-math.log(ratio)], dtype=torch.float64)
    assert float((logp.detach() - old).exp()) == ratio
    rows = policy_losses(objective, logp, old, torch.tensor([advantage], dtype=torch.float64))
    (slope,) = torch.autograd.grad(rows.losses.sum(), logp)
    assert float(slope) == pytest.approx(-ratio * advantage) and not rows.clipped.any()


@pytest.mark.parametrize("ratio", [0.1, 1.0, 5.0])
def test_cispo(ratio):
    objective = settings("cispo", clip_low=0.5, clip_high=1.0)
    loss, slope, _ = derivative(objective, ratio, 1.5)
    bounded = min(max(ratio, 0.5), 2.0)
    assert loss == pytest.approx(-bounded * 1.5 * -1.0) and slope == pytest.approx(-bounded * 1.5)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
@pytest.mark.parametrize("d", [-0.7, 0.0, 0.4])
def test_kl_estimators(name, d):
    reference = torch.tensor([-1.0 + d], dtype=torch.float64)
    with_kl = derivative(settings(kl=name, kl_coef=0.5), 1.0, 1.0, ref_logp=reference)
    without = derivative(settings(), 1.0, 1.0)
    value = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[name]
    slope = {"k1": 1.0, "k2": -d, "k3": 1 - math.exp(d)}[name]
    assert with_kl[0] - without[0] == pytest.approx(0.5 * value, abs=1e-12)
    assert with_kl[1] - without[1] == pytest.approx(0.5 * slope, abs=1e-12)


def test_entropy_bonus():
    loss, _, slope = derivative(settings(entropy_coef=0.1), 1.0, 0.0)
    assert loss == pytest.approx(-0.2) and slope == pytest.approx(-0.1)


def test_gspo_ratio_is_the_masked_sequence_mean():
    logp = torch.tensor([-1.0, -2.0, -3.0, -4.0, -1.0], dtype=torch.float64)
    old = torch.tensor([-1.1, -2.3, -9.0, -4.2, -1.3], dtype=torch.float64)
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    rows = policy_losses(
        settings("gspo"), logp, old, torch.ones(5, dtype=torch.float64), mask=mask, sequence_lengths=[3, 2]
    )
    expected = [math.exp((0.1 + 0.3) / 2)] * 3 + [math.exp((0.2 + 0.3) / 2)] * 2
    torch.testing.assert_close(rows.ratio, torch.tensor(expected, dtype=torch.float64))


def test_normalizers():
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])

    def weights(normalizer):
        return row_weights(mask, torch.zeros(5, dtype=torch.float64), normalizer, [2, 2, 1]).tolist()

    assert weights("sum") == mask.tolist()
    assert weights("token_mean") == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3, 0])
    assert weights("sequence_mean") == pytest.approx([1 / 3, 0, 1 / 6, 1 / 6, 0])
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


@pytest.mark.parametrize(
    "arguments",
    [{"objective": "sapo"}, {"kl": "k4"}, {"clip_low": -0.1}, {"dual_clip": 1.0}],
    ids=lambda a: next(iter(a)),
)
def test_bad_objectives_are_named(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        settings(**arguments)
