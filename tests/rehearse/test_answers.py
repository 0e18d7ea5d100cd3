"""One process of eight, a compiled module, a Triton kernel and a binary attention kernel."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rehearse.rehearsed import SCRIPTS, run_script

import leanstep
from leanstep.rehearse import kernel_costs
from leanstep.rehearse.answers import triton_launches
from leanstep.rehearse.events import Launch

MIB = 2**20


@pytest.fixture(scope="module")
def said(answers):
    assert answers.recording.refused is None, answers.recording.refused
    return json.loads(answers.printed.splitlines()[-1])


def kernels_at(rehearsed, mark):
    """Kernels of the calls on a marked line."""
    calls = [e for e in rehearsed.recording.events if isinstance(e, Launch) and rehearsed.is_at(e.line, mark)]
    return [k for e in calls for k in e.kernels]


def test_the_process_is_rank_0_of_eight(said):
    assert said["world"] == [0, 8]


def test_a_group_has_the_backend_that_was_asked_for(said):
    assert said["backends"] == ["nccl", "gloo"]


def test_ddp_reduces_every_gradient_once_in_buckets(answers):
    reduced = [k for k in kernels_at(answers, "reduced") if k.kind == "collective"]
    assert [(k.name, k.nbytes, k.sizes) for k in reduced] == [
        ("all_reduce", 4 * MIB, (8, 1)),  # the first bucket closes at 1 MiB: one matrix
        ("all_reduce", 28 * MIB, (8, 1)),  # the others at 25 MiB: seven
        ("all_reduce", 8 * MIB, (8, 1)),
    ]


def test_no_sync_sends_nothing(answers):
    assert not [k for k in kernels_at(answers, "no sync") if k.kind == "collective"]


def test_fsdp_holds_an_eighth_and_gathers_whole_layers(answers, said):
    shards = [
        s for s in answers.recording.storages.values() if s.shape == (128, 1024) and s.category == "parameter"
    ]
    assert len(shards) == 2
    # Gradients and two moments of two shards of 0.5 MiB, and two step counters.
    assert said["sharded state"] - said["shards"] == 3 * MIB + 2 * 512
    moved = [(k.name, k.nbytes) for k in kernels_at(answers, "sharded") if k.kind == "collective"]
    assert moved.count(("all_gather", 4 * MIB)) == 4  # each layer in forward and again in backward
    assert moved.count(("reduce_scatter", 4 * MIB)) == 2


def test_a_compiled_module_is_two_graphs_with_the_programs_lines(answers, said):
    graphs = {r.number for r in answers.recording.regions.values() if r.name == "Gate"}
    assert len(graphs) == 2
    assert said["wrapped"] == "_orig_mod.up.weight"
    calls = [e for e in answers.recording.events if isinstance(e, Launch) and e.region in graphs]
    products = [e for e in calls if any(k.kind == "gemm" for k in e.kernels)]
    assert {(e.region, e.phase) for e in products} == {(1, "forward"), (2, "backward")}
    assert all(answers.is_at(e.line, "up") or answers.is_at(e.line, "gate") for e in products)


def test_a_region_says_whether_inductor_may_pad_its_products(answers):
    padded = {r.name: r.padded for r in answers.recording.regions.values()}
    assert padded["Gate"] and not padded["loss_of"]


def test_what_a_compiler_fuses_away_takes_no_memory(said):
    wide = 4096 * 1024 * 4
    inputs = outputs = wide // 4
    # The backward of the product: h, silu(h) and sigmoid(h + 1) are saved, and three gradients are live. The
    # backward of silu is one kernel on a device: it needs no temporaries.
    assert 6 * wide + inputs <= said["eager"] <= 6 * wide + inputs + outputs
    # The first product of the backward: h, the other factor of the product, the gradient of a weight.
    assert said["compiled"] <= 2 * wide + inputs + outputs + 256 * 1024 * 4 + 4096


def test_a_triton_kernel_is_one_pass_over_its_tensors_and_ends_what_was_known(answers, said):
    (kernel,) = kernels_at(answers, "triton")
    assert (kernel.kind, kernel.name, kernel.nbytes) == ("triton", "double", 2 * 8000)
    assert said["unknown after a kernel"] == 1


def test_a_registered_cost_sees_arguments_and_grid(answers):
    (kernel,) = kernels_at(answers, "priced")
    assert (kernel.kind, kernel.nbytes, kernel.dtype) == ("pointwise", 1000 * 4, "int64")


def test_flash_attention_is_priced_by_the_scores_it_computes(answers):
    forward, backward = (k for k in kernels_at(answers, "flash") if k.kind.startswith("attention"))
    scores = 2 * 8 * 512 * 512 / 2  # causal
    assert (forward.flops, backward.flops) == (4 * 64 * scores, 10 * 64 * scores)
    (packed,) = kernels_at(answers, "varlen")
    assert packed.flops == 4 * 64 * 8 * (256**2 + 768**2)


def test_calls_of_one_shape_with_other_windows_have_their_own_price(answers):
    (whole,), (window,) = kernels_at(answers, "whole"), kernels_at(answers, "window")
    assert whole.flops == 4 * 64 * 2 * 8 * 512 * 512 / 2
    assert window.flops == 4 * 64 * 2 * 8 * (128 * 512 - 127 * 128 / 2)


def test_one_captured_graph_is_priced_by_the_documents_of_each_call(answers):
    attention = [k for k in kernels_at(answers, "captured") if k.kind.startswith("attention")]
    scores = [256**2 + 768**2, 256**2 + 768**2, 2 * 512**2, 768**2]  # unknown lengths: one of the longest
    products = {"attention": 4, "attention_bwd": 10}
    assert [k.kind for k in attention] == ["attention", "attention_bwd", "attention", "attention"]
    assert [k.flops / (products[k.kind] * 64 * 8) for k in attention] == scores


def test_flash_attention_3_uses_the_instructions_of_hopper(answers):
    (second,), (third,), (hub,) = (kernels_at(answers, mark) for mark in ("whole", "hopper", "hub"))
    assert (second.kind, third.kind, hub.kind) == ("attention", "attention_hopper", "attention_hopper")
    assert third._replace(kind=second.kind, name=second.name) == second


def test_every_kernel_of_the_package_has_a_cost(monkeypatch):
    monkeypatch.setattr(kernel_costs, "_costs", {})
    triton_launches._register_own_costs()
    found = set()
    for path in Path(leanstep.__file__).parent.rglob("kernel*.py"):
        found |= set(re.findall(r"^@triton.jit\ndef (\w+_kernel)\(", path.read_text(), re.MULTILINE))
    assert len(found) >= 5
    assert found <= set(kernel_costs._costs)


# Benchmarks whose rows need no third-party trainer.
CASES = ("logprob_logits", "policy_loss", "polar", "muon_step", "transpose_add", "bank_access")


def test_every_row_of_a_benchmark_runs_on_the_device(tmp_path):
    ran = run_script(SCRIPTS / "cases.py", *CASES, capture=tmp_path, steps=10**6)
    found = json.loads(ran.printed.splitlines()[-1])
    assert {name: trouble for name, trouble in found.items() if trouble} == {}
    assert len(found) >= 20


def test_a_captured_graph_may_ask_for_the_device_and_make_constants_there(said):
    # Constants of a graph have no value for the host: their product reads as 1.
    assert said["units in a graph"] in (1, 3 * 108)


def test_a_compiled_cross_entropy_keeps_the_logits_of_the_product_alone(said):
    logits = 1024 * 1024 * 2
    assert logits <= said["compiled loss"] < 1.2 * logits


def test_a_triton_kernel_in_a_captured_graph_is_taped(answers):
    (kernel,) = (k for k in kernels_at(answers, "captured triton") if k.name == "double")
    assert kernel.kind == "triton"
    assert json.loads(answers.printed.splitlines()[-1])["shape from a captured kernel"] == [1000]
