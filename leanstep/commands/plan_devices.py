"""Devices by the memory they report, and the verdict on a plan: fits, or not and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from leanstep.commands import BadInput

MIB, GIB = 2**20, 2**30
# What nvidia-smi reports, in MiB: less than the name on the box.
DEVICES_MIB = {
    "rtx4090": 24564,
    "a100-40": 40960,
    "a100-80": 81920,
    "h100": 81559,
    "h200": 143771,
    "b200": 183359,
}


def parse_devices(names: str | None, device_gb: float | None, reserve_gb: float) -> dict[str, int]:
    """Name -> bytes left for the plan, smallest device first."""
    if reserve_gb < 0:
        raise BadInput(f"--reserve-gb: expected 0 or more, got {reserve_gb:g}")
    if device_gb is not None and device_gb <= 0:
        raise BadInput(f"--device-gb: expected more than 0, got {device_gb:g}")
    chosen = {name: mib * MIB for name, mib in DEVICES_MIB.items()}
    if names is not None:
        wanted = [name.strip().lower() for name in names.split(",")]
        for name in wanted:
            if name not in chosen:
                raise BadInput(f"--devices: no device {name!r}; there are {', '.join(chosen)}")
        chosen = {name: chosen[name] for name in wanted}
    elif device_gb is not None:
        chosen = {}
    if device_gb is not None:
        chosen[f"{device_gb:g} GiB"] = round(device_gb * GIB)
    reserve = round(reserve_gb * GIB)
    return {name: max(size - reserve, 0) for name, size in sorted(chosen.items(), key=lambda item: item[1])}


def judge(total_bytes: int, capacities: dict[str, int], largest: str) -> dict[str, dict[str, Any]]:
    """Per device: whether the total fits and, if not, what is missing and what takes most."""
    verdicts: dict[str, dict[str, Any]] = {}
    for name, capacity in capacities.items():
        missing = total_bytes - capacity
        why = None
        if missing > 0:
            why = (
                f"needs {total_bytes / GIB:.2f} GiB of {capacity / GIB:.2f} free, "
                f"{missing / GIB:.2f} too many; most of it: {largest}"
            )
        verdicts[name] = {"fits": missing <= 0, "why": why}
    return verdicts


def device_table(
    title: str,
    rows: list[dict[str, Any]],
    columns: Sequence[tuple[str, Callable[[dict[str, Any]], str]]],
    capacities: dict[str, int],
) -> Table:
    """The rows with their figures, and yes or no under each device."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for index, (name, _) in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    for name, capacity in capacities.items():
        table.add_column(f"{name}\n{capacity / GIB:.0f}", justify="center", no_wrap=True)
    previous = None
    for row in rows:
        marks = ["yes" if v["fits"] else "[dim]no[/dim]" for v in row["devices"].values()]
        label = columns[0][1](row)
        cells = [label if label != previous else "", *(value(row) for _, value in columns[1:])]
        table.add_row(*cells, *marks)
        previous = label
    return table
