"""Every form of the polar iteration against float64, upstream's vectors and its documented properties."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from muon.golden import array, load
from torch import nn

from leanstep.muon import NorMuon, Workspace, reference
from leanstep.muon.polar import (
    PolarPlan,
    _bounds,
    choose_dtype,
    choose_panels,
    commuting_product,
    explain,
    gram_matrix,
    plan_polar,
    polar,
    quadratic,
    run_side_by_side,
)

FORMS = {
    "standard": {"method": "standard", "panels": 1},
    "standard, panels": {"method": "standard", "panels": 3},
    "gram": {"method": "gram", "restart": None, "panels": 1},
    "gram, panels": {"method": "gram", "restart": None, "panels": 3},
    "gram, restart": {"method": "gram", "restart": 2, "panels": 1},
    "gram, restart, panels": {"method": "gram", "restart": 2, "panels": 4},
}
SHAPES = [(41, 401), (401, 41), (127, 127), (1, 17), (17, 1), (96, 144)]


def error(got, truth):
    return ((got.double() - truth).norm() / truth.norm()).item()


def spectrum(rows, cols, smallest):
    short = min(rows, cols)
    u = torch.linalg.qr(torch.randn(rows, short, dtype=torch.float64)).Q
    v = torch.linalg.qr(torch.randn(cols, short, dtype=torch.float64)).Q
    values = torch.logspace(0, torch.tensor(smallest).log10().item(), short, dtype=torch.float64)
    return (u * values) @ v.mT


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("index", range(9))
def test_upstream_vectors(form, index):
    case = load("polar_express")["cases"][index]
    got = polar(array(case["input"]), eps_mode="absolute", compute_dtype=torch.float32, **FORMS[form])
    # Rank-deficient inputs: the squared form resolves singular values only down to sqrt(eps).
    loose = "gram" in form and not isinstance(case["scale"], float)
    torch.testing.assert_close(got, array(case["out_fp32"]), atol=2e-3 if loose else 5e-5, rtol=0)


@pytest.mark.parametrize("index", range(8))
def test_upstream_vectors_in_bfloat16(index):
    case = load("polar_express")["cases"][index]
    got = polar(array(case["input"]), eps_mode="absolute", compute_dtype=torch.bfloat16)
    # Two bfloat16 evaluations differ by their rounding: judge each by its distance from float64.
    truth = reference.polar(array(case["input"]).double(), eps_mode="absolute")
    upstream = array(case["out_bf16"]).float()
    assert error(got, truth) <= 1.5 * error(upstream, truth)
    torch.testing.assert_close(got, upstream, atol=0.1, rtol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_further_from_float64_than_plain_bfloat16(form, shape):
    update = torch.randn(shape)
    truth = reference.polar(update.double())
    plain = error(reference.polar(update.bfloat16()), truth)
    assert error(polar(update, compute_dtype=torch.float32, **FORMS[form]), truth) <= 0.05 * plain + 1e-6


@pytest.mark.parametrize("form", ["standard", "standard, panels"])
@pytest.mark.parametrize("shape", SHAPES)
def test_standard_form_is_as_exact_as_the_plain_loop(form, shape):
    # The worst of ten: in a single draw the rounding errors of one of the two may happen to cancel.
    plain, ours = [], []
    for update in torch.randn(10, *shape):
        truth = reference.polar(update.double())
        plain.append(error(reference.polar(update), truth))
        ours.append(error(polar(update, compute_dtype=torch.float32, **FORMS[form]), truth))
    assert max(ours) <= 2 * max(plain) + 2e-6


@pytest.mark.parametrize("smallest", [1e-4, 1e-10])
def test_restart_recovers_what_squaring_loses(smallest):
    update = spectrum(96, 384, smallest)
    truth = reference.polar(update)
    plain = error(reference.polar(update.bfloat16()), truth)
    once = error(polar(update.float(), **FORMS["gram, panels"]), truth)
    again = error(polar(update.float(), **FORMS["gram, restart, panels"]), truth)
    assert again < 0.3 * once and once < 0.1 * plain


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(96, 160), (160, 96), (96, 96)])
@pytest.mark.parametrize("rank", [1, 4])
def test_low_rank_keeps_its_singular_values(form, shape, rank):
    # Singular values beyond the rank are noise, which Q multiplies by 991: it must not affect the others.
    update = torch.randn(shape[0], rank) @ torch.randn(rank, shape[1])
    truth = reference.polar(update.double())
    plain = error(reference.polar(update), truth)
    assert error(polar(update, compute_dtype=torch.float32, **FORMS[form]), truth) <= 30 * plain


@pytest.mark.parametrize("form", FORMS)
def test_tall_equals_transposed_wide(form):
    update = torch.randn(60, 170, dtype=torch.float64)
    torch.testing.assert_close(
        polar(update.mT.contiguous(), **FORMS[form]), polar(update, **FORMS[form]).mT, atol=1e-11, rtol=0
    )


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 40),
    cols=st.integers(1, 40),
    batch=st.integers(1, 3),
    panels=st.integers(1, 5),
    method=st.sampled_from(["standard", "gram"]),
)
def test_panels_and_form_do_not_change_the_result(rows, cols, batch, panels, method):
    update = torch.randn(
        batch, rows, cols, generator=torch.Generator().manual_seed(rows * 41 + cols)
    ).double()
    got = torch.stack([polar(matrix, method=method, panels=panels) for matrix in update])
    torch.testing.assert_close(got, reference.polar(update), atol=1e-7, rtol=0)
    torch.testing.assert_close(polar(update, method=method), got, atol=1e-9, rtol=0)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-6, 1.0, 1e12, 1e30])
@pytest.mark.parametrize("form", ["standard, panels", "gram, restart, panels"])
def test_relative_mode_ignores_the_scale(form, scale):
    update = torch.randn(40, 100)
    full = polar(update, compute_dtype=torch.float32, **FORMS[form])
    torch.testing.assert_close(
        polar(update * scale, compute_dtype=torch.float32, **FORMS[form]), full, atol=1e-4, rtol=0
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
    workspace = Workspace()
    first = polar(update, workspace=workspace)
    assert torch.equal(first, polar(update, workspace=workspace))
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


def test_flop_table():
    # Units of n^3 in the limit of many panels; a finite number of panels computes (b + 1) / 2b.
    def units(method, restart, ratio, panels):
        return PolarPlan(100, 100 * ratio, method, restart, panels, torch.float32, False).flops() / 100**3

    assert [units("standard", None, r, 1) for r in (1, 4)] == [30, 90]
    assert [units("gram", None, r, 1) for r in (1, 4)] == [38, 50]
    assert [units("gram", 2, r, 1) for r in (1, 4)] == [36, 60]
    assert [units("standard", None, r, 10**9) for r in (1, 4)] == pytest.approx([20, 65])
    assert [units("gram", None, r, 10**9) for r in (1, 4)] == pytest.approx([23, 32])
    assert [units("gram", 2, r, 10**9) for r in (1, 4)] == pytest.approx([21, 39])


def test_plan_follows_shape_and_dtype_and_says_why():
    assert plan_polar(768, 3072, compute_dtype=torch.float32).method == "gram"
    assert plan_polar(768, 3072, compute_dtype=torch.float32).restart is None
    assert plan_polar(768, 3072, compute_dtype=torch.float32, restart=2).restart == 2
    assert plan_polar(64, 256, compute_dtype=torch.float32).restart == 2
    assert plan_polar(768, 900, compute_dtype=torch.float32).method == "standard"
    assert plan_polar(768, 3072, device="cuda").dtype == torch.bfloat16
    assert plan_polar(768, 3072, device="cuda").method == "standard"
    assert plan_polar(64, 64).dtype == torch.float32
    assert plan_polar(64, 64).panels == 1
    assert plan_polar(64, 64, dtype=torch.float64).dtype == torch.float64
    text = explain(3072, 768, compute_dtype=torch.float32)
    assert "gram, X^T X" in text and "ratio 4" in text
    assert "gram, restart after 2" in explain(3072, 768, compute_dtype=torch.float32, restart=2)


def test_cpu_dtype_follows_the_measured_speed(monkeypatch):
    for speed, expected in ((0.01, torch.float32), (2.5, torch.bfloat16)):
        monkeypatch.setattr(
            sys.modules["leanstep.muon.polar"], "cpu_bfloat16_speedup", lambda speed=speed: speed
        )
        dtype, why = choose_dtype(768, 768, torch.device("cpu"), torch.float32)
        assert dtype == expected and str(expected).removeprefix("torch.") in why


@pytest.mark.parametrize(
    ("make", "options", "names"),
    [
        (lambda: torch.zeros(3), {}, "update"),
        (lambda: torch.zeros(3, 3, dtype=torch.int64), {}, "update"),
        (lambda: torch.zeros(3, 3, dtype=torch.complex64), {}, "update"),
        (lambda: torch.zeros(3, 3).to_sparse(), {}, "update"),
        (lambda: torch.zeros(3, 3), {"method": "svd"}, "method"),
        (lambda: torch.zeros(3, 3), {"eps_mode": "none"}, "eps_mode"),
        (lambda: torch.zeros(3, 3), {"panels": 0}, "panels"),
        (lambda: torch.zeros(3, 3), {"restart": 0}, "restart"),
        (lambda: torch.zeros(3, 3), {"compute_dtype": "bf16"}, "compute_dtype"),
    ],
)
def test_bad_arguments_are_named(make, options, names):
    with pytest.raises(ValueError, match=f"^{names}: expected"):
        polar(make(), **options)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.integers(1, 40), st.integers(1, 9), st.booleans())
def test_gram_matrix_by_panels(side, length, panels, tall):
    x = torch.randn(length, side).double() if tall else torch.randn(side, length).double()
    out = torch.empty(side, side, dtype=torch.float64)
    gram_matrix(x, out, tall=tall, panels=panels)
    torch.testing.assert_close(out, x.mT @ x if tall else x @ x.mT)
    if panels > 1 and side > 16 * panels:
        assert out[0, -1] == out[-1, 0]


@pytest.mark.parametrize("panels", [1, 2, 3, 6])
def test_quadratic_and_commuting_products(panels):
    x = torch.randn(50, 60, dtype=torch.float64) / 8
    gram = x @ x.mT
    out, other = torch.empty_like(gram), torch.empty_like(gram)
    quadratic(gram, out, 2.0, -1.5, 0.5, panels=panels)
    want = 2.0 * torch.eye(50, dtype=torch.float64) - 1.5 * gram + 0.5 * gram @ gram
    torch.testing.assert_close(out, want)
    commuting_product(out, gram, other, panels=panels)
    torch.testing.assert_close(other, want @ gram)
    if panels > 1:
        assert torch.equal(other[:16, 32:], other[32:, :16].mT) and torch.equal(
            out[:16, 32:], out[32:, :16].mT
        )


@given(st.integers(1, 2000), st.integers(1, 12))
def test_panels_cover_the_side_in_aligned_pieces_of_about_one_size(side, panels):
    bounds = _bounds(side, panels)
    assert bounds[0][0] == 0 and bounds[-1][1] == side
    assert all(a[1] == b[0] and b[0] % 16 == 0 for a, b in itertools.pairwise(bounds))
    assert all(abs((high - low) - side / panels) <= 16 or len(bounds) < panels for low, high in bounds)


def test_small_sides_and_accelerators_compute_all_of_it():
    assert choose_panels(255, torch.device("cpu")) == 1
    assert choose_panels(768, torch.device("cpu")) > 1
    assert choose_panels(768, torch.device("cuda")) == 1


def test_every_job_runs_once_and_torch_threads_are_restored():
    threads = torch.get_num_threads()
    done = [0] * 20

    def job(index, workspace):
        done[index] += 1
        workspace.take("x", (4, 4), torch.zeros(1)).fill_(index)
        assert not torch.is_grad_enabled()
        assert torch.get_num_threads() == 1

    run_side_by_side([lambda w, i=i: job(i, w) for i in range(20)], Workspace(), workers=3)
    assert done == [1] * 20
    assert torch.get_num_threads() == threads


def test_each_core_has_scratch_of_its_own():
    workspace, seen = Workspace(), set()
    run_side_by_side([lambda w: seen.add(id(w))] * 12, workspace, workers=3)
    assert seen <= {id(workspace.child(core)) for core in range(3)}


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
