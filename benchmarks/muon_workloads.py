"""Workloads and rows that several benchmarks of this family share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import (
    Outputs,
    Params,
    Step,
    Workload,
)


def randn(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Tensor:
    return torch.randn(shape, generator=generator).to(device, dtype)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    # float64 stays float64, for the fp64 reference; narrower dtypes are computed in float32.
    return torch.promote_types(dtype, torch.float32)


def polar_flops(rows: int, cols: int, steps: int = 5) -> float:
    """Return the operations of the steps; symmetric products cost half, gram form if it pays."""
    n, r = min(rows, cols), max(rows, cols) / max(1, min(rows, cols))
    standard = steps * (r + 1 + 2 * r)
    # A Gram matrix, a quadratic per step, two products for the next one, products of factors, one
    # application.
    gram = r + steps + 2 * (steps - 1) + 1 + 2 * (steps - 2) + 2 * r
    return (standard if r < 4 / 3 else gram) * n**3


def matmuls(side: int, flops: float, device: torch.device, dtype: torch.dtype) -> Step:
    """Return a step of plain square matmuls with about `flops` operations in total."""
    a = torch.ones(side, side, dtype=dtype, device=device)
    out = torch.empty_like(a)

    def step() -> Outputs:
        for _ in range(max(1, round(flops / (2 * side**3)))):
            torch.mm(a, a, out=out)
        return {}

    return step


def make_copy(
    params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Workload:
    return Workload({"src": randn((params["cols"], params["rows"]), dtype, device, generator)})


def transposing(function: Callable[[Tensor, Tensor], Any]) -> Callable[[Workload], Step]:
    def build(workload: Workload) -> Step:
        src, dst = workload.tensors["src"], workload.tensors.get("dst")
        out = src.new_empty(src.shape[::-1]) if dst is None else dst.clone()

        def step() -> Outputs:
            function(src, out)
            return {"dst": out}

        return step

    return build


TRANSPOSE_SIZES = {
    "tiny": {"rows": 40, "cols": 130},
    "odd": {"rows": 41, "cols": 1271},
    "empty": {"rows": 8, "cols": 0},
    "cpu": {"rows": 768, "cols": 50304},
    "large": {"rows": 2048, "cols": 128256},
    "gpu": {"rows": 2048, "cols": 128256},
}
