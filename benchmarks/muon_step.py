"""One optimizer step over a transformer's matrices: momentum, polar factor, variance, decay.

python -m benchmarks.muon_step --help
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import muon_peers as peers
from benchmarks.harness import (
    Benchmark,
    Outputs,
    Params,
    Row,
    Step,
    Workload,
    main,
)
from benchmarks.muon_workloads import matmuls, polar_flops, randn, wide_dtype
from leanstep.muon import reference
from leanstep.muon.optimizer import NorMuon


def make_step(
    params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Workload:
    wide = (params["num_wide"], params["dim"], params["ratio"] * params["dim"])
    square = (params["num_square"], params["dim"], params["dim"])
    tensors = {}
    for name, shape in (("wide", wide), ("square", square)):
        tensors[name] = 0.02 * randn(shape, dtype, device, generator)
        tensors[f"grad_{name}"] = randn(shape, dtype, device, generator)
    return Workload(tensors, {"lr": 0.02, "weight_decay": 1.2})


def _parameters(workload: Workload, share: float = 1.0) -> tuple[Outputs, list[nn.Parameter]]:
    """Return stacks of cloned weights (the outputs) and their matrices as parameters with gradients."""
    stacks, parameters = {}, []
    for name in ("wide", "square"):
        count = round(workload.tensors[name].size(0) * share) if share < 1 else workload.tensors[name].size(0)
        stacks[name] = workload.tensors[name][:count].clone()
        for weight, grad in zip(stacks[name], workload.tensors[f"grad_{name}"], strict=False):
            parameter = nn.Parameter(weight)
            parameter.grad = grad
            parameters.append(parameter)
    return stacks, parameters


def _stepping(
    make: Callable[[list[nn.Parameter], dict[str, Any]], Callable[[], Any]],
    share: float = 1.0,
    compare: bool = True,
) -> Callable[[Workload], Step]:
    def build(workload: Workload) -> Step:
        stacks, parameters = _parameters(workload, share)
        advance = make(parameters, workload.constants)

        def step() -> Outputs:
            advance()
            return stacks if compare else {}

        return step

    return build


def _product_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of a step's products: bfloat16 on a GPU, as is usual there."""
    return torch.bfloat16 if parameter.is_cuda else wide_dtype(parameter.dtype)


def _leanstep(compute_dtype: torch.dtype | None):
    def make(parameters: list[nn.Parameter], constants: dict[str, Any]) -> Callable[[], Any]:
        dtype = compute_dtype or _product_dtype(parameters[0])
        return NorMuon(parameters, compute_dtype=dtype, **constants).step

    return make


def _reference_step(orthogonalise: Callable[[Tensor], Tensor] = reference.polar):
    def make(parameters: list[nn.Parameter], constants: dict[str, Any]) -> Callable[[], Any]:
        return peers.PlainNorMuon(parameters, orthogonalise=orthogonalise, **constants).step

    return make


def _step_limit(workload: Workload) -> Step:
    _, rows, cols = workload.tensors["wide"].shape
    flops = sum(
        stack.size(0) * polar_flops(*stack.shape[1:])
        for stack in (workload.tensors["wide"], workload.tensors["square"])
    )
    wide = workload.tensors["wide"]
    return matmuls(min(rows, cols), flops, wide.device, _product_dtype(wide))


def _step_notes(rows: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return notes with the speed relative to torch.optim.Muon in the same run."""

    def seconds(name: str) -> float | None:
        return rows.get(name, {}).get("median_s")

    notes = {}
    for mine in ("leanstep", "leanstep-bf16"):
        parts = []
        for theirs in ("torch-muon-fp32", "torch-muon"):
            a, b = seconds(mine), seconds(theirs)
            if a and b:
                parts.append(f"{b / a:.2f}x the speed of {theirs}")
        if parts:
            notes[mine] = ", ".join(parts)
    return notes


BENCHMARK = Benchmark(
    name="muon-step",
    summary="One optimizer step over a transformer's matrices: momentum, polar factor, variance, decay.",
    make=make_step,
    rows=(
        Row(
            "plain",
            "reference",
            _stepping(_reference_step()),
            note="NorMuon, one matrix at a time, float32",
        ),
        Row(
            "leanstep",
            "fast",
            _stepping(_leanstep(None)),
            note="NorMuon, float32 products on a CPU, bfloat16 on a GPU",
        ),
        Row(
            "leanstep-bf16",
            "fast",
            _stepping(_leanstep(torch.bfloat16)),
            devices=("cpu",),
            unavailable=peers.no_native_half,
            note="NorMuon, bfloat16 products: what compute_dtype='auto' picks if they are native",
        ),
        Row(
            "torch-muon-fp32",
            "peer",
            _stepping(peers.torch_muon(torch.float32), compare=False),
            unavailable=peers.no_torch_muon,
            note="torch.optim.Muon, iteration patched to float32; no variance step",
        ),
        Row(
            "torch-muon",
            "peer",
            _stepping(peers.torch_muon(None), share=0.5, compare=False),
            unavailable=peers.too_slow_in_half,
            time_scale=2.0,
            note="torch.optim.Muon as shipped (bfloat16), half of the matrices, time doubled",
        ),
        Row(
            "nanochat-style",
            "peer",
            _stepping(peers.stacked_compiled, compare=False),
            unavailable=peers.needs_compiler,
            note="equal shapes stacked, the whole step under torch.compile, bfloat16",
        ),
        Row(
            "dion",
            "peer",
            _stepping(peers.dion_normuon, compare=False),
            requires=("dion",),
            note="microsoft/dion NorMuon",
        ),
        Row(
            "limit",
            "limit",
            _step_limit,
            note="bare matmuls with the operations and the dtype of the leanstep row",
        ),
    ),
    sizes={
        "tiny": {"num_wide": 2, "num_square": 2, "dim": 40, "ratio": 4},
        "odd": {"num_wide": 2, "num_square": 4, "dim": 41, "ratio": 3},
        "cpu": {"num_wide": 2, "num_square": 8, "dim": 768, "ratio": 4},
        "seed": {"num_wide": 12, "num_square": 48, "dim": 768, "ratio": 4},
        # All matrices of a 124M GPT.
        "gpu": {"num_wide": 24, "num_square": 48, "dim": 768, "ratio": 4},
    },
    prove_sizes=("tiny", "odd"),
    dtypes=(torch.float32, torch.bfloat16),
    error_baseline=_stepping(_reference_step(lambda u: reference.polar(u.bfloat16()).to(u.dtype))),
    annotate=_step_notes,
    truth_size="odd",
)

if __name__ == "__main__":
    main(BENCHMARK)
