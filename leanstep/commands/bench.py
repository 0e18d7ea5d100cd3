"""`leanstep bench`: reference, fast paths, peers and the roofline side by side; or two scripts of yours."""

from __future__ import annotations

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
    parse_sweep,
    progress_bar,
    select_cases,
    split_list,
    split_scripts,
    write_json,
)


def bench(
    cases: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CASE]... | BEFORE.py AFTER.py [-- ARGS]",
            help=f"Two scripts, or cases to measure (all by default): {', '.join(case_names())}.",
        ),
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="tiny | seed | cpu | gpu | large | ...; each case's own by default.")
    ] = None,
    impl: Annotated[
        str | None, typer.Option(help="Only these implementations (the reference always runs).")
    ] = None,
    sweep: Annotated[str | None, typer.Option(help="Repeat with one parameter changed: key=v,v.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda[:N].")] = "cpu",
    dtype: Annotated[
        str | None,
        typer.Option(help="fp32, bf16, fp16 or fp64; on a GPU bf16 where the case is proven in it."),
    ] = None,
    budget: Annotated[float, typer.Option(help="Seconds of timing per case.")] = 20.0,
    beside: Annotated[
        int, typer.Option(metavar="N", help="Keep N other processes computing during the timing.")
    ] = 0,
    proof: Annotated[
        bool, typer.Option("--proof/--no-proof", help="Of two scripts: prove them first; a ratio needs it.")
    ] = True,
    ranks: Annotated[
        str | None,
        typer.Option("--ranks", metavar="N", help="Of two scripts: processes, as torchrun starts them."),
    ] = None,
    json: JsonOption = None,
    html: HtmlOption = None,
    markdown: MarkdownOption = None,
) -> None:
    """Measure time, peak memory and error side by side.

    On a GPU: CUDA events, a cold L2 cache, the size "gpu" of each case, and the peers' own kernels.

    Example: leanstep bench logprob-linear --sweep response_frac=1,0.5,0.25,0.1
    Example: leanstep bench logprob-linear --device cuda --dtype bf16
    """
    scripts, script_args = split_scripts(cases)
    if budget <= 0:
        raise BadInput(f"--budget: expected seconds above 0, got {budget}")
    if beside < 0:
        raise BadInput(f"--beside: expected a number of processes, 0 or more, got {beside}")
    if scripts:
        if len(scripts) != 2:
            raise BadInput(f"bench: one script, {scripts[0]}; expected a second one to compare it with")
        counts = parse_ranks(ranks)
        if len(counts) > 1:
            raise BadInput(f"--ranks: expected one number of processes, got {ranks!r}")
        _bench_pair(scripts, script_args, counts[0], budget, beside, proof, Outputs(json, html, markdown))
        return
    if ranks is not None:
        raise BadInput("--ranks: expected two scripts beside it")

    from leanstep.measure.side_by_side import run_bench
    from leanstep.report.tables import bench_table

    chosen = select_cases(cases)
    names = split_list(impl, "--impl")
    check_implementations(chosen, names)
    where = parse_device(device)
    dtypes = parse_dtypes(dtype)
    if dtypes is not None and len(dtypes) > 1:
        raise BadInput(f"--dtype: expected one dtype, got {dtype!r}; every dtype is a run of its own")
    overrides = parse_sweep(sweep, chosen)
    for case in chosen:
        if size is not None and size not in case.sizes:
            raise BadInput(f"--size: {case.name} has no {size!r}; it has {', '.join(case.sizes)}")
    check_writable(json, "--json")
    check_writable(html, "--html")
    out = console(json)
    results: list[dict[str, Any]] = []
    failed: list[str] = []
    for case in chosen:
        for override in overrides:
            with progress_bar(out, case.name, plain_lines=True) as report, kept_for_json(json):
                result = run_bench(
                    case,
                    size or case.size_on(where),
                    overrides=override,
                    only=names,
                    device=where,
                    dtype=dtypes[0] if dtypes else None,
                    budget_s=budget,
                    beside=beside,
                    progress=report,
                )
            out.print(bench_table(result.to_json()))
            results.append(result.to_json())
            failed += [f"{row.case}/{row.impl} {row.tensor}" for row in result.failed]
    write_json(results[0] if len(results) == 1 else {"results": results}, json)
    if html:
        from leanstep.report.page import add_section

        add_section(html, "bench", {"results": results})
    if failed:
        raise FellShort(f"bench: parity failed for {len(failed)} tensors, first {failed[0]}")


def _bench_pair(
    scripts: list[str],
    args: list[str],
    ranks: int | None,
    budget: float,
    beside: int,
    with_proof: bool,
    outputs: Outputs,
) -> None:
    """Prove, then measure: a pair that does not make the same update gets its figures and no ratio."""
    from leanstep.prove.compare import prove_scripts
    from leanstep.prove.script_jobs import Job
    from leanstep.prove.stopwatch import bench_scripts
    from leanstep.report.updates import bench_lines, bench_markdown

    before, after = (Job(script, tuple(args), ranks=ranks) for script in scripts)
    out = console(outputs.json)
    proof = None
    with progress_bar(out, "bench", plain_lines=True) as report:
        if with_proof:
            proof = prove_scripts(before, after, fork=True, report=lambda what: report(f"prove {what}", 0.0))
            if proof.problem is not None:
                raise BadInput(f"bench: {proof.problem} (--no-proof measures without comparing)")
        result = bench_scripts(before, after, budget_s=budget, beside=beside, fork=True, report=report)
    result.proven = proof.ok if proof else None
    result.verdict = proof.sentence() if proof else "not proven: --no-proof was given"
    payload = result.to_json()
    out.print(bench_lines(payload))
    outputs.write(f"bench {before.label} {after.label}", payload, bench_markdown(payload))
    if result.proven is False:
        raise FellShort(f"bench: no ratio, {result.verdict}")
