"""`leanstep diagnose SCRIPT`: run a training script, record a few steps, name the lines that waste them."""

from __future__ import annotations

import json as json_text
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from leanstep.commands import BadInput
from leanstep.commands.terminal import (
    MarkdownOption,
    add_markdown,
    check_writable,
    console,
    print_text,
    write_json,
)
from leanstep.config import Config, read_config
from leanstep.diagnose import rule_list
from leanstep.diagnose.outputs import gate, screen
from leanstep.diagnose.step_records import RULE_IDS, Finding, Limits
from leanstep.diagnose.watch import Watch
from leanstep.escape import for_terminal
from leanstep.files import write_text
from leanstep.script.run import Outcome, Program, Stop, is_first_rank, run_script

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
    str | None, typer.Option("--explain", metavar="N|RULE", help="Print entry N, or a rule, in full.")
]
_ALL = Annotated[bool, typer.Option("--all", help="Show small findings as well.")]
_LIMIT = Annotated[
    list[str] | None,
    typer.Option("--threshold", metavar="ID.NAME=N", help="id.name=value, such as op-storm.repeats=64."),
]
_RUN_ON = Annotated[bool, typer.Option("--run-on", help="Let the script run to its end after the recording.")]
_SELECT = Annotated[
    str | None, typer.Option("--select", metavar="RULES", help=f"Only these: {', '.join(RULE_IDS)}.")
]
_IGNORE = Annotated[str | None, typer.Option("--ignore", metavar="RULES", help="Not these.")]
_ON = Annotated[
    str | None, typer.Option("--on", help="Predict each finding's gain on this device, such as h100.")
]
_TRACE = Annotated[
    str | None,
    typer.Option("--trace", metavar="FILE", help="Judge this torch.profiler trace; a second one: compare."),
]

_SOURCE = Annotated[
    list[str] | None,
    typer.Option(
        "--source",
        metavar="DIR",
        help="With --trace: show source lines of this folder too (besides the working directory's and the "
        "trace's own).",
    ),
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
    markdown: str | None

    def check(self) -> None:
        for option in ("json", "html", "sarif", "markdown"):
            check_writable(getattr(self, option), f"--{option}")

    def write(self, report: dict[str, Any], findings: list[Finding], title: str) -> None:
        from leanstep.diagnose.outputs.sarif import as_markdown, as_sarif

        write_json(report, self.json)
        if self.html is not None:
            _write_html(self.html, report, findings)
        if self.sarif is not None:
            write_json(as_sarif(findings), self.sarif)
        add_markdown(as_markdown(findings, title), self.markdown)


def diagnose(
    script: _SCRIPT = None,
    args: _ARGS = None,
    module: _MODULE = None,
    steps: _STEPS = 3,
    warmup: _WARMUP = 1,
    json: _JSON = None,
    html: _HTML = None,
    sarif: _SARIF = None,
    markdown: MarkdownOption = None,
    fail_on: _FAIL = None,
    baseline: _BASELINE = None,
    write_baseline: _WRITE = False,
    annotations: _ANNOTATE = False,
    explain: _EXPLAIN = None,
    show_all: _ALL = False,
    threshold: _LIMIT = None,
    run_on: _RUN_ON = False,
    select: _SELECT = None,
    ignore: _IGNORE = None,
    on: _ON = None,
    trace: _TRACE = None,
    source: _SOURCE = None,
) -> None:
    """Name the lines that waste a training step: run SCRIPT, record a few steps, rank what they cost, stop.

    Exit code: the script's own; 1 when a rule of --fail-on fires; 2 for bad input.

    Examples: leanstep diagnose train.py --steps 3 -- --batch-size 8

    leanstep diagnose diff before.json after.json --threshold 0.1 (exit 1: a finding is new or has grown)

    leanstep diagnose --trace trace.json.gz; leanstep diagnose --trace before.json after.json (exit 1: slower)
    """
    if _is_rule_alone(explain, script or module or trace):
        _say(rule_list.as_markdown(str(explain)).rstrip("\n"), json)
        return
    if script == "diff" and not Path(script).exists():
        raise typer.Exit(_diff(args or [], threshold or [], json))
    if trace is not None:
        running = {
            "-m": module, "--on": on, "--run-on": run_on, "--steps": steps != 3, "--warmup": warmup != 1,
        }  # fmt: skip
        judging = {
            "--html": html, "--sarif": sarif, "--markdown": markdown, "--fail-on": fail_on,
            "--baseline": baseline, "--annotations": annotations, "--explain": explain, "--select": select,
            "--ignore": ignore,
        }  # fmt: skip
        _check_trace_options(running, judging, [trace, *([script] if script else []), *(args or [])])
        if script is not None:
            raise typer.Exit(_compare_traces(trace, script, threshold or [], show_all, json))
    elif source:
        raise BadInput("--source: expected --trace beside it")
    program, arguments = (Program(trace), []) if trace else _program(script, args or [], module)
    config = read_config()
    rules = _Rules.parse(fail_on, select, ignore, config)
    limits = _checked("--threshold", Limits.parse, [*config.thresholds, *(threshold or [])])
    entry = _entry_number(explain)
    known = _Baseline(baseline, write_baseline)
    known.check()
    files = _Files(json, html, sarif, markdown)
    files.check()
    device = _device(on, program)

    if trace is not None:
        watch, outcome = _read_trace(trace, limits, source or []), Outcome()
    else:
        watch = Watch(steps, warmup, limits, timed_warmup=True, on_done=None if run_on else _raise_stop)
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
    if device is not None:
        from leanstep.commands.on_device import add_gains

        _say("\n" + add_gains(report, findings, program, arguments, device), json)
    files.write(report, findings, str(program))
    raise typer.Exit(_exit_code(outcome, watch, findings, rules.fail_on))


def _program(script: str | None, args: list[str], module: str | None) -> tuple[Program, list[str]]:
    if module is not None:
        # What is where the script would be is an argument of the module.
        return Program(module, module=True), [*([script] if script is not None else []), *args]
    if script is None:
        raise BadInput("SCRIPT: expected a training script, a folder with a train.py, or -m package.module")
    return Program.find(script), args


def _read_trace(path: str, limits: Limits, folders: list[str]) -> Any:
    from leanstep.diagnose.traces.trace_report import TraceRun

    for folder in folders:
        if not Path(folder).is_dir():
            raise BadInput(f"--source: no such folder: {folder}")
    sources = tuple(Path(folder) for folder in folders)
    return _checked("--trace", lambda file: TraceRun(file, limits, sources), path)


def _check_trace_options(running: dict[str, Any], judging: dict[str, Any], traces: list[str]) -> None:
    """A trace is a run that is over, and a comparison has no findings: refuse what would do nothing."""
    if len(traces) > 2:
        raise BadInput(f"--trace: expected one trace, or two to compare, got {len(traces)}")
    for option, value in running.items():
        if value:
            raise BadInput(f"{option}: does not fit --trace, which runs no script")
    for path in traces:
        if path.endswith(".py"):
            raise BadInput(f"--trace: expected trace.json or trace.json.gz of torch.profiler, got {path}")
    for option, value in judging.items():
        if value and len(traces) == 2:
            raise BadInput(f"{option}: does not fit two traces; --json, --threshold and --all do")


def _compare_traces(before: str, after: str, threshold: list[str], show_all: bool, json: str | None) -> int:
    from leanstep.diagnose.traces import trace_compare

    check_writable(json, "--json")
    allowed = _share(threshold, trace_compare.THRESHOLD)
    tables = [_checked("--trace", trace_compare.read_table, path) for path in (before, after)]
    comparison = _checked("--trace", lambda pair: trace_compare.compare(pair[0], pair[1], allowed), tables)
    _say(comparison.text(show_all), json)
    write_json(comparison.as_dict(), json)
    return 1 if comparison.is_worse else 0


def _device(name: str | None, program: Program) -> Any:
    if name is None:
        return None
    from leanstep.rehearse.answers import fake_device
    from leanstep.rehearse.devices import device_named

    device = _checked("--on", device_named, name)
    if program.module:
        raise BadInput("--on: expected a script; a rehearsal takes no -m")
    try:
        fake_device.library()  # now, not after the diagnosis
    except fake_device.RehearsalError as error:
        raise BadInput(f"--on: {error}") from None
    return device


def _checked(option: str, parse: Any, value: Any) -> Any:
    try:
        return parse(value)
    except ValueError as error:
        raise BadInput(f"{option}: {error}") from None


def _raise_stop() -> None:
    raise Stop


def _run(program: Program, args: list[str], watch: Watch, json: str | None) -> Outcome:
    if json != "-":
        return run_script(program, args, watch)
    # Standard output belongs to the JSON object: what the script prints goes to standard error.
    with redirect_stdout(sys.stderr):
        return run_script(program, args, watch)


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
        exception=outcome.exception,
    )  # fmt: skip
    _say(text, json)


def _is_rule_alone(explain: str | None, target: str | None) -> bool:
    return explain in RULE_IDS and target is None


def _entry_number(text: str | None) -> int | None:
    """The number of --explain; a rule needs no script."""
    if text is None or (text.isdecimal() and int(text) > 0):
        return None if text is None else int(text)
    if text in RULE_IDS:
        raise BadInput(f"--explain: {text} is a rule: leanstep diagnose --explain {text}, without a script")
    raise BadInput(f"--explain: expected the number of an entry or a rule, got {text!r}")


def _explain(findings: list[Finding], number: int, json: str | None) -> None:
    """Print one entry of the screen in full."""
    entries = screen.entries_of([f for f in findings if not f.baselined])
    if not entries:
        raise BadInput("--explain: no findings")
    if number > len(entries):
        raise BadInput(f"--explain: expected 1 to {len(entries)}, got {number}")
    _say("\n" + screen.explain(entries[number - 1]), json)


def _diff(paths: list[str], threshold: list[str], json: str | None) -> int:
    from leanstep.diagnose.outputs import report_diff

    if len(paths) != 2:
        raise BadInput(f"diff: expected two reports of --json, got {len(paths)}")
    allowed = _share(threshold, report_diff.THRESHOLD)
    before, after = (_checked("diff", report_diff.read_report, path) for path in paths)
    changes = report_diff.compare(before, after, allowed)
    for change in changes:
        _say(str(change), json)
    if not changes:
        console(json).print("No finding is new, gone, grown or shrunk.", markup=False)
    write_json({"threshold": allowed, "changes": [change.as_dict() for change in changes]}, json)
    return 1 if report_diff.is_worse(changes) else 0


def _share(threshold: list[str], default: float) -> float:
    """The last --threshold of a comparison."""
    try:
        allowed = float(threshold[-1]) if threshold else default
    except ValueError:
        allowed = -1.0
    if not allowed >= 0:
        raise BadInput(f"--threshold: expected a share such as 0.1, got {threshold[-1]!r}")
    return allowed


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
