"""`leanstep prove`: fast paths against fp64, and the updates that your own scripts make.

leanstep prove CASE...                        registered cases; --drift trains pairs of runs
leanstep prove before.py after.py             do two scripts make the same update?
leanstep prove train.py --same A --same B     does one script, cut in two ways?
leanstep prove train.py --invariant           does a row keep its bits in other company?
leanstep fix train.py                         repairs of findings, each proven on a copy
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from leanstep.commands import BadInput, FellShort
from leanstep.commands.terminal import (
    HtmlOption,
    JsonOption,
    MarkdownOption,
    Outputs,
    case_names,
    check_implementations,
    check_writable,
    console,
    kept_for_json,
    parse_device,
    parse_dtypes,
    parse_ranks,
    progress_bar,
    select_cases,
    split_list,
    split_scripts,
    write_json,
)
from leanstep.units import ratio, seconds

# Steps of a case's training runs under --drift, and updates of a script that are compared.
DRIFT_STEPS, SCRIPT_STEPS = 60, 2


def prove(
    cases: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CASE]... | BEFORE.py AFTER.py [-- ARGS]",
            help="Two scripts that should make the same update, or cases to prove (all by default): "
            f"{', '.join(case_names())}.",
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp64,fp32,fp16,bf16; each case's own by default.")
    ] = None,
    impl: Annotated[
        str | None, typer.Option(help="Only these implementations; every fast path by default.")
    ] = None,
    drift: Annotated[
        bool, typer.Option("--drift", help="Also train pairs of runs and test the loss for a shift.")
    ] = False,
    runs: Annotated[int, typer.Option(help="Paired runs per variant under --drift.")] = 8,
    steps: Annotated[
        int | None, typer.Option(help="Updates of a script (2), or steps per run under --drift (60).")
    ] = None,
    same: Annotated[
        list[str] | None,
        typer.Option("--same", metavar="ARGS", help="Arguments of one cut of the batch; give two or more."),
    ] = None,
    invariant: Annotated[
        bool, typer.Option("--invariant", help="Name the first line that gives a row other bits.")
    ] = False,
    ranks: Annotated[
        str | None,
        typer.Option(
            "--ranks", metavar="N,N", help="Processes, as torchrun starts them; several with --same."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda[:N].")] = "cpu",
    json: JsonOption = None,
    html: HtmlOption = None,
    markdown: MarkdownOption = None,
) -> None:
    """Show that a fast path, or a changed script, is no further from the fp64 truth than the code before it.

    Example: leanstep prove before.py after.py --steps 3 -- --batch-size 8
    """
    scripts, script_args = split_scripts(cases)
    if steps is not None and steps < 1:
        raise BadInput(f"--steps: expected at least 1, got {steps}")
    outputs = Outputs(json, html, markdown)
    if invariant:
        _prove_invariant(scripts, script_args, outputs)
        return
    counts = parse_ranks(ranks)
    if len(scripts) == 2 and not same:
        if len(counts) > 1:
            raise BadInput(f"--ranks: expected one number of processes with two scripts, got {ranks!r}")
        sizes = (steps or SCRIPT_STEPS, counts[0], runs if drift else 0)
        _prove_pair(scripts, script_args, sizes, outputs)
        return
    if same or ranks:
        _prove_cuts(scripts, script_args, same or [""], counts, outputs)
        return
    if scripts:
        raise BadInput(
            f"prove: one script, {scripts[0]}; expected a second one to compare with, --same or --invariant"
        )
    from leanstep.measure.drift import run_drift
    from leanstep.measure.parity import prove_case
    from leanstep.measure.timing import environment
    from leanstep.report.tables import drift_table, prove_table

    chosen = select_cases(cases)
    names = split_list(impl, "--impl")
    check_implementations(chosen, names)
    dtypes = parse_dtypes(dtype)
    where = parse_device(device)
    steps = steps or DRIFT_STEPS
    if runs < 2:
        raise BadInput(f"--runs: expected at least 2 paired runs, got {runs}")
    able = [case for case in chosen if case.drift is not None]
    if drift and not able:
        names_of = ", ".join(case.name for case in chosen)
        raise BadInput(f"--drift: none of {names_of} has a training run to compare")

    out = console(json)
    rows: list[dict[str, Any]] = []
    drifts: list[dict[str, Any]] = []
    with progress_bar(out, "prove") as report, kept_for_json(json):
        for index, case in enumerate(chosen):
            report(case.name, index / len(chosen))
            rows += [
                row.to_json() for row in prove_case(case, dtypes=dtypes, implementations=names, device=where)
            ]
    out.print(prove_table(rows))
    if drift:
        for case in able:
            with progress_bar(out, f"drift {case.name}") as report, kept_for_json(json):
                found = run_drift(
                    case, runs=runs, steps=steps, on_run=lambda name, done, total: report(name, done / total)
                )
            drifts += [row.to_json() for row in found]
        out.print(drift_table(drifts))
    result = {**environment(where), "rows": rows}
    if drift:
        result["drift"] = drifts
    write_json(result, json)
    if html:
        from leanstep.report.page import add_section

        add_section(html, "prove", result)
    bad = [row for row in rows if not row["ok"]] + [row for row in drifts if not row["ok"]]
    if not rows:
        raise BadInput("prove: nothing to prove for this choice of cases and implementations")
    if bad:
        first = bad[0]
        what = first.get("tensor", "drift of the loss")
        raise FellShort(f"prove: {len(bad)} checks failed, first {first['case']}/{first['impl']} {what}")


def _prove_pair(
    scripts: list[str], args: list[str], sizes: tuple[int, int | None, int], outputs: Outputs
) -> None:
    from leanstep.prove.compare import PairProof, prove_drift, prove_scripts
    from leanstep.prove.script_jobs import Job
    from leanstep.report.updates import pair_lines, pair_markdown

    steps, ranks, drift_runs = sizes
    before, after = (Job(script, tuple(args), steps, ranks=ranks) for script in scripts)
    out = console(outputs.json)
    proof, interrupted = PairProof(before.label, after.label), False
    with progress_bar(out, "prove") as report:
        done = iter(range(9))
        try:
            proof = prove_scripts(
                before, after, fork=True, report=lambda what: report(what, next(done, 9) / (3 + drift_runs))
            )
            if drift_runs and proof.ok:
                report(f"{drift_runs} pairs of runs", 0.5)
                proof.drift = prove_drift(before, after, runs=drift_runs, fork=True)
        except KeyboardInterrupt as error:
            proof, interrupted = getattr(error, "proof", proof), True
    result = proof.to_json()
    out.print(pair_lines(result))
    outputs.write(f"prove {before.label} {after.label}", result, pair_markdown(result))
    if interrupted:
        raise KeyboardInterrupt
    if proof.problem is not None:
        raise BadInput(f"prove: {proof.problem}")
    if not proof.ok:
        raise FellShort(f"prove: {proof.sentence()}")
    if proof.drift is not None and not proof.drift["ok"]:
        raise FellShort(f"prove: the loss of {after.label} is shifted by {proof.drift['shift']:+.3g}")


def _prove_cuts(
    scripts: list[str], args: list[str], same: list[str], counts: Sequence[int | None], outputs: Outputs
) -> None:
    from leanstep.prove.cuts import prove_cuts
    from leanstep.prove.script_jobs import Job
    from leanstep.report.updates import cuts_lines, cuts_markdown

    if len(scripts) != 1:
        raise BadInput(f"--same, --ranks: expected one script, got {len(scripts)}")
    jobs = [
        Job(
            scripts[0],
            (*shlex.split(cut), *args),
            steps=1,
            twin=True,
            dropout=False,
            parts=True,
            ranks=count,
        )
        for cut in same
        for count in counts
    ]
    if len(jobs) < 2:
        raise BadInput("--same: expected at least two cuts to compare; give --same twice, or --ranks 1,2")
    out = console(outputs.json)
    with progress_bar(out, "prove") as report:
        done = iter(range(len(jobs)))
        proof = prove_cuts(
            scripts[0], jobs, fork=True, report=lambda what: report(what, next(done, 0) / len(jobs))
        )
    result = proof.to_json()
    out.print(cuts_lines(result))
    outputs.write(f"prove {scripts[0]} cuts", result, cuts_markdown(result))
    if proof.problem is not None:
        raise BadInput(f"prove: {proof.problem}")
    if not proof.ok:
        raise FellShort(f"prove: {proof.sentence()}")


def _prove_invariant(scripts: list[str], args: list[str], outputs: Outputs) -> None:
    from leanstep.prove.invariance import prove_invariance
    from leanstep.prove.script_jobs import Job
    from leanstep.report.updates import invariance_lines, invariance_markdown

    if len(scripts) != 1:
        raise BadInput(f"--invariant: expected one script, got {len(scripts)}")
    proof = prove_invariance(Job(scripts[0], tuple(args)), fork=True)
    result = proof.to_json()
    console(outputs.json).print(invariance_lines(result))
    outputs.write(f"prove {scripts[0]} invariance", result, invariance_markdown(result))
    if proof.problem is not None:
        raise BadInput(f"prove: {proof.problem}")
    if not proof.ok:
        raise FellShort(f"prove: {proof.sentence()}")


def fix(
    script: Annotated[str, typer.Argument(help="The training script, or a folder with a train.py.")],
    args: Annotated[list[str] | None, typer.Argument(help="Arguments of the script, after --.")] = None,
    rule: Annotated[
        str | None, typer.Option("--rule", metavar="RULES", help="Only repairs of these rules: ids, or any.")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Apply what is offered.")] = False,
    budget: Annotated[float, typer.Option("--budget", help="Seconds of timing per repair.")] = 5.0,
    json: JsonOption = None,
) -> None:
    """Repair the findings that need no thought: diff, proof and measurement of each; --write applies them.

    A repair is tried on a copy. It is offered when its finding is gone, the update is the same (as
    leanstep prove says it) and a step is not slower. Whatever else the file holds stays as it is.

    Example: leanstep fix train.py --rule unbatched-optimizer -- --batch-size 8
    """
    from leanstep.diagnose.outputs.gate import parse_rules
    from leanstep.script.run import Program

    path = Program.find(script).file
    try:
        rules = parse_rules(rule) if rule is not None else ()
    except ValueError as error:
        raise BadInput(f"--rule: {error}") from None
    if budget <= 0:
        raise BadInput(f"--budget: expected seconds above 0, got {budget}")
    check_writable(json, "--json")
    try:
        from leanstep.fix import Settings, find_fixes
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("libcst"):
            raise
        raise BadInput("fix: expected the package libcst; pip install libcst") from None
    out = console(json)
    with progress_bar(out, "fix") as report:
        done = iter(range(19))
        found = find_fixes(
            path,
            args or [],
            Settings(rules, budget_s=budget, fork=True),
            lambda what: report(what, next(done, 19) / 20),
        )
    if write:
        found.write()
    for line in _fix_lines(found, write):
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    write_json({**found.as_dict(), "written": write and bool(found.changed)}, json)


def _fix_lines(found: Any, write: bool) -> list[str]:
    from leanstep.script.lines import short_path

    lines = []
    for offer in found.offers:
        first, *others = offer.findings
        more = f" and {len(others)} more" if others else ""
        lines.append(f"{first.rule}  {_where(first)}{more}: {offer.title}")
        lines.append(f"    proven: {offer.proof.sentence()}")
        lines.append(f"    measured: {_measured_words(offer.bench)}")
    if found.together is not None:
        lines.append(
            f"all together: {_measured_words(found.together.bench)}; {found.together.proof.sentence()}"
        )
    if found.changed:
        lines += ["", found.diff().rstrip("\n"), ""]
    for finding, why in found.refused:
        lines.append(f"left alone: {finding.rule}  {_where(finding)}: {why}")
    if not found.offers:
        lines.append("Nothing to repair mechanically.")
    else:
        files = ", ".join(short_path(str(path)) for path in found.changed)
        lines.append(f"Applied to {files}." if write else f"--write applies this to {files}.")
    return lines


def _where(finding: Any) -> str:
    from leanstep.script.lines import short_path

    return f"{short_path(finding.line.file)}:{finding.line.number}"


def _measured_words(bench: Any) -> str:
    before, after = bench.before, bench.after
    words = [f"step {seconds(before.median_s)} → {seconds(after.median_s)} ({ratio(bench.time_ratio)})"]
    for name, unit in (("host_syncs", "host reads"), ("ops", "ops")):
        old, new = getattr(before, name), getattr(after, name)
        if old is not None and new is not None and old != new:
            words.append(f"{unit} {old:,} → {new:,}")
    return ", ".join(words)
