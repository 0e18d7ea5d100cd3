"""Low bits: exact reconstruction, no bias, non-finite values, upstream's bit patterns."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from muon.golden import array, bits16, load

from leanstep.muon.residual import from_master, to_master
from leanstep.muon.step import write


def as_float(bits):
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=50),
    st.sampled_from(["nearest", "truncate"]),
)
def test_every_finite_word_comes_back(words, mode):
    master = as_float(words)
    master = master[torch.isfinite(master)]
    edge = (master.view(torch.int32) & 0x7FFFFFFF) >= 0x7F7F8000
    if mode == "nearest":
        # Beyond the largest bfloat16 the residual is clamped: the only words that do not come back.
        master = master[~edge]
    high, low = from_master(master, mode)
    assert torch.equal(to_master(high, low, mode).view(torch.int32), master.view(torch.int32))
    assert high.dtype == torch.bfloat16 and low.dtype == torch.int16


def test_nearest_rounds_and_truncate_is_biased():
    master = torch.randn(1 << 16)
    nearest, _ = from_master(master, "nearest")
    truncated, _ = from_master(master, "truncate")
    near = ((nearest.float() - master) / master).mean().abs()
    cut = ((truncated.float() - master) / master).mean()
    assert near < 1e-4 and -4e-3 < cut < -2e-3
    assert (nearest.float() - master).abs().max() <= (master.bfloat16().float() - master).abs().max()


def test_non_finite_and_largest_values():
    master = torch.tensor([float("inf"), -float("inf"), float("nan"), 3.4e38, -3.4e38, 0.0, -0.0])
    master[2] = as_float([0x7F800001])[0]
    high, low = from_master(master, "nearest")
    back = to_master(high, low, "nearest")
    assert torch.equal(back[:2], master[:2]) and back[2].isnan() and high[2].isnan()
    assert torch.isfinite(high[3:]).all() and torch.isfinite(back[3:]).all()
    assert not low[:3].any() and torch.equal(back[5:].view(torch.int32), master[5:].view(torch.int32))


def test_residual_extremes_fit_int16():
    words = [0x3F800000 + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    high, low = from_master(as_float(words), "nearest")
    assert low.tolist() == [0, 1, 32767, -32768, -32767, -1]
    assert torch.equal(to_master(high, low).view(torch.int32), as_float(words).view(torch.int32))


@pytest.mark.parametrize("index", range(3))
def test_fast_write_matches_upstream_bit_for_bit(index):
    case = load("cautious_mantissa")["cases"][index]
    weight = bits16(case["p_bits_in"], case["shape"]).view(torch.bfloat16)
    low = bits16(case["mantissa_in"], case["shape"])
    other, rest = from_master(to_master(weight, low, "truncate"), "nearest")
    for row in case["steps"]:
        update = array(row["update"])
        numbers = {"rate": case["lr"], "decay": case["wd"], "cautious": True}
        write(weight[None], update[None], None, low[None], None, mode="truncate", **numbers)
        write(other[None], update[None], None, rest[None], None, mode="nearest", **numbers)
        assert torch.equal(weight.view(torch.int16), bits16(row["p_bits"], case["shape"]))
        assert torch.equal(low, bits16(row["mantissa"], case["shape"]))
        assert torch.equal(to_master(other, rest, "nearest"), to_master(weight, low, "truncate"))
