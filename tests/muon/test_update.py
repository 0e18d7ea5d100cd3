"""The blocked passes against the reference, upstream's vectors and float64."""

from __future__ import annotations

import pytest
import torch
from muon.golden import array, load
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from leanstep.muon import NorMuon, reference, update
from leanstep.muon.update import adam_, fill_update, variance_scale, write_weight

SHAPES = [(41, 401), (401, 41), (3, 24, 16), (1, 7), (7, 1), (50, 50)]


@pytest.fixture(autouse=True, params=[64, 1 << 20])
def block_elements(request, monkeypatch):
    """Many small blocks and one big block must agree."""
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
    kept = list(shape)
    kept[reference.variance_axis(*shape[-2:], per)] = 1
    second = torch.rand(kept)
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


def trained(dtype, lr_mul, decay, monkeypatch, joined):
    """Three steps of matrices in four parameters and some small tensors; `lr_mul` is for the bank."""
    monkeypatch.setattr(update, "joins", lambda device: joined)
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    shapes = {"a": (6, 9), "b": (6, 9), "bank": (3, 6, 9), "tall": (9, 6)}
    shapes |= {"gain": (7,), "bias": (6,), "one": ()}
    params = {name: nn.Parameter(draw(*shape).to(dtype)) for name, shape in shapes.items()}
    groups = [
        {"params": [params["a"], params["b"], params["tall"]], "decay": decay},
        {"params": [params["bank"]], "lr_mul": lr_mul, "decay": decay},
        {"params": [params["gain"], params["bias"]], "algorithm": "adam"},
        {"params": [params["one"]], "algorithm": "adam", "lr_mul": 2.0},
    ]
    optimizer = NorMuon(groups, compute_dtype=torch.float32)
    for _ in range(3):
        for param in params.values():
            param.grad = draw(*param.shape).to(dtype)
        optimizer.step()
    state = {f"{n} {k}": v for n, p in params.items() for k, v in optimizer.state[p].items()}
    return {**{name: optimizer.master(p) for name, p in params.items()}, **state}


@pytest.mark.parametrize("decay", ["cautious", "decoupled"])
@pytest.mark.parametrize("lr_mul", [1.0, [1.0, 2.0, 0.5]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_joined_tensors_step_like_single_ones(dtype, lr_mul, decay, monkeypatch):
    apart = trained(dtype, lr_mul, decay, monkeypatch, joined=False)
    joined = trained(dtype, lr_mul, decay, monkeypatch, joined=True)
    assert set(apart) == set(joined)
    for name, value in apart.items():
        if value.dtype != torch.int16:
            torch.testing.assert_close(joined[name], value, atol=2e-6, rtol=1e-5, msg=name)


class Count(TorchDispatchMode):
    """How many operations work on data; Adam's steps, counted on the host one by one, are left out."""

    FREE = (
        *("view", "split", "slice", "select", "detach", "unsqueeze", "alias", "diagonal", "expand"),
        *("empty", "transpose", "profiler", "promote", "_local_scalar"),
    )

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        on_host = isinstance(args[0], torch.Tensor) and args[0].ndim == 0
        self.calls += not on_host and not any(word in function.name() for word in self.FREE)
        return function(*args, **(kwargs or {}))


def test_joined_passes_do_not_grow_with_the_number_of_matrices(monkeypatch):
    monkeypatch.setattr(update, "row_blocks", lambda shape, device: [slice(0, shape[-2])])
    monkeypatch.setattr(update, "joins", lambda device: True)
    counts = []
    for number in (4, 12):
        matrices = [nn.Parameter(torch.randn(8, 12)) for _ in range(number)]
        gains = [nn.Parameter(torch.randn(8)) for _ in range(number)]
        groups = [{"params": matrices}, {"params": gains, "algorithm": "adam"}]
        optimizer = NorMuon(groups, nonfinite="ignore")
        for param in (*matrices, *gains):
            param.grad = torch.randn_like(param)
        optimizer.step()
        with Count() as count:
            optimizer.step()
        counts.append(count.calls)
    assert counts[0] == counts[1] <= 110
