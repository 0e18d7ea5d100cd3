"""Workloads and rows that several benchmarks of this family share."""

# T rows · R selected rows · D model · V vocabulary

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks import logprob_peers as peers
from benchmarks.harness import (
    Kind,
    Params,
    Row,
    Step,
    Workload,
    limit_of,
    with_gradients,
)
from leanstep.cpu import find_compiler
from leanstep.heads import linear_logprobs
from leanstep.heads.reference import reference_logprobs

Tensors = dict[str, Tensor]


Constants = dict[str, Any]


# Tensors that get gradients. "hidden": a frozen head; "none": old and reference log-probs.
GRADIENTS = {"both": ("hidden", "weight"), "hidden": ("hidden",), "none": ()}


def response_rows(params: Params) -> tuple[Tensor, list[int]]:
    """Return the rows that score the responses of concatenated samples of equal length, and those lengths."""
    length = params["tokens"] // params["samples"]
    response = min(round(params["response_frac"] * length), length - 1)
    if params["response_frac"] >= 1:
        # Every row, including the last of each sample: the sweep starts with the plain problem.
        response = length
    starts = [k * length + length - 1 - min(response, length - 1) for k in range(params["samples"])]
    parts = [torch.arange(start, start + response) for start in starts]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64), [response] * params["samples"]


def normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=generator) * scale


def make_linear(
    params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Workload:
    rows, lengths = response_rows(params)
    width = params["hidden"]
    tensors = {
        "hidden": normal(generator, params["tokens"], width).to(device, dtype),
        # Logits of a few units, as in a trained head.
        "weight": normal(generator, params["vocab"], width, scale=2.0 / width**0.5).to(device, dtype),
        "targets": torch.randint(0, params["vocab"], (params["tokens"],), generator=generator).to(device),
        "rows": rows.to(device),
        "upstream:logp": normal(generator, len(rows)).to(device),
        "upstream:entropy": normal(generator, len(rows), scale=0.1).to(device),
    }
    gradients = params.get("gradients", "both")
    if gradients not in GRADIENTS:
        raise ValueError(f"gradients: expected {', '.join(GRADIENTS)}, got {gradients!r}")
    constants = {"sequence_lengths": lengths, "chunk": params.get("chunk", 0), "gradients": gradients}
    return Workload(tensors, constants)


def linear_reference(t: Tensors, constants: Constants) -> Tensors:
    logits = torch.nn.functional.linear(t["hidden"], t["weight"])
    return peers.picked(t, *reference_logprobs(logits, t["targets"]))


def linear_fast(t: Tensors, constants: Constants) -> Tensors:
    options = {"rows": t["rows"], "entropy": "grad", "chunk_rows": constants.get("chunk") or None}
    out = linear_logprobs(t["hidden"], t["weight"], t["targets"], **options)
    assert out.entropy is not None
    return {"logp": out.logp, "entropy": out.entropy}


def bare_gemms(projections: int) -> Any:
    """Build only the GEMMs on the selected rows: `projections` x hidden @ weight.T, then both gradients."""

    def build(workload: Workload) -> Step:
        t = workload.tensors
        hidden, weight = t["hidden"].index_select(0, t["rows"]), t["weight"]
        logits = hidden.new_empty(len(hidden), len(weight))

        def step() -> Tensors:
            for _ in range(projections):
                torch.mm(hidden, weight.t(), out=logits)
            # Allocated in every step, as in every implementation: the caller keeps the gradients.
            torch.mm(logits, weight)
            torch.mm(logits.t(), hidden)
            return {}

        return step

    return build


def no_compiler(params: Params) -> str | None:
    return None if find_compiler() else "torch.compile needs a C++ compiler"


def no_rows(params: Params) -> str | None:
    return None if params["response_frac"] > 0 else "no selected rows"


def no_rows_or_compiler(params: Params) -> str | None:
    return no_rows(params) or no_compiler(params)


def against_limit(rows: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Compare each fast path with the limit for the same number of GEMMs."""
    notes = {}
    for name, row in rows.items():
        limit = limit_of(rows, name)
        if row["kind"] == "fast" and row["median_s"] and limit is not None:
            notes[name] = f"{row['median_s'] / limit['median_s']:.2f} x its limit's time"
    return notes


def sizes(**cpu: Any) -> dict[str, dict[str, Any]]:
    """Return the named sizes. chunk: rows per chunk for implementations with row chunks; 0: their default."""
    shared = {"tokens": 2048, "hidden": 1024, "vocab": 32000, "response_frac": 0.25, "samples": 8, **cpu}
    return {
        "tiny": {**shared, "tokens": 48, "hidden": 16, "vocab": 97, "samples": 4},
        "odd": {**shared, "tokens": 401, "hidden": 41, "vocab": 1271, "samples": 3},
        "one": {**shared, "tokens": 4, "hidden": 7, "vocab": 13, "samples": 1},
        "empty": {**shared, "tokens": 12, "hidden": 8, "vocab": 31, "samples": 2, "response_frac": 0.0},
        "check": {**shared, "tokens": 512, "hidden": 256, "vocab": 4001},
        "cpu": shared,
        "large": {**shared, "tokens": 8192, "hidden": 2560, "vocab": 151936},
        # A quarter of the seed's rows, and its head.
        "gpu": {**shared, "tokens": 16384, "hidden": 2560, "vocab": 76032},
    }


def head_row(name: str, kind: Kind, function: Any, note: str = "", **options: Any) -> Row:
    """Return an implementation with gradients of hidden and head, unless the workload needs fewer."""

    def build(workload: Workload) -> Step:
        wrt = GRADIENTS[workload.constants.get("gradients", "both")]
        return with_gradients(function, wrt)(workload) if wrt else without_gradients(function, workload)

    return Row(name, kind, build, note=note, **options)


def without_gradients(function: Any, workload: Workload) -> Step:
    @torch.no_grad()
    def step() -> Tensors:
        return function(workload.tensors, workload.constants)

    return step


# Settings shared by all cases of this folder.
SHARED: Any = {
    # "check" has enough logits to use the C++ passes.
    "prove_sizes": ("tiny", "odd", "one", "empty", "check"),
    "dtypes": (torch.float32, torch.float64, torch.bfloat16),
    "truth_size": "check",
    "annotate": against_limit,
}
