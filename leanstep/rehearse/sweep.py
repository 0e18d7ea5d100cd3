"""`rehearse --sweep name=v1,v2` and `name=fit`: an argument of the user's script, one rehearsal per value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from leanstep.files import BadInput
from leanstep.units import gib, ms

Data = dict[str, Any]
FIT = "fit"
# The search for the largest value that fits ends here; for the first one that the script takes, there.
_LARGEST, _FIRST = 1 << 24, 64
_FRAGMENTATION = "fragmentation"


def parse(text: str) -> tuple[str, list[str] | None]:
    """Return the name and its values; None: search for the largest value that fits."""
    name, equals, values = text.partition("=")
    listed = [value for value in values.split(",") if value]
    if not name.strip("-") or not equals or not listed:
        raise BadInput(f"--sweep: expected NAME=VALUE,VALUE or NAME={FIT}, got {text!r}")
    return name, None if listed == [FIT] else listed


def with_value(args: Sequence[str], name: str, value: str) -> tuple[str, ...]:
    """Replace the argument's value where it is given (`--name v`, `--name=v`, `name=v`), else append it."""
    out = list(args)
    at = _given(args, name)
    if at is None:
        return (*out, name if name.startswith("-") else f"--{name}", value)
    key, equals, _ = out[at].partition("=")
    out[at] = f"{key}={value}" if equals else value
    return tuple(out)


def _given(args: Sequence[str], name: str) -> int | None:
    """Return the index of the word that holds the argument's value."""
    wanted = name.strip("-").replace("_", "-")
    for i, word in enumerate(args):
        key, equals, _ = word.partition("=")
        if key.lstrip("-").replace("_", "-") == wanted:
            if equals:
                return i
            if word.startswith("-") and i + 1 < len(args):
                return i + 1
    return None


def start(args: Sequence[str], name: str) -> int:
    """Return where a search begins: at the value that the command line has, which the script takes."""
    at = _given(args, name)
    text = args[at].partition("=")[2] or args[at] if at is not None else ""
    return max(1, int(text)) if text.isdecimal() else 1


def run(
    values: list[str] | None, judge: Callable[[str], Data], show: Callable[[Data], None], first: int = 1
) -> list[Data]:
    """Rehearse each value, or search for the largest that fits from `first` on, and return a row per value.

    judge: rehearses one value and returns its report. show: called with each row.
    """
    rows: dict[str, Data] = {}
    rejected: set[int] = set()  # stopped by the script itself, not by memory

    def row(value: str) -> Data:
        if value not in rows:
            report = judge(value)
            rows[value] = _row(value, report)
            if values is None and report["memory"]["fits"] and not rows[value]["fits"]:
                rejected.add(int(value))
            show(rows[value])
        return rows[value]

    if values is not None:
        return [row(value) for value in values]
    low, high, guess = 0, 0, first
    while not high or high - low > 1:
        if row(str(guess))["fits"]:
            low = guess
        elif guess not in rejected:
            high = guess
        if guess >= _LARGEST or high == 1:
            break
        if rejected:
            # The script takes some values only, such as the divisors of a batch: double the one that it took.
            guess = 2 * (low or guess)
            if str(guess) in rows or (high and guess >= high) or (not low and guess > _FIRST):
                break
        else:
            guess = _next(low, high, [rows[key] for key in rows])
    return sorted(rows.values(), key=lambda entry: int(entry["value"]))


def _next(low: int, high: int, rows: Sequence[Data]) -> int:
    """Guess where the memory is full from the two largest values that fit, within the known bounds."""
    fits = sorted((int(r["value"]), r["needed_bytes"]) for r in rows if r["fits"])[-2:]
    guess = low * 2 if not high else (low + high) // 2
    if len(fits) == 2 and fits[1][1] > fits[0][1]:
        per = (fits[1][1] - fits[0][1]) / (fits[1][0] - fits[0][0])
        capacity = max(r["capacity_bytes"] for r in rows)
        guess = low + int((capacity - fits[1][1]) / per)
        if high and high - low > 8 and not low < guess < high:
            guess = (low + high) // 2
    return max(low + 1, min(guess, high - 1 if high else _LARGEST))


def _row(value: str, report: Data) -> Data:
    memory, time = report["memory"], report["time"]
    why = report["refused"]["reason"] if report["refused"] is not None else ""
    # Enough memory in total, but not in one piece: a larger value may fit.
    fragmented = not memory["fits"] and (
        memory["allocated_bytes"] + memory["context_bytes"] <= memory["capacity_bytes"]
    )
    if not memory["fits"]:
        why = f"does not fit at {memory['failed_line']}"
        if fragmented:
            why += f"; {_FRAGMENTATION}" + (f", {memory['advice']}" if memory["advice"] else "")
    elif not why and time is None:
        why = f"the script ended after {report['steps']} steps"
    return {
        "value": value,
        "fits": memory["fits"] and not why,
        "ran": not memory["fits"] or not why,
        "fragmented": fragmented,
        "allocated_bytes": memory["allocated_bytes"],
        "needed_bytes": memory["reserved_bytes"] + memory["context_bytes"],
        "capacity_bytes": memory["capacity_bytes"],
        "step_ms": time["step_ms"] if time is not None else None,
        "interval_ms": time["interval_ms"] if time is not None else None,
        "reason": why,
    }


def conclusion(name: str, rows: Sequence[Data]) -> str:
    """Say which value is the largest that fits, and what stopped the next two that were tried.

    Where fragmentation stopped the next one, a larger value may fit: the search says only what it tried.
    """
    fits = [row for row in rows if row["fits"]]
    beyond = [row for row in rows if not fits or int(row["value"]) > int(fits[-1]["value"])]
    if not any(row["ran"] for row in rows):
        return f"no value of {name} could be rehearsed; {beyond[0]['value']}: {beyond[0]['reason']}"
    if fits and beyond and beyond[0]["fragmented"]:
        why = beyond[0]["reason"].partition("; ")[2]
        return (
            f"{name}: {fits[-1]['value']} fits, {beyond[0]['value']} does not: {why}\n"
            "  no larger value that was tried fits; another one may"
        )
    why = "".join(f"; {row['value']}: {row['reason']}" for row in beyond[:2])
    return f"the largest {name} that fits: {fits[-1]['value']}{why}" if fits else f"no {name} fits{why}"


def heading(name: str, device: str) -> str:
    return f"predicted on {device}\n{name:>16s}  {'allocated':>12s}  {'needed':>12s}  {'per step':>10s}"


def line(row: Data) -> str:
    """Return a row of the table."""
    step = ms(row["step_ms"]) if row["step_ms"] is not None else "-"
    figures = f"{gib(row['allocated_bytes']):>12s}  {gib(row['needed_bytes']):>12s}  {step:>10s}"
    return f"{row['value']:>16s}  {figures}  {row['reason'] or 'fits'}"
