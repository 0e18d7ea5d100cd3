"""A hit is what one rule says about one step; a finding is what it says about all recorded steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from leanstep.diagnose.source import Line

# The thresholds of every rule. `--threshold id.name=value` sets one of them.
DEFAULTS: dict[str, dict[str, float]] = {
    "host-sync": {"reads": 1},
    "op-storm": {"repeats": 32, "ops": 100, "tiny_bytes": 256 * 1024},
    "dead-rows": {"rows": 16, "share": 0.10},
    "zero-fill": {"ops": 4, "ratio": 4, "bytes": 256 * 1024},
    "transposed-copy": {"op_bytes": 256 * 1024, "bytes": 1024 * 1024, "share": 0.05},
    "duplicate-cast": {"bytes": 64 * 1024},
    "dtype-round-trip": {"bytes": 64 * 1024},
    "full-vocab": {"bytes": 32 * 1024 * 1024, "rows": 64},
    "retained-chunks": {"chunks": 4, "bytes": 8 * 1024 * 1024, "rows": 64},
    "unbatched-optimizer": {"repeats": 16, "ops": 64, "bytes": 4 * 1024 * 1024, "flops": 4e9},
    "slow-dtype": {"rate": 0.5, "share": 0.01},
    "alloc-churn": {"buffers": 16, "bytes": 1024 * 1024},
    "unused-grad": {"leaves": 1},
}
RULE_IDS = tuple(DEFAULTS)


class Limits:
    """The thresholds of one run."""

    def __init__(self, changes: dict[str, dict[str, float]] | None = None) -> None:
        self._values = {rule: dict(values) for rule, values in DEFAULTS.items()}
        for rule, values in (changes or {}).items():
            if rule not in self._values:
                raise ValueError(f"threshold: unknown rule {rule!r}; expected one of {', '.join(RULE_IDS)}")
            for name, value in values.items():
                if name not in self._values[rule]:
                    known = ", ".join(self._values[rule])
                    raise ValueError(f"threshold: {rule} has no {name!r}; expected one of {known}")
                if not value >= 0:
                    raise ValueError(f"threshold: {rule}.{name}: expected a number >= 0, got {value!r}")
                self._values[rule][name] = value

    def __getitem__(self, rule: str) -> dict[str, float]:
        return self._values[rule]

    @classmethod
    def parse(cls, settings: list[str]) -> Limits:
        """From the command line's `id.name=value` texts."""
        changes: dict[str, dict[str, float]] = {}
        for setting in settings:
            target, equals, value = setting.partition("=")
            rule, dot, name = target.rpartition(".")
            try:
                number = float(value)
            except ValueError:
                number = float("nan")
            if not (equals and dot) or number != number:
                raise ValueError(
                    f"threshold: expected id.name=value (such as op-storm.repeats=64), got {setting!r}"
                )
            changes.setdefault(rule, {})[name] = number
        return cls(changes)


@dataclass
class Work:
    """What a price is made of, per step: tiny ops, bytes moved, FLOPs, bytes held, host reads."""

    ops: float = 0
    moved_bytes: float = 0
    strided_bytes: float = 0
    flops: float = 0
    held_bytes: float = 0
    reads: float = 0
    # Known directly, where a measurement gave it.
    seconds: float | None = None


@dataclass
class Hit:
    line: Line
    count: int
    callers: Counter[Line] = field(default_factory=Counter)
    phase: str = "forward"
    evidence: dict[str, Any] = field(default_factory=dict)
    work: Work = field(default_factory=Work)
    confidence: str = "high"
    compiled: bool = False


@dataclass
class Finding:
    """One line, one rule: the six answers."""

    rule: str
    line: Line
    count: int
    counts: list[int]
    callers: Counter[Line]
    phase: str
    evidence: dict[str, Any]
    work: Work
    confidence: str
    compiled: bool
    what: str
    why: str
    fix: str
    short_fix: str
    leanstep: str | None
    amount: str
    in_loop: bool = False
    seconds: float | None = None
    seconds_range: tuple[float, float] | None = None
    bytes: int | None = None
    share: float | None = None
    basis: str = "calibrated"
    rank: int = 0
    baselined: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        """What survives moved lines: rule, file, the code of the line."""
        from leanstep.diagnose.source import short_path

        return self.rule, short_path(self.line.file), self.line.code

    @property
    def id(self) -> str:
        return ":".join(self.key)

    def __str__(self) -> str:
        from leanstep.diagnose.source import short_path

        return f"{self.rule} {short_path(self.line.file)}:{self.line.number} {self.amount}"
