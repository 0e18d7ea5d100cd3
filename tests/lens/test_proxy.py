"""The proxy objective: a cheap L2 or hinge on a small subset of entries, or a teacher's scores."""

from __future__ import annotations

import pytest
import torch

from leanstep.lens import LensBatch, LensConfig, Variant, lens_loss, proxy_loss
from leanstep.lens.proxy import aggregate_targets

from .test_loss import random_batch, target_signs


def test_proxy_losses_by_hand():
    # One sample, two contexts: the gist context is better, so block 0 of the raw one should collapse.
    samples = [[Variant([0, 1, 2], [0, 0, 0], 2.0, True), Variant([0, 2], [1, 0], 1.0)]]
    config = LensConfig(block_size=2)
    batch = LensBatch.from_variants(samples, config, num_tokens=3)
    t = torch.tanh(torch.tensor(1.0)).item()
    target, masked = aggregate_targets(batch, config)
    torch.testing.assert_close(target, torch.tensor([[-t, -t, 0.0], [0.0, 0.0, 0.0]]))
    assert masked.tolist() == [[True, True, False], [False, False, False]]
    x = torch.tensor([[0.5, -0.2, 9.0], [9.0, 9.0, 9.0]], requires_grad=True)
    l2 = proxy_loss(x, batch, config)
    assert l2.item() == pytest.approx(((0.5 + t) ** 2 + (-0.2 + t) ** 2) / 2, rel=1e-6)
    l2.backward()
    assert (
        x.grad[0, 2] == 0
        and (x.grad[1] == 0).all()
        and x.grad[0, 0].item() == pytest.approx(0.5 + t, rel=1e-6)
    )
    hinge = proxy_loss(x, batch, config, "hinge")
    assert hinge.item() == pytest.approx((t + 0.5 + t - 0.2) / 2, rel=1e-6)
    teacher = torch.zeros_like(x).requires_grad_()
    distill = proxy_loss(x, batch, config, "distill", teacher=teacher)
    first, second = (0.25 + 0.04 + 81) / 3, 81.0
    assert distill.item() == pytest.approx((first + second) / 2, rel=1e-6)
    g = torch.Generator().manual_seed(0)
    seen = {
        round(proxy_loss(x, batch, config, entries_per_context=1, generator=g).item(), 4) for _ in range(20)
    }
    assert seen == {round((0.5 + t) ** 2, 4), round((-0.2 + t) ** 2, 4)}
    with pytest.raises(ValueError, match="teacher"):
        proxy_loss(x, batch, config, "distill")
    with pytest.raises(ValueError, match="kind: expected l2, hinge or distill"):
        proxy_loss(x, batch, config, "l1")


def test_targets_are_the_means_over_the_pairs():
    batch, config = random_batch(seed=3), LensConfig(block_size=4)
    pairs = lens_loss(torch.zeros(batch.pos.shape), batch, config).pairs
    target = target_signs(batch, pairs, config) * pairs.delta.tanh()[:, None]
    mean, masked = aggregate_targets(batch, config, torch.float64)
    assert masked.any() and not mean[~masked].any()
    for v in range(batch.num_contexts):
        mine = target[pairs.worse == v]
        torch.testing.assert_close(mean[v], mine.sum(0) / (mine != 0).sum(0).clamp(min=1))
