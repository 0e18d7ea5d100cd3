"""The cases of this folder: log-probs of existing logits, of hidden states, and the whole policy loss."""

# T rows · R selected rows · D model · V vocabulary

from __future__ import annotations

import shutil
from typing import Any

import torch
from torch import Tensor

from leanstep.case import Case, Implementation, Params, Step, Workload, register, with_gradients
from leanstep.logprob import peers
from leanstep.logprob.linear import linear_logprobs
from leanstep.logprob.logits import token_logprobs
from leanstep.logprob.objective import PolicyObjective, policy_loss
from leanstep.logprob.policy import linear_policy_loss
from leanstep.logprob.reference import reference_logprobs

Tensors = dict[str, Tensor]
Constants = dict[str, Any]

OBJECTIVE = PolicyObjective(clip_low=0.2, clip_high=0.28, kl="k3", kl_coef=0.04, entropy_coef=0.01)


def response_rows(params: Params) -> tuple[Tensor, list[int]]:
    """Rows that score the responses of equal samples laid end to end, and the response lengths."""
    length = params["tokens"] // params["samples"]
    response = min(round(params["response_frac"] * length), length - 1)
    if params["response_frac"] >= 1:
        # Every row, the last of a sample included: the sweep's left end is the plain problem.
        response = length
    starts = [k * length + length - 1 - min(response, length - 1) for k in range(params["samples"])]
    parts = [torch.arange(start, start + response) for start in starts]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64), [response] * params["samples"]


def _normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=generator) * scale


def _make_linear(
    params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Workload:
    rows, lengths = response_rows(params)
    width = params["hidden"]
    tensors = {
        "hidden": _normal(generator, params["tokens"], width).to(device, dtype),
        # Logits of a few units, as a trained head gives.
        "weight": _normal(generator, params["vocab"], width, scale=2.0 / width**0.5).to(device, dtype),
        "tokens": torch.randint(0, params["vocab"], (params["tokens"],), generator=generator).to(device),
        "rows": rows.to(device),
        "upstream:logp": _normal(generator, len(rows)).to(device),
        "upstream:entropy": _normal(generator, len(rows), scale=0.1).to(device),
    }
    return Workload(tensors, {"sequence_lengths": lengths})


def _make_logits(
    params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Workload:
    rows, _ = response_rows(params)
    tensors = {
        "logits": _normal(generator, params["tokens"], params["vocab"], scale=2.0).to(device, dtype),
        "tokens": torch.randint(0, params["vocab"], (params["tokens"],), generator=generator).to(device),
        "rows": rows.to(device),
        "upstream:logp": _normal(generator, len(rows)).to(device),
        "upstream:entropy": _normal(generator, len(rows), scale=0.1).to(device),
    }
    return Workload(tensors, {"all_rows": len(rows) == params["tokens"]})


def _make_policy(
    params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Workload:
    workload = _make_linear(params, dtype, device, generator)
    rows, lengths = workload.tensors["rows"], workload.constants["sequence_lengths"]
    tensors = {k: v for k, v in workload.tensors.items() if not k.startswith("upstream:")}
    with torch.no_grad():
        logp = linear_logprobs(tensors["hidden"], tensors["weight"], tensors["tokens"], rows=rows).logp
    advantages = _normal(generator, len(lengths)).repeat_interleave(lengths[0] if lengths else 0)
    tensors |= {
        "old_logp": logp + _normal(generator, len(rows), scale=0.2).to(device),
        "ref_logp": logp + _normal(generator, len(rows), scale=0.2).to(device),
        "advantages": advantages.to(device),
        "mask": (torch.rand(len(rows), generator=generator) > 0.1).float().to(device),
        "upstream:loss": torch.tensor(1.7, device=device),
    }
    constants = {
        "sequence_lengths": lengths,
        "objective": OBJECTIVE,
        "compiled": shutil.which("g++") is not None,
    }
    return Workload(tensors, constants)


def _linear_reference(t: Tensors, constants: Constants) -> Tensors:
    logits = torch.nn.functional.linear(t["hidden"], t["weight"])
    return peers.picked(t, *reference_logprobs(logits, t["tokens"]))


def _linear_gather_after(t: Tensors, constants: Constants) -> Tensors:
    """Rows selected after the projection: the logits of all rows exist, and so does their gradient."""
    logits = torch.nn.functional.linear(t["hidden"], t["weight"]).index_select(0, t["rows"])
    logp, entropy = reference_logprobs(logits, t["tokens"].index_select(0, t["rows"]))
    return {"logp": logp, "entropy": entropy}


def _linear_fast(t: Tensors, constants: Constants) -> Tensors:
    out = linear_logprobs(t["hidden"], t["weight"], t["tokens"], rows=t["rows"], entropy="grad")
    assert out.entropy is not None
    return {"logp": out.logp, "entropy": out.entropy}


def _logits_reference(t: Tensors, constants: Constants) -> Tensors:
    return peers.picked(t, *reference_logprobs(t["logits"], t["tokens"]))


def _logits_fast(t: Tensors, constants: Constants) -> Tensors:
    rows = None if constants["all_rows"] else t["rows"]
    out = token_logprobs(t["logits"], t["tokens"], rows=rows, entropy="grad")
    assert out.entropy is not None
    return {"logp": out.logp, "entropy": out.entropy}


def _logits_compiled(workload: Workload) -> Step:
    compiled = torch.compile(reference_logprobs, dynamic=False)

    def function(t: Tensors, constants: Constants) -> Tensors:
        return peers.picked(t, *compiled(t["logits"], t["tokens"]))

    return with_gradients(function, ("logits",))(workload)


def _policy_arguments(t: Tensors, constants: Constants) -> dict[str, Any]:
    return {
        "advantages": t["advantages"],
        "objective": constants["objective"],
        "mask": t["mask"],
        "ref_logp": t["ref_logp"],
        "sequence_lengths": constants["sequence_lengths"],
    }


def _policy_reference(t: Tensors, constants: Constants) -> Tensors:
    out = _linear_reference(t, constants)
    arguments = _policy_arguments(t, constants)
    return {"loss": policy_loss(out["logp"], t["old_logp"], entropy=out["entropy"], **arguments).loss}


def _policy_composed(t: Tensors, constants: Constants) -> Tensors:
    out = _linear_fast(t, constants)
    arguments = _policy_arguments(t, constants)
    return {"loss": policy_loss(out["logp"], t["old_logp"], entropy=out["entropy"], **arguments).loss}


def _policy_fast(t: Tensors, constants: Constants) -> Tensors:
    arguments = _policy_arguments(t, constants)
    result = linear_policy_loss(
        t["hidden"], t["weight"], t["tokens"], rows=t["rows"], old_logp=t["old_logp"], **arguments
    )
    return {"loss": result.loss}


def _bare_gemms(projections: int) -> Any:
    """`projections` times hidden x weight, then d hidden and d weight, on the selected rows: nothing else."""

    def build(workload: Workload) -> Step:
        t = workload.tensors
        hidden, weight = t["hidden"].index_select(0, t["rows"]), t["weight"]
        logits = hidden.new_empty(len(hidden), len(weight))

        def step() -> Tensors:
            for _ in range(projections):
                torch.mm(hidden, weight.t(), out=logits)
            # Made anew, as every implementation must: the caller keeps them.
            torch.mm(logits, weight)
            torch.mm(logits.t(), hidden)
            return {}

        return step

    return build


def _logits_streams(workload: Workload) -> Step:
    """Read the logits, read them again and write something of their size: the bytes that must move."""
    logits = workload.tensors["logits"]

    def step() -> Tensors:
        logits.amax(-1)
        torch.mul(logits, 2.0)
        return {}

    return step


def _no_compiler(params: Params) -> str | None:
    return None if shutil.which("g++") or shutil.which("clang++") else "torch.compile needs a C++ compiler"


def _no_torch_head(params: Params) -> str | None:
    if hasattr(torch.nn.functional, "linear_cross_entropy") and hasattr(
        torch.nn, "LinearCrossEntropyOptions"
    ):
        return None
    return "this torch has no linear_cross_entropy"


def _no_rows(params: Params) -> str | None:
    return None if params["response_frac"] > 0 else "no selected rows"


def _no_liger(params: Params) -> str | None:
    return _no_rows(params) or _no_compiler(params)


def _against_limit(rows: dict[str, dict[str, Any]]) -> dict[str, str]:
    limit = rows.get("limit", {}).get("median_s")
    fast = [n for n, row in rows.items() if row["kind"] == "fast" and row["median_s"]]
    return {n: f"{rows[n]['median_s'] / limit:.2f} x the limit's time" for n in fast} if limit else {}


def _drift(implementation: str, seed: int, steps: int) -> list[float]:
    """A bigram policy trained on fixed targets with an entropy bonus, by gradient descent."""
    generator = torch.Generator().manual_seed(seed)
    vocab, width, tokens = 61, 16, 96
    embedding = _normal(generator, vocab, width, scale=0.5).requires_grad_()
    head = _normal(generator, vocab, width, scale=0.5).requires_grad_()
    ids = torch.randint(0, vocab, (tokens + 1,), generator=generator)
    rows = torch.arange(tokens // 4, tokens)
    function = _linear_reference if implementation == "reference" else _linear_fast
    losses = []
    for _ in range(steps):
        tensors = {"hidden": embedding[ids[:-1]], "weight": head, "tokens": ids[1:], "rows": rows}
        out = function(tensors, {})
        loss = -out["logp"].mean() - 0.01 * out["entropy"].mean()
        grads = torch.autograd.grad(loss, [embedding, head])
        with torch.no_grad():
            for parameter, grad in zip((embedding, head), grads, strict=True):
                parameter -= 2.0 * grad
        losses.append(float(loss.detach()))
    return losses


def _sizes(**cpu: Any) -> dict[str, dict[str, Any]]:
    shared = {"tokens": 2048, "hidden": 1024, "vocab": 32000, "response_frac": 0.25, "samples": 8, **cpu}
    return {
        "tiny": {**shared, "tokens": 48, "hidden": 16, "vocab": 97, "samples": 4},
        "odd": {**shared, "tokens": 401, "hidden": 41, "vocab": 1271, "samples": 3},
        "one": {**shared, "tokens": 4, "hidden": 7, "vocab": 13, "samples": 1},
        "empty": {**shared, "tokens": 12, "hidden": 8, "vocab": 31, "samples": 2, "response_frac": 0.0},
        "check": {**shared, "tokens": 256, "hidden": 256, "vocab": 4001},
        "cpu": shared,
        "large": {**shared, "tokens": 8192, "hidden": 2560, "vocab": 151936},
    }


HEAD = ("hidden", "weight")
PROVE = ("tiny", "odd", "one", "empty")
DTYPES = (torch.float32, torch.float64, torch.bfloat16)

register(
    Case(
        name="logprob-logits",
        summary="Log-prob and entropy of existing [T, V] logits, forward and backward.",
        make=_make_logits,
        implementations=(
            Implementation("reference", "reference", with_gradients(_logits_reference, ("logits",))),
            Implementation("leanstep", "fast", with_gradients(_logits_fast, ("logits",))),
            Implementation(
                "torch-compile",
                "peer",
                _logits_compiled,
                unavailable=_no_compiler,
                note="the reference, compiled",
            ),
            Implementation("limit", "limit", _logits_streams, note="two reads and one write of [T, V]"),
        ),
        sizes=_sizes(response_frac=1.0),
        prove_sizes=PROVE,
        dtypes=DTYPES,
        truth_size="check",
        annotate=_against_limit,
    )
)

register(
    Case(
        name="logprob-linear",
        summary="Log-prob and entropy of the response rows from hidden states and the LM head.",
        make=_make_linear,
        implementations=(
            Implementation(
                "reference",
                "reference",
                with_gradients(_linear_reference, HEAD),
                note="all rows, then the wanted",
            ),
            Implementation("leanstep", "fast", with_gradients(_linear_fast, HEAD)),
            Implementation(
                "gather-after",
                "peer",
                with_gradients(_linear_gather_after, HEAD),
                note="rows picked from the logits",
            ),
            Implementation(
                "trl-chunked",
                "peer",
                with_gradients(peers.trl_all_rows, HEAD),
                requires=("trl",),
                note="all rows, as TRL does on a CPU",
            ),
            Implementation(
                "trl-chunked-rows",
                "peer",
                with_gradients(peers.trl_same_rows, HEAD),
                requires=("trl",),
                unavailable=_no_rows,
                note="handed the same rows",
            ),
            Implementation(
                "verl-fused",
                "peer",
                with_gradients(peers.verl_all_rows, HEAD),
                requires=("verl",),
                note="FusedLinearForPPO, all rows",
            ),
            Implementation(
                "verl-fused-rows",
                "peer",
                with_gradients(peers.verl_same_rows, HEAD),
                requires=("verl",),
                unavailable=_no_rows,
                note="handed the same rows",
            ),
            Implementation(
                "liger-chunked",
                "peer",
                with_gradients(peers.liger_logprob, HEAD),
                requires=("liger_kernel",),
                unavailable=_no_rows,
                note="same rows; no entropy",
            ),
            Implementation(
                "torch-linear-ce",
                "peer",
                with_gradients(peers.torch_linear_cross_entropy, HEAD),
                unavailable=lambda p: _no_rows(p) or _no_torch_head(p),
                note="same rows; summed loss, no entropy",
            ),
            Implementation(
                "cut-cross-entropy",
                "peer",
                with_gradients(peers.cut_cross_entropy, HEAD),
                requires=("cut_cross_entropy",),
                unavailable=_no_liger,
                note="torch_compile; same rows; no entropy",
            ),
            Implementation("limit", "limit", _bare_gemms(2), note="4 bare GEMMs on the selected rows"),
        ),
        sizes=_sizes(),
        prove_sizes=PROVE,
        dtypes=DTYPES,
        truth_size="check",
        annotate=_against_limit,
        drift=_drift,
    )
)

register(
    Case(
        name="policy-loss",
        summary="PPO-clip with KL and entropy bonus on the response rows, from hidden states to gradients.",
        make=_make_policy,
        implementations=(
            Implementation("reference", "reference", with_gradients(_policy_reference, HEAD)),
            Implementation(
                "leanstep",
                "fast",
                with_gradients(_policy_fast, HEAD),
                note="gradients formed in the forward pass",
            ),
            Implementation(
                "leanstep-recompute",
                "fast",
                with_gradients(_policy_composed, HEAD),
                note="linear_logprobs, then policy_loss",
            ),
            Implementation(
                "liger-grpo",
                "peer",
                with_gradients(peers.liger_grpo, HEAD),
                requires=("liger_kernel",),
                unavailable=_no_liger,
                note="same rows, compiled; no entropy bonus",
            ),
            Implementation("limit", "limit", _bare_gemms(1), note="3 bare GEMMs on the selected rows"),
        ),
        sizes=_sizes(),
        prove_sizes=PROVE,
        dtypes=(torch.float32, torch.float64),
        truth_size="check",
        annotate=_against_limit,
    )
)
