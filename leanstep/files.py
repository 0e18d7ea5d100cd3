"""Write a file whole or not at all, and say in one line why it could not be written."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Any

_DESCRIPTOR = re.compile(r"/dev/(stdout|stderr|fd/\d+)$|/proc/(self|\d+)/fd/\d+$")


class BadInput(Exception):
    """The caller's mistake: one line that names the argument, what came and what is expected. Exit code 2."""


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` by `data`: a temporary file beside it, fsync, rename, fsync of the folder.

    After a crash the file holds its old content or the new, never a part. A full disk or an interrupt leaves
    no temporary file; `kill -9` may leave one named `.NAME.PID-TOKEN.partial`. A symbolic link stays: its
    target is replaced. A device, a FIFO and what a descriptor of this process is open on are written through.
    """
    if is_written_through(path):
        with path.open("ab", buffering=0) as file:
            _write_all(file, data)
        return
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # A script keeps its x bit.
        with contextlib.suppress(OSError):
            temporary.chmod(path.stat().st_mode)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def is_written_through(path: Path) -> bool:
    """Whether `path` is no regular file, or one that /dev/stdout or /dev/fd/N names."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return True
    except OSError:
        return False
    # What the shell opened (`> log`) must not be replaced under its descriptor.
    return _DESCRIPTOR.match(str(path.absolute())) is not None


def _write_all(file: io.FileIO, data: bytes) -> None:
    """A pipe may take less than it is given."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) or 0 :]


def write_text(path: str | Path, text: str, argument: str = "output") -> None:
    """`write_atomically` of UTF-8 text; a failure becomes a `BadInput` that names `argument`."""
    target = Path(path)
    try:
        write_atomically(target, text.encode())
    except OSError as error:
        writable = os.access(target.parent, os.W_OK)
        place = str(target) if writable else f"to {target.parent}"
        raise BadInput(f"{argument}: cannot write {place}: {error.strerror}") from None


def _sync_folder(folder: Path) -> None:
    """Make a rename durable. Some platforms cannot open a folder; there the rename itself must do."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def finite(value: Any) -> Any:
    """`value` as JSON can hold it: NaN and infinity become None, keys become text, tuples lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
