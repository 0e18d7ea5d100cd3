"""One table of settings per recipe, one checker: every setting has a type and a range.

A table is a frozen dataclass whose fields come from `setting`; its `__post_init__` calls `check_settings`:

    @dataclass(frozen=True)
    class DoublingSettings:
        lr: float = setting(0.1, above=0)
        rows: int = setting(4, least=1, most=1024)
        decay: str = setting("linear", choices=("linear", "cosine"))

        def __post_init__(self):
            check_settings(self)

    DoublingSettings(rows=0)                        # ValueError: rows: expected at least 1, got 0
    parse_setting(DoublingSettings, "lr", "abc")    # ValueError: lr: expected a number, got 'abc'
"""

from __future__ import annotations

import ast
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar

Settings = TypeVar("Settings")
Task = TypeVar("Task")

# Sizes beyond this are typing errors, not runs.
LARGE = 65536
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}


@dataclass(frozen=True)
class Range:
    """The values a setting may have; None = no bound. `least` and `most` are allowed themselves."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()

    def misses(self, value: Any) -> str | None:
        """What is expected of `value`, when it is outside."""
        if self.choices and value not in self.choices:
            return " or ".join(self.choices)
        if self.least is not None and value < self.least:
            return f"at least {self.least:g}"
        if self.above is not None and value <= self.above:
            return f"a number above {self.above:g}"
        if self.most is not None and value > self.most:
            return f"at most {self.most:g}"
        if self.below is not None and value >= self.below:
            return f"a number below {self.below:g}"
        return None


def setting(
    default: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A dataclass field with a default and a range; its type is the field's annotation."""
    return field(default=default, metadata={"range": Range(least, above, most, below, choices)})


def check_settings(settings: Any) -> None:
    """Raise ValueError for the first field whose value has the wrong type or is out of range.

    Numbers must be finite. A field annotated `float` takes whole numbers, one annotated `int` no fractions.
    """
    kinds = _kinds(type(settings))
    for entry in fields(settings):
        value = getattr(settings, entry.name)
        if value is None and NoneType in kinds[entry.name]:
            continue
        expected = _wrong_kind(value, kinds[entry.name])
        if expected is None and "range" in entry.metadata:
            expected = entry.metadata["range"].misses(value)
        if expected is not None:
            raise ValueError(f"{entry.name}: expected {expected}, got {value!r}")


def parse_setting(table: type, name: str, text: str) -> Any:
    """The value that `text` (of a command line) stands for, by the type of the field `name`."""
    kinds = _kinds(table)[name]
    if NoneType in kinds and text.lower() in ("none", "null"):
        return None
    for kind in kinds:
        try:
            if kind is bool:
                return {"true": True, "false": False}[text.lower()]
            if kind in (int, float):
                return kind(text)
            if kind in (str, Path):
                return text
        except (ValueError, KeyError):
            continue
    raise ValueError(f"{name}: expected {_describe(kinds)}, got {text!r}")


def parse_field(table: type, name: str, text: str) -> Any:
    """The value that `text` stands for, by the annotation of the field `name`: tuples and literals too.

    `3,10` and `(3, 10)` are the same tuple, `3` is (3,) where a tuple is expected.
    """
    hint = typing.get_type_hints(table)[name]
    words: dict[str, Any] = {"true": True, "false": False, "none": None}
    try:
        value = words[text.lower()] if text.lower() in words else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    for candidate in (value, (value,)):
        if _is_a(candidate, hint):
            return candidate
    expected = str(hint).replace("typing.", "").replace("<class '", "").replace("'>", "")
    raise ValueError(f"{name}: expected {expected}, got {text!r}")


def _is_a(value: Any, hint: Any) -> bool:
    """Whether `value` has the annotated type; whole numbers are floats, bools are no numbers."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, UnionType):
        return any(_is_a(value, part) for part in parts)
    if origin is typing.Literal:
        return value in parts
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = [parts[0]] * len(value) if parts[-1] is Ellipsis else parts
        return len(kinds) == len(value) and all(map(_is_a, value, kinds))
    if isinstance(value, bool) or hint is bool:
        return isinstance(value, bool) and hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def with_overrides(settings: Settings, overrides: Mapping[str, Any]) -> Settings:
    """Return `settings` with the overrides that are not None; unknown names are refused."""
    known = [entry.name for entry in fields(settings)]  # type: ignore[arg-type]
    for name in overrides:
        if name not in known:
            raise ValueError(f"{name}: no such setting; there are {', '.join(known)}")
    return replace(settings, **{k: v for k, v in overrides.items() if v is not None})  # type: ignore[type-var]


def from_preset(
    sizes: Mapping[str, tuple[Settings, Task, int]],
    preset: str,
    steps: int | None,
    overrides: Mapping[str, Any],
) -> tuple[Settings, Task, int]:
    """Return settings, task and number of steps of a preset, with the overrides that are not None."""
    if preset not in sizes:
        raise ValueError(f"preset: expected one of {', '.join(sizes)}, got {preset!r}")
    settings, task, default_steps = sizes[preset]
    return with_overrides(settings, overrides), task, steps or default_steps


def _kinds(table: type) -> dict[str, tuple[Any, ...]]:
    """The types of every field; the parts of a union one by one."""
    hints = typing.get_type_hints(table)
    return {entry.name: typing.get_args(hints[entry.name]) or (hints[entry.name],) for entry in fields(table)}


def _wrong_kind(value: Any, kinds: tuple[Any, ...]) -> str | None:
    """What is expected of `value`, when it has none of these types."""
    numbers = (int, float) if float in kinds else (int,) if int in kinds else ()
    if isinstance(value, bool):
        return None if bool in kinds else _describe(kinds)
    if numbers and isinstance(value, numbers):
        try:
            return None if math.isfinite(value) else "a finite number"
        except OverflowError:
            return "a finite number"
    others = tuple(kind for kind in kinds if kind not in (int, float, bool, NoneType))
    return None if others and isinstance(value, others) else _describe(kinds)


def _describe(kinds: tuple[Any, ...]) -> str:
    return " or ".join(_KINDS[kind] for kind in kinds if kind in _KINDS)
