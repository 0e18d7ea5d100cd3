"""Polar Express: the semi-orthogonal factor of a momentum matrix in five polynomial steps.

python -m benchmarks.polar --help
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import muon_peers as peers
from benchmarks.harness import (
    Benchmark,
    Params,
    Row,
    Step,
    Workload,
    main,
)
from benchmarks.muon_workloads import matmuls, polar_flops, randn, wide_dtype
from leanstep.muon import reference
from leanstep.muon.polar import polar


def make_polar(
    params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Workload:
    return Workload({"update": randn((params["rows"], params["cols"]), dtype, device, generator)})


def _polar_row(function: Callable[[Tensor], Tensor]) -> Callable[[Workload], Step]:
    return lambda workload: lambda: {"factor": function(workload.tensors["update"])}


def _polar_limit(workload: Workload) -> Step:
    rows, cols = workload.tensors["update"].shape
    flops = polar_flops(rows, cols)
    update = workload.tensors["update"]
    return matmuls(min(rows, cols), flops, update.device, wide_dtype(update.dtype))


BENCHMARK = Benchmark(
    name="polar",
    summary="Polar Express: the semi-orthogonal factor of a momentum matrix in five polynomial steps.",
    make=make_polar,
    rows=(
        Row(
            "plain",
            "reference",
            _polar_row(lambda u: reference.polar(u.to(wide_dtype(u.dtype))).to(u.dtype)),
            note="float32, X <- aX + (bA + cA^2) X",
        ),
        Row(
            "leanstep",
            "fast",
            _polar_row(lambda u: polar(u, compute_dtype=wide_dtype(u.dtype))),
            note="float32; gram form for ratios of at least 4/3, symmetric panels",
        ),
        Row(
            "leanstep-bf16",
            "fast",
            _polar_row(lambda u: polar(u, compute_dtype=torch.bfloat16)),
            unavailable=peers.no_native_half,
            note="what compute_dtype='auto' picks if bfloat16 products are native",
        ),
        Row(
            "addmm-fp32",
            "peer",
            _polar_row(peers.polar_addmm),
            note="implemented like torch.optim.Muon, float32",
        ),
        Row(
            "addmm-bf16",
            "peer",
            _polar_row(lambda u: peers.polar_addmm(u.bfloat16()).to(u.dtype)),
            unavailable=peers.no_native_half,
            note="implemented like torch.optim.Muon, bfloat16",
        ),
        Row(
            "limit",
            "limit",
            _polar_limit,
            note="bare float32 matmuls with the operations of the leanstep row",
        ),
    ),
    sizes={
        "tiny": {"rows": 48, "cols": 160},
        "odd": {"rows": 401, "cols": 41},
        "row": {"rows": 1, "cols": 17},
        "empty": {"rows": 0, "cols": 8},
        "cpu": {"rows": 768, "cols": 3072},
        "tall": {"rows": 3072, "cols": 768},
        "square": {"rows": 768, "cols": 768},
        "large": {"rows": 2048, "cols": 8192},
        "gpu": {"rows": 2048, "cols": 8192},
    },
    prove_sizes=("tiny", "odd", "row", "empty"),
    dtypes=(torch.float32, torch.bfloat16),
    # The gram form is less accurate than the standard form and far more accurate than bfloat16, which
    # most people train with.
    error_baseline=_polar_row(lambda u: reference.polar(u.bfloat16()).to(u.dtype)),
)

if __name__ == "__main__":
    main(BENCHMARK)
