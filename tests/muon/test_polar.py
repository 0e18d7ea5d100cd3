"""Every form of the polar iteration against float64, upstream's vectors and its documented properties."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from muon.golden import array, load
from torch import nn

from leanstep.muon import NorMuon, polar, reference
from leanstep.muon import polar as _public
from leanstep.muon.polar import product_dtype

page = __import__("sys").modules["leanstep.muon.polar"]
assert page is not _public
# What the sizes of a matrix choose: limits that select one way of computing the same polynomial.
FORMS = {
    "standard": {"MIN_GRAM_SIDE": 1 << 30, "MIN_PANEL_SIDE": 1 << 30},
    "standard, panels": {"MIN_GRAM_SIDE": 1 << 30, "MIN_PANEL_SIDE": 1},
    "gram": {"MIN_GRAM_SIDE": 1, "GRAM_RATIO": 0, "MIN_PANEL_SIDE": 1 << 30},
    "gram, panels": {"MIN_GRAM_SIDE": 1, "GRAM_RATIO": 0, "MIN_PANEL_SIDE": 1},
}


def polar_by(form, update, **options):
    with mock.patch.multiple(page, **FORMS[form]):
        return polar(update, **options)


SHAPES = [(41, 401), (401, 41), (127, 127), (1, 17), (17, 1), (96, 144)]


def error(got, truth):
    return ((got.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("index", range(8))
def test_upstream_vectors_in_bfloat16(index):
    case = load("polar_express")["cases"][index]
    got = polar(array(case["input"]), eps_mode="absolute", compute_dtype=torch.bfloat16)
    # Two bfloat16 evaluations differ by their rounding: judge each by its distance from float64.
    truth = reference.polar(array(case["input"]).double(), eps_mode="absolute")
    upstream = array(case["out_bf16"]).float()
    assert error(got, truth) <= 1.5 * error(upstream, truth)
    torch.testing.assert_close(got, upstream, atol=0.1, rtol=0)


@pytest.mark.parametrize("form", ["standard", "standard, panels"])
@pytest.mark.parametrize("shape", SHAPES)
def test_standard_form_is_as_exact_as_the_plain_loop(form, shape):
    # The worst of ten: in a single draw the rounding errors of one of the two may happen to cancel.
    plain, ours = [], []
    for update in torch.randn(10, *shape):
        truth = reference.polar(update.double())
        plain.append(error(reference.polar(update), truth))
        ours.append(error(polar_by(form, update, compute_dtype=torch.float32), truth))
    assert max(ours) <= 2 * max(plain) + 2e-6


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(96, 160), (160, 96), (96, 96)])
@pytest.mark.parametrize("rank", [1, 4])
def test_low_rank_keeps_its_singular_values(form, shape, rank):
    # Singular values beyond the rank are noise, which Q multiplies by 991: it must not affect the others.
    update = torch.randn(shape[0], rank) @ torch.randn(rank, shape[1])
    truth = reference.polar(update.double())
    plain = error(reference.polar(update), truth)
    assert error(polar_by(form, update, compute_dtype=torch.float32), truth) <= 30 * plain


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 70),
    cols=st.integers(1, 70),
    batch=st.integers(1, 3),
    form=st.sampled_from(list(FORMS)),
)
def test_the_form_does_not_change_the_result(rows, cols, batch, form):
    update = torch.randn(
        batch, rows, cols, generator=torch.Generator().manual_seed(rows * 41 + cols)
    ).double()
    torch.testing.assert_close(polar_by(form, update), reference.polar(update), atol=1e-7, rtol=0)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-6, 1.0, 1e12, 1e30])
@pytest.mark.parametrize("form", ["standard, panels", "gram, panels"])
def test_relative_mode_ignores_the_scale(form, scale):
    update = torch.randn(40, 100)
    full = polar_by(form, update, compute_dtype=torch.float32)
    torch.testing.assert_close(
        polar_by(form, update * scale, compute_dtype=torch.float32), full, atol=1e-4, rtol=0
    )


def test_subnormal_updates_keep_their_direction():
    update = torch.full((4, 6), 1e-42)
    got = polar(update)
    assert torch.isfinite(got).all()
    assert got.norm() == pytest.approx(reference.polar(torch.ones(4, 6)).norm().item(), rel=1e-3)


def test_zero_matrix_in_a_bank_stays_exactly_zero():
    bank = torch.randn(3, 24, 40)
    bank[1] = 0
    for dtype in (torch.float32, torch.bfloat16):
        got = polar(bank, compute_dtype=dtype)
        assert not got[1].any() and got[0].any() and torch.isfinite(got).all()


def test_bank_is_normalised_per_matrix():
    bank = torch.randn(3, 30, 80) * torch.tensor([1.0, 1e-5, 1e5]).view(3, 1, 1)
    torch.testing.assert_close(polar(bank), torch.stack([polar(m) for m in bank]), atol=1e-5, rtol=0)


def test_input_is_unchanged_repeats_bitwise_and_may_be_strided():
    update = torch.randn(200, 300)[::2, ::3]
    before = update.clone()
    first = polar(update)
    assert torch.equal(first, polar(update))
    assert torch.equal(update, before)
    torch.testing.assert_close(first, polar(update.contiguous()), atol=1e-5, rtol=0)


def test_other_coefficients_are_pluggable():
    update = torch.randn(20, 50, dtype=torch.float64)
    torch.testing.assert_close(
        polar(update, coefficients=reference.NEWTON_SCHULZ),
        reference.polar(update, reference.NEWTON_SCHULZ),
        atol=1e-9,
        rtol=0,
    )


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 3, 4)])
def test_empty_matrices_come_back_empty(shape):
    assert polar(torch.zeros(shape)).shape == shape


def test_cpu_dtype_follows_the_measured_speed(monkeypatch):
    for speed, expected in ((0.01, torch.float32), (2.5, torch.bfloat16)):
        monkeypatch.setattr(page, "cpu_bfloat16_speedup", lambda speed=speed: speed)
        assert product_dtype(torch.empty(768, 768)) == expected
        assert product_dtype(torch.empty(64, 768)) == torch.float32
        assert product_dtype(torch.empty(768, 768, dtype=torch.float64)) == torch.float64
    assert product_dtype(torch.empty(64, 64, device="meta")) == torch.bfloat16
    assert product_dtype(torch.empty(768, 768), cpu_half=False) == torch.float32


@pytest.mark.parametrize("shape", [(256, 300), (300, 256), (257, 513), (2, 260, 400)])
def test_large_sides_take_panels_and_gram_form_and_are_as_exact(shape):
    """Sizes at which the page itself chooses, without patched limits."""
    update = torch.randn(shape)
    truth = reference.polar(update.double())
    assert (
        error(polar(update, compute_dtype=torch.float32), truth)
        <= 2 * error(reference.polar(update), truth) + 1e-5
    )


def test_small_updates_shrink_as_upstreams_do_in_absolute_mode():
    vectors = load("polar_express")
    for case in vectors["tiny"]:
        update = array(vectors["tiny_base"]) * case["scale"]
        got = polar(update, eps_mode="absolute", compute_dtype=torch.float32)
        torch.testing.assert_close(got, array(case["out_fp32"]), atol=5e-5, rtol=0)
        assert got.norm().item() == pytest.approx(case["fro_out"], rel=1e-4)


@pytest.mark.parametrize(
    ("make", "options", "names"),
    [
        (lambda: torch.zeros(3), {}, "update"),
        (lambda: torch.zeros(3, 3, dtype=torch.int64), {}, "update"),
        (lambda: torch.zeros(3, 3, dtype=torch.complex64), {}, "update"),
        (lambda: torch.zeros(3, 3).to_sparse(), {}, "update"),
        (lambda: torch.zeros(3, 3), {"eps_mode": "none"}, "eps_mode"),
        (lambda: torch.zeros(3, 3), {"compute_dtype": "bf16"}, "compute_dtype"),
    ],
)
def test_bad_arguments_are_named(make, options, names):
    with pytest.raises(ValueError, match=f"^{names}: expected"):
        polar(make(), **options)


def test_step_with_two_threads_equals_step_with_one():
    weights = [torch.randn(80, 90) for _ in range(6)]
    grads = [torch.randn(80, 90) for _ in range(6)]
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            params = [nn.Parameter(w.clone()) for w in weights]
            optimizer = NorMuon(params)
            for _ in range(3):
                for param, grad in zip(params, grads, strict=True):
                    param.grad = grad
                optimizer.step()
        finally:
            torch.set_num_threads(1)
        results.append([p.detach() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
