"""The cases of this folder and their inputs: log-probs from logits or hidden states, and the policy loss."""

# T rows · R selected rows · D model · V vocabulary

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leanstep.case import (
    Case,
    Implementation,
    Kind,
    Params,
    Step,
    Workload,
    limit_of,
    register,
    with_gradients,
)
from leanstep.cpu import find_compiler
from leanstep.logprob import peers
from leanstep.logprob.inputs import Tuning
from leanstep.logprob.linear import linear_logprobs
from leanstep.logprob.logits import token_logprobs
from leanstep.logprob.objective import PolicyBatch, PolicyObjective, policy_loss
from leanstep.logprob.policy import linear_policy_loss
from leanstep.logprob.reference import reference_logprobs

Tensors = dict[str, Tensor]
Constants = dict[str, Any]


# Tensors that get gradients. "hidden": a frozen head; "none": old and reference log-probs.
GRADIENTS = {"both": ("hidden", "weight"), "hidden": ("hidden",), "none": ()}
OBJECTIVE = PolicyObjective(clip_low=0.2, clip_high=0.28, kl="k3", kl_coef=0.04, entropy_coef=0.01)


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


def _linear_reference(t: Tensors, constants: Constants) -> Tensors:
    logits = torch.nn.functional.linear(t["hidden"], t["weight"])
    return peers.picked(t, *reference_logprobs(logits, t["targets"]))


def _linear_gather_after(t: Tensors, constants: Constants) -> Tensors:
    """Select rows after the projection: the logits of all rows and their gradient are allocated."""
    logits = torch.nn.functional.linear(t["hidden"], t["weight"]).index_select(0, t["rows"])
    logp, entropy = reference_logprobs(logits, t["targets"].index_select(0, t["rows"]))
    return {"logp": logp, "entropy": entropy}


def _linear_fast(t: Tensors, constants: Constants, save_logits: str = "grad") -> Tensors:
    tuning = Tuning(tile=_chunk_tile(constants), save_logits=save_logits)
    out = linear_logprobs(
        t["hidden"], t["weight"], t["targets"], rows=t["rows"], entropy="grad", tuning=tuning
    )
    assert out.entropy is not None
    return {"logp": out.logp, "entropy": out.entropy}


def _linear_recompute(t: Tensors, constants: Constants) -> Tensors:
    return _linear_fast(t, constants, save_logits="none")


def _chunk_tile(constants: Constants) -> tuple[int, None] | None:
    """Return tiles of `chunk` rows and all columns; 0: leanstep chooses."""
    chunk = constants.get("chunk", 0)
    return (chunk, None) if chunk else None


def _logits_reference(t: Tensors, constants: Constants) -> Tensors:
    return peers.picked(t, *reference_logprobs(t["logits"], t["targets"]))


def _logits_fast(t: Tensors, constants: Constants) -> Tensors:
    rows = None if constants["all_rows"] else t["rows"]
    tuning = Tuning(tile=_chunk_tile(constants))
    out = token_logprobs(t["logits"], t["targets"], rows=rows, entropy="grad", tuning=tuning)
    assert out.entropy is not None
    return {"logp": out.logp, "entropy": out.entropy}


def _logits_compiled(workload: Workload) -> Step:
    compiled = torch.compile(reference_logprobs, dynamic=False)

    def function(t: Tensors, constants: Constants) -> Tensors:
        return peers.picked(t, *compiled(t["logits"], t["targets"]))

    return with_gradients(function, ("logits",))(workload)


def _batch(t: Tensors, constants: Constants) -> PolicyBatch:
    names = ("old_logp", "advantages", "mask", "ref_logp")
    return PolicyBatch(**{name: t[name] for name in names}, sequence_lengths=constants["sequence_lengths"])


def _policy_reference(t: Tensors, constants: Constants) -> Tensors:
    return _policy_of(_linear_reference(t, constants), t, constants)


def _policy_composed(t: Tensors, constants: Constants) -> Tensors:
    return _policy_of(_linear_fast(t, constants), t, constants)


def _policy_of(out: Tensors, t: Tensors, constants: Constants) -> Tensors:
    batch = vars(_batch(t, constants))
    return {"loss": policy_loss(out["logp"], entropy=out["entropy"], objective=OBJECTIVE, **batch).loss}


def _policy_fast(t: Tensors, constants: Constants) -> Tensors:
    batch = _batch(t, constants)
    result = linear_policy_loss(
        t["hidden"], t["weight"], t["targets"], batch, rows=t["rows"], objective=OBJECTIVE
    )
    return {"loss": result.loss}


def _bare_gemms(projections: int) -> Any:
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


def _logits_streams(workload: Workload) -> Step:
    """Read the logits twice and write a tensor of their size: the minimum memory traffic."""
    logits = workload.tensors["logits"]

    def step() -> Tensors:
        logits.amax(-1)
        torch.mul(logits, 2.0)
        return {}

    return step


def _no_compiler(params: Params) -> str | None:
    return None if find_compiler() else "torch.compile needs a C++ compiler"


def _no_torch_head(params: Params) -> str | None:
    if hasattr(torch.nn.functional, "linear_cross_entropy") and hasattr(
        torch.nn, "LinearCrossEntropyOptions"
    ):
        return None
    return "this torch has no linear_cross_entropy"


def _no_rows(params: Params) -> str | None:
    return None if params["response_frac"] > 0 else "no selected rows"


def _no_rows_or_compiler(params: Params) -> str | None:
    return _no_rows(params) or _no_compiler(params)


def _against_limit(rows: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Compare each fast path with the limit for the same number of GEMMs."""
    notes = {}
    for name, row in rows.items():
        limit = limit_of(rows, name)
        if row["kind"] == "fast" and row["median_s"] and limit is not None:
            notes[name] = f"{row['median_s'] / limit['median_s']:.2f} x its limit's time"
    return notes


def _drift(implementation: str, seed: int, steps: int) -> list[float]:
    """Train a bigram policy on fixed targets with an entropy bonus by gradient descent; return the losses."""
    generator = torch.Generator().manual_seed(seed)
    vocab, width, tokens = 61, 16, 96
    embedding = normal(generator, vocab, width, scale=0.5).requires_grad_()
    head = normal(generator, vocab, width, scale=0.5).requires_grad_()
    ids = torch.randint(0, vocab, (tokens + 1,), generator=generator)
    rows = torch.arange(tokens // 4, tokens)
    function = _linear_reference if implementation == "reference" else _linear_fast
    losses = []
    for _ in range(steps):
        tensors = {"hidden": embedding[ids[:-1]], "weight": head, "targets": ids[1:], "rows": rows}
        out = function(tensors, {})
        loss = -out["logp"].mean() - 0.01 * out["entropy"].mean()
        grads = torch.autograd.grad(loss, [embedding, head])
        with torch.no_grad():
            for parameter, grad in zip((embedding, head), grads, strict=True):
                parameter -= 2.0 * grad
        losses.append(float(loss.detach()))
    return losses


def _sizes(**cpu: Any) -> dict[str, dict[str, Any]]:
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


def _head_row(name: str, kind: Kind, function: Any, note: str = "", **options: Any) -> Implementation:
    """Return an implementation with gradients of hidden and head, unless the workload needs fewer."""

    def build(workload: Workload) -> Step:
        wrt = GRADIENTS[workload.constants.get("gradients", "both")]
        return with_gradients(function, wrt)(workload) if wrt else _without_gradients(function, workload)

    return Implementation(name, kind, build, note=note, **options)


def _without_gradients(function: Any, workload: Workload) -> Step:
    @torch.no_grad()
    def step() -> Tensors:
        return function(workload.tensors, workload.constants)

    return step


def _peer_rows(name: str, module: str, all_rows: Any, same_rows: Any, note: str) -> list[Implementation]:
    """Return two implementations of a peer: unchanged on all rows, and on the selected rows only."""
    return [
        _head_row(name, "peer", all_rows, note, requires=(module,)),
        _head_row(
            f"{name}-rows",
            "peer",
            same_rows,
            "on the same rows",
            requires=(module,),
            unavailable=_no_rows,
        ),
    ]


# Settings shared by all cases of this folder.
SHARED: Any = {
    # "check" has enough logits to use the C++ passes.
    "prove_sizes": ("tiny", "odd", "one", "empty", "check"),
    "dtypes": (torch.float32, torch.float64, torch.bfloat16),
    "truth_size": "check",
    "annotate": _against_limit,
}

register(
    Case(
        name="logprob-logits",
        summary="Log-prob and entropy of existing [T, V] logits, forward and backward.",
        make=make_logits,
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
            Implementation(
                "slime-gather",
                "peer",
                with_gradients(peers.slime_logits, ("logits",)),
                unavailable=_no_rows,
                note="slime pull 2076: selected rows, fused loss in chunks",
            ),
            Implementation("limit", "limit", _logits_streams, note="two reads and one write of [T, V]"),
        ),
        sizes=_sizes(response_frac=1.0, chunk=0),
        **SHARED,
    )
)

register(
    Case(
        name="logprob-linear",
        summary="Log-prob and entropy of the response rows from hidden states and the LM head.",
        make=make_linear,
        implementations=(
            _head_row("reference", "reference", _linear_reference, "all rows, then the selected ones"),
            _head_row("leanstep", "fast", _linear_fast, "3 GEMMs: logits saved in the gradient's memory"),
            _head_row("leanstep-recompute", "fast", _linear_recompute, '4 GEMMs: save_logits="none"'),
            _head_row("gather-after", "peer", _linear_gather_after, "rows selected from the logits"),
            _head_row(
                "slime-gather",
                "peer",
                peers.slime_linear,
                "slime pull 2076: rows selected from the logits, fused loss in chunks",
                unavailable=_no_rows,
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
            _head_row(
                "verl-triton",
                "peer",
                peers.verl_triton,
                "verl's fused Triton kernel, same rows",
                requires=("verl", "triton"),
                devices=("cuda",),
                unavailable=lambda p: "needs hidden divisible by 128" if p["hidden"] % 128 else _no_rows(p),
            ),
            _head_row(
                "liger-chunked",
                "peer",
                peers.liger_logprob,
                "same rows; no entropy",
                requires=("liger_kernel",),
                unavailable=_no_rows,
            ),
            _head_row(
                "liger-triton",
                "peer",
                peers.liger_triton,
                "fused linear cross-entropy, same rows; summed loss, no entropy",
                requires=("liger_kernel", "triton"),
                devices=("cuda",),
                unavailable=_no_rows,
            ),
            _head_row(
                "torch-linear-ce",
                "peer",
                peers.torch_linear_cross_entropy,
                "same rows; summed loss, no entropy",
                unavailable=lambda p: _no_rows(p) or _no_torch_head(p),
            ),
            _head_row(
                "cut-cross-entropy",
                "peer",
                peers.cut_cross_entropy,
                "torch_compile (its own kernel on a GPU); same rows; no entropy",
                requires=("cut_cross_entropy",),
                unavailable=_no_rows_or_compiler,
            ),
            Implementation("limit", "limit", _bare_gemms(1), note="3 bare GEMMs on the selected rows"),
            Implementation(
                "limit-recompute", "limit", _bare_gemms(2), note="4 bare GEMMs on the selected rows"
            ),
        ),
        sizes=_sizes(chunk=0, gradients="both"),
        drift=_drift,
        **SHARED,
    )
)

register(
    Case(
        name="policy-loss",
        summary="PPO-clip with KL and entropy bonus on the response rows, from hidden states to gradients.",
        make=make_policy,
        implementations=(
            _head_row("reference", "reference", _policy_reference),
            _head_row("leanstep", "fast", _policy_fast, "gradients computed in the forward pass"),
            _head_row("leanstep-composed", "fast", _policy_composed, "linear_logprobs, then policy_loss"),
            _head_row(
                "liger-grpo",
                "peer",
                peers.liger_grpo,
                "same rows, compiled; no entropy bonus",
                requires=("liger_kernel",),
                unavailable=_no_rows_or_compiler,
            ),
            Implementation("limit", "limit", _bare_gemms(1), note="3 bare GEMMs on the selected rows"),
        ),
        sizes=_sizes(),
        **SHARED,
    )
)
