"""`leanstep prove`: every fast path against fp64; with --drift, the loss of paired training runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from leanstep.commands import BadInput, FellShort
from leanstep.commands.terminal import (
    HtmlOption,
    JsonOption,
    check_implementations,
    check_writable,
    console,
    kept_for_json,
    parse_device,
    parse_dtypes,
    progress_bar,
    select_cases,
    split_list,
    write_json,
)


def prove(
    cases: Annotated[
        list[str] | None, typer.Argument(metavar="[CASE]...", help="Cases to prove; all by default.")
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
    steps: Annotated[int, typer.Option(help="Steps per run under --drift.")] = 60,
    device: Annotated[str, typer.Option(help="cpu or cuda[:N].")] = "cpu",
    json: JsonOption = None,
    html: HtmlOption = None,
) -> None:
    """Show that a fast path is no further from the fp64 truth than the plain code it replaces.

    Example: leanstep prove logprob-linear --dtype fp32,bf16
    """
    from leanstep.measure.drift import run_drift
    from leanstep.measure.parity import prove_case
    from leanstep.measure.timing import environment
    from leanstep.report.tables import drift_table, prove_table

    chosen = select_cases(cases)
    names = split_list(impl, "--impl")
    check_implementations(chosen, names)
    dtypes = parse_dtypes(dtype)
    where = parse_device(device)
    if runs < 2 or steps < 1:
        raise BadInput(f"--runs, --steps: expected at least 2 runs of 1 step, got {runs} runs of {steps}")
    able = [case for case in chosen if case.drift is not None]
    if drift and not able:
        names_of = ", ".join(case.name for case in chosen)
        raise BadInput(f"--drift: none of {names_of} has a training run to compare")
    check_writable(json, "--json")
    check_writable(html, "--html")

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
