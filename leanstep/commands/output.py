"""Where a command's results go: a JSON object on standard output or in a file, the human part beside it."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from leanstep.commands import BadInput
from leanstep.files import write_text


def console(json_path: str | None = None) -> Console:
    """The console for humans; standard error when standard output carries the JSON object."""
    plain = Console(stderr=json_path == "-", highlight=False)
    # A pipe has no width; the usual guess of 80 columns would break every row of a table in three.
    return plain if plain.is_terminal else Console(stderr=json_path == "-", highlight=False, width=160)


@contextlib.contextmanager
def kept_for_json(json_path: str | None) -> Iterator[None]:
    """While standard output carries the JSON object, what the measured code prints goes to standard error."""
    if json_path == "-":
        with contextlib.redirect_stdout(sys.stderr):
            yield
    else:
        yield


def check_writable(path: str | None, argument: str) -> None:
    """Refuse an output that cannot be written before the long work starts, not after it."""
    if path is None or path == "-":
        return
    target = Path(path)
    if target.is_dir():
        raise BadInput(f"{argument}: {path} is a folder; expected a file name")
    folder = target.parent
    if not folder.is_dir():
        raise BadInput(f"{argument}: the folder {folder} does not exist")
    # Root may write anywhere os.access says no to, and a read-only mount says yes to root: try it.
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BadInput(f"{argument}: cannot write to {folder}: {error.strerror}") from None


def write_json(obj: Any, path: str | None) -> None:
    """Print one JSON object (`-`) or write it to a file; nothing for None. NaN and infinity become null."""
    if path is None:
        return
    text = json.dumps(_finite(obj), indent=1, ensure_ascii=False, allow_nan=False)
    if path == "-":
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    else:
        write_text(path, text + "\n", "--json")


def _finite(obj: Any) -> Any:
    """JSON knows no NaN: a figure that does not exist is null."""
    if isinstance(obj, float):
        return obj if obj == obj and abs(obj) != float("inf") else None
    if isinstance(obj, dict):
        return {str(key): _finite(value) for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return [_finite(value) for value in obj]
    return obj
