"""The docstring of every public name has shapes and equivalent code that runs."""

from __future__ import annotations

import inspect

import pytest
import torch
from docstring_code import code_blocks
from torch import nn

import leanstep.muon as package
from leanstep.muon import from_master, polar, reference, transpose_copy

CONSTANTS = {"NEWTON_SCHULZ", "POLAR_EXPRESS"}
# What the code of a docstring must have computed; the names are those of the docstring and of `world`.
MEANS = {
    "NorMuon": "torch.allclose(weight, stepped, atol=1e-5)",
    "from_master": "weight.equal(from_master(master, 'truncate')[0]) and residual.dtype == torch.int16",
    "momentum_polar": "torch.allclose(factor, momentum_polar(grad, start), atol=1e-4)"
    " and torch.allclose(start, momentum_buffer)",
    "polar": "torch.allclose(factor, polar(update), atol=1e-4)",
    "split_params": "[g['algorithm'] for g in optimizer.param_groups] == ['normuon', 'adam']",
    "to_master": "master.equal(exact)",
    "transpose_add": "torch.allclose(dst, before + src.T)",
    "transpose_copy": "dst.equal(transpose_copy(src))",
    "unbind_bank": "[m.shape for m in matrices] == [(4, 5)] * 6"
    " and all(m.equal(n) for m, n in zip(matrices, unbind_bank(bank)))",
}


def world() -> dict[str, object]:
    """Names that the docstrings use."""
    names = {name: getattr(package, name) for name in package.__all__}
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 4))
    stepped, grad = torch.randn(8, 6), torch.randn(8, 6)
    param = nn.Parameter(stepped.clone())
    param.grad = grad
    package.NorMuon([param], lr=0.02).step()
    exact = torch.randn(5, 7)
    high, low = from_master(exact)
    dst, buffer = torch.randn(7, 5), torch.randn(8, 6)
    names |= {
        **{"momentum_buffer": buffer, "start": buffer.clone()},
        **{"torch": torch, "leanstep": __import__("leanstep"), "reference": reference, "model": model},
        **{"grad": grad, "momentum": torch.zeros(8, 6), "second": torch.zeros(8, 1), "lr": 0.02},
        **{"stepped": param.detach(), "weight": stepped},
        "update": torch.randn(8, 6),
        **{"coefficients": reference.POLAR_EXPRESS, "eps_mode": "relative", "exact": exact},
        **{"master": exact, "residual": low, "src": exact, "dst": dst, "before": dst.clone()},
        "bank": torch.randn(3, 2, 4, 5),
    }
    return names | {"high_of_exact": high}


@pytest.mark.parametrize("name", sorted(set(package.__all__) - CONSTANTS))
def test_docstring_names_shapes_and_its_code_means_the_same(name):
    doc = inspect.getdoc(getattr(package, name)) or ""
    assert "[" in doc, f"{name}: no shape"
    blocks = code_blocks(doc)
    assert blocks, f"{name}: no Equivalent or Example"
    names = world()
    if name == "to_master":
        names["weight"] = names["high_of_exact"]
    for block in blocks:
        exec(block, names)
    assert eval(MEANS[name], names), name


def test_polar_ends_where_the_docstring_says():
    values = torch.linalg.svdvals(polar(torch.randn(256, 512)))
    assert values.min() > 0.8 and values.max() < 1.2 and transpose_copy(values[None]).shape == (256, 1)
