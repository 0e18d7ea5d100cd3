"""dst = src^T: keep an embedding equal to the transposed head it is tied to.

python -m benchmarks.transpose_copy --help
"""

from __future__ import annotations

import torch

from benchmarks.harness import (
    Benchmark,
    Row,
    Step,
    Workload,
    main,
)
from benchmarks.muon_workloads import TRANSPOSE_SIZES, make_copy, transposing
from leanstep.muon.transpose import transpose_copy


def _plain_copy(workload: Workload) -> Step:
    src = workload.tensors["src"]
    dst = torch.empty_like(src)
    return lambda: {"copy": dst.copy_(src)} and {}


BENCHMARK = Benchmark(
    name="transpose-copy",
    summary="dst = src^T: keep an embedding equal to the transposed head it is tied to.",
    make=make_copy,
    rows=(
        Row("plain", "reference", transposing(lambda s, d: d.copy_(s.T)), note="dst.copy_(src.T)"),
        Row(
            "leanstep",
            "fast",
            transposing(transpose_copy),
            note="tiles transposed in registers (torch.compile on a CPU)",
        ),
        Row("limit", "limit", _plain_copy, note="one contiguous copy of the same bytes"),
    ),
    sizes=TRANSPOSE_SIZES,
    prove_sizes=("tiny", "odd", "empty"),
    dtypes=(torch.float32, torch.bfloat16),
)

if __name__ == "__main__":
    main(BENCHMARK)
