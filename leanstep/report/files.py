"""Write a file whole or not at all, and say in one line why it could not be written."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


class BadInput(Exception):
    """The caller's mistake: one line that names the argument, what came and what is expected. Exit code 2."""


def write_text(path: str | Path, text: str, argument: str = "output") -> None:
    """Write `text` to `path` atomically: a temporary file beside it, fsync, rename.

    A full disk, a read-only folder or an interrupt leaves the old file (or none) and no temporary one.
    """
    target = Path(path)
    try:
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise BadInput(f"{argument}: cannot write to {target.parent}: {error.strerror}") from None
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(target)
    except OSError as error:
        raise BadInput(f"{argument}: cannot write {target}: {error.strerror}") from None
    finally:
        # After a successful rename the temporary name is gone already.
        with contextlib.suppress(OSError):
            Path(temporary).unlink(missing_ok=True)
