"""`leanstep diagnose SCRIPT`: run a training script, record a few steps, name the lines that waste them."""

from __future__ import annotations

import difflib
import json as json_text
import sys
import threading
import traceback
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from leanstep.commands import BadInput
from leanstep.commands.terminal import (
    check_writable,
    console,
    print_text,
    progress_line,
    write_json,
)
from leanstep.config import Config, read_config
from leanstep.diagnose import explain as rule_pages
from leanstep.diagnose.findings import Finding
from leanstep.diagnose.outputs import gate, screen
from leanstep.diagnose.rules import RULE_IDS, Limits
from leanstep.diagnose.watch import Watch
from leanstep.escape import for_terminal
from leanstep.files import write_text
from leanstep.tape.lines import USER, judge_code
from leanstep.tape.run import Outcome, Program, Stop, is_first_rank, run_script

_SCRIPT = Annotated[
    str | None, typer.Argument(help="The training script, or a folder with a train.py.", show_default=False)
]
_MODULE = Annotated[
    str | None, typer.Option("-m", metavar="MODULE", help="Run package.module as python -m does.")
]
_ARGS = Annotated[
    list[str] | None, typer.Argument(help="Arguments of the script, after --.", show_default=False)
]
_STEPS = Annotated[int, typer.Option("--steps", min=1, help="Steps to record.")]
_WARMUP = Annotated[int, typer.Option("--warmup", min=0, help="Steps to drop first; the last one is timed.")]
_JSON = Annotated[
    str | None, typer.Option("--json", help="Write the findings as JSON; - for standard output.")
]
_HTML = Annotated[str | None, typer.Option("--html", help="Write or extend a report page.")]
_SARIF = Annotated[
    str | None, typer.Option("--sarif", metavar="FILE", help="Write SARIF 2.1.0, for code scanning.")
]
_FAIL = Annotated[
    str | None, typer.Option("--fail-on", help="Exit 1 when one of these rules fires: ids, or any.")
]
_BASELINE = Annotated[str | None, typer.Option("--baseline", help="Known findings, which do not fail.")]
_WRITE = Annotated[bool, typer.Option("--write-baseline", help="Write the findings to the --baseline file.")]
_ANNOTATE = Annotated[bool, typer.Option("--annotations", help="Print one ::warning line per finding.")]
_EXPLAIN = Annotated[
    str | None,
    typer.Option("--explain", metavar="all|RULE|N", help="List all rules; print a rule or entry N in full."),
]
_ALL = Annotated[bool, typer.Option("--all", help="Show small findings as well.")]
_SELECT = Annotated[
    str | None, typer.Option("--select", metavar="RULES", help=f"Only these: {', '.join(RULE_IDS)}.")
]
_IGNORE = Annotated[str | None, typer.Option("--ignore", metavar="RULES", help="Not these.")]
_DEVICE = Annotated[
    str | None,
    typer.Option("--device", help="Predict each finding's gain on this simulated GPU, such as h100."),
]
_TRACE = Annotated[
    str | None, typer.Option("--trace", metavar="FILE", help="Judge this torch.profiler trace.")
]


@dataclass(frozen=True)
class _Rules:
    """The rules that fail the run, and those that are shown or left out; empty: none named."""

    fail_on: tuple[str, ...]
    select: tuple[str, ...]
    ignore: tuple[str, ...]

    @classmethod
    def parse(cls, fail_on: str | None, select: str | None, ignore: str | None, config: Config) -> _Rules:
        """What was typed; else what pyproject.toml says."""
        return cls(
            fail_on=config.fail_on if fail_on is None else _checked("--fail-on", gate.parse_rules, fail_on),
            select=config.select if select is None else _checked("--select", gate.parse_rules, select),
            ignore=config.ignore if ignore is None else _checked("--ignore", gate.parse_rules, ignore),
        )


@dataclass(frozen=True)
class _Baseline:
    """The file of known findings, read or written."""

    path: str | None
    write: bool

    def check(self) -> None:
        if self.write and self.path is None:
            raise BadInput("--write-baseline: expected --baseline FILE to say where")
        if self.path is not None and not self.write and not Path(self.path).is_file():
            raise BadInput(f"--baseline: no such file: {self.path} (--write-baseline makes it)")
        if self.write:
            check_writable(self.path, "--baseline")

    def apply(self, findings: list[Finding]) -> None:
        """Mark the findings that are known; when writing, all of them."""
        if self.path is None:
            return
        if not self.write:
            _checked("--baseline", lambda file: gate.mark_baselined(findings, file), self.path)
            return
        text = json_text.dumps(gate.baseline_of(findings), indent=1, ensure_ascii=False) + "\n"
        write_text(self.path, text, "--baseline")
        for finding in findings:
            finding.baselined = True


@dataclass(frozen=True)
class _Files:
    """Where the report goes besides the screen."""

    json: str | None
    html: str | None
    sarif: str | None

    def check(self) -> None:
        for option in ("json", "html", "sarif"):
            check_writable(getattr(self, option), f"--{option}")

    def write(self, report: dict[str, Any], findings: list[Finding]) -> None:
        from leanstep.diagnose.outputs.sarif import as_sarif

        write_json(report, self.json)
        if self.html is not None:
            _write_html(self.html, report, findings)
        if self.sarif is not None:
            write_json(as_sarif(findings), self.sarif)


def diagnose(
    script: _SCRIPT = None,
    args: _ARGS = None,
    module: _MODULE = None,
    steps: _STEPS = 3,
    warmup: _WARMUP = 1,
    json: _JSON = None,
    html: _HTML = None,
    sarif: _SARIF = None,
    fail_on: _FAIL = None,
    baseline: _BASELINE = None,
    write_baseline: _WRITE = False,
    annotations: _ANNOTATE = False,
    explain: _EXPLAIN = None,
    show_all: _ALL = False,
    select: _SELECT = None,
    ignore: _IGNORE = None,
    device: _DEVICE = None,
    trace: _TRACE = None,
) -> None:
    """Name the lines that waste a training step: run SCRIPT, record a few steps, rank what they cost, stop.

    Exit code: the script's own; 1 when a rule of --fail-on fires; 2 for bad input.

    Examples: leanstep diagnose train.py --steps 3 -- --batch-size 8

    leanstep diagnose --trace trace.json.gz

    leanstep diagnose --explain all
    """
    if explain in ("all", *RULE_IDS) and not (script or module or trace):
        _explain_rules(str(explain), json)
        return
    entry = _entry_number(explain)
    if trace is not None:
        _check_trace_options(
            trace, {"SCRIPT": script, "-m": module, "--device": device, "--steps": steps != 3,
                    "--warmup": warmup != 1},
        )  # fmt: skip
    program, arguments = (Program(trace), []) if trace else _program(script, args or [], module)
    config = read_config()
    rules = _Rules.parse(fail_on, select, ignore, config)
    limits = Limits(config.thresholds)
    known = _Baseline(baseline, write_baseline)
    known.check()
    files = _Files(json, html, sarif)
    files.check()
    simulated = _device(device, program)

    if trace is not None:
        watch, outcome = _read_trace(trace, limits), Outcome()
    else:
        watch = Watch(steps, warmup, limits, timed_warmup=True, on_done=_raise_stop)
        outcome = _run(program, arguments, watch, json)
    if not is_first_rank():
        raise typer.Exit(outcome.code)
    findings, silenced = gate.without_ignored(gate.selected(watch.findings(), rules.select, rules.ignore))
    known.apply(findings)
    report = screen.as_json(watch, findings, str(program), arguments, outcome.code, outcome.exception)
    _show(watch, findings, program, outcome, silenced, show_all, json)
    if entry is not None:
        _explain(findings, entry, json)
    if annotations:
        for line in screen.annotation_lines(findings):
            console(json).print(line, markup=False, highlight=False, soft_wrap=True)
    if simulated is not None:
        from leanstep.commands.on_device import add_gains

        _say("\n" + add_gains(report, findings, program, arguments, simulated), json)
    files.write(report, findings)
    raise typer.Exit(_exit_code(outcome, watch, findings, rules.fail_on))


def _program(script: str | None, args: list[str], module: str | None) -> tuple[Program, list[str]]:
    if module is not None:
        # What is where the script would be is an argument of the module.
        return Program(module, module=True), [*([script] if script is not None else []), *args]
    if script is None:
        raise BadInput("SCRIPT: expected a training script, a folder with a train.py, or -m package.module")
    return Program.find(script), args


def _read_trace(path: str, limits: Limits) -> Any:
    from leanstep.diagnose.traces.trace_report import TraceRun

    return _checked("--trace", lambda file: TraceRun(file, limits), path)


def _check_trace_options(trace: str, unused: dict[str, Any]) -> None:
    """A trace is a run that is over: refuse what would do nothing."""
    for option, value in unused.items():
        if value:
            raise BadInput(f"{option}: does not fit --trace, which runs no script")
    if trace.endswith(".py"):
        raise BadInput(f"--trace: expected trace.json or trace.json.gz of torch.profiler, got {trace}")


def _device(name: str | None, program: Program) -> Any:
    if name is None:
        return None
    from leanstep.rehearse.answers import fake_device
    from leanstep.rehearse.devices import device_named
    from leanstep.tape.children import temporary_folder

    try:
        device = device_named(name)
    except ValueError as error:
        # It names the argument.
        raise BadInput(f"--{error}") from None
    if program.module:
        raise BadInput("--device: expected a script; a rehearsal takes no -m")
    try:
        with temporary_folder() as folder:
            fake_device.library(folder)  # now, not after the diagnosis
    except fake_device.RehearsalError as error:
        raise BadInput(f"--device: {error}") from None
    return device


def _checked(option: str, parse: Any, value: Any) -> Any:
    try:
        return parse(value)
    except ValueError as error:
        raise BadInput(f"{option}: {error}") from None


def _raise_stop() -> None:
    raise Stop


def _run(program: Program, args: list[str], watch: Watch, json: str | None) -> Outcome:
    # With --json - standard output belongs to the JSON object: what the script prints goes to standard error.
    redirected = redirect_stdout(sys.stderr) if json == "-" else nullcontext()
    with redirected, progress_line("diagnose", lambda: _progress(watch)):
        return run_script(program, args, watch)


def _progress(watch: Watch) -> str:
    """What is shown while the script runs: how far the recording is, or where the script is without one."""
    if watch.steps:
        return f"{len(watch.steps)} of {watch.num_steps} steps recorded"
    if watch.warmup_done:
        return f"warm-up, {watch.warmup_done} of {watch.num_warmup} steps"
    frames = traceback.walk_stack(sys._current_frames().get(threading.main_thread().ident or 0))
    where = next(
        (f"{Path(file).name}:{number}" for file, number in
         ((frame.f_code.co_filename, number) for frame, number in frames) if judge_code(file, "") & USER),
        None,
    )  # fmt: skip
    return f"no step yet{f', at {where}' if where else ''}; Ctrl-C shows what was seen"


def _say(text: str, json: str | None) -> None:
    if text:
        print_text(console(json), for_terminal(text))


def _show(
    watch: Any, findings: list[Finding], program: Program, outcome: Outcome, silenced: int, show_all: bool,
    json: str | None,
) -> None:  # fmt: skip
    target = console(json)
    width = max(target.width, 60) if target.is_terminal else min(target.width, screen.WIDTH)
    text = screen.screen(
        watch, findings, str(program), silenced=silenced, show_all=show_all, width=width,
        exception=outcome.exception, code=outcome.code,
    )  # fmt: skip
    _say(text, json)


def _explain_rules(name: str, json: str | None) -> None:
    """Print one rule in full, or the list of all."""
    check_writable(json, "--json")
    target = console(json)
    if name != "all":
        print_text(target, rule_pages.as_markdown(name).rstrip("\n"))
    else:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("rule", "fires when", "do"):
            table.add_column(column, no_wrap=column == "rule")
        for entry in map(rule_pages.as_dict, RULE_IDS):
            table.add_row(entry["rule"], entry["fires_when"], entry["short_fix"])
        target.print(table, markup=False)
    names = RULE_IDS if name == "all" else (name,)
    write_json({"rules": [rule_pages.as_dict(rule) for rule in names]}, json)


def _entry_number(text: str | None) -> int | None:
    """The number of --explain; rules need no script."""
    if text is None or (text.isdecimal() and int(text) > 0):
        return None if text is None else int(text)
    if text in ("all", *RULE_IDS):
        raise BadInput(f"--explain: {text} needs no script: leanstep diagnose --explain {text}")
    close = difflib.get_close_matches(text, RULE_IDS, n=1)
    meant = f"; did you mean {close[0]}?" if close else ""
    raise BadInput(f"--explain: expected all, a rule or the number of an entry, got {text!r}{meant}")


def _explain(findings: list[Finding], number: int, json: str | None) -> None:
    """Print one entry of the screen in full."""
    entries = screen.entries_of([f for f in findings if not f.baselined])
    if not entries:
        raise BadInput("--explain: no findings")
    if number > len(entries):
        raise BadInput(f"--explain: expected 1 to {len(entries)}, got {number}")
    _say("\n" + screen.explain(entries[number - 1]), json)


def _write_html(path: str, report: dict[str, Any], findings: list[Finding]) -> None:
    from leanstep.report import excerpts, page

    shown = []
    for finding, entry in zip(findings, report["findings"], strict=True):
        line = finding.line
        if not line.readable:
            entry = {**entry, "source": excerpts.without_file(line.number, entry["code"])}
        elif line.library:
            entry = {**entry, "source": excerpts.excerpt(line.file, line.number, entry["code"])}
        shown.append(entry)
    page.add_section(path, "diagnose", {**report, "findings": shown})


def _exit_code(outcome: Outcome, watch: Any, findings: list[Finding], rules: tuple[str, ...]) -> int:
    if outcome.code:
        return outcome.code
    if rules and not watch.steps:
        raise BadInput(
            f"--fail-on: no step was recorded after {watch.num_warmup} of warm-up; nothing can be said"
        )
    trained = watch.boundary != "none" or any(step.backward_runs for step in watch.steps)
    failed = gate.failures(findings, rules)
    if failed:
        names = ", ".join(sorted({finding.rule for finding in failed}))
        print(
            f"leanstep: --fail-on: {len(failed)} finding{'s' * (len(failed) != 1)} ({names})", file=sys.stderr
        )
        return 1
    if rules and not trained:
        raise BadInput(
            "--fail-on: the script ran no training step (no optimizer step, no backward); nothing can be said"
        )
    return 0
