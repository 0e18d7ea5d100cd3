"""Model FLOPs of recorded steps, from their matmuls; `leanstep.flops` states the convention.

flops = step_flops(watch.steps)
share = utilisation(flops, seconds, peak)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from leanstep.diagnose.step import Step
from leanstep.flops import StepFlops, operand_type


def step_flops(steps: Sequence[Step]) -> StepFlops:
    """Return the matmuls of the recorded step whose model FLOPs are the median."""
    if not steps:
        raise ValueError("steps: expected at least one recorded step, got none")
    counted = sorted((_of(step) for step in steps), key=lambda flops: flops.model)
    return counted[(len(counted) - 1) // 2]


def _of(step: Step) -> StepFlops:
    products: Counter[tuple[str, str]] = Counter()
    for (phase, dtype), flops in step.products.items():
        products[phase, operand_type(dtype)] += flops
    return StepFlops.of(products)
