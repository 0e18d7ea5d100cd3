"""What a CI asks: which rules count, what is allowed on a line, what is known, what must not happen."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leanstep.diagnose.step_records import RULE_IDS, Finding

# A count this much above the baseline's is new again.
TOLERANCE = 1.10
_IGNORE = re.compile(r"#\s*leanstep:\s*ignore\s*\[([^\]]*)\]")


def parse_rules(text: str) -> tuple[str, ...]:
    """`any`, or rule ids separated by commas."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if names == ("any",):
        return RULE_IDS
    for name in names:
        if name not in RULE_IDS:
            raise ValueError(f"unknown rule {name!r}; expected any, or some of {', '.join(RULE_IDS)}")
    if not names:
        raise ValueError(f"expected any, or some of {', '.join(RULE_IDS)}; got nothing")
    return names


def selected(findings: Sequence[Finding], select: Sequence[str], ignore: Sequence[str]) -> list[Finding]:
    """The findings of the rules in `select` (empty: of all) that are not in `ignore`, ranked anew."""
    selection = [f for f in findings if (not select or f.rule in select) and f.rule not in ignore]
    for number, finding in enumerate(selection, 1):
        finding.rank = number
    return selection


def without_ignored(findings: Sequence[Finding]) -> tuple[list[Finding], int]:
    """Drop findings whose line says `# leanstep: ignore[rule, ...]`; also how many were dropped."""
    shown = [finding for finding in findings if not _is_ignored(finding)]
    return shown, len(findings) - len(shown)


def _is_ignored(finding: Finding) -> bool:
    """Of a finding inside a library, the comment is on the user's line that led there."""
    for line in (finding.line, *finding.callers):
        match = _IGNORE.search(line.text(line.number))
        if match and finding.rule in re.split(r"[,\s]+", match[1].strip()):
            return True
    return False


def mark_baselined(findings: Sequence[Finding], path: str | Path) -> None:
    """Mark what the baseline file knows; raises ValueError when the file is none."""
    try:
        held = json.loads(Path(path).read_text(encoding="utf-8"))
        known: dict[tuple[str, str, str], int] = {}
        for entry in held["findings"]:
            key = (str(entry["rule"]), str(entry["file"]), str(entry["code"]))
            known[key] = max(known.get(key, 0), int(entry["count"]))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        raise ValueError(f"{path} is no baseline file (--write-baseline makes one)") from None
    for finding in findings:
        finding.baselined = finding.key in known and finding.count <= TOLERANCE * known[finding.key]


def baseline_of(findings: Sequence[Finding]) -> dict[str, Any]:
    """The content of a baseline file: rule, file, code and count of every finding."""
    entries = [
        {"rule": f.key[0], "file": f.key[1], "code": f.key[2], "count": f.count}
        for f in sorted(findings, key=lambda f: f.key)
    ]
    return {"schema": 1, "findings": entries}


def failures(findings: Sequence[Finding], rules: Sequence[str]) -> list[Finding]:
    """The findings that close the gate."""
    return [finding for finding in findings if finding.rule in rules and not finding.baselined]
