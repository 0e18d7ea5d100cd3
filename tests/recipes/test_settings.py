"""Settings: every field has a type and a range, from Python and from a command line."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest

from leanstep.recipes import gpt, grpo, lens
from leanstep.recipes.settings import check_settings, parse_setting, setting, with_overrides


@dataclass(frozen=True)
class Table:
    lr: float = setting(0.1, above=0)
    share: float = setting(0.5, least=0, below=1)
    rows: int = setting(4, least=1, most=1024)
    mode: str | None = setting(None, choices=("a", "b"))
    fast: bool = False

    def __post_init__(self):
        check_settings(self)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr": 0}, "lr: expected a number above 0, got 0"),
        ({"lr": float("nan")}, "lr: expected a finite number, got nan"),
        ({"lr": float("inf")}, "lr: expected a finite number, got inf"),
        ({"lr": 10**400}, "lr: expected a finite number"),
        ({"lr": "abc"}, "lr: expected a number, got 'abc'"),
        ({"lr": True}, "lr: expected a number, got True"),
        ({"share": 1}, "share: expected a number below 1, got 1"),
        ({"share": -0.1}, "share: expected at least 0, got -0.1"),
        ({"rows": 1.5}, "rows: expected a whole number, got 1.5"),
        ({"rows": 0}, "rows: expected at least 1, got 0"),
        ({"rows": 5000}, "rows: expected at most 1024, got 5000"),
        ({"rows": [1]}, r"rows: expected a whole number, got \[1\]"),
        ({"mode": "c"}, "mode: expected a or b, got 'c'"),
        ({"mode": 5}, "mode: expected text, got 5"),
        ({"fast": 1}, "fast: expected true or false, got 1"),
        ({"slow": 1}, "slow: no such setting; there are lr, share, rows, mode, fast"),
    ],
)
def test_what_does_not_fit_is_named(given, message):
    with pytest.raises(ValueError, match=message):
        with_overrides(Table(), given)


def test_none_keeps_the_presets_value():
    assert with_overrides(Table(rows=7), {"rows": None, "lr": 2}) == Table(lr=2, rows=7)


def test_text_is_read_by_the_fields_type():
    texts = {"lr": "1e-3", "rows": "12", "mode": "5", "fast": "True"}
    assert {k: parse_setting(Table, k, v) for k, v in texts.items()} == {
        "lr": 1e-3,
        "rows": 12,
        "mode": "5",
        "fast": True,
    }
    assert parse_setting(Table, "mode", "none") is None
    for name, text, expected in (("rows", "1.5", "a whole number"), ("fast", "2", "true or false")):
        with pytest.raises(ValueError, match=f"{name}: expected {expected}, got '{text}'"):
            parse_setting(Table, name, text)


@pytest.mark.parametrize("recipe", [gpt, grpo, lens])
def test_no_number_of_a_recipe_may_be_infinite_or_of_another_type(recipe):
    for entry in fields(recipe.SETTINGS):
        if entry.name == "data":
            continue
        for bad in (float("nan"), float("-inf"), [], {}, b"x"):
            with pytest.raises(ValueError, match=f"^{entry.name}: expected "):
                recipe.SETTINGS(**{entry.name: bad})
