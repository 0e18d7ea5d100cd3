"""A rule, what it finds in one step (a hit), and what holds over all recorded steps (a finding)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from leanstep.tape.lines import Line, Site, short_path
from leanstep.units import about

if TYPE_CHECKING:
    from leanstep.diagnose.advice import Advice


@dataclass
class Work:
    """The parts of a cost, per step: tiny ops, ops of an optimizer's loop, bytes, FLOPs, host reads."""

    ops: float = 0
    loop_ops: float = 0
    moved_bytes: float = 0
    strided_bytes: float = 0
    flops: float = 0
    held_bytes: float = 0
    reads: float = 0
    # The share of the rollout's time.
    rollout_share: float = 0
    # Set where it was measured directly.
    seconds: float | None = None


@dataclass
class Hit:
    """One line of one step. `callers`: for a line of a package, the user's lines that led there."""

    line: Line
    count: int
    callers: Counter[Line] = field(default_factory=Counter)
    phase: str = "forward"
    evidence: dict[str, Any] = field(default_factory=dict)
    work: Work = field(default_factory=Work)
    confidence: str = "high"
    compiled: bool = False


@dataclass(frozen=True)
class Launches:
    """Which kernels of a compiled line are still the finding.

    limit: the rule's limit that their number must reach; "": one is enough.
    ops: only kernels with one of these ops; empty: all. `only`: kernels that consist of nothing else.
    backward: only kernels of the backward, only others; None: all. `bytes`: the rule's limit for the bytes of
    a kernel. `as_large`: only kernels that write at least half as much as one op of the finding.
    """

    limit: str = ""
    ops: frozenset[str] = frozenset()
    only: bool = False
    backward: bool | None = None
    bytes: str = ""
    as_large: bool = False


@dataclass(frozen=True)
class Rule:
    """A rule: one function from events to hits, and everything that is said about it.

    check: from a step and the rule's limits to hits; rules with `needs="steps"` get all steps.
    amount, what: texts from a finding.
    needs: "step"; "steps": a recording of 8 steps or more; "trace": a profiler trace of a GPU.
    removes: what a repair would remove from a step on a device, for prices; None: nothing a replay can tell.
        "reads", "small ops", "optimizer loop", "fill", "strided", "cast", "rows", "wide tensors", "this CPU".
    edit: the edit of `leanstep fix` that repairs it. "optimizer", "unbind", "retain", "head".
    compiled: how a compiler changes it: `Launches`; "saved": what is kept for the backward; None: it stays.
    traces: shapes, lines and times are enough, so a profiler trace of the step shows it as well.
    smallest: the count is the minimum over the steps, not the median.
    advice: what to do instead in some surroundings; the first that fits replaces `fix`.
    cost: what the screen says about the cost instead of time or memory.
    instead_of: a line that this rule names is not named by that one.
    """

    name: str
    check: Callable[[Any, Mapping[str, float]], Iterable[Hit]]
    limits: Mapping[str, float]
    fires_when: str
    what: Callable[[Finding], str]
    amount: Callable[[Finding], str]
    why: str
    fix: str
    short_fix: str
    leanstep: str | None = None
    needs: str = "step"
    removes: str | None = None
    edit: str | None = None
    compiled: Launches | str | None = None
    traces: bool = False
    smallest: bool = False
    advice: tuple[Advice, ...] = ()
    cost: Callable[[Sequence[Finding]], str] | None = None
    instead_of: str | None = None


@dataclass
class Finding:
    """A rule that fired on a line."""

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
    # Counted per iteration, not per step: only steps with a rollout show it.
    per_rollout: bool = False
    seconds: float | None = None
    seconds_range: tuple[float, float] | None = None
    bytes: int | None = None
    share: float | None = None
    basis: str = "calibrated"
    rank: int = 0
    baselined: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        """Identity that does not depend on line numbers: rule, file, code of the line."""
        return self.rule, short_path(self.line.file), self.line.code

    @property
    def id(self) -> str:
        return ":".join(self.key)

    def __str__(self) -> str:
        return f"{self.line.place}: {self.rule}: {self.amount} → {self.short_fix}"


class Findings(list[Finding]):
    """A list of findings that prints as one line each."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "no findings"


def callers_of(sites: Iterable[Site]) -> Counter[Line]:
    """Count the user's lines that led to lines of packages."""
    return Counter(site.caller for site in sites if site.caller is not None)


def time_text(findings: Sequence[Finding]) -> str:
    """Return about how long findings take, and the share of the step."""
    seconds = sum(f.seconds or 0.0 for f in findings)
    shares = [f.share for f in findings if f.share is not None]
    share = f" ({min(sum(shares), 1.0):.0%} of the step)" if shares and seconds else ""
    return f"{about(seconds)}{share}"


def plural(count: int, word: str, more: str | None = None) -> str:
    """Return "1 read", "2 reads"."""
    return f"{count:,} {word if count == 1 else more or word + 's'}"


def listed(counts: Mapping[str, int]) -> str:
    """Return "3 × add, 1 × mul": the most frequent first."""
    return ", ".join(f"{n} × {name}" for name, n in sorted(counts.items(), key=lambda item: -item[1]))
