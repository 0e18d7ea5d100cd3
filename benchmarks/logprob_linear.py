"""Log-prob and entropy of the response rows from hidden states and the LM head.

python -m benchmarks.logprob_linear --help
"""

# T rows · R selected rows · D model · V vocabulary

from __future__ import annotations

from typing import Any

import torch

from benchmarks import logprob_peers as peers
from benchmarks.harness import (
    Benchmark,
    Params,
    Row,
    main,
)
from benchmarks.logprob_workloads import (
    SHARED,
    Constants,
    Tensors,
    bare_gemms,
    head_row,
    linear_fast,
    linear_reference,
    make_linear,
    no_rows,
    no_rows_or_compiler,
    sizes,
)
from leanstep.heads.reference import reference_logprobs


def _linear_gather_after(t: Tensors, constants: Constants) -> Tensors:
    """Select rows after the projection: the logits of all rows and their gradient are allocated."""
    logits = torch.nn.functional.linear(t["hidden"], t["weight"]).index_select(0, t["rows"])
    logp, entropy = reference_logprobs(logits, t["targets"].index_select(0, t["rows"]))
    return {"logp": logp, "entropy": entropy}


def _no_torch_head(params: Params) -> str | None:
    if hasattr(torch.nn.functional, "linear_cross_entropy") and hasattr(
        torch.nn, "LinearCrossEntropyOptions"
    ):
        return None
    return "this torch has no linear_cross_entropy"


def _peer_rows(name: str, module: str, all_rows: Any, same_rows: Any, note: str) -> list[Row]:
    """Return two implementations of a peer: unchanged on all rows, and on the selected rows only."""
    return [
        head_row(name, "peer", all_rows, note, requires=(module,)),
        head_row(
            f"{name}-rows",
            "peer",
            same_rows,
            "on the same rows",
            requires=(module,),
            unavailable=no_rows,
        ),
    ]


BENCHMARK = Benchmark(
    name="logprob-linear",
    summary="Log-prob and entropy of the response rows from hidden states and the LM head.",
    make=make_linear,
    rows=(
        head_row("plain", "reference", linear_reference, "all rows, then the selected ones"),
        head_row("leanstep", "fast", linear_fast, "3 GEMMs: logits saved in the gradient's memory"),
        head_row("gather-after", "peer", _linear_gather_after, "rows selected from the logits"),
        head_row(
            "slime-gather",
            "peer",
            peers.slime_linear,
            "slime pull 2076: rows selected from the logits, fused loss in chunks",
            unavailable=no_rows,
        ),
        *_peer_rows(
            "trl-chunked",
            "trl",
            peers.trl_all_rows,
            peers.trl_same_rows,
            "all rows, as TRL does on a CPU",
        ),
        *_peer_rows(
            "verl-fused", "verl", peers.verl_all_rows, peers.verl_same_rows, "FusedLinearForPPO, all rows"
        ),
        head_row(
            "verl-triton",
            "peer",
            peers.verl_triton,
            "verl's fused Triton kernel, same rows",
            requires=("verl", "triton"),
            devices=("cuda",),
            unavailable=lambda p: "needs hidden divisible by 128" if p["hidden"] % 128 else no_rows(p),
        ),
        head_row(
            "liger-chunked",
            "peer",
            peers.liger_logprob,
            "same rows; no entropy",
            requires=("liger_kernel",),
            unavailable=no_rows,
        ),
        head_row(
            "liger-triton",
            "peer",
            peers.liger_triton,
            "fused linear cross-entropy, same rows; summed loss, no entropy",
            requires=("liger_kernel", "triton"),
            devices=("cuda",),
            unavailable=no_rows,
        ),
        head_row(
            "torch-linear-ce",
            "peer",
            peers.torch_linear_cross_entropy,
            "same rows; summed loss, no entropy",
            unavailable=lambda p: no_rows(p) or _no_torch_head(p),
        ),
        head_row(
            "cut-cross-entropy",
            "peer",
            peers.cut_cross_entropy,
            "torch_compile (its own kernel on a GPU); same rows; no entropy",
            requires=("cut_cross_entropy",),
            unavailable=no_rows_or_compiler,
        ),
        Row("limit", "limit", bare_gemms(1), note="3 bare GEMMs on the selected rows"),
        Row("limit-recompute", "limit", bare_gemms(2), note="4 bare GEMMs on the selected rows"),
    ),
    sizes=sizes(chunk=0, gradients="both"),
    **SHARED,
)

if __name__ == "__main__":
    main(BENCHMARK)
