"""Triton kernels in the interpreter, whose bfloat16 products conftest.py replaces by correct ones."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

kernel = pytest.importorskip("leanstep.muon.kernel")
pytestmark = pytest.mark.interpreter

TILES = (32, 64, 32)
SHAPES = [(41, 71), (2, 33, 17), (64, 40)]


def error(got, truth):
    return ((got.double() - truth).abs().max() / truth.abs().max()).item()


def values(shape, dtype):
    return (torch.randn(shape) / 4).to(dtype)


def within(got, plain, truth, dtype):
    k, floor = (2, 1e-6) if dtype == torch.float32 else (3, 1e-4)
    return error(got, truth) <= k * error(plain, truth) + floor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_as_exact_as_matmul_and_symmetric_to_the_bit(shape, dtype):
    x = values(shape, dtype)
    before = x.clone()
    for function, left, right in ((kernel.xxt, x, x.mT), (kernel.xtx, x.mT, x)):
        side = left.size(-2)
        out = torch.empty(*shape[:-2], side, side, dtype=dtype)
        function(x, out, tiles=TILES)
        assert within(out, left @ right, left.double() @ right.double(), dtype)
        assert torch.equal(out, out.mT)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("side", [33, 64])
def test_quadratic_epilogue(side, dtype):
    a = values((side, side), dtype)
    a = (a + a.mT) / 2
    out = torch.empty_like(a)
    kernel.ba_caa(a, out, alpha=0.5, beta=-2.8, tiles=TILES)
    wide = a.double()
    assert within(out, (-2.8 * a + 0.5 * (a @ a)).to(dtype), -2.8 * wide + 0.5 * wide @ wide, dtype)
    assert torch.equal(out, out.mT)


@pytest.mark.parametrize("tiles", [(32, 64, 32), (64, 32, 32), (32, 32, 16)])
def test_symmetry_does_not_rest_on_the_products_of_one_library(monkeypatch, tiles):
    """Add a different error to every element of the interpreter's products."""
    x, multiply = values((150, 40), torch.float32), np.matmul
    noise = np.random.default_rng(0)

    def rounded_otherwise(a, b, *args, **options):
        product = multiply(a, b, *args, **options)
        return product + noise.standard_normal(product.shape).astype(product.dtype) / 8

    monkeypatch.setattr(np, "matmul", rounded_otherwise)
    for function, side in ((kernel.xxt, 150), (kernel.xtx, 40)):
        out = torch.empty(side, side)
        function(x, out, tiles=tiles)
        assert torch.equal(out, out.mT)
    assert not torch.allclose(out, x.mT @ x, atol=1e-3)


def test_rows_may_be_strided_and_the_surplus_is_not_touched():
    wide = torch.randn(20, 64)
    out = torch.full((20, 32), 7.0)
    kernel.xxt(wide[:, 3:40], out[:, :20], tiles=TILES)
    torch.testing.assert_close(out[:, :20], wide[:, 3:40] @ wide[:, 3:40].mT)
    assert (out[:, 20:] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(41, 70), (1, 5), (5, 1), (64, 32)])
def test_transposes(shape, dtype):
    src, base = torch.randn(shape).to(dtype), torch.randn(shape[::-1]).to(dtype)
    dst = torch.empty_like(base)
    kernel.transpose_copy(src, dst)
    assert torch.equal(dst, src.T)
    dst = base.clone()
    kernel.transpose_add(src, dst)
    assert torch.equal(dst, base + src.T)


def test_bad_shapes_are_named():
    x = torch.zeros(4, 6)
    with pytest.raises(ValueError, match=r"^out: expected shape"):
        kernel.xxt(x, torch.zeros(6, 6))
    with pytest.raises(ValueError, match=r"^x: expected"):
        kernel.xxt(x[0], torch.zeros(6, 6))
    with pytest.raises(ValueError, match=r"^out: expected .* with contiguous rows"):
        kernel.xxt(x, torch.zeros(8, 8)[::2, ::2])
    with pytest.raises(ValueError, match=r"^dst: expected shape"):
        kernel.transpose_copy(x, torch.zeros(4, 6))


def test_tiles_are_chosen_by_the_size_of_the_result():
    tiles = [kernel.product_tiles(side, side) for side in (300, 768, 1024, 2048, 4096, 9000)]
    assert tiles == [(128, 128, 64)] * 4 + [(128, 256, 64)] * 2
    assert kernel.product_tiles(768, 3072) == (64, 128, 128)


def test_stages_fit_into_the_shared_memory_of_the_card(monkeypatch):
    assert kernel._stages((128, 128, 64), 2, None) == 4
    assert [kernel._stages((128, 128, 64), 2, kib * 1024) for kib in (228, 99, 64)] == [4, 3, 2]
    # The operands of one stage take 48 KiB: two buffers fit on a 4090, three on an A100.
    assert [kernel._stages((128, 256, 64), 2, limit, 1) for limit in (101_376, 166_912)] == [3, 4]
    assert [kernel._stages((128, 256, 64), 2, limit, 0) for limit in (101_376, 232_448)] == [2, 4]
    cards = {"cuda:0": {"shared_memory_per_block": 49152, "shared_memory_per_block_optin": 232448}}
    cards["cuda:1"] = {"shared_memory_per_block": 65536}  # as ROCm names it
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**cards[str(device)])
    )
    assert [kernel.shared_memory(torch.device(name)) for name in cards] == [232448, 65536]


def test_one_stage_has_no_buffer_where_products_read_registers(monkeypatch):
    """Shared memory of compiled kernels says so: sm_80, sm_89 and sm_120 need one buffer less."""
    device = torch.device("cuda:0")
    assert kernel.spare_stages(torch.device("cpu")) == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    spare = {}
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        spare[capability] = kernel.spare_stages(device)
    assert spare == {(8, 0): 1, (8, 9): 1, (9, 0): 0, (10, 0): 0, (12, 0): 1}
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert kernel.spare_stages(device) == 0


def test_a_product_before_hopper_takes_the_stage_that_needs_no_buffer(monkeypatch):
    """On a 4090 two stages of the large tile are one buffer, and loads would not overlap with products."""
    launched = {}

    class Recorded:
        def __getitem__(self, grid):
            return lambda *args, **options: launched.update(options)

    monkeypatch.setattr(kernel, "xxt_kernel", Recorded())
    monkeypatch.setattr(kernel, "shared_memory", lambda device: 101_376)
    monkeypatch.setattr(kernel, "spare_stages", lambda device: 1)
    x = torch.zeros(8, 8, dtype=torch.bfloat16)
    kernel.xxt(x, torch.zeros(8, 8, dtype=torch.bfloat16), tiles=kernel.LARGE_TILE)
    assert launched["num_stages"] == 3


def test_grids_have_one_dimension_and_launches_a_device(monkeypatch):
    grids, entered, original = [], [], torch.cuda.device_of

    class Recorded:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **options: None

    def device_of(tensor):
        entered.append(tensor.device)
        return original(tensor)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    for name in ("transpose_kernel", "xxt_kernel"):
        monkeypatch.setattr(kernel, name, Recorded())
    src = torch.empty(2, 2**22)
    kernel.transpose_copy(src, torch.empty(2**22, 2))
    kernel.xxt(torch.empty(2, 8, 4), torch.empty(2, 8, 8))
    # A second dimension would end at 65,535.
    assert grids == [(2**22 // 128,), (2,)] and entered == [src.device] * 2


def test_shipped_configurations_name_every_argument():
    for entry in kernel.AOT_KERNELS:
        assert set(entry["fn"].arg_names) == set(entry["signature"]) | set(entry["constexprs"]), entry["name"]
    assert len({entry["name"] for entry in kernel.AOT_KERNELS}) == len(kernel.AOT_KERNELS)
