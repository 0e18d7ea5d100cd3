"""`leanstep kernels`: every Triton kernel, compiled ahead of time for GPUs that are not here."""

from __future__ import annotations

import importlib.util
import os
from typing import Annotated, Any

import typer
from rich.table import Table

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
    targets: Annotated[
        str, typer.Option(help="Comma-separated: sm_80, sm_90, sm_100, gfx942, or others of that kind.")
    ] = "sm_80,sm_90,sm_100,gfx942",
    shipped: Annotated[
        bool, typer.Option("--shipped", help="Only the listed configurations, not every flag's variants.")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Compile every Triton kernel ahead of time: registers, spills, shared memory. No GPU is needed.

    With sm_90 among the targets its machine code is looked at, too: tensor cores in products, 128-bit loads
    and stores in passes, nothing in local memory.

    Example: leanstep kernels --targets sm_90,gfx942
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
