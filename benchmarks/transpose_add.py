"""dst += src^T: add the gradient of a tied embedding to that of the head.

python -m benchmarks.transpose_add --help
"""

from __future__ import annotations

import torch

from benchmarks.harness import (
    Benchmark,
    Params,
    Row,
    Step,
    Workload,
    main,
)
from benchmarks.muon_workloads import TRANSPOSE_SIZES, make_copy, randn, transposing
from leanstep.muon.transpose import add_blocked, transpose_add


def make_add(
    params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Workload:
    tensors = make_copy(params, dtype, device, generator).tensors
    return Workload({**tensors, "dst": randn((params["rows"], params["cols"]), dtype, device, generator)})


def _plain_add(workload: Workload) -> Step:
    src = workload.tensors["src"]
    dst = torch.zeros_like(src)
    return lambda: {"sum": dst.add_(src)} and {}


BENCHMARK = Benchmark(
    name="transpose-add",
    summary="dst += src^T: add the gradient of a tied embedding to that of the head.",
    make=make_add,
    rows=(
        Row("plain", "reference", transposing(lambda s, d: d.add_(s.T)), note="dst.add_(src.T)"),
        Row(
            "leanstep",
            "fast",
            transposing(transpose_add),
            note="tiles transposed in registers (torch.compile on a CPU)",
        ),
        Row(
            "leanstep-blocked",
            "fast",
            transposing(lambda s, d: add_blocked(d, s)),
            note="plain torch, for machines without a C++ compiler",
        ),
        Row("limit", "limit", _plain_add, note="one contiguous add of the same bytes"),
    ),
    sizes=TRANSPOSE_SIZES,
    prove_sizes=("tiny", "odd", "empty"),
    dtypes=(torch.float32, torch.bfloat16),
)

if __name__ == "__main__":
    main(BENCHMARK)
