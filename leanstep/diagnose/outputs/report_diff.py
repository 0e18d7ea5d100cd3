"""Compare two `--json` reports: findings that are new, gone, grown or shrunk."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from leanstep.escape import printable

# A count that changes by more than this is grown or shrunk.
THRESHOLD = 0.10
KINDS = ("new", "grown", "shrunk", "gone")


@dataclass(frozen=True)
class Change:
    """One finding in two reports; the count is 0 in a report without it."""

    kind: str
    rule: str
    file: str
    line: int
    code: str
    before: int
    after: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.kind:<7} {self.rule:<19} {self.file}:{self.line}  {self.before:,} → {self.after:,}"


def read_report(path: str) -> dict[str, Any]:
    """Read a report of `leanstep diagnose --json`. Raise ValueError if the file is not one."""
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
        report["findings"] = [_checked(finding) for finding in report["findings"]]
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, RecursionError):
        raise ValueError(f"{path} is not a report of leanstep diagnose --json") from None
    return report


def _checked(finding: dict[str, Any]) -> dict[str, Any]:
    """Return a finding from an untrusted file, with checked types and printable text."""
    texts = {name: printable(_of_type(finding[name], str)) for name in ("rule", "file", "code")}
    return {**texts, "line": _of_type(finding["line"], int), "count": _of_type(finding["count"], int)}


def _of_type(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


def _key(finding: dict[str, Any]) -> tuple[str, str, str]:
    # As in the baseline, lines may move.
    return finding["rule"], finding["file"], finding["code"]


def compare(before: dict[str, Any], after: dict[str, Any], threshold: float = THRESHOLD) -> list[Change]:
    """Return the changes between two reports, worst kinds first; a count may change by `threshold`."""
    old, new = _by_key(before["findings"]), _by_key(after["findings"])
    changes = []
    for key in old.keys() | new.keys():
        was, now = old.get(key, (0, 0)), new.get(key, (0, 0))
        kind = _kind(was[0], now[0], threshold)
        if kind is not None:
            rule, file, code = key
            changes.append(Change(kind, rule, file, now[1] or was[1], code, was[0], now[0]))
    return sorted(changes, key=lambda c: (KINDS.index(c.kind), c.file, c.line, c.rule))


def _by_key(findings: Iterable[dict[str, Any]]) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Add up the counts of equal lines, as two loops may contain the same code."""
    counts: dict[tuple[str, str, str], tuple[int, int]] = {}
    for finding in findings:
        count, line = counts.get(_key(finding), (0, finding["line"]))
        counts[_key(finding)] = (count + finding["count"], line)
    return counts


def _kind(before: int, after: int, threshold: float) -> str | None:
    if not before or not after:
        return "new" if after else "gone"
    if after > before * (1 + threshold):
        return "grown"
    return "shrunk" if after < before * (1 - threshold) else None


def is_worse(changes: Iterable[Change]) -> bool:
    return any(change.kind in ("new", "grown") for change in changes)
