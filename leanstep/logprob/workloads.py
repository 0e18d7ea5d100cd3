"""Inputs of this folder's cases: hidden states, a head, and the rows that score the responses."""

# T rows · R selected rows · D model · V vocabulary

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from leanstep.cpu import find_compiler
from leanstep.logprob.linear import linear_logprobs
from leanstep.logprob.objective import PolicyObjective

Params = Mapping[str, Any]
# Tensors by name, and constants by name.
Inputs = tuple[dict[str, Tensor], dict[str, Any]]

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


def normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=generator) * scale


def make_linear(
    params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Inputs:
    rows, lengths = response_rows(params)
    width = params["hidden"]
    tensors = {
        "hidden": normal(generator, params["tokens"], width).to(device, dtype),
        # Logits of a few units, as a trained head gives.
        "weight": normal(generator, params["vocab"], width, scale=2.0 / width**0.5).to(device, dtype),
        "tokens": torch.randint(0, params["vocab"], (params["tokens"],), generator=generator).to(device),
        "rows": rows.to(device),
        "upstream:logp": normal(generator, len(rows)).to(device),
        "upstream:entropy": normal(generator, len(rows), scale=0.1).to(device),
    }
    return tensors, {"sequence_lengths": lengths}


def make_logits(
    params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Inputs:
    rows, _ = response_rows(params)
    tensors = {
        "logits": normal(generator, params["tokens"], params["vocab"], scale=2.0).to(device, dtype),
        "tokens": torch.randint(0, params["vocab"], (params["tokens"],), generator=generator).to(device),
        "rows": rows.to(device),
        "upstream:logp": normal(generator, len(rows)).to(device),
        "upstream:entropy": normal(generator, len(rows), scale=0.1).to(device),
    }
    return tensors, {"all_rows": len(rows) == params["tokens"]}


def make_policy(
    params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Inputs:
    tensors, constants = make_linear(params, dtype, device, generator)
    rows, lengths = tensors["rows"], constants["sequence_lengths"]
    tensors = {k: v for k, v in tensors.items() if not k.startswith("upstream:")}
    with torch.no_grad():
        logp = linear_logprobs(tensors["hidden"], tensors["weight"], tensors["tokens"], rows=rows).logp
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
    return tensors, constants
