"""`leanstep rehearse CASE --set … --sweep …`: parameters of a case as typed, and the table of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from leanstep import units
from leanstep.case import Case, get_case
from leanstep.commands import BadInput
from leanstep.commands.terminal import (
    DTYPES,
    check_implementations,
    console,
    print_text,
    progress_bar,
    split_list,
    write_json,
)
from leanstep.rehearse.devices import Device
from leanstep.rehearse.events import Request
from leanstep.rehearse.stage import RehearsalError, rehearse
from leanstep.rehearse.sweep import FIT, Sweep, run_sweep

Data = dict[str, Any]
Report = Callable[[str, float], None]
GIB = 2**30
# A reason in a row of the table is cut here; the JSON has all of it.
REASON_WIDTH = 100


def parse_settings(text: str | None) -> dict[str, Any]:
    """tokens=205280,response_frac=0.25,dtype=bf16 -> numbers where they are numbers."""
    settings: dict[str, Any] = {}
    for pair in (text or "").split(","):
        if not pair.strip():
            continue
        name, equals, value = pair.strip().partition("=")
        if not equals or not name or not value:
            raise BadInput(f"--set: expected name=value pairs, got {pair.strip()!r}")
        settings[name] = _number_or_text(value)
    return settings


def _number_or_text(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def parse_sweep(options: Sequence[str]) -> tuple[str, tuple[Any, ...] | str]:
    """["response_frac=1,0.5"] -> ("response_frac", (1, 0.5)); ["tokens=fit"] -> ("tokens", FIT)."""
    if len(options) > 1:
        raise BadInput(f"--sweep: expected one parameter, got {len(options)}; run the command once for each")
    key, equals, text = options[0].partition("=")
    items = [item.strip() for item in text.split(",")]
    if not equals or not key.strip() or not all(items) or "=" in text:
        raise BadInput(f"--sweep: expected name=value,value,… or name={FIT}, got {options[0]!r}")
    return key.strip(), FIT if items == [FIT] else tuple(_number_or_text(item) for item in items)


def check_settings(case: Case, settings: dict[str, Any], option: str) -> None:
    """Every name is a parameter of the case (or its size or dtype), every value one that it can have."""
    size = settings.get("size", case.default_size)
    if size not in case.sizes:
        raise BadInput(f"{option}: {case.name} has no size {size!r}; it has {', '.join(case.sizes)}")
    params = case.params(size)
    for name, value in settings.items():
        if name == "dtype" and value not in DTYPES and not hasattr(torch, str(value)):
            raise BadInput(f"{option}: no dtype {value!r}; it takes {', '.join(DTYPES)}")
        if name in ("size", "dtype"):
            continue
        if name not in params:
            known = ", ".join([*params, "dtype", "size"])
            raise BadInput(f"{option}: {case.name} has no parameter {name!r}; it has {known}")
        expected = _expected(name, params[name], value)
        if expected is not None:
            raise BadInput(f"{option}: {name}: expected {expected}, got {value!r}")


def _expected(name: str, usual: Any, value: Any) -> str | None:
    """What the parameter takes, where `value` is something else; `usual`: its value in the case."""
    if isinstance(usual, str):
        return None if isinstance(value, str) else "a name"
    if isinstance(usual, int):
        least = min(1, usual)
        return None if isinstance(value, int) and value >= least else f"a whole number from {least} on"
    if not isinstance(value, (int, float)):
        return "a number"
    if name.endswith("_frac"):
        return None if 0 <= value <= 1 else "a fraction from 0 to 1"
    return None


def typed_sweep(
    request: Request, options: Sequence[str], devices: Sequence[Device], impl: str | None, reserve_gb: float
) -> Sweep:
    """The sweep that was typed, checked."""
    case = get_case(request.target)
    key, values = parse_sweep(options)
    settings = dict(request.settings)
    if key in settings:
        raise BadInput(f"--sweep: {key} is fixed by --set; give it once")
    check_settings(case, settings, "--set")
    if values == FIT:
        _check_countable(case, {**settings, key: 1}, key)
    else:
        for value in values:
            check_settings(case, {**settings, key: value}, "--sweep")
    if reserve_gb < 0:
        raise BadInput(f"--reserve-gb: expected 0 or more, got {reserve_gb:g}")
    names = split_list(impl, "--impl")
    check_implementations([case], names)
    chosen = tuple(i for i in case.implementations if i.kind != "limit" and (not names or i.name in names))
    return Sweep(case, request, key, values, chosen, tuple(devices), round(reserve_gb * GIB))


def _check_countable(case: Case, settings: dict[str, Any], key: str) -> None:
    check_settings(case, settings, "--sweep")
    params = case.params(settings.get("size", case.default_size))
    if not isinstance(params.get(key), int):
        counts = ", ".join(name for name, value in params.items() if isinstance(value, int))
        raise BadInput(f"--sweep: {key}={FIT}: expected a parameter that counts: {counts}")


def run(sweep: Sweep, json: str | None, html: str | None) -> int:
    """Rehearse, print the tables, write the JSON object. Returns 3 where no rehearsal came to its end."""
    out = console(json)
    with progress_bar(out, sweep.case.name) as report:
        result = rehearse_sweep(sweep, report)
    print_text(out, text(result))
    write_json(result, json)
    if html is not None:
        from leanstep.report import page

        page.add_section(html, "sweep", result)
    return 0 if any(cell["why"] is None for row in result["rows"] for cell in row["cells"]) else 3


def rehearse_sweep(sweep: Sweep, report: Report = lambda what, share: None) -> Data:
    """The result as docs/rehearse.md describes it."""
    try:
        rows = run_sweep(sweep, lambda request: rehearse(request, quiet=True), report)
    except RehearsalError as error:
        raise BadInput(f"rehearse: {error}") from None
    return to_json(sweep, rows)


def to_json(sweep: Sweep, rows: list[Data]) -> Data:
    """The rows with what they were rehearsed for."""
    from leanstep.measure.timing import environment

    settings = dict(sweep.request.settings)
    size = str(settings.pop("size", sweep.case.default_size))
    dtype = settings.pop("dtype", None) or next(k for k, v in DTYPES.items() if v == sweep.case.bench_dtype)
    params = {**sweep.case.params(size, settings), "dtype": dtype}
    params.pop(sweep.key, None)
    return {
        **environment(),
        "predicted": True,
        "case": sweep.case.name,
        "sweep": sweep.key,
        "values": list(sweep.values) if sweep.values != FIT else FIT,
        "params": params,
        "ranks": sweep.request.ranks,
        "reserve_bytes": sweep.reserve_bytes,
        "devices": {
            device.key: {
                "name": device.name,
                "memory_bytes": device.memory_bytes,
                "room_bytes": sweep.room(device),
            }
            for device in sweep.devices
        },
        "rows": rows,
    }


def text(result: Data) -> str:
    """One table for each device, or one column for each device where the largest value was searched."""
    params = ", ".join(f"{key} {_value(value)}" for key, value in result["params"].items())
    lines = [f"{result['case']}: {params}"]
    if result["values"] == FIT:
        lines.append(f"largest {result['sweep']} that fits, predicted; peak memory and time per step there")
        lines += _table(
            [""] + [_device_title(result, key) for key in result["devices"]], result["rows"], None
        )
    else:
        for key in result["devices"]:
            lines.append(f"peak memory and time per step on {_device_title(result, key)}, predicted")
            heads = [f"{result['sweep']} ="] + [_value(value) for value in result["values"]]
            lines += _table(heads, result["rows"], key)
    lines += _partial_reasons(result["rows"])
    if any("time ?" in line for line in lines):
        lines.append("time ?: most of its products are inside a kernel that the rehearsal cannot see into.")
    lines.append("All figures are predicted from shapes and published device figures; nothing was measured.")
    return "\n".join(lines)


def _device_title(result: Data, key: str) -> str:
    return f"{key} ({result['devices'][key]['room_bytes'] / GIB:.1f} GiB)"


def _value(value: Any) -> str:
    return (
        f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)
    )


def _table(heads: Sequence[str], rows: Sequence[Data], device: str | None) -> list[str]:
    """Rows in aligned columns. A row without any figure says why in their place."""
    shown = [(row["impl"], [_cell_text(cell, device) for cell in row["cells"]]) for row in rows]
    names = max(len(text) for text in (heads[0], *(name for name, _ in shown)))
    widths = [max(len(head), *(len(cells[i]) for _, cells in shown)) for i, head in enumerate(heads[1:])]

    def line(name: str, cells: Sequence[str]) -> str:
        return "  ".join(
            [f"  {name:{names}}", *(f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=True))]
        )

    lines = [line(heads[0], heads[1:])]
    for row, (name, cells) in zip(rows, shown, strict=True):
        why = _why_all(row)
        lines.append(line(name, cells) if why is None else f"  {name:{names}}  {_short(why)}")
    return lines


def _cell_text(cell: Data, device: str | None) -> str:
    """`5.73 GiB 6.2 s`, with the value in front where it was searched."""
    if cell["why"] is not None:
        return "0" if cell["value"] == 0 else "-"
    there = cell["devices"][device or cell["device"]]
    if not there["fits"]:
        time = "does not fit"
    else:
        time = units.seconds(there["step_ms"] / 1e3) if there["step_ms"] is not None else "time ?"
    figures = f"{units.size(cell['peak_bytes'])} {time}"
    return figures if device is not None else f"{cell['value']:,}: {figures}"


def _why_all(row: Data) -> str | None:
    """The reason why a row has no figure at all."""
    reasons = [cell["why"] for cell in row["cells"]]
    return reasons[0] if all(reason is not None for reason in reasons) else None


def _partial_reasons(rows: Sequence[Data]) -> list[str]:
    """Why single cells of a row are empty."""
    return [
        f"  {row['impl']} at {_value(cell['value'])}: {_short(cell['why'])}"
        for row in rows
        if _why_all(row) is None
        for cell in row["cells"]
        if cell["why"] is not None
    ]


def _short(reason: str) -> str:
    reason = reason.removeprefix("the program raised ")
    return reason if len(reason) <= REASON_WIDTH else reason[: REASON_WIDTH - 1] + "…"
