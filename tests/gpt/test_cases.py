from __future__ import annotations

import pytest
import torch

from leanstep.case import get_case
from leanstep.measure import parity


@pytest.mark.parametrize("name", ["bank-access", "gpt-step"])
def test_every_fast_path_is_proven(name: str):
    rows = parity.prove_case(get_case(name))
    assert rows and not [row for row in rows if not row.ok]


def test_a_wrong_model_is_caught():
    case = get_case("gpt-step")
    workload = case.workload(case.params("odd"), torch.float32)
    truth, plain = parity.truth_of(case, workload), parity.plain_of(case, workload)
    fast = case.implementation("leanstep")
    candidate = fast.build(workload)()
    candidate["grad:mlp_bank"][1, 0] *= 1.0001
    rows = parity.compare(case, fast, torch.float32, "odd", truth, plain, candidate)
    assert [row.tensor for row in rows if not row.ok] == ["odd/grad:mlp_bank"]


def test_limits_and_peers_run_and_drift_trains():
    case = get_case("gpt-step")
    workload = case.workload(case.params("odd"), torch.float32)
    assert case.implementation("limit").build(workload)() == {}
    losses = case.drift("leanstep", 0, 6)
    again = case.drift("reference", 0, 6)
    assert losses[-1] < losses[0] and max(abs(a - b) for a, b in zip(losses, again, strict=True)) < 1e-4
