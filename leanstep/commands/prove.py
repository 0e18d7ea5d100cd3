"""`leanstep prove`: compare fast paths with fp64, and the updates that your scripts make.

leanstep prove CASE...                        registered cases; --drift trains pairs of runs
leanstep prove before.py after.py             do two scripts make the same update?
leanstep prove train.py --same A --same B     does the update depend on how the batch is split?
leanstep prove train.py --invariant           does a row depend on the rest of the batch?
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from leanstep import units
from leanstep.case import Case
from leanstep.commands import BadInput, FellShort
from leanstep.commands.terminal import (
    HtmlOption,
    JsonOption,
    MarkdownOption,
    Outputs,
    SandboxOption,
    case_names,
    check_implementations,
    console,
    enter_sandbox,
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

# Steps of training runs under --drift, and updates of a script that are compared.
DRIFT_STEPS, SCRIPT_STEPS = 60, 2


def prove(
    context: typer.Context,
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
        int | None, typer.Option(help="Updates that are compared (2); under --drift, steps per run (60).")
    ] = None,
    same: Annotated[
        list[str] | None,
        typer.Option(
            "--same",
            metavar="ARGS",
            help="Script arguments for one split of the batch; pass --same at least twice.",
        ),
    ] = None,
    invariant: Annotated[
        bool,
        typer.Option(
            "--invariant",
            help="Name the first line whose output for a row depends on the rest of the batch.",
        ),
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
    sandbox: SandboxOption = False,
) -> None:
    """Show that a fast path, or a changed script, is no further from the fp64 truth than the code before it.

    Scripts run for real, several times: the files that they write are written, unless --sandbox is given.

    Example: leanstep prove before.py after.py --steps 3 -- --batch-size 8
    """
    scripts, script_args = split_scripts(cases)
    if steps is not None and steps < 1:
        raise BadInput(f"--steps: expected at least 1, got {steps}")
    if sandbox:
        if not scripts:
            raise BadInput("--sandbox: expected scripts beside it; cases write no files")
        json, html, markdown, *scripts = enter_sandbox(context, [json, html, markdown], scripts)
    outputs = Outputs(json, html, markdown)
    if invariant:
        _prove_invariant(scripts, script_args, outputs)
        return
    counts = parse_ranks(ranks)
    if len(scripts) == 2 and not same:
        if len(counts) > 1:
            raise BadInput(f"--ranks: expected one number of processes with two scripts, got {ranks!r}")
        if drift and runs < 2:
            raise BadInput(f"--runs: expected at least 2 paired runs, got {runs}")
        sizes = _PairSizes(steps or SCRIPT_STEPS, counts[0])
        if drift:
            sizes = _PairSizes(SCRIPT_STEPS, counts[0], drift_runs=runs, drift_steps=steps or DRIFT_STEPS)
        _prove_pair(scripts, script_args, sizes, outputs)
        return
    if same or ranks:
        _prove_cuts(scripts, script_args, same or [""], counts, outputs)
        return
    if scripts:
        raise BadInput(
            f"prove: one script, {scripts[0]}; expected a second one to compare with, --same or --invariant"
        )
    if runs < 2:
        raise BadInput(f"--runs: expected at least 2 paired runs, got {runs}")
    proof = _CaseProof(
        cases=select_cases(cases),
        implementations=split_list(impl, "--impl"),
        dtypes=parse_dtypes(dtype),
        device=parse_device(device),
        drift_runs=runs if drift else 0,
        drift_steps=steps or DRIFT_STEPS,
    )
    _prove_cases(proof, json, html)


@dataclass(frozen=True)
class _CaseProof:
    """Registered cases to prove. drift_runs: pairs of training runs for each; 0: no drift."""

    cases: list[Case]
    implementations: tuple[str, ...] | None
    dtypes: tuple[torch.dtype, ...] | None
    device: torch.device
    drift_runs: int
    drift_steps: int

    def check(self) -> None:
        check_implementations(self.cases, self.implementations)
        if self.drift_runs and not self.with_training():
            names = ", ".join(case.name for case in self.cases)
            raise BadInput(f"--drift: none of {names} has a training run to compare")

    def with_training(self) -> list[Case]:
        return [case for case in self.cases if case.drift is not None]


def _prove_cases(proof: _CaseProof, json: str | None, html: str | None) -> None:
    from leanstep.measure.timing import environment
    from leanstep.report.tables import drift_table, prove_table

    proof.check()
    out = console(json)
    rows = _parity_rows(proof, out, json)
    out.print(prove_table(rows))
    result = {**environment(proof.device), "rows": rows}
    if proof.drift_runs:
        result["drift"] = _drift_rows(proof, out, json)
        out.print(drift_table(result["drift"]))
    write_json(result, json)
    if html:
        from leanstep.report.page import add_section

        add_section(html, "prove", result)
    if not rows:
        raise BadInput("prove: nothing to prove for this choice of cases and implementations")
    failed = [row for row in [*rows, *result.get("drift", [])] if not row["ok"]]
    if failed:
        first = failed[0]
        what = first.get("tensor", "drift of the loss")
        raise FellShort(f"prove: {len(failed)} checks failed, first {first['case']}/{first['impl']} {what}")


def _parity_rows(proof: _CaseProof, out: Console, json: str | None) -> list[dict[str, Any]]:
    """Each tensor of each fast path against fp64."""
    from leanstep.measure.parity import prove_case

    rows = []
    with progress_bar(out, "prove", plain_lines=True) as report, kept_for_json(json):
        for index, case in enumerate(proof.cases):
            report(case.name, index / len(proof.cases))
            rows += prove_case(
                case, dtypes=proof.dtypes, implementations=proof.implementations, device=proof.device
            )
    return [row.to_json() for row in rows]


def _drift_rows(proof: _CaseProof, out: Console, json: str | None) -> list[dict[str, Any]]:
    """Losses of paired training runs, tested for a shift."""
    from leanstep.measure.drift import run_drift

    rows = []
    for case in proof.with_training():
        with progress_bar(out, f"drift {case.name}", plain_lines=True) as report, kept_for_json(json):
            rows += run_drift(
                case,
                runs=proof.drift_runs,
                steps=proof.drift_steps,
                on_run=lambda name, done, total, report=report: report(name, done / total),
            )
    return [row.to_json() for row in rows]


@dataclass(frozen=True)
class _PairSizes:
    """Updates of two scripts to compare, and pairs of training runs. drift_runs 0: no drift."""

    steps: int
    ranks: int | None
    drift_runs: int = 0
    drift_steps: int = 0


def _prove_pair(scripts: list[str], args: list[str], sizes: _PairSizes, outputs: Outputs) -> None:
    from leanstep.prove.compare import PairProof, prove_drift, prove_scripts
    from leanstep.prove.script_jobs import Job
    from leanstep.report.updates import pair_lines, pair_markdown

    before, after = (Job(script, tuple(args), sizes.steps, ranks=sizes.ranks) for script in scripts)
    out = console(outputs.json)
    proof, interrupted = PairProof(before.label, after.label), False
    num_runs = sizes.drift_runs
    with progress_bar(out, "prove", plain_lines=True) as report:
        done = iter(range(9))
        try:
            proof = prove_scripts(
                before, after, fork=True, report=lambda what: report(what, next(done, 9) / (3 + num_runs))
            )
            if num_runs and proof.ok:
                report(f"{num_runs} pairs of runs, {units.steps(sizes.drift_steps)} each", 0.5)
                long = [replace(job, steps=sizes.drift_steps) for job in (before, after)]
                proof.drift = prove_drift(long[0], long[1], runs=num_runs, fork=True)
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
            (*shlex.split(arguments), *args),
            steps=1,
            twin=True,
            dropout=False,
            parts=True,
            ranks=count,
        )
        for arguments in same
        for count in counts
    ]
    if len(jobs) < 2:
        raise BadInput("--same: expected at least two splits to compare; pass --same twice, or --ranks 1,2")
    out = console(outputs.json)
    with progress_bar(out, "prove", plain_lines=True) as report:
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
    out = console(outputs.json)
    with progress_bar(out, "prove", plain_lines=True) as report:
        report("each row in other batches", 0.0)
        proof = prove_invariance(Job(scripts[0], tuple(args)), fork=True)
    result = proof.to_json()
    out.print(invariance_lines(result))
    outputs.write(f"prove {scripts[0]} invariance", result, invariance_markdown(result))
    if proof.problem is not None:
        raise BadInput(f"prove: {proof.problem}")
    if not proof.ok:
        raise FellShort(f"prove: {proof.sentence()}")
