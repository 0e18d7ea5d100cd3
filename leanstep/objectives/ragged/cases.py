"""The case of this folder: Bradley-Terry over ragged groups of pairs."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from leanstep.case import Case, Implementation, Outputs, Params, Step, Workload, register, with_gradients
from leanstep.objectives.ragged.logistic import bradley_terry


def _make_pairs(
    params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Workload:
    groups, most = params["groups"], params["pairs"]
    chosen, rejected, items, offsets, starts = [], [], 0, [0], [0]
    for _ in range(groups):
        size = int(torch.randint(2, max(most // 4, 3), (), generator=generator))
        count = int(torch.randint(0 if most < 8 else most // 2, most + 1, (), generator=generator))
        i = torch.randint(size, (count,), generator=generator)
        j = (i + 1 + torch.randint(size - 1, (count,), generator=generator)) % size
        chosen.append(i + items)
        rejected.append(j + items)
        items += size
        offsets.append(items)
        starts.append(starts[-1] + count)
    tensors = {
        "scores": torch.randn(items, generator=generator).to(device, dtype),
        "chosen": torch.cat(chosen).to(device),
        "rejected": torch.cat(rejected).to(device),
        "margin": (0.2 * torch.rand(starts[-1], generator=generator)).to(device, dtype),
        "upstream:loss": torch.tensor(0.6, device=device),
    }
    return Workload(tensors, {"starts": starts, "offsets": offsets})


def _widen(scores: Tensor) -> Tensor:
    return scores if scores.dtype in (torch.float32, torch.float64) else scores.float()


def _per_group(tensors: dict[str, Tensor], constants: dict[str, Any]) -> Outputs:
    scores, margin = _widen(tensors["scores"]), _widen(tensors["margin"])
    total, starts = scores.sum() * 0, constants["starts"]
    for begin, end in itertools.pairwise(starts):
        if begin == end:
            continue
        gap = (
            scores[tensors["chosen"][begin:end]] - scores[tensors["rejected"][begin:end]] - margin[begin:end]
        )
        total = total - torch.nn.functional.logsigmoid(gap).sum()
    return {"loss": total / max(starts[-1], 1)}


def _trl_formula(tensors: dict[str, Tensor], constants: dict[str, Any]) -> Outputs:
    scores = _widen(tensors["scores"])
    rewards_chosen, rewards_rejected = scores[tensors["chosen"]], scores[tensors["rejected"]]
    return {
        "loss": -torch.nn.functional.logsigmoid(
            rewards_chosen - rewards_rejected - _widen(tensors["margin"])
        ).mean()
    }


def _ragged_pairs(tensors: dict[str, Tensor], constants: dict[str, Any]) -> Outputs:
    pairs = (tensors["chosen"], tensors["rejected"])
    return {"loss": bradley_terry(tensors["scores"], pairs=pairs, margin=_widen(tensors["margin"]))}


def _stream_pairs(workload: Workload) -> Step:
    def step() -> Outputs:
        for name in ("scores", "chosen", "rejected", "margin", "scores"):
            workload.tensors[name].clone()
        return {}

    return step


register(
    Case(
        name="pair-loss",
        summary="Bradley-Terry reward loss over pairs in ragged groups, with a margin per pair",
        make=_make_pairs,
        implementations=(
            Implementation(
                "per-group",
                "reference",
                with_gradients(_per_group, wrt=("scores",)),
                note="one Python iteration per group",
            ),
            Implementation("leanstep", "fast", with_gradients(_ragged_pairs, wrt=("scores",))),
            Implementation(
                "trl-reward",
                "peer",
                with_gradients(_trl_formula, wrt=("scores",)),
                note="the formula of TRL's reward loss",
            ),
            Implementation("limit", "limit", _stream_pairs, note="copies every input once"),
        ),
        sizes={
            "tiny": {"groups": 5, "pairs": 7},
            "odd": {"groups": 41, "pairs": 401},
            "cpu": {"groups": 39, "pairs": 256},
            "large": {"groups": 1024, "pairs": 1271},
            "gpu": {"groups": 1024, "pairs": 1271},
        },
        prove_sizes=("tiny", "odd"),
        dtypes=(torch.float32, torch.bfloat16),
    )
)
