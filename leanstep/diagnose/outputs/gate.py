"""CI gates: rule selection, ignore comments, baseline files, and findings that fail the run."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import linecache
import re
import tokenize
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leanstep.diagnose.findings import Finding
from leanstep.diagnose.rules import RULE_IDS

# A count this much above the baseline's is new again.
TOLERANCE = 1.10
_IGNORE = re.compile(r"#\s*leanstep:\s*ignore\s*\[([^\]]*)\]")


def parse_rules(text: str) -> tuple[str, ...]:
    """Parse `any`, or rule ids separated by commas."""
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
    """Return the findings of rules in `select` (empty: all rules) that are not in `ignore`, ranked again."""
    selection = [f for f in findings if (not select or f.rule in select) and f.rule not in ignore]
    for number, finding in enumerate(selection, 1):
        finding.rank = number
    return selection


def without_ignored(findings: Sequence[Finding]) -> tuple[list[Finding], int]:
    """Drop findings on lines with `# leanstep: ignore[rule, ...]`; also return how many were dropped."""
    shown = [finding for finding in findings if not _is_ignored(finding)]
    return shown, len(findings) - len(shown)


def _is_ignored(finding: Finding) -> bool:
    """Return whether a comment allows the finding.

    Inside a library, the user's calling line has the comment.
    """
    for line in (finding.line, *finding.callers):
        text = "".join(linecache.getlines(line.file)) if line.readable else ""
        match = _IGNORE.search(_comments(text).get(line.number, ""))
        if match and finding.rule in re.split(r"[,\s]+", match[1].strip()):
            return True
    return False


@functools.lru_cache(maxsize=16)
def _comments(text: str) -> dict[int, str]:
    """Return the comments of a source text by line: the same characters in a string are none."""
    comments: dict[int, str] = {}
    # What cannot be split into tokens has the comments before that place.
    with contextlib.suppress(tokenize.TokenError, SyntaxError):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                comments[token.start[0]] = token.string
    return comments


def mark_baselined(findings: Sequence[Finding], path: str | Path) -> None:
    """Mark findings that the baseline file contains. Raise ValueError if it is not a baseline file."""
    try:
        held = json.loads(Path(path).read_text(encoding="utf-8"))
        known: dict[tuple[str, str, str], int] = {}
        for entry in held["findings"]:
            key = (str(entry["rule"]), str(entry["file"]), str(entry["code"]))
            known[key] = max(known.get(key, 0), int(entry["count"]))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        raise ValueError(f"{path} is not a baseline file (--write-baseline writes one)") from None
    for finding in findings:
        finding.baselined = finding.key in known and finding.count <= TOLERANCE * known[finding.key]


def baseline_of(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the content of a baseline file: rule, file, code and count of every finding."""
    entries = [
        {"rule": f.key[0], "file": f.key[1], "code": f.key[2], "count": f.count}
        for f in sorted(findings, key=lambda f: f.key)
    ]
    return {"schema": 1, "findings": entries}


def failures(findings: Sequence[Finding], rules: Sequence[str]) -> list[Finding]:
    """Return the findings that fail the gate."""
    return [finding for finding in findings if finding.rule in rules and not finding.baselined]
