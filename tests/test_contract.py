"""The contract: commands, options, public names and signatures. Adding one means editing these lists."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import typer
from contract import NAMES, OPTIONS

from leanstep.cli import COMMANDS, app
from leanstep.integrations.versions import UnknownVersion


def command(name: str) -> Any:
    group = typer.main.get_command(app)
    return group.get_command(group.make_context("leanstep", [name]), name)


def spelled(function: Any) -> str:
    """Names of the parameters, `=` where one has a default, `*` before keywords."""
    words, keywords = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keywords:
            words.append("*")
        keywords = keywords or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        words.append(stars + parameter.name + "=" * (parameter.default is not parameter.empty))
    return f"({', '.join(words)})"


def signature(value: Any) -> str:
    """`(a, b=)` of a function or class, `value` of a constant."""
    if inspect.isclass(value) and issubclass(value, BaseException):
        return "exception"
    return spelled(value) if inspect.isroutine(value) or inspect.isclass(value) else "value"


def test_commands():
    assert list(COMMANDS) == list(OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_a_command(name):
    options = {
        spelling
        for parameter in command(name).params
        for spelling in (*parameter.opts, *parameter.secondary_opts)
        if spelling.startswith("-")
    }
    assert sorted(options - {"--help", "-h"}) == sorted(OPTIONS[name].split())


@pytest.mark.parametrize("module", NAMES)
@pytest.mark.filterwarnings("ignore")  # of the packages that the adapters import
def test_public_names_and_signatures(module):
    try:
        package = importlib.import_module(module)
    except (UnknownVersion, ModuleNotFoundError) as missing:
        if str(getattr(missing, "name", None)).startswith("leanstep"):
            raise
        pytest.skip(str(missing))
    listed = {name: signature(getattr(package, name)) for name in package.__all__}
    assert listed == NAMES[module]
