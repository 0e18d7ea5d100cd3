"""Model FLOPs utilisation of a recorded step, from the products it made and not from a formula.

    flops = step_flops(watch.steps)
    share = utilisation(flops, seconds, peak)

A product of [m, k] and [k, n] counts 2mkn. What a checkpoint, a fused kernel or a backward in tiles computes
a second time is `recomputed`, what an optimizer multiplies is `optimizer`: neither is the model's. Experts
count with the tokens they got, so a mixture counts its active parameters. Every product is held against the
peak of its own operand type, and a share above one is refused: then the time or the device is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from leanstep.diagnose.step_records import BACKWARD, FORWARD, OPTIMIZER, RECOMPUTE, StepRecord
from leanstep.units import seconds as in_words


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one training step by operand type ("bfloat16"), in four parts."""

    forward: Mapping[str, int] = field(default_factory=dict)
    backward: Mapping[str, int] = field(default_factory=dict)
    recomputed: Mapping[str, int] = field(default_factory=dict)
    optimizer: Mapping[str, int] = field(default_factory=dict)

    @property
    def model(self) -> int:
        """What the model asks for: forward and backward."""
        return sum(self.forward.values()) + sum(self.backward.values())

    @property
    def all(self) -> int:
        return self.model + sum(self.recomputed.values()) + sum(self.optimizer.values())


def step_flops(steps: Sequence[StepRecord]) -> StepFlops:
    """The products of the recorded step whose model FLOPs are the median of all.

    The backward of a product is two of its size. What a line's own backward multiplies beyond twice the
    forward was there before: `recomputed`.
    """
    if not steps:
        raise ValueError("steps: expected at least one recorded step, got none")
    counted = sorted((_of(step) for step in steps), key=lambda flops: flops.model)
    return counted[(len(counted) - 1) // 2]


def _of(step: StepRecord) -> StepFlops:
    parts: dict[str, dict[str, int]] = {FORWARD: {}, BACKWARD: {}, RECOMPUTE: {}, OPTIMIZER: {}}
    for (phase, dtype), flops in step.products.items():
        name = str(dtype).removeprefix("torch.")
        parts[phase][name] = parts[phase].get(name, 0) + flops
    forward, backward, again = parts[FORWARD], parts[BACKWARD], parts[RECOMPUTE]
    allowed, done = 2 * sum(forward.values()), sum(backward.values())
    if done > allowed:
        for name, flops in backward.items():
            kept = flops * allowed // done
            again[name] = again.get(name, 0) + flops - kept
            backward[name] = kept
    return StepFlops(forward, backward, again, parts[OPTIMIZER])


def utilisation(
    flops: StepFlops, seconds: float, peak: Callable[[str], float] | float, device: str = "the device"
) -> float:
    """The model's share of what the device could have multiplied in the time of the step: MFU, 0 to 1.

    Args:
        seconds: of one whole, unrecorded step.
        peak: FLOP/s by operand type (`leanstep.rehearse.devices.device_named("h100").flops`), or one figure.

    Raises:
        ValueError: above 1, with what was counted: a device does not exceed its peak.
    """
    if not seconds > 0:
        raise ValueError(f"seconds: expected the time of one step, got {seconds!r}")
    of_type = peak if callable(peak) else lambda _: float(peak)
    ideal = sum(
        count / of_type(name) for part in (flops.forward, flops.backward) for name, count in part.items()
    )
    share = ideal / seconds
    if share > 1:
        raise ValueError(
            f"mfu: {flops.model:.3g} FLOPs in {in_words(seconds)} are {share:.0%} of the peak of {device}: "
            "the time is not that of a whole step, or the device is another one"
        )
    return share
