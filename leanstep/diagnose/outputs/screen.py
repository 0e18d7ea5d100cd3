"""What a recording says: the JSON object, the terminal's screen, one finding in full, CI annotations."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import leanstep
from leanstep import units
from leanstep.diagnose import iteration_times
from leanstep.diagnose.cost import is_small
from leanstep.diagnose.recording import source
from leanstep.diagnose.rules import RULES
from leanstep.diagnose.step_records import Finding
from leanstep.escape import for_workflow
from leanstep.script.lines import Line, short_path
from leanstep.script.marks import OTHER

SCHEMA = 1
SCHEMA_FILE = Path(__file__).with_name("schema.json")
# Entries shown without `--all`; five of them fill one screen of 24 lines.
MAX_ENTRIES = 10
# From this share of the step on, waiting for a batch is said before any finding.
MUCH_WAITING = 0.3
# From this share of its own time on, what a step waited for a core is said.
MUCH_LOAD = 0.2
WIDTH = 80


def as_json(
    watch: Any,
    findings: Sequence[Finding],
    script: str = "",
    argv: Sequence[str] = (),
    code: int = 0,
    exception: str | None = None,
) -> dict[str, Any]:
    """The object of `--json`; `schema.json` in this folder describes it."""
    ops = sorted(step.num_ops for step in watch.steps)
    return {
        "schema": SCHEMA,
        "leanstep": leanstep.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": "cuda" if watch.recorder.accelerator else "cpu",
        "threads": torch.get_num_threads(),
        "script": script,
        "argv": list(argv),
        "exit": {"code": code, "exception": exception},
        "steps": {
            "warmup": watch.warmup_done,
            "recorded": len(watch.steps),
            "iterations": watch.iterations,
            "boundary": watch.boundary,
            "ops": ops[len(ops) // 2] if ops else 0,
            "step_seconds": watch.step_seconds,
            "waited_seconds": watch.waited_seconds,
            "parts": watch.clock.parts,
            "iteration": _iteration(watch),
            "phases": [iteration_times.as_dict(entry) for entry in watch.phases],
        },
        "findings": [_finding(finding) for finding in findings],
        "compiled": watch.compiled.as_dict(),
        "not_seen": watch.not_seen,
    }


def _iteration(watch: Any) -> dict[str, Any] | None:
    """A rollout and its updates, where one was timed."""
    iteration = watch.iteration_clock.iteration
    return {"seconds": watch.iteration_seconds, "steps": iteration.steps} if iteration is not None else None


def _finding(f: Finding) -> dict[str, Any]:
    cost: dict[str, Any] = {
        "seconds": f.seconds,
        "bytes": f.bytes,
        "flops": int(f.work.flops) or None,
        "share": f.share,
        "basis": f.basis,
    }
    if f.seconds_range is not None:
        cost["seconds_range"] = list(f.seconds_range)
    return {
        "id": f.id,
        "rule": f.rule,
        "rank": f.rank,
        "file": short_path(f.line.file),
        "line": f.line.number,
        "function": f.line.function,
        "code": f.line.code,
        "called_from": [
            {"file": short_path(line.file), "line": line.number, "count": count}
            for line, count in f.callers.most_common()
        ],
        "count": f.count,
        "counts": f.counts,
        "phase": f.phase,
        "in_loop": f.in_loop,
        "cost": cost,
        "what": f.what,
        "why": f.why,
        "fix": f.fix,
        "leanstep": f.leanstep,
        "confidence": f.confidence,
        "compiled": f.compiled,
        "evidence": f.evidence,
        "baselined": f.baselined,
    }


class Entry:
    """Findings of one rule on neighbouring lines of one function: one entry on the screen."""

    def __init__(self, finding: Finding) -> None:
        self.findings = [finding]

    def takes(self, other: Finding) -> bool:
        mine = self.findings[0]
        same = (mine.rule, mine.line.file, mine.line.function) == (
            other.rule,
            other.line.file,
            other.line.function,
        )
        return same and any(abs(f.line.number - other.line.number) <= 3 for f in self.findings)

    @property
    def first(self) -> Finding:
        return self.findings[0]

    @property
    def where(self) -> str:
        """`path:line`, which terminals open; of a library's line, the user's line that led there."""
        callers: Counter[Line] = Counter()
        for finding in self.findings:
            callers.update(finding.callers)
        line = callers.most_common(1)[0][0] if callers else None
        if line is not None:
            more = f" and {len(callers) - 1} more" if len(callers) > 1 else ""
            return f"{line.place}{more}"
        numbers = sorted(f.line.number for f in self.findings)
        if len(numbers) == 1 or not numbers[0]:
            return self.first.line.place
        place = f"{short_path(self.first.line.file)}:{numbers[0]}–{numbers[-1]}"
        return f"{place} in {self.first.line.function} ({len(numbers)} lines)"

    @property
    def inside(self) -> str:
        """The library's own line, where the user's leads."""
        if not any(finding.callers for finding in self.findings):
            return ""
        return f"in {self.first.line.place}: "

    @property
    def amount(self) -> str:
        total = sum(f.count for f in self.findings)
        return RULES[self.first.rule].amount(replace(self.first, count=total))

    @property
    def cost(self) -> str:
        return cost_text(self.findings)


def cost_text(findings: Sequence[Finding]) -> str:
    """What it costs about, in a few words."""
    first = findings[0]
    if first.seconds_range is not None:
        low = sum(f.seconds_range[0] for f in findings if f.seconds_range)
        high = sum(f.seconds_range[1] for f in findings if f.seconds_range)
        return f"{units.about_range(low, high)} on a GPU"
    if first.rule == "dead-rows":
        return f"{100 * first.count / first.evidence['rows']:.0f} % of the head"
    if first.work.held_bytes and first.rule != "unused-grad":
        return f"{units.size(sum(f.work.held_bytes for f in findings))} held"
    seconds = sum(f.seconds or 0.0 for f in findings)
    shares = [f.share for f in findings if f.share is not None]
    share = f" ({min(sum(shares), 1.0):.0%} of the step)" if shares and seconds else ""
    return f"{units.about(seconds)}{share}"


def entries_of(findings: Sequence[Finding]) -> list[Entry]:
    """Group neighbours; the order is that of the ranks."""
    entries: list[Entry] = []
    for finding in sorted(findings, key=lambda f: (f.line.file, f.rule, f.line.number)):
        if entries and entries[-1].takes(finding):
            entries[-1].findings.append(finding)
        else:
            entries.append(Entry(finding))
    return sorted(entries, key=lambda entry: min(f.rank for f in entry.findings))


def header(watch: Any, script: str) -> str:
    facts = getattr(watch, "facts", None)
    if facts is not None:
        # A trace was made elsewhere: it says itself what it is of.
        return f"leanstep diagnose --trace {script}\n  " + " · ".join(facts)
    device = "cuda" if watch.recorder.accelerator else "cpu"
    parts = [
        f"torch {torch.__version__}",
        f"{device}, {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() != 1)}",
    ]
    after = f" after {watch.warmup_done}" if watch.warmup_done else ""
    parts.append(f"{units.steps(len(watch.steps), watch.iterations)} recorded{after}")
    parts += _times(watch)
    text = f"leanstep diagnose {script}\n  " + " · ".join(parts)
    shares = shares_of(watch)
    if shares:
        text += "\n  of it " + ", ".join(f"{share:.0%} {name}" for name, share in shares.items())
    return "\n".join([text, *_waiting(watch), *_phase_lines(watch)])


def _times(watch: Any) -> list[str]:
    """How long a step takes, or an iteration where a rollout comes before one or more updates."""
    iteration = watch.iteration_clock.iteration
    if iteration is not None:
        updates = f", {iteration.steps} updates" if iteration.steps > 1 else ""
        return [f"iteration {units.about(watch.iteration_seconds)} unrecorded{updates}"]
    if not watch.step_seconds:
        return []
    took = units.about(watch.step_seconds)
    return [f"step at most {took} (as recorded)" if watch.step_is_bound else f"step {took} unrecorded"]


def _waiting(watch: Any) -> list[str]:
    """A line where the script's own clock must show far more than the header's time."""
    seconds, waited = watch.iteration_seconds or watch.step_seconds or 0.0, watch.waited_seconds
    if waited < MUCH_LOAD * seconds or not seconds:
        return []
    what = "iteration" if watch.iteration_clock.iteration is not None else "step"
    whole, part = units.about(seconds + waited), units.about(waited)
    return [f"  By the clock the {what} took {whole}: for {part} other processes held the cores."]


def _phase_lines(watch: Any) -> list[str]:
    """A line for each phase: what it takes in one iteration."""
    lines = []
    longest = max((len(entry.phase) for entry in watch.phases), default=0)
    for entry in watch.phases:
        took = units.about(entry.seconds) if entry.seconds else "-"
        flops = f"{entry.flops / 1e9:,.1f} GFLOP" if entry.flops else ""
        written = f"{units.size(entry.written_bytes)} written"
        phase = entry.phase.ljust(longest)
        lines.append(f"    {phase} {took:>8}  {entry.ops:>7,} ops  {written}  {flops}".rstrip())
    return lines


def shares_of(watch: Any) -> dict[str, float]:
    """Share of the step by part, without what is below one percent; empty when no whole step was timed.

    The parts are the phases where the script has more than updates.
    """
    parts = {entry.phase: entry.seconds or 0.0 for entry in watch.phases} or watch.clock.parts or {}
    total = sum(parts.values())
    return {name: seconds / total for name, seconds in parts.items() if total and seconds >= 0.01 * total}


def screen(
    watch: Any,
    findings: Sequence[Finding],
    script: str,
    *,
    silenced: int = 0,
    show_all: bool = False,
    width: int = WIDTH,
    exception: str | None = None,
) -> str:
    """The terminal's text: header, entries, what was not seen. `exception`: what the script ended with."""
    entries = entries_of([f for f in findings if not f.baselined])
    visible = entries
    if not show_all:
        visible = [e for e in entries if not all(is_small(f) for f in e.findings)][:MAX_ENTRIES]
    lines = [header(watch, script), *_remarks(watch, exception), "", *_verdict(watch, entries)]
    for number, entry in enumerate(visible, 1):
        lines += _entry_lines(number, entry, width)
    lines += _hidden([entry for entry in entries if entry not in visible])
    footer = _footer(watch, sum(f.baselined for f in findings), silenced)
    if footer:
        lines += ["", *footer]
    return "\n".join(line.rstrip() for line in lines)


def _remarks(watch: Any, exception: str | None) -> list[str]:
    """What limits the recording: no steps, no boundary between them, no lines of the backward."""
    lines = []
    if watch.steps and watch.boundary == "none":
        lines.append("  No optimizer step seen: the whole run is taken as one step.")
    missing = source.missing_private_names()
    if missing:
        lines.append(f"  This torch has no {' and no '.join(missing)}: backward ops have no line.")
    if not watch.steps and exception is not None:
        lines.append(f"  No step was recorded: the script raised {exception} before its first step was over.")
    elif not watch.steps:
        lines.append("  No step was recorded: the script ended within the warm-up (--warmup 0 records it).")
    return lines


def _verdict(watch: Any, entries: Sequence[Entry]) -> list[str]:
    """What comes before any entry: much waiting for the batch, or that there is nothing to show."""
    shares = shares_of(watch)
    waiting = shares.get("before the model", 0.0)
    if watch.phases and shares.get(OTHER, 0.0) >= MUCH_WAITING:
        return [f"  {shares[OTHER]:.0%} passes outside the model: rewards, making batches, logging."]
    if waiting >= MUCH_WAITING:
        workers = "More workers, prefetching" if watch.has_loader else "Prefetching"
        return [
            f"  {waiting:.0%} of the step passes before the model's first op: making the batch, logging.",
            f"  {workers} or cheaper preparation come first.",
        ]
    return ["  Nothing to complain about."] if watch.steps and not entries else []


def _hidden(entries: Sequence[Entry]) -> list[str]:
    if not entries:
        return []
    rules = Counter(entry.first.rule for entry in entries)
    names = ", ".join(f"{count} × {rule}" for rule, count in rules.most_common())
    if len(entries) == 1:
        return [f"  and 1 smaller one: {names} (--all shows it)"]
    return [f"  and {len(entries)} smaller ones: {names} (--all shows them)"]


def _footer(watch: Any, baselined: int, silenced: int) -> list[str]:
    lines = [*watch.compiled.lines(), *_not_seen(watch)]
    if baselined:
        lines.append(f"Suppressed by baseline: {baselined}.")
    if silenced:
        lines.append(f"Silenced by comments: {silenced}.")
    return lines


def _entry_lines(number: int, entry: Entry, width: int) -> list[str]:
    first = entry.first
    compiled = "  compiled" if first.compiled else ""
    amount = entry.amount + compiled
    return [
        # Never cut: a path that is whole can be opened from the terminal.
        f"{number:3}  {first.rule:<19} {entry.where:<26} {amount}",
        _clip(f"     {entry.inside}{first.line.statement or first.what}", width),
        _clip(f"     costs about {entry.cost} → {first.short_fix}", width),
    ]


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 1, 1)] + "…"


def _not_seen(watch: Any) -> list[str]:
    grouped: dict[str, list[str]] = {}
    for note in watch.not_seen:
        grouped.setdefault(note["note"], []).append(note["where"])
    lines = []
    for text, places in grouped.items():
        places = [place for place in places if place]
        where = f" ({', '.join(places[:3])}{' …' if len(places) > 3 else ''})" if places else ""
        lines.append(f"Not seen: {text}{where}.")
    return lines


def explain(entry: Entry) -> str:
    """One entry in full, with six lines of source around each line."""
    parts = []
    for f in entry.findings:
        steps = f"{len(f.counts)} step{'s' * (len(f.counts) != 1)}"
        cost = cost_text([f])
        parts += [
            f"{f.rule}  {f.line.place} in {f.line.function}",
            *_excerpt(f.line),
            *(f"  called from {line.place}: {count}" for line, count in f.callers.most_common(8)),
            f"  what   {f.what}",
            f"  often  {f.amount} per step (on {steps}: {', '.join(map(str, f.counts[:8]))}); phase "
            f"{f.phase}",
            f"  costs  {cost} per step, {f.basis}; confidence {f.confidence}",
            f"  why    {f.why}",
            f"  do     {f.fix}",
            "",
        ]
    return "\n".join(parts).rstrip()


def _excerpt(line: Line, around: int = 3) -> list[str]:
    found = []
    for number in range(max(1, line.number - around), line.number + around):
        text = line.text(number).rstrip()
        if text or number == line.number:
            found.append(f"  {'>' if number == line.number else ' '} {number:4}  {text}")
    return found


def annotation_lines(findings: Sequence[Finding]) -> list[str]:
    """GitHub workflow commands, one per finding; a library's line stands where the user's code called it."""
    commands = []
    for f in findings:
        if f.baselined:
            continue
        line = f.callers.most_common(1)[0][0] if f.line.library and f.callers else f.line
        title = for_workflow(f"leanstep {f.rule}", property=True)
        message = for_workflow(f"{f.what} {f.fix}")
        # A trace without stacks knows no file.
        where = f"file={for_workflow(short_path(line.file), property=True)},line={line.number}," * bool(
            line.number
        )
        commands.append(f"::warning {where}title={title}::{message}")
    return commands
