"""The C++ path: the same pairs, loss and gradient as torch, and a clear way back where it cannot go."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leanstep.preference import LensBatch, LensConfig, lens_loss
from leanstep.preference.native import native_loss, native_pairs, why_not
from leanstep.preference.pairs import build_pairs

from .test_loss import EVERY_TERM, random_batch

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
def test_pairs_equal_those_of_torch(data, num_variants, num_samples, ratio, max_pairs):
    values = st.lists(LOSSES, min_size=num_variants, max_size=num_variants)
    loss = torch.tensor([data.draw(values) for _ in range(num_samples)], dtype=torch.float32)
    row = torch.arange(loss.numel()).view(loss.shape)
    config = LensConfig(hard_negative_ratio=ratio, max_pairs=max_pairs)
    for losses in (loss, loss.double()):
        got, want = native_pairs(losses, row, config), build_pairs(losses, row, config)
        assert torch.equal(got.valid, want.valid) and torch.equal(got.live, want.live)
        assert torch.equal(got.delta, want.delta) and got.delta.dtype == losses.dtype
        for name in ("better", "worse"):
            assert torch.equal(getattr(got, name)[want.valid], getattr(want, name)[want.valid])


@pytest.mark.parametrize("form", ["logistic", "hinge", "squared_hinge"])
@pytest.mark.parametrize("with_gists", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_loss_terms_and_gradient_equal_those_of_torch(seed, with_gists, form):
    batch = random_batch(seed=seed, num_samples=4, num_variants=4)
    batch = batch if with_gists else without_gists(batch)
    config = LensConfig(block_size=4, form=form, **EVERY_TERM)
    x = torch.randn(batch.pos.shape, dtype=torch.float64).tanh().requires_grad_()
    x.data[0, 0] = 0.0
    arguments = {"prev_scores": 0.5 * x.detach(), "state": torch.tensor(0.2)}
    a, b = (lens_loss(x, batch, config, backend=name, **arguments) for name in ("native", "eager"))
    torch.testing.assert_close(a.loss, b.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(a.state, b.state, rtol=1e-12, atol=1e-15)
    assert torch.equal(a.kept, b.kept) and a.terms.keys() == b.terms.keys()
    for name in a.terms:
        torch.testing.assert_close(a.terms[name], b.terms[name], rtol=1e-11, atol=1e-15)
    (ga,), (gb,) = torch.autograd.grad(a.loss, x), torch.autograd.grad(b.loss, x)
    torch.testing.assert_close(ga, gb, rtol=1e-10, atol=1e-15)


def test_auto_is_native_and_does_not_call_torch_operations_per_pair():
    batch, config = random_batch(seed=3), LensConfig(block_size=4)
    x = torch.randn(batch.pos.shape)
    with torch.profiler.profile() as profile:
        lens_loss(x, batch, config)
    assert sum(event.count for event in profile.key_averages()) < 60
    assert torch.equal(lens_loss(x, batch, config).loss, lens_loss(x, batch, config, backend="native").loss)


def test_holes_and_falling_positions_go_to_torch():
    batch, config = random_batch(seed=5), LensConfig(block_size=4)
    holes = batch.valid.clone()
    holes[:, 2] = False
    turned = batch.pos.clone()
    turned[:, [0, 1]] = turned[:, [1, 0]]
    x = torch.randn(batch.pos.shape)
    zero = torch.zeros(())
    for odd in (without_gists(batch, valid=holes), without_gists(batch, pos=turned)):
        pairs = native_pairs(odd.loss, odd.row, config)
        assert native_loss(x, odd, pairs, config, ("pref",), zero, None, None) is None
        a, b = (lens_loss(x, odd, config, backend=name).loss for name in ("auto", "eager"))
        torch.testing.assert_close(a, b)


def test_a_score_that_is_not_finite_shows_in_the_loss():
    batch, config = random_batch(seed=1), LensConfig(block_size=4)
    for value in (math.nan, math.inf, -math.inf):
        x = torch.full(batch.pos.shape, value)
        a, b = (
            lens_loss(x, batch, config, backend=name, terms={"pref"}).loss for name in ("native", "eager")
        )
        torch.testing.assert_close(a, b, equal_nan=True)


def test_what_it_cannot_do_is_refused_by_name():
    batch, x = random_batch(seed=2), torch.zeros(random_batch(seed=2).pos.shape)
    config = LensConfig(block_size=4, span_sampling="topk")
    with pytest.raises(ValueError, match=r'backend: "native" cannot take this call: span_sampling is "topk"'):
        lens_loss(x, batch, config, backend="native")
    assert 'normalize is "global"' in why_not(x, LensConfig(normalize="global"))
    assert "expected cpu" in why_not(x.to("meta"), LensConfig())
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        assert "FakeTensor" in why_not(mode.from_tensor(x), LensConfig())


def test_without_the_library_torch_takes_over(monkeypatch):
    monkeypatch.setenv("LEANSTEP_NATIVE", "0")
    batch, config = random_batch(seed=2), LensConfig(block_size=4)
    x = torch.randn(batch.pos.shape)
    assert torch.equal(lens_loss(x, batch, config).loss, lens_loss(x, batch, config, backend="fused").loss)
    with pytest.raises(ValueError, match="cannot take this call: LEANSTEP_NATIVE is 0"):
        lens_loss(x, batch, config, backend="native")
