"""The blocked passes against the reference, upstream's vectors and float64."""

from __future__ import annotations

import pytest
import torch
from muon.golden import array, load

from leanstep.muon import reference, update
from leanstep.muon.update import adam_, fill_update, variance_scale, write_weight

SHAPES = [(41, 401), (401, 41), (3, 24, 16), (1, 7), (7, 1), (50, 50)]


@pytest.fixture(autouse=True, params=[64, 1 << 20])
def block_elements(request, monkeypatch):
    """Many small blocks and one large block must agree."""
    monkeypatch.setattr(update, "BLOCK_ELEMENTS", request.param)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_momentum(shape, dtype):
    grad, buffer = torch.randn(shape).to(dtype), torch.randn(shape)
    want, moved = reference.nesterov(grad.double(), buffer.double(), 0.9)
    out = torch.empty(shape)
    fill_update(grad, buffer, 0.9, out)
    torch.testing.assert_close(out.double(), want, atol=1e-6, rtol=0)
    torch.testing.assert_close(buffer.double(), moved, atol=1e-6, rtol=0)
    fill_update(grad, buffer, 0.9, out, nesterov=False)
    assert torch.equal(out, buffer)


@pytest.mark.parametrize("per", ["long", "row"])
@pytest.mark.parametrize("shape", SHAPES)
def test_variance_is_as_exact_as_the_plain_formula(shape, per):
    factor = torch.randn(shape)
    reduced = list(shape)
    reduced[reference.variance_axis(*shape[-2:], per)] = 1
    second = torch.rand(reduced)
    truth, moved = reference.reduce_variance(factor.double(), second.double(), 0.95, per)
    plain, _ = reference.reduce_variance(factor, second, 0.95, per)
    got = factor * variance_scale(factor, second, 0.95, per)
    distance = (got.double() - truth).abs().max()
    assert distance <= 2 * (plain.double() - truth).abs().max() + 1e-6
    torch.testing.assert_close(second.double(), moved, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("index", range(3))
def test_variance_vectors(index):
    case = load("normuon_variance")["cases"][index]
    second = torch.zeros_like(array(case["steps"][0]["second_momentum_after"]))
    for row in case["steps"]:
        factor = array(row["v_in"])
        got = factor * variance_scale(factor, second, case["beta2"])
        torch.testing.assert_close(got, array(row["v_out"]), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(second, array(row["second_momentum_after"]), atol=1e-7, rtol=1e-5)
    row = case["bf16"]
    second = torch.zeros_like(second)
    factor = array(row["v_in"])
    got = factor.float() * variance_scale(factor, second, case["beta2"])
    torch.testing.assert_close(got, array(row["v_out"]).float(), atol=1e-2, rtol=1e-2)


def test_zero_factor_stays_zero_through_variance_and_write():
    weight, factor, second = torch.randn(2, 6, 9), torch.zeros(2, 6, 9), torch.zeros(2, 1, 9)
    before = weight.clone()
    scale = variance_scale(factor, second, 0.95)
    assert torch.isfinite(scale).all()
    write_weight(weight, factor, lr=0.1, decay=0.0, scale=scale)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("decay", [0.0, 0.03])
def test_write_is_bitwise_the_reference(shape, decay):
    weight, factor = torch.randn(shape), torch.randn(shape)
    want = reference.cautious_decay(weight, factor, 0.02, decay)
    write_weight(weight, factor, lr=0.02, decay=decay)
    assert torch.equal(weight, want)


@pytest.mark.parametrize("index", range(2))
def test_adam_vectors(index):
    case = load("adam_cautious")["cases"][index]
    weight = array(case["p_in"])
    first, second = torch.zeros(weight.shape), torch.zeros(weight.shape)
    decay = case["lr"] ** 2 * case["weight_decay"] * case["wd_mul"]
    options = {"lr": case["lr"], "betas": tuple(case["betas"]), "eps": case["eps"], "decay": decay}
    for step, row in enumerate(case["steps"], 1):
        adam_(weight, array(row["grad"]), first, second, step=step, **options)
        torch.testing.assert_close(first, array(row["exp_avg"]), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(second, array(row["exp_avg_sq"]), atol=1e-6, rtol=1e-6)
        if weight.dtype == torch.bfloat16:
            ulps = (weight.view(torch.int16).int() - array(row["p"]).view(torch.int16).int()).abs()
            assert ulps.max() <= 1
        else:
            torch.testing.assert_close(weight, array(row["p"]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("shape", [(), (7,), (5, 9), (2, 3, 4)])
def test_adam_on_any_number_of_dimensions(shape):
    weight, grad = torch.randn(shape), torch.randn(shape)
    first, second = torch.zeros(shape), torch.zeros(shape)
    options = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-10}
    want, *_ = reference.adam(weight, grad, first, second, 1, weight_decay=5.0, **options)
    adam_(weight, grad, first, second, step=1, decay=0.01**2 * 5.0, **options)
    torch.testing.assert_close(weight, want, atol=1e-6, rtol=0)
