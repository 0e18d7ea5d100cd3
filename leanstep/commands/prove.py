"""`leanstep prove`: compare the parameter updates that scripts make, or two functions.

leanstep prove before.py after.py               do two scripts make the same update?
leanstep prove heads.py:plain heads.py:fused    do two functions compute the same outputs and gradients?
leanstep prove train.py --args A --args B       does the update depend on these arguments?
leanstep prove train.py --splits                does the update depend on how the batch is split?
leanstep prove train.py --with P==1 --with P==2 does the update depend on the version of a package?
leanstep prove train.py --invariant             does a row depend on the rest of the batch?
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group

from leanstep import units
from leanstep.commands import BadInput
from leanstep.commands.terminal import (
    JsonOption,
    check_writable,
    console,
    parse_ranks,
    print_text,
    progress_bar,
    split_scripts,
    write_json,
)
from leanstep.extras import require

# Steps of training runs under --drift, and updates of a script that are compared.
DRIFT_STEPS, SCRIPT_STEPS = 60, 2


def prove(
    scripts: Annotated[
        list[str],
        typer.Argument(
            metavar="BEFORE.py [AFTER.py] [-- ARGS]",
            help="Scripts that should make the same update, or two functions as FILE.py:NAME.",
        ),
    ],
    drift: Annotated[
        bool, typer.Option("--drift", help="Also train pairs of runs and test the loss for a shift.")
    ] = False,
    runs: Annotated[int, typer.Option(help="Paired runs under --drift.")] = 8,
    steps: Annotated[
        int | None, typer.Option(help="Updates that are compared (2); under --drift, steps per run (60).")
    ] = None,
    args: Annotated[
        list[str] | None,
        typer.Option(
            "--args",
            metavar="ARGS",
            help="Script arguments of one run: a split of the batch or a value of a flag; at least twice.",
        ),
    ] = None,
    splits: Annotated[
        bool,
        typer.Option("--splits", help="Find the batch-size and accumulation arguments and choose splits."),
    ] = False,
    with_: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="REQUIREMENT",
            help="Install this for the runs only; pass --with twice to compare two versions with one script.",
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
            "--ranks", metavar="N,N", help="Processes, as torchrun starts them; several with --args."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Where two functions run.")] = "cpu",
    json: JsonOption = None,
) -> None:
    """Check that a changed script makes the same parameter updates, up to rounding.

    Compares loss, gradients and parameter changes with fp64. Scripts run for real, three times or more: the
    files that they write are written. A small script takes about 20 seconds.

    Example: leanstep prove before.py after.py --steps 3 -- --batch-size 8
    """
    from leanstep.prove.functions import prove_function_files, split_function
    from leanstep.prove.invariance import prove_invariance
    from leanstep.prove.overlay import overlay
    from leanstep.prove.script_jobs import Job
    from leanstep.prove.splits import choose_splits
    from leanstep.report.updates import functions_lines, invariance_lines
    from leanstep.tape.children import temporary_folder

    check_writable(json, "--json")
    if steps is not None and steps < 1:
        raise BadInput(f"--steps: expected at least 1, got {steps}")
    functions = [word for word in scripts[:2] if split_function(word)]
    named, argv = ([], []) if functions else split_scripts(scripts)
    if functions and (len(functions) != 2 or len(scripts) != 2):
        raise BadInput(
            f"prove: expected two functions, FILE.py:BEFORE FILE.py:AFTER, got {' '.join(scripts)}"
        )
    if not functions and not named:
        raise BadInput(f"prove: expected a script, got {scripts[0]}")
    if drift and (functions or invariant):
        raise BadInput("--drift: only for two scripts, or one with --args twice")
    if drift:
        require("--drift", "stats", "scipy")
    if drift and runs < 2:
        raise BadInput(f"--runs: expected at least 2 paired runs, got {runs}")
    training = (runs, steps or DRIFT_STEPS) if drift else None
    compared = SCRIPT_STEPS if drift else steps or SCRIPT_STEPS
    if device != "cpu" and not functions:
        raise BadInput(f"--device: only for two functions, got {device} with {named[0]}")
    if len(with_ or []) > 2 or (len(with_ or []) == 2 and (args or splits or invariant or len(named) != 1)):
        raise BadInput("--with: two versions are compared with one script; otherwise expected one --with")
    counts = parse_ranks(ranks)
    with temporary_folder("leanstep-with-") as folder:
        paths = [overlay(words, folder / str(number)) for number, words in enumerate(with_ or [])]
        paths = [(*sys.path[:1], *path, *sys.path[1:]) for path in paths]
        path = paths[0] if paths else ()
        if functions:
            out = console(json)
            with progress_bar(out, "prove", plain_lines=True) as report:
                report(" and ".join(functions), 0.0)
                proof: Any = prove_function_files(*functions, device=device, path=path, fork=True)
            _finish(proof, functions_lines, json)
            return
        jobs = [Job(script, tuple(argv), compared, path=path) for script in named]
        if invariant:
            if len(named) != 1:
                raise BadInput(f"--invariant: expected one script, got {len(named)}")
            with progress_bar(console(json), "prove", plain_lines=True) as report:
                report("each row in other batches", 0.0)
                proof = prove_invariance(jobs[0], fork=True)
            _finish(proof, invariance_lines, json)
            return
        if splits:
            args, argv = choose_splits(named[0], argv)
        if args or (ranks and len(named) == 1 and len(paths) < 2):
            if len(named) != 1:
                raise BadInput(f"--args, --splits, --ranks: expected one script, got {len(named)}")
            own = [tuple(shlex.split(words)) for words in args or [""]]
            runs_ = [replace(jobs[0], argv=(*words, *argv), ranks=count) for words in own for count in counts]
            if len(runs_) < 2:
                raise BadInput(
                    "--args: expected at least two runs to compare; pass --args twice, or --ranks 1,2"
                )
            if drift and len(runs_) != 2:
                raise BadInput(f"--drift: expected two runs to compare, got {len(runs_)}")
            _prove_cuts(runs_, training, json)
            return
        if len(paths) == 2:
            jobs = [
                replace(jobs[0], path=path, name=words)
                for path, words in zip(paths, with_ or [], strict=True)
            ]
        if len(jobs) != 2:
            raise BadInput(
                f"prove: one script, {named[0]}; expected a second one to compare with, "
                "--args, --splits, --with twice or --invariant"
            )
        if len(counts) > 1:
            raise BadInput(f"--ranks: expected one number of processes with two scripts, got {ranks!r}")
        before, after = (replace(job, ranks=counts[0]) for job in jobs)
        _prove_pair(before, after, training, json)


def _finish(proof: Any, lines: Callable[[dict[str, Any]], Group], json: str | None) -> None:
    """Print and write a proof, its verdict last; raise what makes the exit code."""
    from leanstep.measure.timing import environment

    result, out = proof.to_json(), console(json)
    out.print(lines(result))
    drift = getattr(proof, "drift", None) or {"ok": True}
    if proof.problem is None and not proof.ok:
        print_text(out, proof.sentence())
    elif proof.problem is None and not drift["ok"]:
        print_text(out, f"the loss after {units.steps(drift['steps'])} is shifted by {drift['shift']:+.3g}")
    write_json({**environment(), **result}, json)
    if proof.problem is not None:
        raise BadInput(f"prove: {proof.problem}")
    if not proof.ok or not drift["ok"]:
        raise typer.Exit(1)


def _train_pairs(
    proof: Any, jobs: list[Any], drift: tuple[int, int] | None, report: Callable[[str, float], None]
) -> None:
    """Add the result of --drift to a proof that holds."""
    from leanstep.prove.compare import NotComparable, prove_drift

    if drift is None or not proof.ok:
        return
    runs, steps = drift
    report(f"{runs} pairs of runs, {units.steps(steps)} each", 0.5)
    before, after = (replace(job, steps=steps) for job in jobs)
    try:
        proof.drift = prove_drift(before, after, runs=runs, fork=True)
    except NotComparable as error:
        proof.problem = str(error)


def _prove_pair(before: Any, after: Any, drift: tuple[int, int] | None, json: str | None) -> None:
    from leanstep.prove.compare import PairProof, prove_scripts
    from leanstep.report.updates import pair_lines

    proof, interrupted = PairProof(before.label, after.label), False
    num_runs = drift[0] if drift else 0
    with progress_bar(console(json), "prove", plain_lines=True) as report:
        done = iter(range(9))
        try:
            proof = prove_scripts(
                before, after, fork=True, report=lambda what: report(what, next(done, 9) / (3 + num_runs))
            )
            _train_pairs(proof, [before, after], drift, report)
        except KeyboardInterrupt as error:
            proof, interrupted = getattr(error, "proof", proof), True
    if interrupted:
        proof.problem = proof.problem or "interrupted"
        console(json).print(pair_lines(proof.to_json()))
        write_json(proof.to_json(), json)
        raise KeyboardInterrupt
    _finish(proof, pair_lines, json)


def _prove_cuts(jobs: list[Any], drift: tuple[int, int] | None, json: str | None) -> None:
    from leanstep.prove.cuts import in_fp64
    from leanstep.prove.difference import prove_cuts
    from leanstep.report.updates import cuts_lines

    with progress_bar(console(json), "prove", plain_lines=True) as report:
        done = iter(range(len(jobs)))
        proof = prove_cuts(
            Path(jobs[0].script).name,
            [in_fp64(job) for job in jobs],
            fork=True,
            report=lambda what: report(what, next(done, 0) / len(jobs)),
        )
        _train_pairs(proof, jobs, drift, report)
    _finish(proof, cuts_lines, json)
