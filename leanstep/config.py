"""`[tool.leanstep]` in pyproject.toml: defaults of the command line and of budgets in tests.

    [tool.leanstep]
    ignore = ["float64"]
    fail-on = ["host-sync", "dead-rows"]
    device = "h100"

    [tool.leanstep.thresholds]
    op-storm.repeats = 64

    [tool.leanstep.budgets]
    host_reads = 0
    peak_mib = 512

What is typed on a command line replaces the value of the file.
"""

from __future__ import annotations

import difflib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leanstep.files import BadInput

if sys.version_info >= (3, 11):
    import tomllib
else:  # the same module
    import tomli as tomllib

FILE = "pyproject.toml"
BUDGETS = ("host_reads", "op_storms", "peak_mib")
KEYS = ("select", "ignore", "fail-on", "device", "thresholds", "budgets")


@dataclass(frozen=True)
class Config:
    """The settings of one file; without a file, all of them are empty."""

    path: Path | None = None
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    fail_on: tuple[str, ...] = ()
    # Rule -> name -> value, as `Limits` takes them.
    thresholds: dict[str, dict[str, float]] = field(default_factory=dict)
    device: str | None = None
    budgets: dict[str, float] = field(default_factory=dict)


def read_config(folder: Path | None = None) -> Config:
    """The settings in the nearest pyproject.toml of `folder` (the working directory) or above it."""
    folder = (folder or Path.cwd()).resolve()
    for place in (folder, *folder.parents):
        path = place / FILE
        if path.is_file():
            return _read(path)
    return Config()


def _read(path: Path) -> Config:
    try:
        document: Any = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadInput(f"{path}: cannot be read: it is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        # Not only TOMLDecodeError: Python refuses numbers of thousands of digits and deep lists itself.
        raise BadInput(f"{path}: not valid TOML: {error}") from None
    tools = document.get("tool", {})
    if not isinstance(tools, dict):
        raise BadInput(f"{path}: [tool]: expected a table, got {tools!r}")
    table = tools.get("leanstep", {})
    _check_keys(path, "[tool.leanstep]", table, KEYS)
    return Config(
        path=path if "leanstep" in tools else None,
        select=_rules(path, table, "select"),
        ignore=_rules(path, table, "ignore"),
        fail_on=_rules(path, table, "fail-on"),
        thresholds=_thresholds(path, table.get("thresholds", {})),
        device=_device(path, table.get("device")),
        budgets=_budgets(path, table.get("budgets", {})),
    )


def _check_keys(path: Path, table: str, values: Any, known: tuple[str, ...]) -> None:
    if not isinstance(values, dict):
        raise BadInput(f"{path}: {table}: expected a table, got {values!r}")
    for key in values:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            meant = f"; did you mean {close[0]!r}?" if close else ""
            raise BadInput(f"{path}: {table}: unknown key {key!r}{meant} (expected {', '.join(known)})")


def _rules(path: Path, table: dict[str, Any], key: str) -> tuple[str, ...]:
    from leanstep.diagnose.rules import RULE_IDS

    names = table.get(key, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise BadInput(f'{path}: {key}: expected a list of rules such as ["host-sync"], got {names!r}')
    if names == ["any"]:
        return RULE_IDS
    for name in names:
        if name not in RULE_IDS:
            raise BadInput(
                f"{path}: {key}: unknown rule {name!r}; `leanstep diagnose --explain all` lists them"
            )
    return tuple(names)


def _thresholds(path: Path, table: Any) -> dict[str, dict[str, float]]:
    from leanstep.diagnose.rules import RULE_IDS, Limits

    _check_keys(path, "[tool.leanstep.thresholds]", table, RULE_IDS)
    for rule, values in table.items():
        if not isinstance(values, dict):
            raise BadInput(f"{path}: thresholds: expected {rule}.NAME = NUMBER, got {rule} = {values!r}")
    try:
        Limits(table)
    except ValueError as error:
        raise BadInput(f"{path}: {error}") from None
    return table


def _device(path: Path, value: Any) -> str | None:
    from leanstep.rehearse.devices import devices_named

    if value is None:
        return None
    if not isinstance(value, str):
        raise BadInput(f'{path}: device: expected a name such as "h100", got {value!r}')
    try:
        devices_named(value)
    except ValueError as error:
        raise BadInput(f"{path}: {error}") from None
    return value


def _budgets(path: Path, table: Any) -> dict[str, float]:
    _check_keys(path, "[tool.leanstep.budgets]", table, BUDGETS)
    for name, value in table.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            raise BadInput(f"{path}: budgets: {name}: expected a number >= 0, got {value!r}")
    return table
