"""Pairs against the loop reference, and contexts that only the dense layout supports."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leanstep.lens import LensBatch, LensConfig, ObjectiveConfig, SamplingConfig, lens_loss
from leanstep.lens.pairs import build_pairs, pairs_per_sample
from leanstep.lens.reference import reference_pairs

from .test_closed_form import EVERY_TERM, random_batch

LOSSES = st.one_of(st.just(math.nan), st.sampled_from([1.0, 1.5, 2.0, 2.25]), st.floats(0, 5, width=32))


def without_gists(batch, **changes):
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
            assert got.live[mine].tolist()[: len(want)] == [delta > 0 for _, _, _, delta in want]
            assert got.delta[mine].tolist()[: len(want)] == [max(delta, 0.0) for _, _, _, delta in want]
            for k, (_, better, worse, _) in enumerate(want):
                assert got.better[mine][k] == row[sample, better] and got.worse[mine][k] == row[sample, worse]


@pytest.mark.parametrize("form", ["logistic", "hinge", "squared_hinge"])
@pytest.mark.parametrize("with_gists", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_loss_terms_and_gradient_equal_those_of_autograd(seed, with_gists, form):
    batch = random_batch(seed=seed, num_samples=4, num_variants=4)
    batch = batch if with_gists else without_gists(batch)
    config = LensConfig(block_size=4, objective=ObjectiveConfig(form=form, **EVERY_TERM))
    x = torch.randn(batch.pos.shape, dtype=torch.float64).tanh().requires_grad_()
    x.data[0, 0] = 0.0
    arguments = {"prev_scores": 0.5 * x.detach(), "state": torch.tensor(0.2)}
    a, b = (lens_loss(x, batch, config, backend=name, **arguments) for name in ("fused", "eager"))
    torch.testing.assert_close(a.loss, b.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(a.state, b.state, rtol=1e-12, atol=1e-15)
    assert torch.equal(a.kept, b.kept) and a.terms.keys() == b.terms.keys()
    for name in a.terms:
        torch.testing.assert_close(a.terms[name], b.terms[name], rtol=1e-11, atol=1e-15)
    (ga,), (gb,) = torch.autograd.grad(a.loss, x), torch.autograd.grad(b.loss, x)
    torch.testing.assert_close(ga, gb, rtol=1e-10, atol=1e-15)


def test_holes_and_falling_positions_are_compared_densely():
    batch, config = random_batch(seed=5), LensConfig(block_size=4)
    holes = batch.valid.clone()
    holes[:, 2] = False
    turned = batch.pos.clone()
    turned[:, [0, 1]] = turned[:, [1, 0]]
    x = torch.randn(batch.pos.shape)
    for odd in (without_gists(batch, valid=holes), without_gists(batch, pos=turned)):
        a, b = (lens_loss(x, odd, config, backend=name).loss for name in ("auto", "eager"))
        torch.testing.assert_close(a, b)


def test_a_score_that_is_not_finite_shows_in_the_loss():
    batch, config = random_batch(seed=1), LensConfig(block_size=4)
    for value in (math.nan, math.inf, -math.inf):
        x = torch.full(batch.pos.shape, value)
        a, b = (lens_loss(x, batch, config, backend=name, terms={"pref"}).loss for name in ("fused", "eager"))
        torch.testing.assert_close(a, b, equal_nan=True)
