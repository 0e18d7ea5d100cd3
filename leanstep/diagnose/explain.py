"""A rule in full: what `diagnose --explain` prints and the documentation shows."""

from __future__ import annotations

import json
import re
from typing import Any

from leanstep.diagnose.rules import RULES

_CODE = re.compile(r"[\w.]+\([^()]*\)|[\w.]*_[\w.]*\*?|\w+=\w+")
_NEEDS = {
    "step": "a recorded step",
    "steps": "a recording of 8 steps or more (--steps 8)",
    "trace": "a trace of a GPU (--trace)",
}


def as_dict(name: str) -> dict[str, Any]:
    """Return one rule as `diagnose --explain RULE --json FILE` writes it."""
    rule = RULES[name]
    return {
        "rule": name,
        "fires_when": rule.fires_when,
        "why": rule.why,
        "fix": rule.fix,
        "short_fix": rule.short_fix,
        "leanstep": rule.leanstep,
        "thresholds": dict(rule.limits),
        "needs": _NEEDS[rule.needs],
    }


def page_of(name: str) -> str:
    """Return the path of a rule's page, relative to the root of the documentation."""
    return f"rules/{name}"


def as_markdown(name: str) -> str:
    """Return the page of one rule."""
    rule = RULES[name]
    options = "\n".join(f"{name}.{key} = {_number(value)}" for key, value in rule.limits.items())
    parts = [
        f"# {name}",
        f"**Fires when** {rule.fires_when}.",
        f"**Why it is waste.** {_with_code(rule.why)}",
        f"**What to do.** {_with_code(rule.fix)}",
        f"**In short:** {_with_code(rule.short_fix)}.",
        f"**Call:** `{rule.leanstep}`." if rule.leanstep else "",
        f"The rule needs {_NEEDS[rule.needs]}.",
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
