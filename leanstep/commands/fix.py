"""`leanstep fix`: mechanical fixes of findings, each proven and measured on a copy."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from rich.console import Console

from leanstep.commands import BadInput
from leanstep.commands.terminal import (
    JsonOption,
    check_writable,
    console,
    print_text,
    progress_bar,
    say_above,
    write_json,
)
from leanstep.units import ratio, seconds


def fix(
    script: Annotated[str, typer.Argument(help="The training script, or a folder with a train.py.")],
    args: Annotated[list[str] | None, typer.Argument(help="Arguments of the script, after --.")] = None,
    select: Annotated[
        str | None,
        typer.Option("--select", metavar="RULES", help="Only repairs of these rules: ids, or any."),
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Apply what is offered.")] = False,
    budget: Annotated[
        float,
        typer.Option("--budget", help="Time limit in seconds; fixes not verified by then are skipped."),
    ] = 600.0,
    json: JsonOption = None,
) -> None:
    """Apply mechanical fixes: prints a diff, and the proof and measurement of each; --write applies them.

    A fix is tried on a copy. It is offered when its finding is gone, the update is the same (as leanstep
    prove defines it) and a step is not slower. The rest of the file is not modified. What is printed or
    logged is not compared. Files outside the script's project are never written.

    Runs the script many times: minutes, at most --budget seconds.

    Example: leanstep fix train.py --select unbatched-optimizer -- --batch-size 8
    """
    from leanstep.diagnose.outputs.gate import parse_rules
    from leanstep.tape.run import Program

    path = Program.find(script).file
    try:
        rules = parse_rules(select) if select is not None else ()
    except ValueError as error:
        raise BadInput(f"--select: {error}") from None
    if budget <= 0:
        raise BadInput(f"--budget: expected seconds above 0, got {budget}")
    check_writable(json, "--json")
    from leanstep.fix.offers import Settings, find_fixes
    from leanstep.measure.timing import environment

    out, start = console(json), time.monotonic()

    def show(offer: Any) -> None:
        passed = f"{time.monotonic() - start:.0f} s"
        line = f"fix: {passed}: {offer.findings[0].rule}: proven, {_time_words(offer.bench)}"
        say_above(out if out.is_terminal else Console(stderr=True), line)

    with progress_bar(out, "fix", plain_lines=True) as report:
        fixes = find_fixes(
            path,
            args or [],
            Settings(rules, timing_s=min(5.0, budget / 20), budget_s=budget, fork=True),
            lambda what: report(f"{what} (--budget {budget:.0f} s)", 0.0),
            show,
        )
    if write:
        fixes.write()
    for line in _fix_lines(fixes, write):
        # A diff that is folded is none.
        if line.startswith("--- "):
            out.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print_text(out, line)
    write_json({**environment(), **fixes.as_dict(), "written": write and bool(fixes.changed)}, json)


def _fix_lines(fixes: Any, write: bool) -> list[str]:
    from leanstep.fix.offers import NOT_PROVEN, PROVEN
    from leanstep.tape.lines import short_path

    lines = []
    for offer in fixes.offers:
        first, *others = offer.findings
        more = f" and {len(others)} more" if others else ""
        lines.append(f"{first.rule}  {_where(first)}{more}: {offer.title}")
        lines.append(f"    proven: {offer.proof.sentence()}")
        lines.append(f"    measured: {_measured_words(offer.bench)}")
    if fixes.together is not None:
        lines.append(
            f"all together: {_measured_words(fixes.together.bench)}; {fixes.together.proof.sentence()}"
        )
    if fixes.changed:
        lines += ["", fixes.diff().rstrip("\n"), ""]
    for finding, why in fixes.refused:
        lines.append(f"not changed: {finding.rule}  {_where(finding)}: {why}")
    if not fixes.offers:
        lines.append("Nothing to fix mechanically." if fixes.refused else "No findings: nothing to fix.")
    else:
        lines += [f"The proof covers {PROVEN}.", f"It does not cover {NOT_PROVEN}."]
        files = ", ".join(short_path(str(path)) for path in fixes.changed)
        lines.append(f"Applied to {files}." if write else f"--write applies this to {files}.")
    return lines


def _where(finding: Any) -> str:
    from leanstep.fix.offers import users_line
    from leanstep.tape.lines import short_path

    line = users_line(finding)
    return f"{short_path(line.file)}:{line.number}"


def _time_words(bench: Any) -> str:
    before, after = bench.before.median_s, bench.after.median_s
    return f"step {seconds(before)} → {seconds(after)} ({ratio(bench.time_ratio)})"


def _measured_words(bench: Any) -> str:
    before, after = bench.before, bench.after
    words = [_time_words(bench)]
    for name, unit in (("host_syncs", "host syncs"), ("ops", "ops")):
        old, new = getattr(before, name), getattr(after, name)
        if old is not None and new is not None and old != new:
            words.append(f"{unit} {old:,} → {new:,}")
    return ", ".join(words)
