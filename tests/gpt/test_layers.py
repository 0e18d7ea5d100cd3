"""Hand-written backwards against numerical differentiation in float64."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

from leanstep.gpt import mlp
from leanstep.gpt.attention import Rotary, make_plan
from leanstep.gpt.layers import MLP, Injections, Mix, Norm, NormLinear, ResidualMLP, SmearNorm
from leanstep.gpt.projections import AttentionOut, AttentionWeights, Heads, HeadShape
from leanstep.gpt.reference import norm
from leanstep.kernel_checks.bfloat16 import exact_bfloat16


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def test_norm():
    x = draw(5, 8)
    assert torch.allclose(Norm.apply(x), norm(x), rtol=1e-14)
    assert gradcheck(Norm.apply, (x,))
    # A row of zeros stays zero and finite.
    zero = torch.zeros(2, 8, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(Norm.apply(zero).sum(), zero)
    assert torch.isfinite(grad).all()


def test_norm_linear_and_mlp():
    x, first, second = draw(5, 8), draw(12, 8), draw(12, 8)
    assert torch.allclose(NormLinear.apply(x, first), norm(x) @ first.T)
    assert torch.allclose(MLP.apply(x, first, second), (norm(x) @ first.T).relu().square() @ second)
    assert gradcheck(NormLinear.apply, (x, first))
    assert gradcheck(MLP.apply, (x, first, second))
    resid, post = draw(), draw()
    want = resid * x + post * MLP.apply(x, first, second)
    assert torch.allclose(ResidualMLP.apply(x, resid, post, first, second), want)
    assert gradcheck(ResidualMLP.apply, (x, resid, post, first, second))
    assert gradcheck(lambda *a: ResidualMLP.apply(a[0], a[1], 1.0, a[2], a[3]), (x, resid, first, second))


@pytest.mark.parametrize("closed", [None, [True, False, False, True, False]])
def test_smear_norm(closed):
    x, smear, weight = draw(5, 8), draw(), draw(1, 4)
    mask = None if closed is None else torch.tensor(closed)
    gate = smear * torch.sigmoid(x[1:, :4] @ weight.T)
    if mask is not None:
        gate = gate.masked_fill(mask[1:, None], 0)
    want = norm(torch.cat([x[:1], x[1:] + gate * x[:-1]]))
    assert torch.allclose(SmearNorm.apply(x, smear, weight, mask), want)
    assert gradcheck(lambda *a: SmearNorm.apply(*a, mask), (x, smear, weight))


def test_edges_deliver_the_injections_gradients():
    x0, xb, x0_factors, xb_factors, lanes = draw(5, 8), draw(5, 8), draw(3), draw(3), draw(3, 5, 8)
    upstream = torch.randn(3, 5, 8, dtype=torch.float64)

    def injected_by_edges(x0, xb, x0_factors, xb_factors):
        edges = Injections.apply(x0, x0_factors, xb, xb_factors, [0, 2])
        out = []
        for layer, edge in zip([0, 2], edges, strict=True):
            injected = [(x0_factors[layer].item(), x0.detach())]
            if layer:
                injected.append((xb_factors[layer].item(), xb.detach()))
            out.append(Mix.apply(edge, injected, 2.0, lanes[layer].detach()))
        return torch.stack(out)

    def plain(x0, xb, x0_factors, xb_factors):
        zeroth = 2.0 * lanes[0].detach() + x0_factors[0] * x0
        return torch.stack([zeroth, 2.0 * lanes[2].detach() + x0_factors[2] * x0 + xb_factors[2] * xb])

    inputs = (x0, xb, x0_factors, xb_factors)
    got, want = injected_by_edges(*inputs), plain(*inputs)
    assert torch.allclose(got, want)
    gradients = zip(
        torch.autograd.grad(got, inputs, upstream[:2]),
        torch.autograd.grad(want, inputs, upstream[:2]),
        strict=True,
    )
    assert all(torch.allclose(a, b) for a, b in gradients)


def test_mix():
    factors, tensors = [draw(), draw()], [draw(4, 3), draw(4, 3)]
    assert gradcheck(lambda *a: Mix.apply(None, [], *a), (*factors, *tensors))
    assert gradcheck(lambda f, a, b: Mix.apply(None, [], f, 0.5, a, b), (factors[0], *tensors))


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("starts", [None, [0, 3]])
def test_heads(paired: bool, extras: bool, starts):
    length, heads, dim = 5, 2, 8
    shape = HeadShape(heads, dim, paired, key_offset=not paired, gated=extras, has_ve=extras)
    bounds = [0, 3, length]
    plan = make_plan([2 * b for b in bounds] if paired else bounds, 3, dim, torch.float64)
    rotary, size = Rotary(dim, 1024.0, 0.1), (length, paired, torch.float64, torch.device("cpu"))
    table = rotary.full_table(heads, *size)
    mask = None
    if starts is not None:
        mask = torch.zeros(length, dtype=torch.bool)
        mask[starts] = True
    projected = draw(length, shape.rows)
    ve, ve_weight = (draw(length, shape.model), draw(heads, 3)) if extras else (None, None)
    if paired:
        ve_weight = None
    weight, x, resid = draw(shape.model, shape.model), draw(length, shape.model), draw()

    def through(projected, weight, x, resid, ve=None, ve_weight=None):
        q, k, v, gate = Heads.apply(projected, ve, ve_weight, table, mask, plan, shape)
        # Any smooth function of all three will do in place of attention.
        y = q * (k.mean(-2, keepdim=True) + (v * k).sum(-2, keepdim=True))
        return AttentionOut.apply(y, gate, weight, x, resid, None, [], plan, shape)

    arguments = [projected, weight, x, resid] + [t for t in (ve, ve_weight) if t is not None]
    assert gradcheck(through, arguments)
    # The table that a GPU broadcasts, one row for all heads or one per parity: the same numbers.
    out = through(*arguments)
    grads = torch.autograd.grad(out.square().sum(), arguments)
    table = rotary.head_table(*size)
    assert table.shape[1] == 1 + paired and torch.equal(through(*arguments), out)
    again = torch.autograd.grad(through(*arguments).square().sum(), arguments)
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


def test_attention_weights_fold_lambdas_and_gates():
    shapes = [HeadShape(1, 8, False, False, True, has_ve) for has_ve in (False, True)]
    bank, scales, gates, ve_gates = draw(2, 32, 8), draw(2, 2), draw(2, 1, 4), draw(1, 1, 4)
    taken = AttentionWeights.apply(bank, scales, gates, ve_gates, torch.float64, shapes)
    # 24 + 1 rows are odd: one row of zeros is added.
    assert [w.shape[0] for w in taken] == [26, 26, 8, 8]
    assert torch.allclose(taken[1][:24], scales[1, 0] * bank[1, :24])
    assert torch.allclose(taken[3], scales[1, 1] * bank[1, 24:])
    assert torch.equal(taken[1][24:25, :4], gates[1]) and torch.equal(taken[1][25:, :4], ve_gates[0])
    assert (taken[0][25] == 0).all() and (taken[1][24:, 4:] == 0).all()

    def total(*inputs):
        taken = AttentionWeights.apply(*inputs, torch.float64, shapes)
        return tuple(w.square().sum() for w in taken)

    assert gradcheck(total, (bank, scales, gates, ve_gates))


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
