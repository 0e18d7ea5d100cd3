"""The registered cases: fast paths within their bound, rows that report themselves, paired training runs."""

from __future__ import annotations

import functools

import pytest
import torch

from leanstep.case import get_case
from leanstep.measure.parity import prove_case
from leanstep.muon import cases, peers

NAMES = ["polar", "muon-step", "transpose-copy", "transpose-add"]


@pytest.mark.parametrize("name", NAMES)
def test_fast_paths_are_within_their_bound(name):
    rows = prove_case(get_case(name))
    assert rows and not [row for row in rows if not row.ok]


@pytest.mark.parametrize("name", NAMES)
def test_limit_and_reference_rows_run(name):
    case = get_case(name)
    workload = case.workload(case.params("tiny"), torch.float32)
    limit = next(i for i in case.implementations if i.kind == "limit")
    assert limit.build(workload)() == {}
    assert case.reference.build(workload)()


def test_step_notes_compare_with_torch_in_the_same_run():
    rows = {
        "leanstep": {"median_s": 1.0},
        "torch-muon-fp32": {"median_s": 1.8},
        "torch-muon": {"median_s": None},
    }
    assert cases._step_notes(rows) == {"leanstep": "1.80x the speed of torch-muon-fp32"}


def test_training_runs_are_paired_and_agree():
    plain = cases.train_losses("reference", 0, 15)
    fast = cases.train_losses("leanstep", 0, 15)
    assert plain == pytest.approx(fast, rel=1e-3)
    assert plain[-1] < plain[0] and cases.train_losses("reference", 1, 2)[0] != plain[0]


def test_torch_muon_rows_say_why_they_are_absent_before_torch_2_9(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    case = get_case("muon-step")
    rows = {row.name: row for row in case.implementations}
    for name in ("torch-muon", "torch-muon-fp32"):
        assert "2.9" in rows[name].unavailable(case.params("tiny"))


def test_stacked_peer_keeps_its_buffers_where_the_parameters_are(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch, "tensor", functools.partial(torch.tensor, device="meta"))
    params = [torch.nn.Parameter(torch.empty(6, 4, device="meta")) for _ in range(2)]
    for param in params:
        param.grad = torch.empty_like(param)
    peers.stacked_compiled(params, {"lr": 0.1})()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no torch.optim.Muon")
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
def test_patched_torch_muon_runs_in_float32():
    grad, moved = torch.randn(20, 30), {}
    for label, dtype, kind in (
        ("truth", torch.float64, torch.float64),
        ("fp32", torch.float32, torch.float32),
        ("stock", None, torch.float32),
    ):
        param = torch.nn.Parameter(torch.zeros(20, 30, dtype=kind))
        param.grad = grad.to(kind)
        peers.torch_muon(dtype)([param], {"lr": 0.1})()
        moved[label] = param.detach().double()
    errors = {label: (moved[label] - moved["truth"]).norm() for label in ("fp32", "stock")}
    assert errors["fp32"] < 0.01 * errors["stock"]
