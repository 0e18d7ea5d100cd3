"""Pairs against the loop reference, and unusual contexts."""

from __future__ import annotations

import math

import torch

from leanstep.lens import LensBatch, LensConfig, lens_loss, lens_loss_reference

from .test_loss import random_batch


def like(batch, **changes):
    fields = {"pos": batch.pos, "lod": batch.lod, "valid": batch.valid} | changes
    return LensBatch.from_tensors(
        fields["pos"],
        fields["lod"],
        batch.loss,
        batch.row,
        num_tokens=batch.num_tokens,
        valid=fields["valid"],
    )


def test_holes_and_falling_positions_give_the_loops_loss():
    batch, config = random_batch(seed=5), LensConfig(block_size=4)
    holes = batch.valid.clone()
    holes[:, 2] = False
    turned = batch.pos.clone()
    turned[:, [0, 1]] = turned[:, [1, 0]]
    x = torch.randn(batch.pos.shape)
    for odd in (like(batch, valid=holes), like(batch, pos=turned)):
        got = lens_loss(x, odd, config)
        expected = lens_loss_reference(x, odd, config).loss
        torch.testing.assert_close(got.loss, expected, rtol=1e-5, atol=1e-7)
        # Of a batch without known variants per sample, those with a loss are counted.
        assert got.metrics.read()["mc/variants_total"] == (~odd.loss.isnan()).sum()


def test_a_score_that_is_not_finite_shows_in_the_loss():
    batch, config = random_batch(seed=1), LensConfig(block_size=4)
    for value in (math.nan, math.inf, -math.inf):
        x = torch.full(batch.pos.shape, value)
        assert not lens_loss(x, batch, config, terms={"pref"}).loss.isfinite()
