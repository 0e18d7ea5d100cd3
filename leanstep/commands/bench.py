"""`leanstep bench BEFORE.py AFTER.py`: prove two scripts, then time them in alternation."""

from __future__ import annotations

from typing import Annotated

import typer

from leanstep.commands import BadInput, FellShort
from leanstep.commands.terminal import (
    JsonOption,
    check_writable,
    console,
    parse_ranks,
    progress_bar,
    split_scripts,
    write_json,
)


def bench(
    scripts: Annotated[
        list[str], typer.Argument(metavar="BEFORE.py AFTER.py [-- ARGS]", help="Two scripts.")
    ],
    budget: Annotated[float, typer.Option(help="Seconds of timing.")] = 20.0,
    no_proof: Annotated[
        bool, typer.Option("--no-proof", help="Measure without proving the scripts first; gives no ratio.")
    ] = False,
    ranks: Annotated[
        str | None, typer.Option("--ranks", metavar="N", help="Processes, as torchrun starts them.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Measure time and peak memory of two scripts in alternation.

    Checks first that both make the same update. Scripts run for real, several times: the files that they
    write are written. Takes --budget seconds, plus about ten steps and three starts of each script.

    Example: leanstep bench before.py after.py -- --batch-size 8
    """
    pair, args = split_scripts(scripts)
    if budget <= 0:
        raise BadInput(f"--budget: expected seconds above 0, got {budget}")
    if len(pair) != 2:
        raise BadInput(f"bench: expected two scripts, got {' '.join(scripts)}")
    counts = parse_ranks(ranks)
    if len(counts) > 1:
        raise BadInput(f"--ranks: expected one number of processes, got {ranks!r}")
    check_writable(json, "--json")
    _bench_pair(pair, args, counts[0], budget, not no_proof, json)


def _bench_pair(
    scripts: list[str],
    args: list[str],
    ranks: int | None,
    budget: float,
    with_proof: bool,
    json: str | None,
) -> None:
    """Prove, then measure: a pair that does not make the same update gets its figures and no ratio."""
    from leanstep.measure.timing import environment
    from leanstep.prove.compare import prove_scripts
    from leanstep.prove.script_jobs import Job
    from leanstep.prove.stopwatch import bench_scripts
    from leanstep.report.updates import bench_lines

    before, after = (Job(script, tuple(args), ranks=ranks) for script in scripts)
    out = console(json)
    proof = None
    with progress_bar(out, "bench", plain_lines=True) as report:
        if with_proof:
            proof = prove_scripts(before, after, fork=True, report=lambda what: report(f"prove {what}", 0.0))
            if proof.problem is not None:
                raise BadInput(f"bench: {proof.problem} (--no-proof measures without comparing)")
        result = bench_scripts(before, after, budget_s=budget, fork=True, report=report)
    result.proven = proof.ok if proof else None
    result.verdict = proof.sentence() if proof else "not proven: --no-proof was given"
    payload = result.to_json()
    out.print(bench_lines(payload))
    write_json({**environment(), **payload}, json)
    if result.proven is False:
        raise FellShort(f"bench: no ratio, {result.verdict}")
