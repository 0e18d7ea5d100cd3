"""The registered cases: every fast path is proven at every proving size; peers give the same numbers."""

from __future__ import annotations

import pytest
import torch

from leanstep.case import get_case
from leanstep.logprob.cases import response_rows
from leanstep.script.syncs import host_syncs

NAMES = ["logprob-logits", "logprob-linear", "policy-loss"]


@pytest.mark.parametrize("name", NAMES)
def test_the_sweep_key_exists_and_cpu_is_the_documented_size(name):
    params = get_case(name).params("cpu")
    assert (params["tokens"], params["vocab"]) == (2048, 32000) and "response_frac" in params


@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.25, 0.1, 0.0625])
def test_response_rows(fraction):
    params = {"tokens": 160, "samples": 4, "response_frac": fraction}
    rows, lengths = response_rows(params)
    assert len(rows) == sum(lengths) == 4 * round(40 * fraction)
    # Windows [P - 1, L - 1): the last row of a sample scores nothing, unless every row is asked for.
    assert ((rows % 40) < 39).all() or fraction == 1.0
    assert len(rows.unique()) == len(rows) and rows.max() < 160


def test_rows_that_cannot_run_say_why():
    case = get_case("logprob-linear")
    empty = case.params("empty")
    assert case.implementation("torch-linear-ce").missing(empty) == "no selected rows"


@pytest.mark.parametrize(
    ("case_name", "impl"),
    [("logprob-linear", "gather-after"), ("policy-loss", "limit"), ("logprob-linear", "limit-recompute")],
)
def test_plain_rows_run(case_name, impl):
    case = get_case(case_name)
    workload = case.workload(case.params("tiny"), torch.float32)
    result = case.implementation(impl).build(workload)()
    expected = case.reference.build(workload)()
    for name, value in result.items():
        torch.testing.assert_close(value, expected[name], atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize(
    ("impl", "module"), [("slime-gather", "torch"), ("trl-chunked", "trl"), ("trl-chunked-rows", "trl"),
                         ("verl-fused", "verl"), ("liger-chunked", "liger_kernel"),
                         ("torch-linear-ce", "torch")]
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_peers_agree_where_they_give_the_same_thing(impl, module):
    """Their results equal ours, so that their times can be compared with ours."""
    pytest.importorskip(module)
    case = get_case("logprob-linear")
    if case.implementation(impl).missing(case.params("tiny")):
        pytest.skip(str(case.implementation(impl).missing(case.params("tiny"))))
    workload = case.workload(case.params("tiny"), torch.float32)
    result = case.implementation(impl).build(workload)()
    expected = case.reference.build(workload)()
    if "loss" in result:
        torch.testing.assert_close(result["loss"], -expected["logp"].sum(), atol=1e-4, rtol=1e-5)
        return
    names = ["logp"] if "entropy" not in result else list(expected)
    for name in names:
        torch.testing.assert_close(result[name], expected[name], atol=2e-5, rtol=2e-4)


def test_drift_runs_stay_together():
    case = get_case("logprob-linear")
    assert case.drift is not None
    reference, fast = (case.drift(name, 0, 30) for name in ("reference", "leanstep"))
    assert reference[-1] < reference[0] - 0.5
    assert max(abs(a - b) for a, b in zip(reference, fast, strict=True)) < 1e-4


def test_fast_paths_stand_beside_the_limit_of_their_own_gemms():
    case = get_case("logprob-linear")
    assert case.annotate is not None
    times = {
        "leanstep": 6.6,
        "leanstep-recompute": 8.0,
        "limit": 6.0,
        "limit-recompute": 8.0,
        "trl-chunked": 9.0,
    }
    rows = {n: {"kind": case.implementation(n).kind, "median_s": s} for n, s in times.items()}
    notes = case.annotate(rows)
    assert notes == {"leanstep": "1.10 x its limit's time", "leanstep-recompute": "1.00 x its limit's time"}


@pytest.mark.parametrize("name", NAMES)
def test_fast_paths_never_make_the_host_read(name):
    case = get_case(name)
    workload = case.workload(case.params("odd"), torch.float32)
    for implementation in case.implementations:
        if implementation.kind == "fast":
            assert host_syncs(implementation.build(workload)) == 0, implementation.name
