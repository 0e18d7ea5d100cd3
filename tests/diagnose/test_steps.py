"""Every practice script: exactly the marked findings, on the marked lines, with the marked counts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from leanstep.diagnose.find import find
from leanstep.diagnose.rules import RULES

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


def found(watch) -> Expected:
    findings = find(watch.steps, watch.limits)
    return {(f.rule, f.line.file, f.line.number, f.count) for f in findings}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem if p.parent == STEPS else p.parent.name)
def test_script_has_exactly_the_marked_findings(script: Path, watched) -> None:
    watch = watched(script)
    assert found(watch) == expected(script, slow_dtypes(watch))
    assert watch.not_seen == []


def test_every_rule_has_a_script() -> None:
    marked = {rule for script in SCRIPTS for rule, *_ in expected(script, slow={torch.bfloat16})}
    assert marked == {name for name, rule in RULES.items() if rule.needs == "step"}
