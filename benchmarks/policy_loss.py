"""PPO-clip with KL and entropy bonus on the response rows, from hidden states to gradients.

python -m benchmarks.policy_loss --help
"""

# T rows · R selected rows · D model · V vocabulary

from __future__ import annotations

import torch

from benchmarks import logprob_peers as peers
from benchmarks.harness import (
    Benchmark,
    Params,
    Row,
    Workload,
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
    no_rows_or_compiler,
    normal,
    sizes,
)
from leanstep.cpu import find_compiler
from leanstep.heads import linear_logprobs, linear_policy_loss, policy_loss

OBJECTIVE = {"clip_low": 0.2, "clip_high": 0.28, "kl": "k3", "kl_coef": 0.04, "entropy_coef": 0.01}


def make_policy(
    params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Workload:
    workload = make_linear(params, dtype, device, generator)
    tensors, lengths = workload.tensors, workload.constants["sequence_lengths"]
    rows = tensors["rows"]
    tensors = {k: v for k, v in tensors.items() if not k.startswith("upstream:")}
    with torch.no_grad():
        logp = linear_logprobs(tensors["hidden"], tensors["weight"], tensors["targets"], rows=rows).logp
    advantages = normal(generator, len(lengths)).repeat_interleave(lengths[0] if lengths else 0)
    tensors |= {
        "old_logp": logp + normal(generator, len(rows), scale=0.2).to(device),
        "ref_logp": logp + normal(generator, len(rows), scale=0.2).to(device),
        "advantages": advantages.to(device),
        "mask": (torch.rand(len(rows), generator=generator) > 0.1).float().to(device),
        "upstream:loss": torch.tensor(1.7, device=device),
    }
    constants = {
        "sequence_lengths": lengths,
        "objective": OBJECTIVE,
        "compiled": find_compiler() is not None,
    }
    return Workload(tensors, constants)


def _batch(t: Tensors, constants: Constants) -> dict:
    names = ("old_logp", "advantages", "mask", "ref_logp")
    return {name: t[name] for name in names} | OBJECTIVE


def _policy_reference(t: Tensors, constants: Constants) -> Tensors:
    return _policy_of(linear_reference(t, constants), t, constants)


def _policy_composed(t: Tensors, constants: Constants) -> Tensors:
    return _policy_of(linear_fast(t, constants), t, constants)


def _policy_of(out: Tensors, t: Tensors, constants: Constants) -> Tensors:
    return {"loss": policy_loss(out["logp"], entropy=out["entropy"], **_batch(t, constants)).loss}


def _policy_fast(t: Tensors, constants: Constants) -> Tensors:
    tensors = (t["hidden"], t["weight"], t["targets"])
    return {"loss": linear_policy_loss(*tensors, rows=t["rows"], **_batch(t, constants)).loss}


BENCHMARK = Benchmark(
    name="policy-loss",
    summary="PPO-clip with KL and entropy bonus on the response rows, from hidden states to gradients.",
    make=make_policy,
    rows=(
        head_row("plain", "reference", _policy_reference),
        head_row("leanstep", "fast", _policy_fast, "gradients computed in the forward pass"),
        head_row("leanstep-composed", "fast", _policy_composed, "linear_logprobs, then policy_loss"),
        head_row(
            "liger-grpo",
            "peer",
            peers.liger_grpo,
            "same rows, compiled; no entropy bonus",
            requires=("liger_kernel",),
            unavailable=no_rows_or_compiler,
        ),
        Row("limit", "limit", bare_gemms(1), note="3 bare GEMMs on the selected rows"),
    ),
    sizes=sizes(),
    **SHARED,
)

if __name__ == "__main__":
    main(BENCHMARK)
