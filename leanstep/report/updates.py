"""Output of `prove` and `bench` for scripts: terminal lines, Markdown and page sections, from their JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from leanstep import units

Data = dict[str, Any]
# Characters of a script and its arguments in a title or a table; two of them fit into a line.
LABEL = 36


def _table() -> Table:
    return Table(box=None, pad_edge=False, header_style="bold")


def _notes(result: Data) -> list[Text]:
    return [Text(f"  {note}", style="dim") for note in result["notes"]]


def _judged(title: str, table: Table, result: Data, below: Sequence[Text] = ()) -> Group:
    """Print a title, the rows, the notes and the verdict; the command prints a failing verdict behind it."""
    verdict = [Text(result["verdict"], style="green")] if result["ok"] else []
    return Group(Text(title, style="bold"), table, *below, *_notes(result), *verdict)


def pair_lines(result: Data) -> Group:
    """`prove before.py after.py` for the terminal."""
    table = _table()
    table.add_column("step")
    for name in ("loss before", "loss after", "loss in fp64", "checks"):
        table.add_column(name, justify="right")
    for step, rows in _by_step(result["rows"]).items():
        passed = sum(row["ok"] for row in rows)
        losses = [result["losses"].get(name, []) for name in ("before", "after", "truth")]
        table.add_row(
            str(step),
            *[f"{of[step - 1]:.6f}" if len(of) >= step else "-" for of in losses],
            f"{passed}/{len(rows)}",
            style=None if passed == len(rows) else "red",
        )
    names = "  →  ".join(_short(result[side]) for side in ("before", "after"))
    judged = _judged(names, table, result, _worst_lines(result["rows"]))
    return Group(judged, Text(drift_sentence(result["drift"]))) if result.get("drift") else judged


def _short(label: str) -> str:
    """Return the script's name and the beginning of its arguments."""
    return label if len(label) <= LABEL else label[: LABEL - 1] + "…"


def _worst_lines(rows: list[Data]) -> list[Text]:
    """Return two lines on the check that fails first, or is closest to its bound."""
    if not rows:
        return []
    worst = _worst(rows)
    which = "closest to its bound" if worst["ok"] else "first that fails"
    what = f"{worst['what']} of {worst['parameter']}" if worst["parameter"] else "loss"
    errors = ", ".join(
        f"{name} {units.small(worst[key])}"
        for name, key in (("error", "error"), ("before", "reference_error"), ("bound", "bound"))
    )
    return [Text(f"{which}: {what}, step {worst['step']}"), Text(f"  {errors}")]


def drift_sentence(drift: Data) -> str:
    """Return a line on the loss of paired runs of two scripts."""
    at = drift["first_divergence"]
    apart = "the losses never differ" if at is None else f"the losses first differ at step {at + 1}"
    interval = f"{drift['shift_low']:+.1e} … {drift['shift_high']:+.1e}"
    return (
        f"loss after {units.steps(drift['steps'])}, {drift['runs']} paired runs: shift {drift['shift']:+.2e} "
        f"(95 % interval {interval}), p = {drift['p_value']:.3f}; "
        f"a shift of {units.small(drift['detectable_shift'])} would be seen 4 times out of 5; {apart}"
    )


def _by_step(rows: list[Data]) -> dict[int, list[Data]]:
    steps: dict[int, list[Data]] = {}
    for row in rows:
        steps.setdefault(row["step"], []).append(row)
    return steps


def _worst(rows: list[Data]) -> Data:
    """Return the first row that fails, in forward order; else the one closest to its bound."""
    failed = [row for row in rows if not row["ok"]]
    return failed[0] if failed else max(rows, key=lambda row: row["error"] / max(row["bound"], 1e-300))


def functions_lines(result: Data) -> Group:
    """`prove FILE.py:before FILE.py:after` for the terminal: one row per output and gradient."""
    table = _table()
    for name in ("", "largest error", "before", "bound", "draws"):
        table.add_column(name, justify="left" if not name else "right")
    for what in dict.fromkeys(row["what"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["what"] == what]
        judged = [row for row in rows if row["sure"] or not row["ok"]]
        worst = _worst(judged) if judged else rows[0]
        cells = [units.small(worst[key]) if judged else "-" for key in ("error", "reference_error", "bound")]
        failed = sum(not row["ok"] for row in rows)
        table.add_row(what, *cells, f"{len(judged) - failed}/{len(judged)}", style="red" if failed else None)
    return _judged(f"{result['before']}  →  {result['after']}", table, result)


def cuts_lines(result: Data) -> Group:
    """`prove train.py --args ... --args ...` for the terminal."""
    table = _table()
    for name in ("split", "ranks", "backward calls", "gradients", "changes", "result"):
        table.add_column(name, justify="left" if name in ("split", "result") else "right")
    for row in result["rows"]:
        table.add_row(
            row["cut"],
            str(row["ranks"]),
            str(row["backward_calls"]),
            units.small(row["distance"]),
            units.small(row["change_distance"]),
            row["sentence"],
            style=None if row["same"] else "red",
        )
    against = f"  against {result['rows'][0]['against']}, in fp64" if result["rows"] else ""
    judged = _judged(f"{result['script']}{against}", table, result)
    return Group(judged, Text(drift_sentence(result["drift"]))) if result.get("drift") else judged


_COLUMNS = ("script", "median", "p20–p80", "steps", "peak above start", "host syncs", "ops")


def _cells(row: Data) -> list[str]:
    whole = [str(row["samples"]), units.size(row["peak_bytes"])]
    counts = ["-" if row[key] is None else f"{row[key]:,}" for key in ("host_syncs", "ops")]
    spread = f"{units.seconds(row['p20_s'])}–{units.seconds(row['p80_s'])}"
    return [row["script"], units.seconds(row["median_s"]), spread, *whole, *counts]


def _gain(result: Data) -> str:
    if result["time_ratio"] is None:
        return "no ratio: " + result["verdict"]
    gains = [_factor(result["time_ratio"], "faster", "slower")]
    if result["memory_ratio"]:
        above = "memory above the step's start"
        gains.append(_factor(result["memory_ratio"], f"less {above}", f"more {above}"))
    return f"{', '.join(gains)}; {result['verdict']}"


def _factor(ratio: float, better: str, worse: str) -> str:
    return f"{units.ratio(ratio)} {better}" if ratio >= 1 else f"{units.ratio(1 / ratio)} {worse}"


def bench_lines(result: Data) -> Group:
    """`bench before.py after.py` for the terminal."""
    table = _table()
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "script" else "right")
    for row in result["rows"]:
        label, *cells = _cells(row)
        # Arguments are the same on both sides, and would make rows of several lines.
        table.add_row(_short(label.split(" ")[0]), *cells)
    style = "green" if result["proven"] else "bold red" if result["proven"] is False else "yellow"
    return Group(table, *_notes(result), Text(_gain(result), style=style))


def invariance_lines(result: Data) -> Group:
    """`prove train.py --invariant` for the terminal: one line per variant that changes bits."""
    table = _table()
    for name in ("the row is", "first line that changes it", "op", "shapes", "difference", ""):
        table.add_column(name)
    for row in result["rows"]:
        shapes = f"{row['shape']} → {row['variant_shape']}"
        place = f"{row['file']}:{row['line']}" + (f" from {row['called_from']}" if row["called_from"] else "")
        table.add_row(row["variant"], place, row["op"], shapes, units.small(row["difference"]), row["kind"])
        table.add_row("", Text(f"    {row['code']}", style="dim"))
    return _judged(f"{result['script']}: {result['ops']} ops, {result['variants']} variants", table, result)
