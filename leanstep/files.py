"""Write files atomically, with a one-line error if that fails."""

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
    """Invalid input: one line that names the argument, its value and what is expected. Exit code 2."""


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` by `data`: temporary file in the same folder, fsync, rename, fsync of the folder.

    After a crash the file has its old or its new content, never a part. A full disk or an interrupt leaves no
    temporary file; `kill -9` may leave one named `.NAME.PID-TOKEN.partial`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # Preserve the mode, such as a script's executable bit.
        with contextlib.suppress(OSError):
            temporary.chmod(path.stat().st_mode)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def write_output(path: Path, data: bytes) -> None:
    """Write a file that the user named.

    A regular file is replaced atomically. The target of a symbolic link is replaced, the link remains.
    Devices, FIFOs and files behind a descriptor of this process are written directly.
    """
    if is_written_through(path):
        with path.open("ab", buffering=0) as file:
            _write_all(file, data)
    else:
        write_atomically(Path(os.path.realpath(path)), data)


def is_written_through(path: Path) -> bool:
    """Return whether `path` is not a regular file, or is named by /dev/stdout or /dev/fd/N."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return True
    except OSError:
        return False
    # A file that the shell opened (`> log`) must not be replaced while its descriptor is in use.
    return _DESCRIPTOR.match(str(path.absolute())) is not None


def _write_all(file: io.FileIO, data: bytes) -> None:
    """Write all of `data`; a pipe may accept only a part per call."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) or 0 :]


def write_text(path: str | Path, text: str, argument: str = "output") -> None:
    """Write UTF-8 text with `write_output`; raise a `BadInput` that names `argument` on failure."""
    target = Path(path)
    try:
        write_output(target, text.encode())
    except OSError as error:
        writable = os.access(target.parent, os.W_OK)
        place = str(target) if writable else f"to {target.parent}"
        raise BadInput(f"{argument}: cannot write {place}: {error.strerror}") from None


def _sync_folder(folder: Path) -> None:
    """Make a rename durable; does nothing on platforms that cannot open a folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def finite(value: Any) -> Any:
    """Convert `value` for JSON: NaN and infinity become None, keys become strings, tuples become lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
