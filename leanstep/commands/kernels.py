"""`leanstep kernels` compiles for GPUs that are not here, `leanstep gpu-report` runs on one that is."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from leanstep.commands import BadInput, FellShort
from leanstep.commands.terminal import (
    JsonOption,
    check_writable,
    console,
    parse_device,
    progress_bar,
    say_above,
    select_cases,
    split_list,
    write_json,
)


def kernels(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE.py]", help="Check the kernels of this file; leanstep's own by default."
        ),
    ] = None,
    targets: Annotated[
        str, typer.Option(help="Comma-separated: sm_80, sm_90, gfx942, or others of that kind.")
    ] = "sm_80,sm_89,sm_90,sm_100,sm_120,gfx942",
    launch: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py[:FUNCTION]",
            help="Function that launches FILE.py's kernels on small tensors; its own launch() by default.",
        ),
    ] = None,
    skip_memory: Annotated[
        bool, typer.Option("--skip-memory", help="Only compile FILE.py, no check of bounds and races.")
    ] = False,
    shipped: Annotated[
        bool, typer.Option("--shipped", help="Only the listed configurations, not every flag's variants.")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Compile Triton kernels without a GPU: registers, spills, shared memory; of a file, bounds and races.

    Without FILE.py: every kernel of leanstep. With sm_90 among the targets its machine code is checked as
    well: tensor cores in products, 128-bit loads and stores in passes, nothing in local memory.

    With FILE.py: what its launch() launches is compiled with those arguments and run in the interpreter.

    Example: leanstep kernels my_kernels.py --targets sm_90,gfx942
    """
    from leanstep.measure.aot import compile_all, parse_target

    if importlib.util.find_spec("triton") is None:
        raise BadInput("kernels: triton is not installed; pip install 'leanstep[triton]'")
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise BadInput("kernels: TRITON_INTERPRET=1 replaces kernels by Python; unset it to compile them")
    names = split_list(targets, "--targets") or ()
    try:
        for name in names:
            parse_target(name)
    except ValueError as error:
        raise BadInput(f"--{error}") from None
    check_writable(json, "--json")
    if file is not None:
        _check_own_file(file, launch, names, shipped, skip_memory, json)
        return
    if launch is not None or skip_memory:
        raise BadInput(f"{'--launch' if launch else '--skip-memory'}: expected FILE.py with it, got none")

    out = console(json)
    try:
        with progress_bar(out, "kernels") as report:
            compiled = list(compile_all(names, progress=report, every_variant=not shipped))
    except ValueError as error:
        raise BadInput(f"--{error}") from None
    rows = [row.to_json() for row in compiled]
    out.print(_table(rows, names))
    write_json({"targets": names, "rows": rows}, json)
    wrong = [row for row in compiled if row.complaint]
    if wrong:
        first = wrong[0]
        raise FellShort(
            f"{len(wrong)} of {len(compiled)} fall short; {first.kernel} for {first.target} {first.complaint}"
        )


def _check_own_file(
    file: Path,
    launch: str | None,
    targets: tuple[str, ...],
    shipped: bool,
    skip_memory: bool,
    json: str | None,
) -> None:
    from leanstep.kernel_checks.file_check import FileProblem, check_file

    if shipped:
        raise BadInput("--shipped: expected no FILE.py with it, it lists leanstep's own kernels")
    for name, path in (("FILE.py", file), ("--launch", Path((launch or str(file)).partition(":")[0]))):
        if path.suffix != ".py" or not path.is_file():
            raise BadInput(f"{name}: expected a Python file, got {path}")
    out = console(json)
    try:
        report = check_file(file, launch, targets, memory=not skip_memory)
    except FileProblem as problem:
        raise BadInput(f"kernels: {problem}") from None
    result = report.to_json()
    out.print(_table(result["rows"], targets))
    if not skip_memory:
        total = sum(report.launches.values())
        summary = f"{len(report.problems)} problems" if report.problems else "no problem"
        out.print(f"bounds and races, {total} launches in the interpreter: {summary}")
        for problem in report.problems:
            out.print(f"  {problem}", markup=False, soft_wrap=True)
    if report.not_launched:
        out.print(f"not launched, so not checked: {', '.join(report.not_launched)}", soft_wrap=True)
    write_json({"targets": targets, **result}, json)
    if report.complaints:
        count = len(report.complaints)
        raise FellShort(f"{report.complaints[0]}" + (f" (and {count - 1} more)" if count > 1 else ""))


def _table(rows: list[dict[str, Any]], targets: tuple[str, ...]) -> Table:
    title = "registers per thread / shared bytes per block"
    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    table.add_column("kernel")
    table.add_column("warps", justify="right")
    for target in targets:
        table.add_column(target, justify="right")
    lines: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        lines.setdefault((row["package"], row["kernel"]), {})[row["target"]] = row
    for (package, kernel), cells in lines.items():
        warps = str(next(iter(cells.values()))["num_warps"])
        table.add_row(f"{package} {kernel}", warps, *(_cell(cells.get(target)) for target in targets))
    return table


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    if row["error"]:
        return "failed"
    spills = f" ({row['spill_bytes']} spilled)" if row["spill_bytes"] else ""
    missed = f" ({row['shortfall']})" if row["shortfall"] else ""
    return f"{row['registers']} / {row['shared_bytes']}{spills}{missed}"


def gpu_report(
    cases: Annotated[
        list[str] | None, typer.Argument(metavar="[CASE]...", help="Cases to run; all by default.")
    ] = None,
    out: Annotated[
        str, typer.Option(metavar="DIR", help="Where to write report.json and index.html.")
    ] = "leanstep-gpu-report",
    device: Annotated[str, typer.Option(help="cuda[:N].")] = "cuda",
    size: Annotated[str | None, typer.Option(help="Another size than each case's own for GPUs.")] = None,
    budget: Annotated[float, typer.Option(help="Seconds of timing per case.")] = 10.0,
    predict: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Only rehearse and write the predictions."),
    ] = None,
) -> None:
    """Prove, measure and watch every case on a GPU, each figure beside its prediction: attach it to an issue.

    Exit code: 1 when a proof failed, a fast path waits more often than predicted, or a case did not run.

    Example: leanstep gpu-report --out leanstep-gpu-report
    """
    from leanstep.report import gpu_report as report

    chosen = select_cases(cases)
    for case in chosen:
        if size is not None and size not in case.sizes:
            raise BadInput(f"--size: {case.name} has no {size!r}; it has {', '.join(case.sizes)}")
    if budget <= 0:
        raise BadInput(f"--budget: expected seconds above 0, got {budget}")
    console_out = console(None)

    def say(line: str) -> None:
        say_above(console_out, line)

    if predict is not None:
        from leanstep.rehearse.stage import RehearsalError

        check_writable(predict, "--predict")
        try:
            write_json(report.predict(chosen, size, say), predict)
        except RehearsalError as error:
            raise BadInput(f"--predict: {error}") from None
        return
    where = parse_device(device)
    if where.type != "cuda":
        raise BadInput(
            f"--device: expected cuda[:N], got {device!r}; `leanstep bench` and `prove` run on a CPU"
        )
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out: cannot make {out}: {error.strerror}") from None
    check_writable(str(folder / "report.json"), "--out")
    results = report.run_report(chosen, where, size=size, budget_s=budget, say=say)
    report.write_report(results, folder)
    say(f"wrote {folder / 'report.json'} and {folder / 'index.html'}")
    wrong = report.shortfalls(results)
    if wrong:
        raise FellShort(
            f"gpu-report: {wrong[0]}" + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else "")
        )
