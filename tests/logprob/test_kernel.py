"""The Triton kernels in the interpreter against the plain passes they replace, alone and in use."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from leanstep.logprob import kernel, linear_logprobs, token_logprobs
from leanstep.logprob.statistics import RowStatistics

# Opposite ends of fp32 overflow when subtracted, on purpose; the interpreter is numpy and says so.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")
NAMES = {"update_statistics", "update_statistics_entropy", "scale_exponentials", "scale_exponentials_entropy"}


def tile(rows, columns, spread=4.0):
    z = torch.randn(rows, columns) * spread
    if rows > 3 and columns > 3:
        z[1, : columns // 2] = -torch.inf
        z[2] = -torch.inf
        z[3, 1] = 3e38
        z[3, 2] = -3e38
    return z


@pytest.mark.parametrize(("rows", "columns"), [(5, 41), (4, 401), (2, 4100), (1, 1), (0, 7)])
@pytest.mark.parametrize("moment", [True, False])
def test_statistics(rows, columns, moment):
    first, second = tile(rows, columns), tile(rows, columns)
    expected = RowStatistics.empty(rows, moment=moment)
    found = RowStatistics.empty(rows, moment=moment)
    for z in (first, second):
        expected.update_(z.clone(), torch.zeros_like(z))
        kernel.update_statistics(z, found.max, found.sum, found.moment)
    torch.testing.assert_close(found.max, expected.max)
    torch.testing.assert_close(found.sum, expected.sum, rtol=1e-5, atol=1e-6)
    if moment:
        torch.testing.assert_close(found.moment, expected.moment, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "columns"), [(5, 41), (4, 401), (2, 2100), (1, 1), (0, 7)])
@pytest.mark.parametrize("has_slope", [True, False])
def test_gradient(rows, columns, has_slope):
    z = tile(rows, columns)
    maximum = torch.where(z.amax(-1) == -torch.inf, 0.0, z.amax(-1)) if rows else torch.zeros(0)
    constant, slope = torch.randn(2, rows)
    x = z.double() - maximum.double().unsqueeze(-1)
    e = x.exp()
    factor = constant.unsqueeze(-1) + (slope.unsqueeze(-1) * x if has_slope else 0.0)
    expected = torch.where(e.float() == 0, 0.0, e * factor)
    wide = torch.full((rows, columns + 3), 7.0)
    wide[:, :columns] = z
    view = wide[:, :columns]
    found = kernel.scale_exponentials(view, maximum, constant, slope if has_slope else None)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    assert found.isfinite().all() and torch.equal(wide[:, columns:], torch.full((rows, 3), 7.0))


@pytest.fixture
def through_kernels(monkeypatch):
    """Send every fp32 tile through the kernels, as on a GPU."""
    chosen = lambda z: kernel if z.dtype == torch.float32 and z.stride(-1) == 1 else None  # noqa: E731
    monkeypatch.setattr("leanstep.logprob.statistics.kernels_for", chosen)
    monkeypatch.setattr("leanstep.logprob.gradient.kernels_for", chosen)


def test_public_functions_through_kernels(through_kernels, monkeypatch):
    hidden, weight = torch.randn(13, 8), torch.randn(157, 8)
    tokens, upstream = torch.randint(0, 157, (13,)), torch.randn(2, 13)

    def results():
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        out = linear_logprobs(h, w, tokens, entropy="grad", tile=(5, 60))
        grads = torch.autograd.grad([out.logp, out.entropy], [h, w], list(upstream))
        z = (hidden @ weight.t()).requires_grad_()
        direct = token_logprobs(z, tokens, entropy="grad", chunk_rows=4)
        (grad,) = torch.autograd.grad([direct.logp, direct.entropy], z, list(upstream))
        return out.logp, out.entropy, *grads, direct.logp, direct.entropy, grad

    with_kernels = results()
    monkeypatch.undo()
    for a, b in zip(with_kernels, results(), strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=2e-5, atol=2e-5)


def test_shipped_configurations_are_listed():
    assert {entry["name"] for entry in kernel.AOT_KERNELS} == NAMES
    for entry in kernel.AOT_KERNELS:
        constants = {name for name, kind in entry["signature"].items() if kind == "constexpr"}
        assert constants == set(entry["constexprs"])
