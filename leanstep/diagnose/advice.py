"""Context-specific advice: what a user can change from their own line, in their kind of script.

Each entry names what is available there: a trainer class where a trainer runs the step, a function where the
user writes the loop. `fit` puts the first matching entry into a finding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leanstep.diagnose.findings import Finding, Rule
from leanstep.tape.lines import Line, short_path

if TYPE_CHECKING:
    from leanstep.diagnose.step import Step

TRANSFORMERS, TRL = "transformers/", "trl/"
# Replaces a loss that transformers computes from labels.
APPLY = "leanstep.integrations.transformers.apply_leanstep"
# The user's line that starts a trainer's loop.
_TRAINER_CALL = re.compile(r"\.train\(")


@dataclass(frozen=True)
class Surroundings:
    """The kind of script that the findings are in.

    trainer: a Trainer runs the step. model_in: the package whose code multiplies by the head, "" for the
    user's own. has_labels: transformers computes the loss. is_rl: the script generates its training data.
    """

    trainer: bool = False
    model_in: str = ""
    has_labels: bool = False
    is_rl: bool = False


def surroundings(
    steps: Sequence[Step], findings: Sequence[Finding], rules: Mapping[str, Rule]
) -> Surroundings:
    heads = [site for step in steps for site in step.head_sites]
    about_heads = {name for name, rule in rules.items() if any(a.model_in is not None for a in rule.advice)}
    lines = [site.line for site in heads] + [f.line for f in findings if f.rule in about_heads]
    callers = [site.caller for site in heads if site.caller is not None]
    callers += [caller for finding in findings for caller in finding.callers]
    packages = [package for package in (TRANSFORMERS, TRL) if any(_is_in(line, package) for line in lines)]
    return Surroundings(
        trainer=any(_TRAINER_CALL.search(caller.statement) for caller in callers),
        model_in=packages[0] if packages else "",
        has_labels=any(_is_in(line, f"{TRANSFORMERS}loss/") for line in lines),
        is_rl=any(step.has_rollout for step in steps),
    )


def _is_in(line: Line, package: str) -> bool:
    return line.library and short_path(line.file).startswith(package)


@dataclass(frozen=True)
class Advice:
    """Advice for findings in files that start with `package`, on lines that contain one of `code`.

    trainer, model_in, has_labels, is_rl: the required kind of script; None matches any. `when`: what must be
    true of the finding. `what`: replaces what the rule says, "" to keep it.
    """

    fix: str
    short_fix: str
    package: str = ""
    code: tuple[str, ...] = ("",)
    leanstep: str | None = None
    trainer: bool | None = None
    model_in: str | None = None
    has_labels: bool | None = None
    is_rl: bool | None = None
    when: Callable[[Finding], bool] | None = None
    what: str = ""

    def fits(self, finding: Finding, around: Surroundings) -> bool:
        wanted = ("trainer", "model_in", "has_labels", "is_rl")
        if any(getattr(self, name) not in (None, getattr(around, name)) for name in wanted):
            return False
        if self.package and not _is_in(finding.line, self.package):
            return False
        if self.when is not None and not self.when(finding):
            return False
        lines = [finding.line, *finding.callers]
        return any(
            word in near.statement or word in short_path(near.file) for near in lines for word in self.code
        )


def fit(findings: Sequence[Finding], rules: Mapping[str, Rule], steps: Sequence[Step]) -> None:
    """Replace the advice of each finding by the first of its rule that matches its context, if any."""
    around = surroundings(steps, findings, rules)
    for finding in findings:
        for advice in rules[finding.rule].advice:
            if advice.fits(finding, around):
                finding.fix, finding.short_fix = advice.fix, advice.short_fix
                finding.leanstep, finding.what = advice.leanstep, advice.what or finding.what
                break
