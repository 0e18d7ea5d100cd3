"""The vocabulary in parts, one per core: the same numbers and gradients, and the same bits in every run."""

from __future__ import annotations

import pytest
import torch
from logprob.engine.test_saved_logits import OPTIONS, SAVE_OPTIONS, call, normal, values_and_gradients

from leanstep.logprob import Tiles, linear
from leanstep.logprob.engine import tiles
from leanstep.logprob.engine.tiles import MAX_CORE_BYTES, choose_cores


@pytest.fixture(params=[Tiles(4, 7, "vocab"), Tiles(11, 5, "vocab"), Tiles(11, 40, "vocab")], ids=str)
def split(monkeypatch, request):
    """Use three cores and small tiles for every call; return the numbers of cores used."""
    calls = []

    def arranged(*shape, tile=None, **options):
        arrangement = tiles.arrange(*shape, tile=tile, **options)
        if tile is None:
            calls.append(arrangement.cores)
        return arrangement

    monkeypatch.setattr(tiles, "choose_cores", lambda *shape: 3)
    monkeypatch.setattr(tiles, "choose_tiles", lambda *shape, **options: request.param)
    monkeypatch.setattr(linear, "arrange", arranged)
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", OPTIONS)
def test_parts_give_the_numbers_of_the_whole(name, dtype, split):
    whole = values_and_gradients(name, dtype, Tiles(11, 40, "vocab"))
    parts = values_and_gradients(name, dtype, None)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype]
    for a, b in zip(parts, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    again = values_and_gradients(name, dtype, None)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))
    assert split == [1 if name.startswith(("k", "allowed")) else 3] * 2


@pytest.mark.parametrize("options", SAVE_OPTIONS.values(), ids=list(SAVE_OPTIONS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["rows", "softcap", "lora", "smoothing"])
def test_kept_logits_give_the_same_bits(name, dtype, options, split):
    expected = values_and_gradients(name, dtype, None, save_logits="none")
    actual = values_and_gradients(name, dtype, None, **options)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert split == [3, 3]


@pytest.mark.parametrize("name", ["rows", "smoothing", "lora"])
def test_gradcheck(name, split):
    inputs, outputs = call(name, torch.float64, None)
    assert torch.autograd.gradcheck(outputs, tuple(inputs))


def test_main_grad_is_added_to(split):
    inputs, outputs = call("plain", torch.float32, None)
    values = outputs(*inputs)
    upstream = [normal(*x.shape, seed=30, dtype=x.dtype) for x in values]
    _, expected = torch.autograd.grad(values, inputs, upstream)
    main_grad = torch.ones_like(inputs[1])
    inputs, outputs = call("plain", torch.float32, None, main_grad=main_grad)
    torch.autograd.grad(outputs(*inputs), inputs, upstream, allow_unused=True)
    torch.testing.assert_close(main_grad - 1, expected, rtol=1e-4, atol=1e-5)


def test_cores_are_used_where_they_pay():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert choose_cores(512, 32000, 1024) == 2
        assert choose_cores(8, 100, 64) == 1
        assert choose_cores(512, 32000, 1024, "cuda") == 1
        # The hidden gradients of two more parts would be too large.
        assert choose_cores(MAX_CORE_BYTES // 8192, 32000, 1024) == 2
        assert choose_cores(MAX_CORE_BYTES // 8192 + 1, 32000, 1024) == 1
        torch.set_num_threads(1)
        assert choose_cores(512, 32000, 1024) == 1
    finally:
        torch.set_num_threads(threads)
