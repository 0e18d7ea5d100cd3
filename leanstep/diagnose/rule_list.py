"""The rules as a list and as pages: what `diagnose --explain` prints and the documentation shows.

The texts of a rule are in `rules.py`; this module states the condition under which each one fires.
"""

from __future__ import annotations

import json
import re
from typing import Any

from leanstep.diagnose.rules import RULES
from leanstep.diagnose.step_records import DEFAULTS, GROWTH_RULES, TRACE_RULES

_CODE = re.compile(r"[\w.]+\([^()]*\)|[\w.]*_[\w.]*\*?|\w+=\w+")

FIRES_WHEN = {
    "host-sync": (
        "the host reads a device value: `.item()`, `if tensor`, a boolean index, `tolist`, `nonzero`, a print"
    ),
    "op-storm": "a line repeats a tiny op (≤ 256 KiB) ≥ 32 times (≥ 100 times with its backward)",
    "dead-rows": "rows of the head's output gradient are exactly zero: ≥ 16 and ≥ 10 %",
    "zero-fill": "≥ 4 backward ops write a buffer ≥ 4 × their gradient",
    "transposed-copy": "a copy or add of ≥ 256 KiB between memory layouts",
    "duplicate-cast": "the same version of a tensor is cast to the same dtype again",
    "dtype-round-trip": "a tensor is widened and cast back at once",
    "full-vocab": "`[*, V]` tensors saved for the backward, ≥ 32 MiB",
    "retained-chunks": "a chunk loop inside autograd saves every chunk",
    "no-grad-vocab": (
        "`[*, V]` tensors of ≥ 64 rows written without gradients, ≥ 32 MiB: old and reference "
        "log-probs, an entropy"
    ),
    "no-kv-cache": "≥ 8 model calls, each with the previous call's input plus one position",
    "no-context": (
        "≥ 2 model calls with one token and an empty `DynamicCache`: `generate()` with "
        "checkpointing in training mode ignores the prompt"
    ),
    "unbatched-optimizer": "an optimizer updates one small tensor at a time",
    "slow-dtype": "half-precision matmuls run at less than half the measured fp32 rate of this CPU",
    "alloc-churn": "under `no_grad`, a line allocates ≥ 16 buffers ≥ 1 MiB",
    "unused-grad": "a leaf that no optimizer holds gets a gradient",
    "attention-matrix": "a softmax over queries × keys (each ≥ 64) saves ≥ 4 MiB on a line",
    "gelu-by-hand": "an activation with tanh or erf, written as ≥ 5 elementwise ops on one line",
    "float64": "≥ 256 KiB computed in float64 on a line while parameters are narrower",
    "weight-clone": "≥ 256 KiB of parameters copied on a line",
    "indexed-weight": "`weight[ids]` reads ≥ 256 KiB of a parameter's rows, with gradients",
    "retain-graph": "`backward(retain_graph=True)` without `create_graph`",
    "growing-memory": (
        "with `--steps 8` or more: tensors (≥ 4,096 bytes per step) that a line allocated in ≥ 75 "
        "% of the steps, or the graphs of their losses, are still alive at the end"
    ),
    "growing-step": (
        "with `--steps 8` or more: ops, FLOPs or written bytes rise by ≥ 20 % from the first "
        "third of the steps to the last; or, at the same ops, CPU time doubles"
    ),
    "launch-bound": "in a trace: the device is idle between ≥ 16 launches of a phase for ≥ 10 % of the step",
    "blocking-copy": "in a trace: the host waits for a copy to the device",
    "step-gap": "in a trace: the device is idle for ≥ 5 % of the step while the next batch is prepared",
}


def as_dict(name: str) -> dict[str, Any]:
    """Return one rule as `diagnose --explain RULE --json FILE` writes it."""
    rule = RULES[name]
    return {
        "rule": name,
        "fires_when": FIRES_WHEN[name],
        "why": rule.why,
        "fix": rule.fix,
        "short_fix": rule.short_fix,
        "leanstep": rule.leanstep,
        "thresholds": DEFAULTS[name],
        "needs": _needs(name),
    }


def _needs(name: str) -> str:
    if name in GROWTH_RULES:
        return "a recording of 8 steps or more (--steps 8)"
    return "a trace of a GPU (--trace)" if name in TRACE_RULES else "a recorded step"


def page_of(name: str) -> str:
    """Return the path of a rule's page, relative to the root of the documentation."""
    return f"rules/{name}"


def as_markdown(name: str) -> str:
    """Return the page of one rule."""
    rule, limits = RULES[name], DEFAULTS[name]
    options = "\n".join(f"{name}.{key} = {_number(value)}" for key, value in limits.items())
    parts = [
        f"# {name}",
        f"**Fires when** {FIRES_WHEN[name]}.",
        f"**Why it is waste.** {_with_code(rule.why)}",
        f"**What to do.** {_with_code(rule.fix)}",
        f"**In short:** {_with_code(rule.short_fix)}.",
        f"**Call:** `{rule.leanstep}`." if rule.leanstep else "",
        f"The rule needs {_needs(name)}.",
        "## Thresholds",
        "The defaults, as `pyproject.toml` sets them:",
        f"```toml\n[tool.leanstep.thresholds]\n{options}\n```",
        "## Switch it off",
        "On one line, with a comment at its end:",
        f"```python\nloss = step(batch)  # leanstep: ignore[{name}]\n```",
        "For a project, in `pyproject.toml`:",
        f"```toml\n[tool.leanstep]\nignore = [{json.dumps(name)}]\n```",
        f"For one run: `leanstep diagnose train.py --ignore {name}`.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _with_code(text: str) -> str:
    """Put calls, options and names with underscores in backticks: `_foreach_*` would become italics."""
    return _CODE.sub(lambda code: f"`{code[0]}`", text)


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"
