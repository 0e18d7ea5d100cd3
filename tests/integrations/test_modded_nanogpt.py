"""modded-nanogpt's names: values, argument order and whole graphs, on a CPU.

With LEANSTEP_MODDED_NANOGPT=checkout (20dd158), ten steps of upstream's own optimizer are compared as well.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest
import torch
from test_imports import leanstep_imports
from tool_loader import load_tool

from leanstep.integrations import modded_nanogpt
from leanstep.muon import POLAR_EXPRESS, reference

UPSTREAM = {
    "XXT": ["A", "out"],
    "XTX": ["A", "out"],
    "ba_plus_cAA": ["A", "alpha", "beta", "out"],
    "transpose_copy": ["src", "dst"],
    "transpose_add": ["src", "dst"],
    "polar_express": ["grad_chunk", "momentum_buffer", "momentum_t", "split_baddbmm"],
}


@pytest.mark.parametrize("name", UPSTREAM)
def test_arguments_come_in_upstreams_order(name):
    parameters = list(inspect.signature(getattr(modded_nanogpt, name)).parameters)
    assert parameters[: len(UPSTREAM[name])] == UPSTREAM[name]


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (3, 5, 9), (3, 9, 5)])
@pytest.mark.parametrize("traced", [False, True])
def test_products_as_upstream_calls_them(shape, traced, fresh_dynamo):
    def products(x):
        wide = torch.empty(*x.shape[:-1], x.size(-2), dtype=x.dtype)
        tall = torch.empty(*x.shape[:-2], x.size(-1), x.size(-1), dtype=x.dtype)
        modded_nanogpt.XXT(x, out=wide)
        modded_nanogpt.XTX(x, out=tall)
        square = torch.empty_like(wide)
        modded_nanogpt.ba_plus_cAA(wide, alpha=0.3, beta=-1.7, out=square)
        return wide, tall, square

    x = torch.randn(shape, dtype=torch.float64)
    run = torch.compile(products, backend="aot_eager", dynamic=False, fullgraph=True) if traced else products
    wide, tall, square = run(x)
    torch.testing.assert_close(wide, x @ x.mT)
    torch.testing.assert_close(tall, x.mT @ x)
    torch.testing.assert_close(square, 0.3 * wide @ wide - 1.7 * wide)


@pytest.mark.parametrize("shape", [(2, 8, 24), (2, 24, 8)])
@pytest.mark.parametrize("traced", [False, True])
def test_polar_express_is_momentum_and_the_factor(shape, traced, fresh_dynamo):
    grad, buffer = torch.randn(shape), torch.randn(shape)
    expected_buffer = torch.lerp(buffer, grad, 0.05)
    update = torch.lerp(grad, expected_buffer, 0.95)
    truth = reference.polar(update.double(), POLAR_EXPRESS, "absolute")
    run = modded_nanogpt.polar_express
    if traced:
        run = torch.compile(run, backend="aot_eager", dynamic=False, fullgraph=True)
    factor = run(grad, buffer, torch.tensor(0.95), split_baddbmm=True)
    assert factor.dtype == torch.bfloat16 and factor.shape == grad.shape
    torch.testing.assert_close(buffer, expected_buffer)
    torch.testing.assert_close(grad, update)
    # What upstream's five steps lose in bfloat16 is a few per cent of each entry's usual size.
    assert (factor.double() - truth).norm() <= 0.05 * truth.norm()


def test_a_new_momentum_is_no_new_graph(fresh_dynamo):
    counter = torch._dynamo.testing.CompileCounter()
    run = torch.compile(modded_nanogpt.polar_express, backend=counter, dynamic=False, fullgraph=True)
    for momentum in (0.85, 0.9, 0.95):
        run(torch.randn(8, 8), torch.zeros(8, 8), torch.tensor(momentum))
    assert counter.frame_count == 1


def test_bank_forms_train_alike():
    from benchmarks.bank_access import BANK_FORMS, train_from_banks

    curves = [train_from_banks(form, seed=3, steps=6) for form in BANK_FORMS]
    assert curves[0] == curves[1] == curves[2] and curves[0][-1] < curves[0][0]


@pytest.mark.skipif("LEANSTEP_MODDED_NANOGPT" not in os.environ, reason="it names no checkout")
def test_ten_steps_of_upstreams_own_optimizer(fresh_dynamo):
    tool = load_tool("modded_nanogpt")
    found = tool.compare_optimizers(Path(os.environ["LEANSTEP_MODDED_NANOGPT"]), 10)
    for name in ("float32, pieces", "float32, preset"):
        assert max(found[name].values()) <= 1e-6, name
    # Adam's tables have the same bits; matrices differ by the rounding of bfloat16 products.
    assert all(found["bfloat16, preset"][n] == 0 for n in ("lm_head", "embed", "scalars"))
    assert max(found["bfloat16, preset"].values()) <= 0.03


def test_the_pieces_import_no_model():
    assert leanstep_imports(Path(modded_nanogpt.__file__)) == {"muon"}
