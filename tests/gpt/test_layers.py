"""Plain operations against their definitions and numerical differentiation in float64; the MLP's kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from leanstep.gpt import mlp
from leanstep.gpt.attention import Rotary, make_plan
from leanstep.gpt.layers import (
    EPS,
    HeadShape,
    attention,
    attention_weights,
    norm,
    shift_keys,
    smear_norm,
    weighted_sum,
)
from leanstep.kernel_checks.bfloat16 import exact_bfloat16


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def test_norm_is_torchs():
    x = draw(5, 8)
    assert torch.allclose(norm(x), F.rms_norm(x, (8,), eps=EPS), rtol=1e-14)
    for dtype in (torch.float32, torch.bfloat16):
        low = x.detach().to(dtype)
        assert norm(low).dtype == dtype
        truth = F.rms_norm(low.double(), (8,), eps=EPS)
        unit = torch.finfo(dtype).eps
        assert ((norm(low).double() - truth).abs() <= 3 * unit * truth.abs()).all()
    # A row of zeros stays zero and finite.
    zero = torch.zeros(2, 8, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(norm(zero).sum(), zero)
    assert torch.isfinite(grad).all()


def test_a_weighted_sum_takes_numbers_and_tensors():
    (a, b, c), factor = (draw(4, 3) for _ in range(3)), draw()
    want = a + factor * b - 0.5 * c
    assert torch.allclose(weighted_sum((1.0, a), (factor, b), (-0.5, c)), want, rtol=1e-14)
    assert torch.allclose(weighted_sum((factor, b)), factor * b) and weighted_sum((1.0, a)) is a
    assert gradcheck(lambda *x: weighted_sum((x[0], x[1]), (0.5, x[2]), (x[0], x[3])), (factor, a, b, c))


@pytest.mark.parametrize("closed", [None, [True, False, False, True, False]])
def test_smear_norm(closed):
    x, smear, weight = draw(5, 8), draw(), draw(1, 4)
    mask = None if closed is None else torch.tensor(closed)
    rows = [x[0]]
    for t in range(1, 5):
        gate = 0.0 if closed is not None and closed[t] else smear * torch.sigmoid(x[t, :4] @ weight[0])
        rows.append(x[t] + gate * x[t - 1])
    want = F.rms_norm(torch.stack(rows), (8,), eps=EPS)
    assert torch.allclose(smear_norm(x, smear, weight, mask), want)


@pytest.mark.parametrize("starts", [None, [True, False, False, True, False]])
def test_half_of_a_key_comes_from_the_previous_token(starts):
    k = torch.randn(5, 2, 8)
    shifted = shift_keys(k, None if starts is None else torch.tensor(starts))
    for t in range(5):
        source = t if t == 0 or (starts is not None and starts[t]) else t - 1
        assert torch.equal(shifted[t, :, :4], k[t, :, :4])
        assert torch.equal(shifted[t, :, 4:], k[source, :, 4:])


def test_attention_weights_fold_lambdas_and_gates():
    bank, scales, gates, ve_gates = draw(2, 32, 8), draw(2, 2), draw(2, 1, 4), draw(2, 1, 4)
    projections, outputs = attention_weights(bank, scales, gates, ve_gates, 64)
    for i, (projection, output) in enumerate(zip(projections, outputs, strict=True)):
        assert projection.shape == (64, 8)
        assert torch.allclose(projection[:24], scales[i, 0] * bank[i, :24])
        assert torch.allclose(output, scales[i, 1] * bank[i, 24:])
        assert torch.equal(projection[24:25, :4], gates[i])
        assert torch.equal(projection[25:26, :4], ve_gates[i])
        assert (projection[24:, 4:] == 0).all() and (projection[26:] == 0).all()
    unpadded, _ = attention_weights(bank, scales, gates, None, 1)
    assert [w.shape[0] for w in unpadded] == [25, 25]


@pytest.mark.parametrize("paired", [False, True])
def test_a_compiled_graphs_tables_scale_and_padding_change_nothing(paired: bool):
    length, heads, dim = 5, 2, 8
    shape = HeadShape(heads, dim, paired, key_offset=not paired, gated=True)
    slots = [0, 6, 10] if paired else [0, 3, 5]
    plan = make_plan(slots, 3, dim, torch.float64)
    rotary, size = Rotary(dim, 1024.0, 0.3), (length, paired, torch.float64, torch.device("cpu"))
    bank, gates, ve_gates = draw(1, 64, 16), draw(1, 2, 4), draw(1, 2, 4)
    x, ve, ve_weight = draw(length, 16), draw(length, 16), None if paired else draw(heads, 3)
    inputs = [t for t in (x, bank, gates, ve_gates, ve, ve_weight) if t is not None]

    def results(table, scale, row_multiple):
        ones = torch.ones(1, 2, dtype=torch.float64)
        (projection,), (output,) = attention_weights(bank, ones, gates, ve_gates, row_multiple)
        y = attention(x, projection, output, ve, ve_weight, table, None, plan, shape, scale)
        return [y, *torch.autograd.grad(y.square().sum(), inputs)]

    eager = results(rotary.head_table(*size), rotary.attention_scale, 1)
    compiled = results(rotary.real_table(*size), rotary.scale_on(torch.float64, "cpu"), 64)
    for a, b in zip(eager, compiled, strict=True):
        assert (a - b).abs().max() <= 1e-12 * b.abs().max()


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_relu_squared_inside_the_products_is_no_further_from_float64_than_plain_code(dtype, monkeypatch):
    kernel = pytest.importorskip("leanstep.gpt.kernel")
    monkeypatch.setattr(kernel, "TILE", (16, 32, 16))
    given = [torch.randn(shape).to(dtype).requires_grad_() for shape in ((41, 24), (99, 24), (99, 24))]
    upstream = torch.randn(41, 24).to(dtype)

    def results(function, inputs):
        out = function(*inputs)
        return [out, *torch.autograd.grad(out, inputs, upstream.to(out.dtype))]

    wide = [t.detach().double().requires_grad_() for t in given]
    with exact_bfloat16():
        fused = results(mlp.fused_mlp, given)
    plain, truths = results(mlp.squared_relu_mlp, given), results(mlp.squared_relu_mlp, wide)
    for a, b, truth in zip(fused, plain, truths, strict=True):
        error, other = ((x.double() - truth).norm() for x in (a, b))
        assert error <= 2 * other + 1e-6 * truth.norm()
    x = torch.tensor([[-1.0], [0.0], [2.0], [torch.nan]])
    pre, squares = mlp.relu_product(x, torch.ones(1, 1))
    torch.testing.assert_close(squares, x.relu().square(), equal_nan=True)
    slope = mlp.relu_product_backward(torch.ones(4, 1), torch.ones(1, 1), pre)
    torch.testing.assert_close(slope, 2 * x.relu(), equal_nan=True)
    assert mlp.relu_product(torch.zeros(0, 4), torch.zeros(3, 4))[1].shape == (0, 3)


def test_a_cpu_has_no_kernel_for_an_mlp():
    assert not mlp.has_kernel(torch.zeros(4, 4, dtype=torch.bfloat16))
