"""The fp64 rule over every fast path of every benchmark."""

from __future__ import annotations

import importlib

import pytest

from benchmarks import BENCHMARKS
from benchmarks.harness import check

# benchmark -> rows that are compared with fp64
FAST = {
    "bank_access": ("leanstep", "halves"),
    "distill": ("leanstep",),
    "dpo": ("leanstep",),
    "gpt_step": ("leanstep",),
    "grpo_step": ("leanstep",),
    "lens_loss": ("leanstep",),
    "lens_step": ("leanstep",),
    "logprob_linear": ("leanstep",),
    "logprob_logits": ("leanstep",),
    "masked_head": ("leanstep",),
    "muon_step": ("leanstep", "leanstep-bf16"),
    "polar": ("leanstep", "leanstep-bf16"),
    "policy_loss": ("leanstep", "leanstep-composed"),
    "sft_step": ("leanstep",),
    "transpose_add": ("leanstep", "leanstep-blocked"),
    "transpose_copy": ("leanstep",),
}


def test_no_fast_path_is_left_out():
    assert tuple(FAST) == BENCHMARKS
    for module, names in FAST.items():
        rows = importlib.import_module(f"benchmarks.{module}").BENCHMARK.rows
        assert {row.name for row in rows if row.kind == "fast" and not row.on_request} == set(names), module


@pytest.mark.parametrize("module", FAST)
def test_fast_paths_keep_the_fp64_rule(module, device):
    benchmark = importlib.import_module(f"benchmarks.{module}").BENCHMARK
    missing = benchmark.reference.missing(benchmark.params("tiny"))
    if missing is not None:
        pytest.skip(f"{module}: {missing}")
    failed, checked = [], 0
    for name in FAST[module]:
        row = benchmark.row(name)
        for dtype in row.dtypes or benchmark.dtypes:
            for size in benchmark.prove_sizes:
                if row.missing(benchmark.params(size), device) is None:
                    checks = check(benchmark, row, dtype, size, device=device)
                    failed += [c for c in checks if not c.ok]
                    checked += len(checks)
    assert checked and not failed
