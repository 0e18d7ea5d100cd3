"""Late steps against early ones: memory and work that grow are named, noise is not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from diagnose.made import HERE, op, sized, steps

from leanstep.diagnose.find import find
from leanstep.diagnose.rules import GROWTH_STEPS, RULES, Limits
from leanstep.diagnose.rules.growth import rises
from leanstep.diagnose.step import Amount, Step
from leanstep.diagnose.watch import Watch

SCRIPTS = sorted((Path(__file__).parent / "growth").glob("*.py"))
MARK = re.compile(r"# expect: (\S+) (\S+)$")
GROWTH_RULES = [name for name, rule in RULES.items() if rule.needs == "steps"]


def kind(finding) -> str:
    """What the finding says that grows."""
    evidence = finding.evidence
    if finding.rule == "growing-memory":
        return "graphs" if evidence["graphs"] else "bytes"
    return "work" if evidence["cpu_seconds"] is None else "time"


def found(steps, limits: Limits | None = None) -> set[tuple[str, int, str]]:
    findings = find(steps, limits or Limits(), GROWTH_RULES)
    return {(f.rule, f.line.number, kind(f)) for f in findings}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_exactly_what_grows_is_named(script: Path, watched) -> None:
    watch = watched(script, Watch(steps=36, timed_warmup=True))
    lines = enumerate(script.read_text(encoding="utf-8").splitlines(), 1)
    marks = ((number, MARK.search(text)) for number, text in lines)
    assert found(watch.steps) == {(mark[1], number, mark[2]) for number, mark in marks if mark}


def left(num_bytes: int, pattern: str = "x" * 20) -> list[Step]:
    """Steps that leave a buffer of this size alive (x) or not (.)."""
    parts = [[op("add", sized(8), 1, outs=[sized(num_bytes)])] for _ in pattern]
    made = steps(*parts)
    for part, sign in zip(parts, pattern, strict=True):
        if sign == ".":
            made[0].tape.alive -= {out.storage for event in part for out in event.results}
    return made


def test_memory_must_be_left_by_nearly_every_step() -> None:
    some = left(4096)
    assert found(some) == {("growing-memory", 7, "bytes")}
    assert found(left(4095)) == set()
    # 18 steps count; the last two may leave anything.
    assert found(left(4096, "x" * 14 + "." * 6)) == {("growing-memory", 7, "bytes")}
    assert found(left(4096, "x" * 13 + "." * 7)) == set()
    assert found(left(4096, "." * 18 + "xx")) == set()
    assert found(left(4096, "x" * GROWTH_STEPS)) == {("growing-memory", 7, "bytes")}
    assert found(left(4096, "x" * (GROWTH_STEPS - 1))) == set()


def of_ops(*ops: int) -> list[Step]:
    made = steps(*([] for _ in ops))
    for step, count in zip(made, ops, strict=True):
        step.totals = Amount(count, 1000, 1000)
    return made


def test_work_must_rise_and_not_only_differ() -> None:
    assert {rule for rule, *_ in found(of_ops(*range(100, 140)))} == {"growing-step"}
    # A tenth more is no finding, nor is one large step, nor a fall.
    assert found(of_ops(*range(200, 230))) == set()
    assert found(of_ops(*[100] * 15, 1000, *[100] * 14)) == set()
    assert found(of_ops(*range(130, 100, -1))) == set()


def test_steps_with_a_rollout_are_compared_with_each_other() -> None:
    recorded = of_ops(*(900 if i % 3 == 0 else 100 for i in range(30)))
    for i, step in enumerate(recorded):
        step.has_rollout = i % 3 == 0
    assert found(recorded) == set()
    # An iteration with more updates towards the end has fewer rollouts there, and no step that grew.
    assert found([*recorded[::3], *(s for s in recorded if not s.has_rollout)]) == set()
    for i, step in enumerate(recorded):
        step.totals = step.totals._replace(ops=step.num_ops + 20 * i)
    assert {rule for rule, *_ in found(recorded)} == {"growing-step"}


def timed(*seconds: float) -> list[Step]:
    made = of_ops(*([100] * len(seconds)))
    for step, cpu_seconds in zip(made, seconds, strict=True):
        step.cpu_seconds, step.update_site = cpu_seconds, HERE
    return made


def test_cpu_time_must_rise_throughout_and_double() -> None:
    assert found(timed(*(0.010 + 0.001 * i for i in range(30)))) == {("growing-step", 7, "time")}
    # Load that sets in once, however long it stays, and a slow rise.
    assert found(timed(*[0.010] * 15, *[0.030] * 15)) == set()
    assert found(timed(*[0.010] * 10, *[0.030] * 20)) == set()
    assert found(timed(*(0.010 + 0.0002 * i for i in range(30)))) == set()
    # Microseconds.
    assert found(timed(*(1e-5 + 1e-6 * i for i in range(30)))) == set()


def test_values_that_jump_about_do_not_rise() -> None:
    assert rises(list(range(8)))
    assert not rises(list(range(5)))
    assert not rises([1.0] * 30)
    assert not rises([float((7 * i) % 30) for i in range(30)])


def test_the_texts_say_how_much() -> None:
    (memory,) = find(left(2**20), Limits(), GROWTH_RULES)
    assert memory.amount == "1 MiB per step" and "18 MiB so far" in memory.what
    (work,) = find(of_ops(*range(100, 160)), Limits(), GROWTH_RULES)
    assert "109 ops → 149 ops" in work.what and work.amount == "grows over 60 steps"
