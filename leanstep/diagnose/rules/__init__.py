"""The rules: one function from the events of a step to hits, with its texts beside it.

One module per family. A new rule is a function and a `Rule` in one of them, and a line in `RULES`.
"""

from __future__ import annotations

from collections.abc import Mapping

from leanstep.diagnose.findings import Rule
from leanstep.diagnose.rules import (
    attention,
    growth,
    ops,
    optimizer,
    precision,
    rl,
    syncs,
    vocabulary,
)
from leanstep.diagnose.rules.growth import GROWTH_STEPS

RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        syncs.HOST_SYNC,
        ops.OP_STORM,
        vocabulary.DEAD_ROWS,
        ops.ZERO_FILL,
        ops.TRANSPOSED_COPY,
        precision.DUPLICATE_CAST,
        precision.DTYPE_ROUND_TRIP,
        vocabulary.FULL_VOCAB,
        vocabulary.RETAINED_CHUNKS,
        vocabulary.NO_GRAD_VOCAB,
        rl.NO_KV_CACHE,
        rl.NO_CONTEXT,
        optimizer.UNBATCHED_OPTIMIZER,
        precision.SLOW_DTYPE,
        optimizer.ALLOC_CHURN,
        optimizer.UNUSED_GRAD,
        optimizer.MISSING_GRAD,
        attention.ATTENTION_MATRIX,
        ops.GELU_BY_HAND,
        precision.FLOAT64,
        optimizer.WEIGHT_CLONE,
        ops.INDEXED_WEIGHT,
        growth.RETAIN_GRAPH,
        growth.GROWING_MEMORY,
        growth.GROWING_STEP,
        ops.LAUNCH_BOUND,
        syncs.BLOCKING_COPY,
        ops.STEP_GAP,
    )
}
RULE_IDS = tuple(RULES)


class Limits:
    """The thresholds of one run. `[tool.leanstep.thresholds]` in pyproject.toml sets them."""

    def __init__(self, changes: Mapping[str, Mapping[str, float]] | None = None) -> None:
        self._values = {name: dict(rule.limits) for name, rule in RULES.items()}
        for rule, values in (changes or {}).items():
            if rule not in self._values:
                raise ValueError(f"threshold: unknown rule {rule!r}; expected one of {', '.join(RULE_IDS)}")
            for name, value in values.items():
                if name not in self._values[rule]:
                    known = ", ".join(self._values[rule])
                    raise ValueError(f"threshold: {rule} has no {name!r}; expected one of {known}")
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
                    raise ValueError(f"threshold: {rule}.{name}: expected a number >= 0, got {value!r}")
                self._values[rule][name] = value

    def __getitem__(self, rule: str) -> dict[str, float]:
        return self._values[rule]


__all__ = ["GROWTH_STEPS", "RULES", "RULE_IDS", "Limits", "Rule"]
