"""The newer policy terms against verl's own losses, in the fused path, and their documented properties."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from verl_source import agg_loss, masked_functions, verl_functions

from leanstep.logprob import (
    OBJECTIVES,
    CovarianceChoice,
    PolicyBatch,
    PolicyObjective,
    linear_policy_loss,
    policy_loss,
)
from leanstep.logprob.objective import KINDS, policy_losses

B, T = 4, 9
LENGTHS = [T] * B


class Config(SimpleNamespace):
    def get(self, name, default=None):
        return getattr(self, name, default)


class Nothing: ...


@functools.cache
def verl(name):
    """Return verl's loss; it reads a few numbers of the actor's configuration and checks its class."""
    namespace = {
        "ActorConfig": Config,
        "AlgoConfig": Nothing,
        "verl_F": masked_functions(),
        "agg_loss": agg_loss(),
    }
    name = f"compute_policy_loss_{name}"
    return getattr(verl_functions("trainer/ppo/core_algos.py", [name], **namespace), name)


def batch(seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    logp = -torch.rand(B, T, generator=g, dtype=torch.float64) * 3
    old = logp + 0.4 * torch.randn(B, T, generator=g, dtype=torch.float64)
    advantages = torch.randn(B, 1, generator=g, dtype=torch.float64).expand(B, T).clone()
    mask = torch.ones(B, T, dtype=torch.float64)
    mask[0, 5:] = 0
    mask[2, 2:4] = 0
    return (
        logp.to(dtype).requires_grad_(),
        old.clamp(max=-1e-3).to(dtype),
        advantages.to(dtype),
        mask.to(dtype),
    )


TERMS = [
    ("gpg", OBJECTIVES["gpg"], {}),
    ("sapo", OBJECTIVES["sapo"], {"tau_pos": 1.0, "tau_neg": 1.05}),
    ("sapo", PolicyObjective("sapo", temperatures=(0.7, 2.0)), {"tau_pos": 0.7, "tau_neg": 2.0}),
    ("dppo_tv", OBJECTIVES["dppo_tv"], {"clip_ratio": 0.15, "clip_ratio_c": 20.0}),
    (
        "dppo_tv",
        PolicyObjective("dppo_tv", 0.02, 0.05, dual_clip=1.3),
        {"clip_ratio": 0.2, "clip_ratio_low": 0.02, "clip_ratio_high": 0.05, "clip_ratio_c": 1.3},
    ),
    ("dppo_kl", OBJECTIVES["dppo_kl"], {"clip_ratio": 0.05, "clip_ratio_c": 20.0}),
    (
        "dppo_kl",
        PolicyObjective("dppo_kl", 0.001, 0.01, dual_clip=1.3),
        {"clip_ratio": 0.2, "clip_ratio_low": 0.001, "clip_ratio_high": 0.01, "clip_ratio_c": 1.3},
    ),
    ("kl_cov", OBJECTIVES["kl_cov"], {"policy_loss": {"kl_cov_ratio": 2e-4, "ppo_kl_coef": 1.0}}),
    (
        "kl_cov",
        PolicyObjective("kl_cov", covariance=CovarianceChoice(share=0.3, coef=0.5)),
        {"policy_loss": {"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.5}},
    ),
    (
        # A share that takes all of the band: verl draws by torch's generator, leanstep by a hash.
        "clip_cov",
        PolicyObjective("clip_cov", covariance=CovarianceChoice(share=1.0, low=0.1, high=0.9)),
        {"clip_ratio": 0.2, "policy_loss": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 0.9}},
    ),
]


@pytest.mark.parametrize(
    ("name", "objective", "config"), TERMS, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(TERMS)]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_equals_verl(name, objective, config, seed):
    settings = {"clip_ratio_low": None, "clip_ratio_high": None, "global_batch_info": {}, **config}
    if "policy_loss" in settings:
        settings["policy_loss"] = Config(**settings["policy_loss"])
    logp, old, advantages, mask = batch(seed)
    theirs, _ = verl(name)(old, logp, advantages, mask, "token-mean", Config(**settings))
    (their_grad,) = torch.autograd.grad(theirs, logp)
    flat = [x.reshape(-1) for x in (logp, old, advantages, mask)]
    # verl averages SAPO per sequence, whatever it is told.
    normalizer = "sequence_mean" if name == "sapo" else "token_mean"
    ours = policy_loss(
        *flat[:3], objective=objective, mask=flat[3], normalizer=normalizer, sequence_lengths=LENGTHS
    )
    (our_grad,) = torch.autograd.grad(ours.loss, logp)
    torch.testing.assert_close(ours.loss, theirs, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(our_grad, their_grad, rtol=1e-7, atol=1e-9)
    assert (our_grad != 0).any() and not our_grad[mask == 0].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [None, 1 << 14])
def test_the_fused_path_gives_the_same_loss_and_gradients(kind, budget):
    from leanstep.logprob import Tuning, linear_logprobs

    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(B * T, 16, generator=g, dtype=torch.float64).requires_grad_()
    weight = torch.randn(67, 16, generator=g, dtype=torch.float64).mul_(0.3).requires_grad_()
    targets = torch.randint(0, 67, (B * T,), generator=g)
    _, _, advantages, mask = (x.detach().reshape(-1) for x in batch())
    objective = PolicyObjective(
        kind, entropy_coef=0.01, covariance=CovarianceChoice(share=0.2, low=0.0, high=9.0)
    )
    out = linear_logprobs(hidden, weight, targets, entropy="grad")
    old = out.logp.detach() + 0.3 * torch.randn(B * T, generator=g, dtype=torch.float64)
    plain = policy_loss(
        out.logp, old, advantages, objective=objective, entropy=out.entropy, mask=mask,
        normalizer="sequence_sum", sequence_lengths=LENGTHS,
    )  # fmt: skip
    fused = linear_policy_loss(
        hidden, weight, targets, PolicyBatch(old, advantages, mask, sequence_lengths=LENGTHS),
        objective=objective, normalizer="sequence_sum", tuning=Tuning(budget=budget),
    )  # fmt: skip
    torch.testing.assert_close(fused.loss, plain.loss)
    for name, value in plain.metrics.items():
        torch.testing.assert_close(fused.metrics[name], value, msg=name)
    for a, b in zip(*(torch.autograd.grad(x.loss, (hidden, weight)) for x in (fused, plain)), strict=True):
        torch.testing.assert_close(a, b)


def test_clip_cov_draws_the_share_it_is_told():
    g = torch.Generator().manual_seed(5)
    logp, advantages = (torch.randn(2000, generator=g, dtype=torch.float64) for _ in range(2))
    mask = (torch.arange(2000) % 4 != 0).double()
    objective = PolicyObjective("clip_cov", covariance=CovarianceChoice(share=0.02, low=0.2, high=3.0))
    everything = replace(objective, covariance=objective.covariance._replace(share=1.0))
    few, all_of_it = (policy_losses(o, logp, logp, advantages, mask=mask) for o in (objective, everything))
    assert few.clipped.sum() == 30 and few.clipped.sum() < all_of_it.clipped.sum() < 1500
    assert not (few.clipped & ~all_of_it.clipped).any() and not few.losses[few.clipped].any()
    # Drawn, and not the largest or the first: spread over the band.
    chosen = few.clipped.nonzero().flatten().double()
    assert 600 < chosen.mean() < 1400
    again = policy_losses(objective, logp, logp, advantages, mask=mask)
    assert torch.equal(again.clipped, few.clipped)
    # Another rounding of logp draws the same rows.
    close = policy_losses(objective, logp * (1 + 1e-8), logp, advantages, mask=mask)
    assert torch.equal(close.clipped, few.clipped)


@pytest.mark.parametrize("kind", KINDS)
def test_masked_rows_may_hold_anything(kind):
    logp, old, advantages, mask = (x.reshape(-1) for x in batch())
    spoilt = [torch.where(mask == 0, bad, x) for x, bad in ((old, -torch.inf), (advantages, torch.nan))]
    leaf = torch.where(mask == 0, torch.inf, logp.detach()).requires_grad_()
    objective = PolicyObjective(kind, covariance=CovarianceChoice(share=0.5, low=-1.0))
    clean = policy_loss(logp, old, advantages, objective=objective, mask=mask, sequence_lengths=LENGTHS)
    dirty = policy_loss(leaf, *spoilt, objective=objective, mask=mask, sequence_lengths=LENGTHS)
    torch.testing.assert_close(dirty.loss, clean.loss)
    (grad,) = torch.autograd.grad(dirty.loss, leaf)
    (expected,) = torch.autograd.grad(clean.loss, logp)
    torch.testing.assert_close(grad, expected.reshape(-1))


@pytest.mark.parametrize("kind", ["sapo", "dppo_tv", "dppo_kl", "gpg", "kl_cov"])
def test_extreme_ratios_stay_finite(kind):
    logp = torch.tensor([-0.0, -200.0, -1.0], requires_grad=True)
    old = torch.tensor([-200.0, -0.0, -1.0])
    out = policy_loss(logp, old, torch.tensor([1.0, -1.0, 0.5]), objective=kind)
    out.loss.backward()
    assert out.loss.isfinite() and logp.grad.isfinite().all()


def test_luspo_is_gspo_summed_over_a_sequence():
    logp, old, advantages, mask = (x.reshape(-1) for x in batch())
    out = policy_loss(
        logp,
        old,
        advantages,
        objective="gspo",
        mask=mask,
        normalizer="sequence_sum",
        sequence_lengths=LENGTHS,
    )
    rows = policy_losses(OBJECTIVES["gspo"], logp, old, advantages, mask=mask, sequence_lengths=LENGTHS)
    torch.testing.assert_close(out.loss, (rows.losses * mask).view(B, T).sum(1).mean())


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match=r"kind: expected one of clip, .*, got 'vanilla'"):
        PolicyObjective("vanilla")
    with pytest.raises(ValueError, match="temperatures: expected two values > 0"):
        PolicyObjective("sapo", temperatures=(1.0, 0.0))
    with pytest.raises(ValueError, match=r"covariance.share: expected 0 < value <= 1, got 0"):
        PolicyObjective("kl_cov", covariance=CovarianceChoice(share=0))
