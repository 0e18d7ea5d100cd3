"""From steps to findings: what a rule says about every recorded step.

A finding must hold on every recorded step. Its count is the median over the steps, or the minimum where a
rule says so: the only count that is waste on every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from leanstep.diagnose import advice
from leanstep.diagnose.findings import Finding, Hit, Rule
from leanstep.diagnose.rules import RULES, Limits
from leanstep.diagnose.step import Step
from leanstep.tape.lines import Line

Hits = dict[str, dict[Line, Hit]]


def judge(step: Step, limits: Limits, rules: Sequence[str] | None = None) -> Hits:
    """Return what every rule finds in one step."""
    if step.hits is not None:
        return step.hits
    hits: Hits = {}
    for name, rule in RULES.items():
        if rule.needs != "steps" and (rules is None or name in rules):
            hits[name] = {hit.line: hit for hit in rule.check(step, limits[name])}
    for name, by_line in hits.items():
        for line, hit in by_line.items():
            hit.compiled = line in step.compiled
            hits.get(RULES[name].instead_of or "", {}).pop(line, None)
    return hits


def find(
    steps: Sequence[Step], limits: Limits | None = None, rules: Sequence[str] | None = None
) -> list[Finding]:
    """Return the findings that hold on every one of `steps`, in the order of the rules.

    Where several updates follow a rollout, a finding that appears only on steps with a rollout must hold on
    all of these.
    """
    if not steps:
        return []
    limits = limits or Limits()
    verdicts = [judge(step, limits, rules) for step in steps]
    findings = []
    for name, rule in RULES.items():
        if rules is not None and name not in rules:
            continue
        if rule.needs == "steps":
            findings.extend(finding_of(rule, [hit]) for hit in rule.check(steps, limits[name]))
            continue
        by_step = [hits.get(name, {}) for hits in verdicts]
        everywhere = [line for line in by_step[0] if all(line in hits for hits in by_step)]
        findings.extend(finding_of(rule, [hits[line] for hits in by_step]) for line in everywhere)
        rollouts = [hits for hits, step in zip(by_step, steps, strict=True) if step.has_rollout]
        others = [hits for hits, step in zip(by_step, steps, strict=True) if not step.has_rollout]
        for line in _of_rollouts(rollouts, others):
            findings.append(finding_of(rule, [hits[line] for hits in rollouts], per_rollout=True))
    advice.fit(findings, RULES, steps)
    return findings


def _of_rollouts(rollouts: Sequence[dict[Line, Hit]], others: Sequence[dict[Line, Hit]]) -> list[Line]:
    """Return the lines that a rule names on every step with a rollout, and on none of the others."""
    if not rollouts or not others:
        return []
    return [
        line
        for line in rollouts[0]
        if all(line in hits for hits in rollouts) and not any(line in hits for hits in others)
    ]


def finding_of(rule: Rule, hits: Sequence[Hit], per_rollout: bool = False) -> Finding:
    """Return the finding of a rule on one line from its hits in the steps."""
    counts = [hit.count for hit in hits]
    count = min(counts) if rule.smallest else sorted(counts)[(len(counts) - 1) // 2]
    typical: Any = next(hit for hit in hits if hit.count == count)
    callers: Counter[Line] = Counter(typical.callers)
    confidence = "high" if any(hit.confidence == "high" for hit in hits) else "medium"
    finding = Finding(
        rule=rule.name, line=typical.line, count=count, counts=counts, callers=callers, phase=typical.phase,
        evidence=dict(typical.evidence), work=typical.work, confidence=confidence,
        compiled=any(hit.compiled for hit in hits),
        what="", why=rule.why, fix=rule.fix, short_fix=rule.short_fix, leanstep=rule.leanstep, amount="",
        in_loop=bool(typical.work.reads) and count >= 2, per_rollout=per_rollout,
    )  # fmt: skip
    finding.what, finding.amount = rule.what(finding), rule.amount(finding)
    return finding
