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
    json: JsonOption = None,
) -> None:
    """Compile every Triton kernel ahead of time: registers, spills, shared memory. No GPU is needed.

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
            rows = [row.to_json() for row in compile_all(names, progress=report)]
    except ValueError as error:
        raise BadInput(f"--{error}") from None
    out.print(_table(rows, names))
    write_json({"targets": names, "rows": rows}, json)
    failed = [row for row in rows if row["error"]]
    spilled = [row for row in rows if row["spill_bytes"]]
    if failed:
        first = failed[0]
        raise FellShort(
            f"{len(failed)} did not compile; {first['kernel']} for {first['target']}: {first['error']}"
        )
    if spilled:
        first = spilled[0]
        where = f"{first['kernel']} for {first['target']}"
        raise FellShort(f"{len(spilled)} spill registers; {where}: {first['spill_bytes']} bytes")


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
        table.add_row(f"{package} {kernel}", warps, *(_cell(cells[target]) for target in targets))
    return table


def _cell(row: dict[str, Any]) -> str:
    if row["error"]:
        return "failed"
    spills = f" ({row['spill_bytes']} spilled)" if row["spill_bytes"] else ""
    return f"{row['registers']} / {row['shared_bytes']}{spills}"
