"""The registry, its parameters and its guards."""

from __future__ import annotations

import pytest
import torch
from toy_case import fast, implementation, toy_case

from leanstep.case import all_cases, get_case, register, unregister

EXPECTED = {
    "lens-loss", "lens-step", "pair-loss", "logprob-logits", "logprob-linear", "policy-loss", "polar",
    "muon-step", "transpose-copy", "transpose-add", "bank-access", "gpt-step", "grpo-step",
}  # fmt: skip


def test_every_case_of_the_design_is_registered():
    assert set(all_cases()) >= EXPECTED


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_case_has_a_fast_path_a_limit_and_a_tiny_size(name):
    case = get_case(name)
    kinds = [i.kind for i in case.implementations]
    assert kinds[0] == "reference" and "fast" in kinds and "limit" in kinds
    assert "tiny" in case.sizes and case.summary


def test_unknown_names_list_what_there_is():
    case = toy_case()
    with pytest.raises(ValueError, match="no 'nope'; it has tiny, odd, empty"):
        case.params("nope")
    with pytest.raises(ValueError, match="no parameter 'depth'; it has rows, width"):
        case.params("tiny", {"depth": 3})
    with pytest.raises(ValueError, match="has no 'nope'; it has reference, fast"):
        case.implementation("nope")
    with pytest.raises(ValueError, match="no case 'nope'"):
        get_case("nope")


def test_a_name_is_registered_once():
    register(toy_case("toy-twice"))
    try:
        with pytest.raises(ValueError, match="registered twice"):
            register(toy_case("toy-twice"))
    finally:
        unregister("toy-twice")
    assert "toy-twice" not in all_cases()


def test_workloads_repeat_with_the_seed_and_differ_between_seeds():
    case = toy_case()
    params = case.params("odd")
    a, b, c = (case.workload(params, torch.float32, seed=s).tensors["x"] for s in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_with_gradients_uses_the_upstream_gradient_of_the_workload():
    case = toy_case()
    workload = case.workload(case.params("tiny"), torch.float64)
    out = case.reference.build(workload)()
    x = workload.tensors["x"]
    expected = torch.softmax(x, -1) * workload.tensors["upstream:lse"][:, None]
    torch.testing.assert_close(out["grad:x"], expected, rtol=1e-12, atol=1e-14)
    assert not workload.tensors["x"].requires_grad


def test_a_missing_package_is_named():
    peer = implementation("peer", fast, "peer", requires=("no_such_module_anywhere",))
    assert peer.missing({}) == "no_such_module_anywhere is not installed"
    kernel = implementation("kernel", fast, "peer", devices=("cuda",))
    assert kernel.missing({}) == "runs on cuda only, not on cpu" and kernel.missing({}, "cuda:1") is None
    sized = implementation(
        "sized", fast, "peer", unavailable=lambda p: "too large" if p["rows"] > 10 else None
    )
    assert sized.missing({"rows": 11}) == "too large" and sized.missing({"rows": 1}) is None
