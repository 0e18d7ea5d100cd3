"""Packages that only some commands and functions need, and the line that says how to install them.

The core needs torch, typer and rich. Whatever needs more calls `require` before it imports more.
"""

from __future__ import annotations

import importlib
from typing import Any


class MissingExtra(ModuleNotFoundError):
    """A package of an extra is not installed; the message has the command that installs it. Exit code 2."""


def require(what: str, extra: str, *modules: str) -> None:
    """Raise MissingExtra unless all `modules` can be imported.

    Args:
        what: who needs them, as the first words of the message.
        extra: the extra of leanstep that brings them.
        modules: names to import.
    """
    missing = [name for name in modules if _imported(name) is None]
    if missing:
        names = " and ".join(missing)
        raise MissingExtra(f'{what} needs {names}: pip install "leanstep[{extra}]"', name=missing[0])


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A package that is there and lacks one of its own is broken: that is another message.
        if error.name is not None and error.name.partition(".")[0] != name.partition(".")[0]:
            raise
        return None
