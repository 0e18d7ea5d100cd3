"""A small case for testing the measurements: a log-sum-exp, a correct fast path and several broken ones."""

from __future__ import annotations

import torch

from leanstep.case import Case, Implementation, Workload, with_gradients


def make(params, dtype, device, generator) -> Workload:
    x = torch.randn(params["rows"], params["width"], generator=generator).to(device, dtype)
    upstream = torch.randn(params["rows"], generator=generator).to(device, dtype)
    return Workload({"x": x, "upstream:lse": upstream})


def reference(tensors, constants):
    x = tensors["x"]
    shift = x.amax(-1, keepdim=True).detach()
    return {"lse": (x - shift).exp().sum(-1).log() + shift.squeeze(-1)}


def fast(tensors, constants):
    return {"lse": torch.logsumexp(tensors["x"], -1)}


def wrong_gradient(tensors, constants):
    lse = torch.logsumexp(tensors["x"], -1)
    return {"lse": lse + 1e-3 * (tensors["x"].sum(-1) - tensors["x"].sum(-1).detach())}


def mutating(tensors, constants):
    out = fast(tensors, constants)
    with torch.no_grad():
        tensors["upstream:lse"].mul_(1.001)
    return out


_calls = iter(range(10**9))


def unrepeatable(tensors, constants):
    return {"lse": fast(tensors, constants)["lse"] * (1 + 1e-6 * (next(_calls) % 2))}


def syncing(tensors, constants):
    out = fast(tensors, constants)
    assert out["lse"].sum().item() == out["lse"].sum().item()
    return out


def implementation(name: str, function, kind: str = "fast", **options) -> Implementation:
    return Implementation(name, kind, with_gradients(function, ("x",)), **options)


def toy_case(name: str = "toy", *fast_paths: Implementation, **options) -> Case:
    limit = Implementation(
        "limit", "limit", lambda workload: lambda: {"copy": workload.tensors["x"].clone()} and {}
    )
    return Case(
        name=name,
        summary="log-sum-exp of rows",
        make=make,
        implementations=(
            Implementation("reference", "reference", with_gradients(reference, ("x",))),
            *(fast_paths or (implementation("fast", fast),)),
            implementation("absent-peer", fast, "peer", requires=("no_such_module_anywhere",)),
            limit,
        ),
        sizes={
            "tiny": {"rows": 7, "width": 33},
            "odd": {"rows": 41, "width": 401},
            "empty": {"rows": 0, "width": 5},
        },
        prove_sizes=("tiny", "odd", "empty"),
        default_size="tiny",
        **options,
    )
