"""Findings as SARIF 2.1.0, for code scanning."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

import leanstep
from leanstep.diagnose.findings import Finding
from leanstep.diagnose.outputs.screen import cost_text
from leanstep.diagnose.rules import RULES
from leanstep.tape.lines import Line, short_path

SCHEMA_URI = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def users_line(finding: Finding) -> Line:
    """Return the line to annotate: for a finding in a library, the user's line that called it."""
    if finding.line.library and finding.callers:
        return finding.callers.most_common(1)[0][0]
    return finding.line


def as_sarif(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return one SARIF run with the rules that fired and one result per finding; known ones are unchanged."""
    names = sorted({finding.rule for finding in findings}, key=list(RULES).index)
    return {
        "$schema": SCHEMA_URI,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "leanstep",
                        "semanticVersion": leanstep.__version__,
                        "rules": [_rule(name) for name in names],
                    }
                },
                "results": [_result(finding, names.index(finding.rule)) for finding in findings],
            }
        ],
    }


def _rule(name: str) -> dict[str, Any]:
    rule = RULES[name]
    return {
        "id": name,
        "shortDescription": {"text": rule.short_fix},
        "fullDescription": {"text": rule.why},
        "help": {"text": rule.fix},
        "defaultConfiguration": {"level": "warning"},
    }


def _result(finding: Finding, index: int) -> dict[str, Any]:
    line = users_line(finding)
    text = f"{finding.what} Costs about {cost_text([finding])} per step. {finding.fix}"
    return {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": "warning",
        "message": {"text": text},
        "locations": [
            {
                "physicalLocation": {
                    # A trace without stacks has call paths of ops instead of files.
                    "artifactLocation": {"uri": quote(PurePath(short_path(line.file)).as_posix())},
                    "region": {"startLine": max(line.number, 1), "snippet": {"text": line.code}},
                }
            }
        ],
        # Like the baseline, independent of line numbers.
        "partialFingerprints": {"leanstepFinding/v1": hashlib.sha256(finding.id.encode()).hexdigest()},
        "baselineState": "unchanged" if finding.baselined else "new",
    }
