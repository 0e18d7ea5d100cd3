"""Rollout correction against verl's own functions, and its effect on an objective."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from verl_source import masked_functions, verl_functions

from leanstep.logprob import PolicyBatch, linear_policy_loss, policy_loss
from leanstep.objectives import RolloutCorrection, correct_rollout


@functools.cache
def verl():
    names = ["_parse_rollout_is_threshold", "_parse_rollout_rs_thresholds", "compute_rollout_rejection_mask"]
    names += ["compute_rs_metrics", "compute_rollout_correction_weights", "compute_is_metrics"]
    return verl_functions("trainer/ppo/rollout_corr_helper.py", names, verl_F=masked_functions())


LENGTHS = [4, 1, 0, 5, 3]
N = sum(LENGTHS)


def batch(seed=0):
    g = torch.Generator().manual_seed(seed)
    old, rollout, advantages = (0.3 * torch.randn(N, generator=g, dtype=torch.float64) for _ in range(3))
    mask = torch.ones(N, dtype=torch.float64)
    mask[[2, 4]] = 0
    rollout[2] = torch.inf
    return PolicyBatch(old, advantages, mask, sequence_lengths=LENGTHS), rollout


def padded(values):
    out = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=values.dtype)
    for row, part in enumerate(values.split(LENGTHS)):
        out[row, : len(part)] = part
    return out


def flat(values):
    return torch.cat([values[row, :n] for row, n in enumerate(LENGTHS)])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("bounds", [(None, 1.2), (0.2, 3.0)], ids=["tis", "icepop"])
@pytest.mark.parametrize("normalize", [False, True])
def test_weights_equal_verl(level, bounds, normalize):
    original, rollout = batch()
    ratio = torch.where(original.mask == 0, 0.0, original.old_logp - rollout)
    spec = bounds[1] if bounds[0] is None else f"{bounds[0]}_{bounds[1]}"
    weights, _ = verl().compute_rollout_correction_weights(
        padded(ratio), padded(original.mask), level, spec, normalize
    )
    new, metrics = correct_rollout(
        original, rollout, RolloutCorrection(level, lower=bounds[0], upper=bounds[1], normalize=normalize)
    )
    torch.testing.assert_close(new.advantages, original.advantages * flat(weights))
    assert new.mask is original.mask
    torch.testing.assert_close(metrics["mean_weight"], (flat(weights)).sum() / original.mask.sum())


RULES = [("token_k1", 0.5, 1.6), ("token_k2", None, 0.05), ("token_k3", None, 0.05), ("seq_sum_k1", 0.3, 2.5)]
RULES += [
    ("seq_mean_k1", 0.8, 1.2),
    ("seq_mean_k3", None, 0.05),
    ("seq_sum_k2", None, 0.25),
    ("seq_max_k3", None, 0.12),
]
RULES += [("seq_max_k2", None, 0.1), ("seq_sum_k3", None, 0.3), ("seq_mean_k2", None, 0.06)]


@pytest.mark.parametrize("rule", [*RULES, "two"], ids=str)
def test_rejection_equals_verl(rule):
    original, rollout = batch()
    ratio = torch.where(original.mask == 0, 0.0, original.old_logp - rollout)
    rules = [("token_k1", 0.2, 3.0), ("seq_mean_k3", None, 0.04)] if rule == "two" else [rule]
    spec = ",".join(str(high) if low is None else f"{low}_{high}" for _, low, high in rules)
    mask, _ = verl().compute_rollout_rejection_mask(
        padded(ratio), padded(original.mask), ",".join(kind for kind, *_ in rules), spec
    )
    new, metrics = correct_rollout(original, rollout, RolloutCorrection(None, reject=rules))
    torch.testing.assert_close(new.mask, flat(mask))
    torch.testing.assert_close(metrics["rejected"], 1 - flat(mask).sum() / original.mask.sum())
    assert new.advantages is original.advantages


@pytest.mark.parametrize("objective", ["grpo", "cispo"])
def test_weights_multiply_the_loss_of_a_row(objective):
    """As in verl: they multiply the row's loss, with the normalizer of the mask; fused and unfused."""
    original, rollout = batch()
    new, _ = correct_rollout(original, rollout, RolloutCorrection(reject=[("seq_mean_k1", 0.5, 2.0)]))
    hidden = torch.randn(N, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 3, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 11, (N,))
    logp = torch.log_softmax(hidden @ weight.T, -1).gather(1, targets[:, None])[:, 0]
    factors = torch.where(original.mask == 0, 0.0, (original.old_logp - rollout).exp().clamp(max=2.0))
    plain = []
    for row in range(N):
        alone = dataclasses.replace(original, mask=torch.nn.functional.one_hot(torch.tensor(row), N).double())
        one = policy_loss(
            logp, alone.old_logp, alone.advantages, objective=objective, mask=alone.mask, normalizer="sum"
        )
        plain.append(one.loss * factors[row] * (new.mask[row] != 0))
    expected = torch.stack(plain).sum() / new.mask.sum().clamp(min=1)
    fused = linear_policy_loss(hidden, weight, targets, new, objective=objective).loss
    torch.testing.assert_close(fused, expected)
    for mine, theirs in zip(
        *(torch.autograd.grad(x, (hidden, weight)) for x in (fused, expected)), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: RolloutCorrection("row"), "level: expected token, sequence or None"),
        (lambda: RolloutCorrection(lower=3.0), "lower, upper: expected 0 < lower <= upper"),
        (lambda: RolloutCorrection(reject=[("token_k4", 1, 2)]), "reject: expected"),
        (lambda: RolloutCorrection(reject=[("token_k2", 1, 2)]), "low None and high > 0 for token_k2"),
        (lambda: RolloutCorrection(reject=[("token_k1", None, 2)]), "0 < low <= high for token_k1"),
        (
            lambda: correct_rollout(batch()[0], torch.zeros(3), RolloutCorrection()),
            r"rollout_logp: expected \(13,\)",
        ),
    ],
)
def test_refusals(make, complaint):
    with pytest.raises(ValueError, match=complaint):
        make()
