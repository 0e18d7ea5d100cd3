"""The reference against the speedrun's own numbers and against the singular value decomposition."""

from __future__ import annotations

import pytest
import torch
from muon.golden import array, bits16, load

from leanstep.muon import reference
from leanstep.muon.residual import from_master, to_master


@pytest.mark.parametrize("index", range(9))
def test_polar_matches_upstream(index):
    case = load("polar_express")["cases"][index]
    got = reference.polar(array(case["input"]), eps_mode="absolute")
    torch.testing.assert_close(got, array(case["out_fp32"]), atol=2e-5, rtol=0)


def test_coefficients_are_upstreams():
    assert [list(triple) for triple in reference.POLAR_EXPRESS] == load("polar_express")["coeffs"]


def test_absolute_eps_bends_tiny_updates_and_relative_does_not():
    data = load("polar_express")
    base = array(data["tiny_base"])
    full = reference.polar(base)
    for row in data["tiny"]:
        update = base * row["scale"]
        bent = reference.polar(update, eps_mode="absolute")
        torch.testing.assert_close(bent, array(row["out_fp32"]), atol=2e-5, rtol=0)
        torch.testing.assert_close(reference.polar(update), full, atol=2e-5, rtol=0)
        if row["scale"] <= 1e-6:
            assert (bent - full).abs().max() > 0.01


def test_nesterov_and_polar_share_one_buffer():
    buffer = None
    for row in load("polar_express")["fused_momentum"]:
        grad = array(row["grad"])
        buffer = torch.zeros_like(grad) if buffer is None else buffer
        update, buffer = reference.nesterov(grad, buffer, row["mu"])
        torch.testing.assert_close(update, array(row["nesterov"]), atol=1e-6, rtol=0)
        torch.testing.assert_close(buffer, array(row["buffer"]), atol=1e-6, rtol=0)
        got = reference.polar(update, eps_mode="absolute")
        torch.testing.assert_close(got, array(row["out_fp32"]), atol=2e-5, rtol=0)


@pytest.mark.parametrize("index", range(3))
def test_variance_reduction_matches_upstream(index):
    case = load("normuon_variance")["cases"][index]
    assert reference.variance_axis(*case["shape"][-2:]) == case["red_dim"]
    second = torch.zeros_like(array(case["steps"][0]["second_momentum_after"]))
    for row in case["steps"]:
        got, second = reference.reduce_variance(array(row["v_in"]), second, case["beta2"])
        torch.testing.assert_close(got, array(row["v_out"]), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(second, array(row["second_momentum_after"]), atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("index", range(3))
def test_cautious_update_matches_upstream_bit_for_bit(index):
    case = load("cautious_mantissa")["cases"][index]
    weight = bits16(case["p_bits_in"], case["shape"]).view(torch.bfloat16)
    low = bits16(case["mantissa_in"], case["shape"])
    for row in case["steps"]:
        master = to_master(weight, low, "truncate")
        master = reference.cautious_decay(master, array(row["update"]), case["lr"], case["wd"])
        weight, low = from_master(master, "truncate")
        assert torch.equal(weight.view(torch.int16), bits16(row["p_bits"], case["shape"]))
        assert torch.equal(low, bits16(row["mantissa"], case["shape"]))


@pytest.mark.parametrize("index", range(2))
def test_adam_matches_upstream(index):
    case = load("adam_cautious")["cases"][index]
    weight = array(case["p_in"])
    half = case["dtype"] == "bfloat16"
    first = second = torch.zeros(weight.shape)
    for step, row in enumerate(case["steps"], 1):
        new, first, second = reference.adam(
            weight.float(),
            array(row["grad"]).float(),
            first,
            second,
            step,
            lr=case["lr"],
            betas=tuple(case["betas"]),
            eps=case["eps"],
            weight_decay=case["weight_decay"] * case["wd_mul"],
        )
        weight = new.to(weight.dtype)
        torch.testing.assert_close(first, array(row["exp_avg"]), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(second, array(row["exp_avg_sq"]), atol=1e-6, rtol=1e-6)
        if half:
            ulps = (weight.view(torch.int16).int() - array(row["p"]).view(torch.int16).int()).abs()
            assert ulps.max() <= 1
        else:
            torch.testing.assert_close(weight, array(row["p"]), atol=1e-6, rtol=0)


def test_singular_values_land_in_the_band_and_vectors_are_kept():
    update = torch.randn(64, 160, dtype=torch.float64)
    got = reference.polar(update)
    values = torch.linalg.svdvals(got)
    assert 0.85 < values.min() and values.max() < 1.15
    # Same singular vectors: the result commutes with the exact factor into a symmetric matrix.
    product = got @ reference.polar_factor(update).mT
    torch.testing.assert_close(product, product.mT, atol=1e-10, rtol=0)


def test_zero_update_gives_zero_everywhere():
    zero = torch.zeros(3, 8, 5)
    assert not reference.polar(zero).any()
    got, second = reference.reduce_variance(zero, torch.zeros(3, 8, 1), 0.95)
    assert not got.any() and not second.any()
