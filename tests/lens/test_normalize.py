"""The objective over several ranks. No relative imports: ranks load this file alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from leanstep.lens import LensBatch, LensConfig, ObjectiveConfig, lens_loss
from recipes.lens.contexts import sample_variants

CONFIG = LensConfig(block_size=4, max_lod=2)


def problem(rank):
    """Return a batch per rank with different numbers of samples, and so of pairs with a target."""
    generator = torch.Generator().manual_seed(rank)
    samples = []
    for _ in range(2 + 3 * rank):
        variants = sample_variants(48, 4, 2, 2, 36, generator, recent_tokens=8)
        losses = torch.rand(len(variants), generator=generator).tolist()
        samples.append([replace(v, loss=x) for v, x in zip(variants, losses, strict=True)])
    batch = LensBatch.from_variants(samples, CONFIG, num_tokens=48)
    scores = torch.rand(batch.pos.shape, generator=generator, dtype=torch.float64) * 2 - 1
    return batch, scores.requires_grad_()


def normalize_on_rank(rank, world_size):
    batch, x = problem(rank)
    result = lens_loss(x, batch, replace(CONFIG, objective=ObjectiveConfig(normalize="global")))
    result.loss.backward()
    return result.loss.item(), int(result.kept.sum()), x.grad.tolist()


def test_global_normalisation_is_the_mean_over_all_ranks(run_ranks):
    outcomes = run_ranks(2, normalize_on_rank)
    total = sum(num_pairs for _, num_pairs, _ in outcomes)
    assert outcomes[0][1] != outcomes[1][1]
    for rank, (value, num_pairs, grad) in enumerate(outcomes):
        batch, x = problem(rank)
        local = lens_loss(x, batch, CONFIG).loss * num_pairs
        (2 * local / total).backward()
        assert value == pytest.approx(2 * local.item() / total, rel=1e-12)
        torch.testing.assert_close(torch.tensor(grad, dtype=torch.float64), x.grad, rtol=1e-12, atol=1e-15)


def test_global_without_a_process_group_is_refused():
    batch, x = problem(0)
    with pytest.raises(ValueError, match="normalize"):
        lens_loss(x, batch, replace(CONFIG, objective=ObjectiveConfig(normalize="global")))
