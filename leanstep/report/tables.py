"""Terminal tables of bench, prove and drift results, built from JSON: a saved file prints the same."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from leanstep import units


def bench_table(result: dict[str, Any]) -> Group:
    machine = f"torch {result['torch']} · {result['device']}, {result['threads']} threads"
    if result.get("omp_wait_policy"):
        machine += f" (OMP_WAIT_POLICY={result['omp_wait_policy']})"
    title = f"{result['case']} · {result['size']} · {machine}"
    if result.get("beside"):
        title += f" · beside {result['beside']} busy process{'es' * (result['beside'] > 1)}"
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("implementation", "kind"):
        table.add_column(name)
    for name in ("median", "p20–p80", "faster", "extra memory", "peak", "less", "host reads", "error"):
        table.add_column(name, justify="right")
    notes = []
    for row in result["rows"]:
        if not row["available"]:
            table.add_row(row["impl"], row["kind"], "absent", style="dim")
        else:
            given_up = row["median_s"] is None
            spread = "" if given_up else f"{units.seconds(row['p20_s'])}–{units.seconds(row['p80_s'])}"
            table.add_row(
                row["impl"],
                row["kind"],
                time_text(row),
                spread,
                units.ratio(row["time_ratio"]),
                units.size(row["extra_bytes"]),
                units.size(row["peak_bytes"]),
                units.ratio(row["memory_ratio"]),
                "-" if row["host_syncs"] is None else str(row["host_syncs"]),
                units.small(row["max_error"]),
                style="bold" if row["kind"] == "fast" else None,
            )
        if row["note"]:
            notes.append(Text(f"  {row['impl']}: {row['note']}", style="dim"))
    return Group(Text(title, style="bold"), table, *notes, Text())


def time_text(row: dict[str, Any]) -> str:
    """Return the median of a row, or `> 40 s` for one that was aborted."""
    limit, colon, _ = row["note"].partition(":")
    given_up = row["median_s"] is None and colon and limit.startswith("> ")
    return limit if given_up else units.seconds(row["median_s"])


def prove_table(rows: list[dict[str, Any]]) -> Table:
    """Print one line per case, implementation and dtype: the tensor closest to its bound, or failing."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("case", "implementation", "dtype"):
        table.add_column(name)
    table.add_column("checks", justify="right")
    table.add_column("closest to its bound")
    for name in ("error", "plain code", "bound"):
        table.add_column(name, justify="right")
    table.add_column("")
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["case"], row["impl"], row["dtype"]), []).append(row)
    for (case, impl, dtype), members in groups.items():
        failed = [row for row in members if not row["ok"]]
        worst = max(
            failed or members, key=lambda row: row["error"] / row["bound"] if row["bound"] else row["error"]
        )
        table.add_row(
            case,
            impl,
            dtype,
            f"{len(members) - len(failed)}/{len(members)}",
            worst["tensor"],
            units.small(worst["error"]),
            units.small(worst["reference_error"]),
            units.small(worst["bound"]),
            Text("FAILED", style="bold red") if failed else Text("ok", style="green"),
        )
    return table


def drift_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        box=None, pad_edge=False, header_style="bold", title="paired training runs", title_justify="left"
    )
    for name in ("case", "implementation"):
        table.add_column(name)
    for name in ("runs", "loss shift", "95 % interval", "p", "could see", "diverges at", "fp64 rank"):
        table.add_column(name, justify="right")
    for row in rows:
        at = row["first_divergence"]
        table.add_row(
            row["case"],
            row["impl"],
            str(row["runs"]),
            f"{row['shift']:+.2e}",
            f"{row['shift_low']:+.1e} … {row['shift_high']:+.1e}",
            f"{row['p_value']:.3f}",
            units.small(row["detectable_shift"]),
            "never" if at is None else f"step {at}",
            str(row["fp64_rank"]),
            style=None if row["ok"] else "bold red",
        )
    return table
