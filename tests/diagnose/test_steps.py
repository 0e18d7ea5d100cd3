"""Every practice script: exactly the marked findings, on the marked lines, with the marked counts."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from leanstep.diagnose.find import find
from leanstep.diagnose.rules import RULE_IDS, RULES

STEPS = Path(__file__).parent / "steps"
SCRIPTS = sorted([*STEPS.glob("*.py"), *STEPS.glob("*/train.py")])
MARK = re.compile(r"# expect: (.*)$")
Expected = set[tuple[str, str, int, int]]


def expected(script: Path, slow: set[torch.dtype]) -> Expected:
    """{(rule, file, line, count)} of the markers; `when=` ones only where this CPU's bf16 is slow."""
    files = [script] if script.parent == STEPS else sorted(script.parent.rglob("*.py"))
    found: Expected = set()
    for file in files:
        for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            match = MARK.search(text)
            if match is None or match[1] == "nothing":
                continue
            for mark in match[1].split(";"):
                rule, count, *conditions = mark.split()
                if "when=no-native-bf16" in conditions and torch.bfloat16 not in slow:
                    continue
                found.add((rule, str(file), number, int(count.removeprefix("count="))))
    return found


def slow_dtypes(watch) -> set[torch.dtype]:
    rates = watch.tape.half_rates
    return {dtype for dtype, (rate, full) in rates.items() if rate < 0.5 * full}


def found(watch, names=None) -> Expected:
    findings = find(watch.steps, watch.limits, names)
    return {(f.rule, f.line.file, f.line.number, f.count) for f in findings}


recordings: dict[Path, object] = {}


@pytest.fixture
def record(watched):
    def run(script: Path):
        if script not in recordings:
            recordings[script] = watched(script)
        return recordings[script]

    return run


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem if p.parent == STEPS else p.parent.name)
def test_script_has_exactly_the_marked_findings(script: Path, record) -> None:
    watch = record(script)
    assert found(watch) == expected(script, slow_dtypes(watch))
    assert watch.not_seen == []


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.needs == "step"])
def test_every_rule_is_needed(rule: str, record) -> None:
    """With one rule switched off at least one script no longer gives its findings."""
    scripts = [s for s in SCRIPTS if f"expect: {rule} " in s.read_text(encoding="utf-8") or rule in s.stem]
    if rule == "slow-dtype":
        # bf16 may be fast here; float16 is marked by no script, so the rule is tested with records instead.
        scripts = [s for s in scripts if torch.bfloat16 in slow_dtypes(record(s))]
        if not scripts:
            pytest.skip("this CPU multiplies bf16 fast")
    others = [name for name in RULE_IDS if name != rule]
    assert any(found(record(s), others) != expected(s, slow_dtypes(record(s))) for s in scripts)


@pytest.mark.parametrize("name", ["clean_lm", "storm_pairs", "unbatched_adamw"])
def test_three_steps_are_recorded_after_one(name: str, record) -> None:
    watch = record(STEPS / f"{name}.py")
    assert (len(watch.steps), watch.warmup_done, watch.boundary) == (3, 1, "optimizer")
    # How long a step takes is the machine's affair; that it was timed is ours.
    assert watch.step_seconds is not None
    assert math.isfinite(watch.step_seconds) and watch.step_seconds > 0
