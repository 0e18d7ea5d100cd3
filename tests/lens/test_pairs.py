"""Pairs against the loop reference, and unusual contexts."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leanstep.lens import LensBatch, LensConfig, SamplingConfig, lens_loss, lens_loss_reference
from leanstep.lens.loss import build_pairs, pairs_per_sample
from leanstep.lens.reference import reference_pairs

from .test_loss import random_batch

LOSSES = st.one_of(st.just(math.nan), st.sampled_from([1.0, 1.5, 2.0, 2.25]), st.floats(0, 5, width=32))


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


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 6), st.integers(1, 4), st.sampled_from([0.3, 0.7, 1.0]), st.integers(1, 9))
def test_pairs_equal_those_of_the_loops(data, num_variants, num_samples, ratio, max_pairs):
    values = st.lists(LOSSES, min_size=num_variants, max_size=num_variants)
    loss = torch.tensor([data.draw(values) for _ in range(num_samples)], dtype=torch.float32)
    row = torch.arange(loss.numel()).view(loss.shape)
    config = LensConfig(sampling=SamplingConfig(hard_negative_ratio=ratio, max_pairs=max_pairs))
    for losses in (loss, loss.double()):
        got = build_pairs(losses, row, config)
        assert got.delta.dtype == losses.dtype
        slots = pairs_per_sample(num_variants, config)
        for sample in range(num_samples):
            want = reference_pairs(losses[sample], config, sample)
            mine = slice(sample * slots, (sample + 1) * slots)
            assert got.valid[mine].tolist() == [True] * len(want) + [False] * (slots - len(want))
            assert got.delta[mine].tolist()[: len(want)] == [max(delta, 0.0) for _, _, _, delta in want]
            for k, (_, better, worse, delta) in enumerate(want):
                better = better if delta > 0 else worse  # without a difference there is no target
                assert got.better[mine][k] == row[sample, better] and got.worse[mine][k] == row[sample, worse]


def test_holes_and_falling_positions_give_the_loops_loss():
    batch, config = random_batch(seed=5), LensConfig(block_size=4)
    holes = batch.valid.clone()
    holes[:, 2] = False
    turned = batch.pos.clone()
    turned[:, [0, 1]] = turned[:, [1, 0]]
    x = torch.randn(batch.pos.shape)
    for odd in (like(batch, valid=holes), like(batch, pos=turned)):
        torch.testing.assert_close(
            lens_loss(x, odd, config).loss, lens_loss_reference(x, odd, config).loss, rtol=1e-5, atol=1e-7
        )


def test_a_score_that_is_not_finite_shows_in_the_loss():
    batch, config = random_batch(seed=1), LensConfig(block_size=4)
    for value in (math.nan, math.inf, -math.inf):
        x = torch.full(batch.pos.shape, value)
        assert not lens_loss(x, batch, config, terms={"pref"}).loss.isfinite()
