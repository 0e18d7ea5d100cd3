"""The controller objective at shapes not at hand: look-up table and pair tensors."""

from __future__ import annotations

from typing import Any

import torch

from leanstep.case import Outputs, Step, Workload
from leanstep.measure.peaks import SimulatedPeak, simulate_peak
from leanstep.preference import LensBatch, LensConfig, SamplingConfig, lens_loss

LENS_METHODS = {
    "fused": "leanstep.preference.lens_loss: closed-form gradient",
    "eager": "the same under autograd, dense rows (what torch.compile sees)",
}
# [P, W] fp32 tensors alive at the peak, counted on fake tensors.
_PAIR_TENSORS = {"fused": 11, "eager": 11}


def plan_objective(
    method: str, samples: int, variants: int, tokens: int, width: int, pairs: int
) -> dict[str, int]:
    """Bytes by what they hold; a sequence has at most all pairs of its variants."""
    contexts = samples * variants
    count = samples * min(pairs, variants * (variants - 1) // 2)
    return {
        "inputs": contexts * width * 14 + samples * variants * 20,
        "tables": (contexts + count) * (tokens + 1),
        "pair tensors": _PAIR_TENSORS[method] * count * width * 4,
    }


def make_objective_inputs(samples: int, variants: int, tokens: int, width: int) -> dict[str, torch.Tensor]:
    contexts = samples * variants
    return {
        "scores": torch.empty(contexts, width),
        "pos": torch.empty(contexts, width, dtype=torch.int64),
        "lod": torch.empty(contexts, width, dtype=torch.int8),
        "valid": torch.empty(contexts, width, dtype=torch.bool),
        "loss": torch.empty(samples, variants),
        "row": torch.empty(samples, variants, dtype=torch.int64),
        "tokens": torch.empty(contexts, dtype=torch.int64),
        "baseline": torch.empty(samples, dtype=torch.int64),
    }


def simulate_objective(
    method: str, samples: int, variants: int, tokens: int, width: int, pairs: int
) -> SimulatedPeak:
    """Forward and backward of the real objective on fake tensors."""
    config = LensConfig(sampling=SamplingConfig(max_pairs=pairs, num_random_variants=max(variants - 1, 1)))

    def build(workload: Workload) -> Step:
        def step() -> Outputs:
            t: dict[str, Any] = dict(workload.tensors)
            scores = t.pop("scores").detach().requires_grad_()
            result = lens_loss(scores, LensBatch(**t, num_tokens=tokens), config, backend=method)
            (grad,) = torch.autograd.grad(result.loss, scores)
            return {"grad": grad}

        return step

    return simulate_peak(build, lambda: Workload(make_objective_inputs(samples, variants, tokens, width)))
