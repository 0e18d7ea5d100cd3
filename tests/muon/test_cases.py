"""The registered cases: fast paths within their bound, rows that report themselves, paired training runs."""

from __future__ import annotations

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
