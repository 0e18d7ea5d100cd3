"""Log-prob and entropy of existing [T, V] logits, forward and backward.

python -m benchmarks.logprob_logits --help
"""

# T rows · R selected rows · D model · V vocabulary

from __future__ import annotations

import torch

from benchmarks import logprob_peers as peers
from benchmarks.harness import (
    Benchmark,
    Params,
    Row,
    Step,
    Workload,
    main,
    with_gradients,
)
from benchmarks.logprob_workloads import (
    SHARED,
    Constants,
    Tensors,
    no_compiler,
    no_rows,
    normal,
    response_rows,
    sizes,
)
from leanstep.heads import token_logprobs
from leanstep.heads.reference import reference_logprobs


def make_logits(
    params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Workload:
    rows, _ = response_rows(params)
    tensors = {
        "logits": normal(generator, params["tokens"], params["vocab"], scale=2.0).to(device, dtype),
        "targets": torch.randint(0, params["vocab"], (params["tokens"],), generator=generator).to(device),
        "rows": rows.to(device),
        "upstream:logp": normal(generator, len(rows)).to(device),
        "upstream:entropy": normal(generator, len(rows), scale=0.1).to(device),
    }
    return Workload(tensors, {"all_rows": len(rows) == params["tokens"], "chunk": params["chunk"]})


def _logits_reference(t: Tensors, constants: Constants) -> Tensors:
    return peers.picked(t, *reference_logprobs(t["logits"], t["targets"]))


def _logits_fast(t: Tensors, constants: Constants) -> Tensors:
    rows = None if constants["all_rows"] else t["rows"]
    chunk = constants["chunk"] or None
    out = token_logprobs(t["logits"], t["targets"], rows=rows, entropy="grad", chunk_rows=chunk)
    assert out.entropy is not None
    return {"logp": out.logp, "entropy": out.entropy}


def _logits_compiled(workload: Workload) -> Step:
    compiled = torch.compile(reference_logprobs, dynamic=False)

    def function(t: Tensors, constants: Constants) -> Tensors:
        return peers.picked(t, *compiled(t["logits"], t["targets"]))

    return with_gradients(function, ("logits",))(workload)


def _logits_streams(workload: Workload) -> Step:
    """Read the logits twice and write a tensor of their size: the minimum memory traffic."""
    logits = workload.tensors["logits"]

    def step() -> Tensors:
        logits.amax(-1)
        torch.mul(logits, 2.0)
        return {}

    return step


BENCHMARK = Benchmark(
    name="logprob-logits",
    summary="Log-prob and entropy of existing [T, V] logits, forward and backward.",
    make=make_logits,
    rows=(
        Row("plain", "reference", with_gradients(_logits_reference, ("logits",))),
        Row("leanstep", "fast", with_gradients(_logits_fast, ("logits",))),
        Row(
            "torch-compile",
            "peer",
            _logits_compiled,
            unavailable=no_compiler,
            note="the reference, compiled",
        ),
        Row(
            "slime-gather",
            "peer",
            with_gradients(peers.slime_logits, ("logits",)),
            unavailable=no_rows,
            note="slime pull 2076: selected rows, fused loss in chunks",
        ),
        Row("limit", "limit", _logits_streams, note="two reads and one write of [T, V]"),
    ),
    sizes=sizes(response_frac=1.0, chunk=0),
    **SHARED,
)

if __name__ == "__main__":
    main(BENCHMARK)
