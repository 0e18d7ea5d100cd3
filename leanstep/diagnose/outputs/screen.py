"""Formats a recording: the JSON object, the terminal screen, one finding in full, CI annotations."""

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
from leanstep.diagnose.explain import page_of
from leanstep.diagnose.findings import Finding, time_text
from leanstep.diagnose.rules import RULES
from leanstep.escape import for_workflow
from leanstep.tape.lines import Line, short_path
from leanstep.tape.marks import OTHER
from leanstep.tape.nodes import missing_private_names

SCHEMA = 1
SCHEMA_FILE = Path(__file__).with_name("schema.json")
# Entries shown without `--all`; five of them fill one screen of 24 lines.
MAX_ENTRIES = 10
# From this share of the step on, the time before the model is reported before any finding.
MUCH_WAITING = 0.3
# From this share of its own time on, the time a step waited for a core is reported.
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
    """Return the object of `--json`; `schema.json` in this folder describes it."""
    ops = sorted(step.num_ops for step in watch.steps)
    return {
        "schema": SCHEMA,
        "leanstep": leanstep.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": "cuda" if watch.accelerator else "cpu",
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
    """Return the time of a rollout and its updates, or None if none was timed."""
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
        """`path:line`, which terminals can open. For a line in a library: the user's line that called it."""
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
        """The line in the library, if the user's line called one."""
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
    """Return the approximate cost in a few words."""
    first = findings[0]
    if first.seconds_range is not None:
        low = sum(f.seconds_range[0] for f in findings if f.seconds_range)
        high = sum(f.seconds_range[1] for f in findings if f.seconds_range)
        return f"{units.about_range(low, high)} on a GPU"
    own = RULES[first.rule].cost
    if own is not None:
        return own(findings)
    if first.work.held_bytes:
        return f"{units.size(sum(f.work.held_bytes for f in findings))} held"
    return time_text(findings)


def entries_of(findings: Sequence[Finding]) -> list[Entry]:
    """Group findings on neighbouring lines; entries are ordered by rank."""
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
        # A trace was recorded elsewhere and describes its own environment.
        return f"leanstep diagnose --trace {script}\n  " + " · ".join(facts)
    device = "cuda" if watch.accelerator else "cpu"
    parts = [
        f"torch {torch.__version__}",
        f"{device}, {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() != 1)}",
    ]
    after = f" after {watch.warmup_done} warm-up" if watch.warmup_done else ""
    parts.append(f"{units.steps(len(watch.steps), watch.iterations)} recorded{after}")
    parts += _times(watch)
    text = f"leanstep diagnose {script}\n  " + " · ".join(parts)
    shares = shares_of(watch)
    if shares:
        text += "\n  " + ", ".join(f"{share:.0%} {name}" for name, share in shares.items())
    return "\n".join([text, *_waiting(watch), *_phase_lines(watch)])


def _times(watch: Any) -> list[str]:
    """Return the time per step, or per iteration if a rollout precedes one or more updates."""
    iteration = watch.iteration_clock.iteration
    if iteration is not None:
        updates = f", {iteration.steps} updates" if iteration.steps > 1 else ""
        return [f"{units.about(watch.iteration_seconds)} per iteration{updates}"]
    if not watch.step_seconds:
        return []
    took = units.about(watch.step_seconds)
    return [f"at most {took} per step (while recording)" if watch.step_is_bound else f"{took} per step"]


def _waiting(watch: Any) -> list[str]:
    """Explain why the wall-clock time is much longer than the time in the header."""
    seconds, waited = watch.iteration_seconds or watch.step_seconds or 0.0, watch.waited_seconds
    if waited < MUCH_LOAD * seconds or not seconds:
        return []
    what = "iteration" if watch.iteration_clock.iteration is not None else "step"
    whole, part = units.about(seconds + waited), units.about(waited)
    return [f"  Wall-clock time: {whole} per {what}. Other processes used the cores for {part} of it."]


def _phase_lines(watch: Any) -> list[str]:
    """Return one line per phase: its share of one iteration."""
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
    """Return the share of each part of the step, from one percent on; empty if no whole step was timed.

    If the script has phases other than updates, the parts are the phases.
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
    code: int = 0,
) -> str:
    """Return the text for the terminal: header, entries, limits. exception, code: how the script ended."""
    entries = entries_of([f for f in findings if not f.baselined])
    visible = entries
    if not show_all:
        visible = [e for e in entries if not all(is_small(f) for f in e.findings)][:MAX_ENTRIES]
    lines = [header(watch, script), *_remarks(watch, exception, code), "", *_verdict(watch, entries)]
    for number, entry in enumerate(visible, 1):
        lines += _entry_lines(number, entry, width)
    lines += _hidden([entry for entry in entries if entry not in visible])
    footer = _footer(watch, sum(f.baselined for f in findings), silenced)
    if footer:
        lines += ["", *footer]
    return "\n".join(line.rstrip() for line in lines)


def _remarks(watch: Any, exception: str | None, code: int) -> list[str]:
    """List the limits of the recording: no steps, no step boundary, no source lines for backward ops."""
    lines = []
    if watch.steps and watch.boundary == "none":
        lines.append("  No optimizer step was seen, so the whole run counts as one step.")
    missing = missing_private_names()
    if missing:
        lines.append(f"  This torch has no {' and no '.join(missing)}: backward ops have no source line.")
    if not watch.steps:
        lines.append(f"  No step was recorded: {_why_no_step(watch, exception, code)}.")
    return lines


def _why_no_step(watch: Any, exception: str | None, code: int) -> str:
    ended = (
        f"raised {exception}" if exception is not None else f"exited with code {code}" if code else "ended"
    )
    if exception == "KeyboardInterrupt" and not watch.warmup_done:
        ran = units.about(watch.ran_seconds)
        return f"interrupted; no optimizer step was seen in {ran} (--warmup 0 records from the start)"
    if watch.warmup_done:
        return f"the script {ended} during warm-up (--warmup 0 records it)"
    return f"the script {ended} {'during' if watch.began else 'before'} its first step"


def _verdict(watch: Any, entries: Sequence[Entry]) -> list[str]:
    """Say first if much time is spent outside the model, or if there are no findings."""
    shares = shares_of(watch)
    waiting = shares.get("before the model", 0.0)
    if watch.phases and shares.get(OTHER, 0.0) >= MUCH_WAITING:
        return [f"  {shares[OTHER]:.0%} is spent outside the model: rewards, preparing batches, logging."]
    if waiting >= MUCH_WAITING:
        workers = "more workers, prefetching" if watch.has_loader else "prefetching"
        return [
            f"  {waiting:.0%} of the step is spent before the first model op: preparing the batch, logging.",
            f"  Start there: {workers} or cheaper preparation.",
        ]
    return ["  No findings."] if watch.steps and not entries else []


def _hidden(entries: Sequence[Entry]) -> list[str]:
    if not entries:
        return []
    rules = Counter(entry.first.rule for entry in entries)
    names = ", ".join(f"{count} × {rule}" for rule, count in rules.most_common())
    if len(entries) == 1:
        return [f"  1 smaller finding: {names} (--all shows it)"]
    return [f"  {len(entries)} smaller findings: {names} (--all shows them)"]


def _footer(watch: Any, baselined: int, silenced: int) -> list[str]:
    lines = [*watch.compiled.lines(), *_not_seen(watch)]
    if baselined:
        lines.append(f"Suppressed by baseline: {baselined}.")
    if silenced:
        lines.append(f"Ignored by comments: {silenced}.")
    return lines


def _entry_lines(number: int, entry: Entry, width: int) -> list[str]:
    first = entry.first
    compiled = "  compiled" if first.compiled else ""
    amount = entry.amount + compiled
    return [
        # Never truncated: terminals can open a complete path.
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
    """Return one entry in full, with six lines of source around each line."""
    parts = []
    for f in entry.findings:
        steps = f"{len(f.counts)} step{'s' * (len(f.counts) != 1)}"
        cost = cost_text([f])
        parts += [
            f"{f.rule}  {f.line.place} in {f.line.function}",
            *_excerpt(f.line),
            *(f"  called from {line.place}: {count}" for line, count in f.callers.most_common(8)),
            f"  what   {f.what}",
            f"  count  {f.amount} per step (in {steps}: {', '.join(map(str, f.counts[:8]))}); phase "
            f"{f.phase}",
            f"  costs  {cost} per step, {f.basis}; confidence {f.confidence}",
            f"  why    {f.why}",
            f"  fix    {f.fix}",
            f"  page   {page_of(f.rule)} in the documentation; here: leanstep diagnose --explain {f.rule}",
            "",
        ]
    return "\n".join(parts).rstrip()


def _excerpt(line: Line, around: int = 3) -> list[str]:
    excerpt = []
    for number in range(max(1, line.number - around), line.number + around):
        text = line.text(number).rstrip()
        if text or number == line.number:
            excerpt.append(f"  {'>' if number == line.number else ' '} {number:4}  {text}")
    return excerpt


def annotation_lines(findings: Sequence[Finding]) -> list[str]:
    """Return one GitHub workflow command per finding, placed at the user's line that called a library."""
    commands = []
    for f in findings:
        if f.baselined:
            continue
        line = f.callers.most_common(1)[0][0] if f.line.library and f.callers else f.line
        title = for_workflow(f"leanstep {f.rule}", property=True)
        message = for_workflow(f"{f.what} {f.fix}")
        # A trace without stacks has no file.
        where = f"file={for_workflow(short_path(line.file), property=True)},line={line.number}," * bool(
            line.number
        )
        commands.append(f"::warning {where}title={title}::{message}")
    return commands
