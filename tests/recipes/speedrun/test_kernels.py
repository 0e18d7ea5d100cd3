"""The Triton kernels, interpreted, against plain code; the head's 8-bit products on a CPU."""

from __future__ import annotations

import types

import pytest
import torch

from dev.kernel_checks.bfloat16 import exact_bfloat16
from recipes.speedrun import train
from recipes.speedrun.reference import softcap_loss
from recipes.speedrun.train import head_loss, multiplies_8_bits, relu_squared_mlp

kernels = pytest.importorskip("recipes.speedrun.kernels")
CAP = (23.0, 5.0, 7.5)


@pytest.fixture
def route_of_a_gpu(monkeypatch):
    """Rows of logits through the kernel, interpreted."""
    monkeypatch.setattr(train, "has_kernels", lambda x: True)
    monkeypatch.setattr(train, "triton_kernels", lambda: kernels)
    monkeypatch.setattr(kernels, "BLOCK", 64)


@pytest.mark.interpreter
@pytest.mark.parametrize("chunk_rows", [100, 7])
@pytest.mark.parametrize("cap", [CAP, (90.0, 5.0, 7.5)], ids=["cap", "high cap"])
def test_the_rows_kernel_is_the_formula(route_of_a_gpu, chunk_rows, cap):
    hidden, head = torch.randn(41, 24), torch.randn(24, 131)
    targets, mtp = torch.randint(-1, 131, (41,)), (1.0, 0.5, 0.25)
    leaves = [x.clone().requires_grad_() for x in (hidden, head)]
    wide = [x.double().requires_grad_() for x in (hidden, head)]
    found = head_loss(*leaves, targets, mtp, cap, chunk_rows=chunk_rows)
    want = softcap_loss(wide[0] @ wide[1], targets, mtp, cap).sum()
    grads = torch.autograd.grad(0.7 * found, leaves), torch.autograd.grad(0.7 * want, wide)
    assert abs(found.item() - want.item()) < 1e-5 * abs(want.item())
    for got, truth in zip(*grads, strict=True):
        assert (got - truth).abs().max() < 1e-5 * truth.abs().max()
    with torch.no_grad():
        torch.testing.assert_close(
            head_loss(*leaves, targets, mtp, cap, chunk_rows=chunk_rows), found.detach()
        )


def e4m3(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x / scale rounded to e4m3, by hand, times the scale."""
    scaled = (x / scale).clamp(-448, 448)
    exponent = torch.floor(torch.log2(scaled.abs().clamp(min=2.0**-20))).clamp(min=-6)
    step = 2.0 ** (exponent - 3)
    return torch.round(scaled / step) * step * scale


@pytest.mark.interpreter
def test_a_head_of_8_bits_is_that_of_its_rounded_operands(route_of_a_gpu, monkeypatch):
    """Loss and logit gradients of rounded operands; the gradients are rounded, then multiplied with those."""
    monkeypatch.setattr(train, "multiplies_8_bits", lambda hidden, head: True)
    stored = []

    def in_float32(u, grad, *rest):
        # The interpreter has no 8-bit floats: the kernel writes wide ones, torch rounds them.
        wide = torch.empty(u.shape)
        kernels.softcap_rows(u.float(), wide, *rest)
        stored.append(wide)
        grad.copy_(wide.to(grad.dtype))

    monkeypatch.setattr(train, "triton_kernels", lambda: types.SimpleNamespace(softcap_rows=in_float32))
    hidden = torch.randn(48, 32).bfloat16().requires_grad_()
    head = (0.3 * torch.randn(32, 144)).bfloat16().requires_grad_()
    targets = torch.randint(144, (48,))
    found = head_loss(hidden, head, targets, softcap=CAP, float8=True)
    found.backward()
    scales = (train.HIDDEN_SCALE, train.HEAD_SCALE)
    rounded = [e4m3(t.detach().double(), scale) for t, scale in zip((hidden, head), scales, strict=True)]
    logits = (rounded[0] @ rounded[1]).requires_grad_()
    want = softcap_loss(logits, targets, (1.0,), CAP).sum()
    (slope,) = torch.autograd.grad(want, logits)
    assert abs(found.item() - want.item()) < 2e-3 * abs(want.item())
    # e5m2 rounds by an eighth at most; nothing overflows.
    assert stored[0].abs().max() <= 57344
    for got, truth in ((hidden.grad, slope @ rounded[1].T), (head.grad, rounded[0].T @ slope)):
        assert (got.double() - truth).norm() < 0.1 * truth.norm()


def test_8_bits_are_taken_where_the_device_has_them(monkeypatch):
    hidden, head = torch.zeros(64, 32, dtype=torch.bfloat16), torch.zeros(32, 144)
    assert not multiplies_8_bits(hidden, head)
    monkeypatch.setattr(train, "has_kernels", lambda x: True)
    for capability, has in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
        assert multiplies_8_bits(hidden, head) is has
    assert not multiplies_8_bits(hidden, torch.zeros(32, 150))
    # On a CPU the option changes nothing.
    monkeypatch.undo()
    given = torch.randn(41, 32), torch.randn(32, 144), torch.randint(144, (41,))
    assert head_loss(*given, float8=True) == head_loss(*given)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_relu_squared_inside_the_products_is_no_further_from_float64_than_plain_code(dtype, monkeypatch):
    monkeypatch.setattr(kernels, "TILE", (16, 32, 16))
    given = [torch.randn(shape).to(dtype).requires_grad_() for shape in ((41, 24), (99, 24), (99, 24))]
    upstream = torch.randn(41, 24).to(dtype)

    def results(function, inputs):
        out = function(*inputs)
        return [out, *torch.autograd.grad(out, inputs, upstream.to(out.dtype))]

    wide = [t.detach().double().requires_grad_() for t in given]
    with exact_bfloat16():
        fused = results(kernels.relu_squared_mlp, given)
    plain, truths = results(relu_squared_mlp, given), results(relu_squared_mlp, wide)
    for a, b, truth in zip(fused, plain, truths, strict=True):
        error, other = ((x.double() - truth).norm() for x in (a, b))
        assert error <= 2 * other + 1e-6 * truth.norm()
    x = torch.tensor([[-1.0], [0.0], [2.0], [torch.nan]])
    pre, squares = kernels.relu_squared_op(x, torch.ones(1, 1))
    torch.testing.assert_close(squares, x.relu().square(), equal_nan=True)
    slope = kernels.relu_squared_backward_op(torch.ones(4, 1), torch.ones(1, 1), pre)
    torch.testing.assert_close(slope, 2 * x.relu(), equal_nan=True)
    assert kernels.relu_squared_op(torch.zeros(0, 4), torch.zeros(3, 4))[1].shape == (0, 3)
