"""Cases of this folder: the polar factor, a whole optimizer step, and the two transposes of a tied head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from leanstep.case import Case, Implementation, Outputs, Params, Step, Workload, register
from leanstep.muon import peers, reference
from leanstep.muon.optimizer import NorMuon
from leanstep.muon.polar import plan_polar, polar
from leanstep.muon.transpose import transpose_add, transpose_copy


def _randn(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Tensor:
    return torch.randn(shape, generator=generator).to(device, dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    # float64 stays float64, for the fp64 reference; narrower dtypes are computed in float32.
    return torch.promote_types(dtype, torch.float32)


# polar


def make_polar(
    params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Workload:
    return Workload({"update": _randn((params["rows"], params["cols"]), dtype, device, generator)})


def _polar_row(function: Callable[[Tensor], Tensor]) -> Callable[[Workload], Step]:
    return lambda workload: lambda: {"factor": function(workload.tensors["update"])}


def _polar_limit(workload: Workload) -> Step:
    rows, cols = workload.tensors["update"].shape
    flops = plan_polar(rows, cols, compute_dtype=torch.float32, panels=10**6).flops()
    update = workload.tensors["update"]
    return _matmuls(min(rows, cols), flops, update.device, _wide(update.dtype))


def _matmuls(side: int, flops: float, device: torch.device, dtype: torch.dtype) -> Step:
    """Return a step of plain square matmuls with about `flops` operations in total."""
    a = torch.ones(side, side, dtype=dtype, device=device)
    out = torch.empty_like(a)

    def step() -> Outputs:
        for _ in range(max(1, round(flops / (2 * side**3)))):
            torch.mm(a, a, out=out)
        return {}

    return step


register(
    Case(
        name="polar",
        summary="Polar Express: the semi-orthogonal factor of a momentum matrix in five polynomial steps.",
        make=make_polar,
        implementations=(
            Implementation(
                "reference",
                "reference",
                _polar_row(lambda u: reference.polar(u.to(_wide(u.dtype))).to(u.dtype)),
                note="float32, X <- aX + (bA + cA^2) X",
            ),
            Implementation(
                "leanstep",
                "fast",
                _polar_row(lambda u: polar(u, compute_dtype=_wide(u.dtype))),
                note="float32; gram form for ratios of at least 4/3, symmetric panels",
            ),
            Implementation(
                "leanstep-restart",
                "fast",
                _polar_row(lambda u: polar(u, compute_dtype=_wide(u.dtype), method="gram", restart=2)),
                note="float32, gram form, one restart: more work, one or two more digits on bad spectra",
            ),
            Implementation(
                "leanstep-bf16",
                "fast",
                _polar_row(lambda u: polar(u, compute_dtype=torch.bfloat16)),
                unavailable=peers.no_native_half,
                note="what compute_dtype='auto' picks if bfloat16 products are native",
            ),
            Implementation(
                "addmm-fp32",
                "peer",
                _polar_row(peers.polar_addmm),
                note="implemented like torch.optim.Muon, float32",
            ),
            Implementation(
                "addmm-bf16",
                "peer",
                _polar_row(lambda u: peers.polar_addmm(u.bfloat16()).to(u.dtype)),
                unavailable=peers.no_native_half,
                note="implemented like torch.optim.Muon, bfloat16",
            ),
            Implementation(
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
)


# muon-step


def make_step(
    params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Workload:
    wide = (params["num_wide"], params["dim"], params["ratio"] * params["dim"])
    square = (params["num_square"], params["dim"], params["dim"])
    tensors = {}
    for name, shape in (("wide", wide), ("square", square)):
        tensors[name] = 0.02 * _randn(shape, dtype, device, generator)
        tensors[f"grad_{name}"] = _randn(shape, dtype, device, generator)
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
    return torch.bfloat16 if parameter.is_cuda else _wide(parameter.dtype)


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
        stack.size(0) * plan_polar(*stack.shape[1:], compute_dtype=torch.float32, panels=10**6).flops()
        for stack in (workload.tensors["wide"], workload.tensors["square"])
    )
    wide = workload.tensors["wide"]
    return _matmuls(min(rows, cols), flops, wide.device, _product_dtype(wide))


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


def train_losses(name: str, seed: int, steps: int) -> list[float]:
    """Train a small two-layer network with one of the implementations and return its losses."""
    generator = torch.Generator().manual_seed(seed)
    weights = [nn.Parameter(torch.randn(shape, generator=generator) / 8) for shape in ((96, 24), (24, 96))]
    teacher = torch.randn(24, 24, generator=generator) / 5
    options = {"lr": 0.02, "weight_decay": 1.2}
    if name == "reference":
        advance = _reference_step()(weights, options)
    elif name == "leanstep-bf16":
        advance = _leanstep(torch.bfloat16)(weights, options)
    else:
        advance = _leanstep(None)(weights, options)
    losses = []
    for _ in range(steps):
        x = torch.randn(32, 24, generator=generator)
        loss = (torch.relu(x @ weights[0].mT) @ weights[1].mT - torch.tanh(x @ teacher)).square().mean()
        for weight, grad in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.grad = grad
        advance()
        losses.append(loss.item())
    return losses


register(
    Case(
        name="muon-step",
        summary="One optimizer step over a transformer's matrices: momentum, polar factor, variance, decay.",
        make=make_step,
        implementations=(
            Implementation(
                "reference",
                "reference",
                _stepping(_reference_step()),
                note="NorMuon, one matrix at a time, float32",
            ),
            Implementation(
                "leanstep",
                "fast",
                _stepping(_leanstep(None)),
                note="NorMuon, float32 products on a CPU, bfloat16 on a GPU",
            ),
            Implementation(
                "leanstep-bf16",
                "fast",
                _stepping(_leanstep(torch.bfloat16)),
                devices=("cpu",),
                unavailable=peers.no_native_half,
                note="NorMuon, bfloat16 products: what compute_dtype='auto' picks if they are native",
            ),
            Implementation(
                "torch-muon-fp32",
                "peer",
                _stepping(peers.torch_muon(torch.float32), compare=False),
                unavailable=peers.no_torch_muon,
                note="torch.optim.Muon, iteration patched to float32; no variance step",
            ),
            Implementation(
                "torch-muon",
                "peer",
                _stepping(peers.torch_muon(None), share=0.5, compare=False),
                unavailable=peers.too_slow_in_half,
                time_scale=2.0,
                note="torch.optim.Muon as shipped (bfloat16), half of the matrices, time doubled",
            ),
            Implementation(
                "nanochat-style",
                "peer",
                _stepping(peers.stacked_compiled, compare=False),
                unavailable=peers.needs_compiler,
                note="equal shapes stacked, the whole step under torch.compile, bfloat16",
            ),
            Implementation(
                "dion",
                "peer",
                _stepping(peers.dion_normuon, compare=False),
                requires=("dion",),
                note="microsoft/dion NorMuon",
            ),
            Implementation(
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
        drift=train_losses,
        annotate=_step_notes,
        truth_size="odd",
    )
)


# transpose-copy, transpose-add: a tied head and its embedding


def make_copy(
    params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Workload:
    return Workload({"src": _randn((params["cols"], params["rows"]), dtype, device, generator)})


def make_add(
    params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Workload:
    tensors = make_copy(params, dtype, device, generator).tensors
    return Workload({**tensors, "dst": _randn((params["rows"], params["cols"]), dtype, device, generator)})


def _transposing(function: Callable[[Tensor, Tensor], Any]) -> Callable[[Workload], Step]:
    def build(workload: Workload) -> Step:
        src, dst = workload.tensors["src"], workload.tensors.get("dst")
        out = src.new_empty(src.shape[::-1]) if dst is None else dst.clone()

        def step() -> Outputs:
            function(src, out)
            return {"dst": out}

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
    "gpu": {"rows": 2048, "cols": 128256},
}

register(
    Case(
        name="transpose-copy",
        summary="dst = src^T: keep an embedding equal to the transposed head it is tied to.",
        make=make_copy,
        implementations=(
            Implementation(
                "reference", "reference", _transposing(lambda s, d: d.copy_(s.T)), note="dst.copy_(src.T)"
            ),
            Implementation(
                "leanstep",
                "fast",
                _transposing(transpose_copy),
                note="tiles transposed in registers (torch.compile on a CPU)",
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
                "reference", "reference", _transposing(lambda s, d: d.add_(s.T)), note="dst.add_(src.T)"
            ),
            Implementation(
                "leanstep",
                "fast",
                _transposing(transpose_add),
                note="tiles transposed in registers (torch.compile on a CPU)",
            ),
            Implementation(
                "leanstep-blocked",
                "fast",
                _transposing(lambda s, d: transpose_add(s, d, impl="blocked")),
                note="plain torch, for machines without a C++ compiler",
            ),
            Implementation("limit", "limit", _plain_add, note="one contiguous add of the same bytes"),
        ),
        sizes=_TRANSPOSE_SIZES,
        prove_sizes=("tiny", "odd", "empty"),
        dtypes=(torch.float32, torch.bfloat16),
    )
)
