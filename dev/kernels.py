"""`python -m dev.kernels [FILE.py]` compiles Triton kernels for GPUs and checks them without one."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from leanstep.cli import HELP, run_command
from leanstep.commands import BadInput, FellShort
from leanstep.commands.terminal import (
    JsonOption,
    check_writable,
    console,
    progress_bar,
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
    plain: Annotated[
        str | None,
        typer.Option(
            metavar="FUNCTION",
            help="Function with the expected results, beside launch(); its own plain() by default.",
        ),
    ] = None,
    skip_memory: Annotated[
        bool,
        typer.Option("--skip-memory", help="Only compile FILE.py, without bounds, races and results."),
    ] = False,
    shipped: Annotated[
        bool, typer.Option("--shipped", help="Only the listed configurations, not every flag's variants.")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Compile Triton kernels without a GPU: registers, spills, shared memory; of a file, results and bounds.

    Without FILE.py: every kernel of leanstep. With sm_90 among the targets its machine code is checked as
    well: tensor cores in products, 128-bit loads and stores in passes, nothing in local memory.

    With FILE.py: what its launch() launches is compiled with those arguments and run in the interpreter, with
    bounds and races checked. What launch() returns must agree with what its plain() returns, in plain torch.

    Example: python -m dev.kernels my_kernels.py --targets sm_90,gfx942
    """
    from dev.kernel_checks import aot

    if importlib.util.find_spec("triton") is None:
        raise BadInput("kernels: triton is not installed; pip install 'leanstep[triton]'")
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise BadInput("kernels: TRITON_INTERPRET=1 replaces kernels by Python; unset it to compile them")
    names = split_list(targets, "--targets") or ()
    try:
        for name in names:
            aot.parse_target(name)
    except ValueError as error:
        raise BadInput(f"--{error}") from None
    check_writable(json, "--json")
    if file is not None:
        _check_own_file(file, launch, plain, names, shipped, skip_memory, json)
        return
    for option, value in (("--launch", launch), ("--plain", plain), ("--skip-memory", skip_memory)):
        if value:
            raise BadInput(f"{option}: expected FILE.py with it, got none")

    out = console(json)
    try:
        with progress_bar(out, "kernels") as report:
            compiled = list(aot.compile_all(names, progress=report, every_variant=not shipped))
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
    plain: str | None,
    targets: tuple[str, ...],
    shipped: bool,
    skip_memory: bool,
    json: str | None,
) -> None:
    from dev.kernel_checks.file_check import FileProblem, check_file

    if shipped:
        raise BadInput("--shipped: expected no FILE.py with it, it lists leanstep's own kernels")
    for name, path in (("FILE.py", file), ("--launch", Path((launch or str(file)).partition(":")[0]))):
        if path.suffix != ".py" or not path.is_file():
            raise BadInput(f"{name}: expected a Python file, got {path}")
    out = console(json)
    try:
        report = check_file(file, launch, targets, memory=not skip_memory, plain=plain)
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
        if report.parity is None:
            out.print("results: not compared; write plain(), which returns what launch() should return")
        for row in report.parity or ():
            verdict = "agrees" if row["error"] <= row["tolerance"] else "DIFFERS"
            text = (
                f"result {row['result']} {verdict} with {row['plain']}(): relative error {row['error']:.1e}"
            )
            out.print(text, markup=False, soft_wrap=True)
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


app = typer.Typer(add_completion=False)
app.command(context_settings=HELP)(kernels)


def run(arguments: list[str] | None = None) -> int:
    return run_command(typer.main.get_command(app), "python -m dev.kernels", arguments)


if __name__ == "__main__":
    sys.exit(run())
