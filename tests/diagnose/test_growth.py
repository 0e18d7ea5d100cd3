"""Late steps against early ones: memory and work that grow are named, noise is not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from leanstep.diagnose import growth_checks, rules
from leanstep.diagnose.step_records import GROWTH_RULES, GROWTH_STEPS, Limits, StepRecord, Tally
from leanstep.diagnose.watch import Watch
from leanstep.tape.lines import Line, Site

SCRIPTS = sorted((Path(__file__).parent / "growth").glob("*.py"))
MARK = re.compile(r"# expect: (\S+) (\S+)$")
HERE = Site(Line("train.py", 7, "train"))


def kind(finding) -> str:
    """What the finding says that grows."""
    evidence = finding.evidence
    if finding.rule == "growing-memory":
        return "graphs" if evidence["graphs"] else "bytes"
    return "work" if evidence["cpu_seconds"] is None else "time"


def found(steps, limits: Limits | None = None) -> set[tuple[str, int, str]]:
    findings = rules.find(steps, limits or Limits(), GROWTH_RULES)
    return {(f.rule, f.line.number, kind(f)) for f in findings}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_exactly_what_grows_is_named(script: Path, watched) -> None:
    watch = watched(script, Watch(steps=36, timed_warmup=True))
    lines = enumerate(script.read_text(encoding="utf-8").splitlines(), 1)
    marks = ((number, MARK.search(text)) for number, text in lines)
    assert found(watch.steps) == {(mark[1], number, mark[2]) for number, mark in marks if mark}


def test_a_few_steps_are_not_compared_and_nothing_is_followed(watched) -> None:
    script = next(path for path in SCRIPTS if path.stem == "cache_never_emptied")
    watch = watched(script, Watch(steps=GROWTH_STEPS - 1))
    assert not watch.recorder.survivors.on and not any(step.outlived for step in watch.steps)
    assert found(watch.steps) == set()
    assert found(watched(script, Watch(steps=GROWTH_STEPS)).steps) == {
        ("growing-memory", 14, "bytes"),
        ("growing-memory", 15, "bytes"),
    }


def left(num_bytes: int, steps: int = 20) -> list[StepRecord]:
    return [StepRecord(outlived={HERE: Tally(1, num_bytes)}) for _ in range(steps)]


def test_memory_must_be_left_by_nearly_every_step() -> None:
    some, none = left(4096), [StepRecord() for _ in range(20)]
    assert found(some) == {("growing-memory", 7, "bytes")}
    assert found(left(4095)) == set()
    # 18 steps count; the last two may leave anything.
    assert found([*some[:14], *none[:6]]) == {("growing-memory", 7, "bytes")}
    assert found([*some[:13], *none[:7]]) == set()
    assert found([*none[:18], *some[:2]]) == set()


def of_ops(*ops: int) -> list[StepRecord]:
    return [StepRecord(num_ops=count, flops=1000, written_bytes=1000) for count in ops]


def test_work_must_rise_and_not_only_differ() -> None:
    assert {rule for rule, *_ in found(of_ops(*range(100, 140)))} == {"growing-step"}
    # A tenth more is no finding, nor is one large step, nor a fall.
    assert found(of_ops(*range(200, 230))) == set()
    assert found(of_ops(*[100] * 15, 1000, *[100] * 14)) == set()
    assert found(of_ops(*range(130, 100, -1))) == set()


def test_steps_with_a_rollout_are_compared_with_each_other() -> None:
    steps = of_ops(*(900 if i % 3 == 0 else 100 for i in range(30)))
    for i, step in enumerate(steps):
        step.has_rollout = i % 3 == 0
    assert found(steps) == set()
    # An iteration with more updates towards the end has fewer rollouts there, and no step that grew.
    assert found([*steps[::3], *(s for s in steps if not s.has_rollout)]) == set()
    for i, step in enumerate(steps):
        step.num_ops += 20 * i
    assert {rule for rule, *_ in found(steps)} == {"growing-step"}


def timed(*seconds: float) -> list[StepRecord]:
    return [StepRecord(num_ops=100, cpu_seconds=s, update_site=HERE) for s in seconds]


def test_cpu_time_must_rise_throughout_and_double() -> None:
    assert found(timed(*(0.010 + 0.001 * i for i in range(30)))) == {("growing-step", 7, "time")}
    # Load that sets in once, however long it stays, and a slow rise.
    assert found(timed(*[0.010] * 15, *[0.030] * 15)) == set()
    assert found(timed(*[0.010] * 10, *[0.030] * 20)) == set()
    assert found(timed(*(0.010 + 0.0002 * i for i in range(30)))) == set()
    # Microseconds.
    assert found(timed(*(1e-5 + 1e-6 * i for i in range(30)))) == set()


def test_values_that_jump_about_do_not_rise() -> None:
    assert growth_checks.rises(list(range(8)))
    assert not growth_checks.rises(list(range(5)))
    assert not growth_checks.rises([1.0] * 30)
    assert not growth_checks.rises([float((7 * i) % 30) for i in range(30)])


def test_the_texts_say_how_much() -> None:
    (memory,) = rules.find(left(2**20), Limits(), GROWTH_RULES)
    assert memory.amount == "1 MiB per step" and "18 MiB so far" in memory.what
    (work,) = rules.find(of_ops(*range(100, 160)), Limits(), GROWTH_RULES)
    assert "109 ops → 149 ops" in work.what and work.amount == "grows over 60 steps"
