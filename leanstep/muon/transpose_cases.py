"""The two transposes as cases: a tied head and its embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from leanstep.case import Case, Implementation, Outputs, Params, Step, Workload, register
from leanstep.muon.transpose import transpose_add, transpose_copy


def make_copy(
    params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Workload:
    src = torch.randn(params["cols"], params["rows"], generator=generator)
    return Workload({"src": src.to(device, dtype)})


def make_add(
    params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Workload:
    tensors = make_copy(params, dtype, device, generator).tensors
    dst = torch.randn(params["rows"], params["cols"], generator=generator)
    return Workload({**tensors, "dst": dst.to(device, dtype)})


def _copying(function: Callable[[Tensor, Tensor], Any]) -> Callable[[Workload], Step]:
    def build(workload: Workload) -> Step:
        src = workload.tensors["src"]
        dst = torch.empty(src.shape[::-1], dtype=src.dtype, device=src.device)

        def step() -> Outputs:
            function(src, dst)
            return {"dst": dst}

        return step

    return build


def _adding(function: Callable[[Tensor, Tensor], Any]) -> Callable[[Workload], Step]:
    def build(workload: Workload) -> Step:
        src, dst = workload.tensors["src"], workload.tensors["dst"].clone()

        def step() -> Outputs:
            function(src, dst)
            return {"dst": dst}

        return step

    return build


def _plain_copy(workload: Workload) -> Step:
    src = workload.tensors["src"]
    dst = torch.empty_like(src)
    return lambda: {"copy": dst.copy_(src)} and {}


def _plain_add(workload: Workload) -> Step:
    src = workload.tensors["src"]
    dst = torch.zeros_like(src)
    return lambda: {"sum": dst.add_(src)} and {}


_TRANSPOSE_SIZES = {
    "tiny": {"rows": 40, "cols": 130},
    "odd": {"rows": 41, "cols": 1271},
    "empty": {"rows": 8, "cols": 0},
    "cpu": {"rows": 768, "cols": 50304},
    "large": {"rows": 2048, "cols": 128256},
}

register(
    Case(
        name="transpose-copy",
        summary="dst = src^T: keep an embedding equal to the transposed head it is tied to.",
        make=make_copy,
        implementations=(
            Implementation(
                "reference", "reference", _copying(lambda s, d: d.copy_(s.T)), note="dst.copy_(src.T)"
            ),
            Implementation(
                "leanstep",
                "fast",
                _copying(transpose_copy),
                note="tiles turned in registers (torch.compile on a CPU)",
            ),
            Implementation("limit", "limit", _plain_copy, note="one contiguous copy of the same bytes"),
        ),
        sizes=_TRANSPOSE_SIZES,
        prove_sizes=("tiny", "odd", "empty"),
        dtypes=(torch.float32, torch.bfloat16),
    )
)
register(
    Case(
        name="transpose-add",
        summary="dst += src^T: add the gradient of a tied embedding to that of the head.",
        make=make_add,
        implementations=(
            Implementation(
                "reference", "reference", _adding(lambda s, d: d.add_(s.T)), note="dst.add_(src.T)"
            ),
            Implementation(
                "leanstep",
                "fast",
                _adding(transpose_add),
                note="tiles turned in registers (torch.compile on a CPU)",
            ),
            Implementation(
                "leanstep-blocked",
                "fast",
                _adding(lambda s, d: transpose_add(s, d, impl="blocked")),
                note="plain torch, for machines without a C++ compiler",
            ),
            Implementation("limit", "limit", _plain_add, note="one contiguous add of the same bytes"),
        ),
        sizes=_TRANSPOSE_SIZES,
        prove_sizes=("tiny", "odd", "empty"),
        dtypes=(torch.float32, torch.bfloat16),
    )
)
