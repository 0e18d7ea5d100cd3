"""Run a script in a copy of the working directory: its files stay as they are.

Relative paths refer to the copy. Absolute paths and the network are not isolated: this protects against
accidents, not against a hostile script.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from leanstep import units
from leanstep.files import BadInput
from leanstep.script.children import temporary_folder


@contextlib.contextmanager
def sandbox() -> Iterator[Path]:
    """Make a copy of the working directory the current one inside the block, then remove it."""
    home = Path.cwd()
    with temporary_folder("leanstep-sandbox-") as folder:
        needed, free = _size(home, set()), shutil.disk_usage(folder).free
        if needed > free:
            raise BadInput(
                f"--sandbox: the working directory holds {units.size(needed)}, {folder.parent} has "
                f"{units.size(free)} free; TMPDIR names another place"
            )
        copy = folder / (home.name or "root")
        try:
            _copy(home, copy, home, copy)
        except OSError as error:
            raise BadInput(f"--sandbox: cannot copy {error.filename}: {error.strerror}") from None
        os.chdir(copy)
        try:
            yield copy
        finally:
            os.chdir(home)


def inside(path: str, home: Path, copy: Path) -> str:
    """Return the file in the copy if an absolute path is inside the working directory."""
    target = Path(path)
    return (
        str(copy / target.relative_to(home)) if target.is_absolute() and target.is_relative_to(home) else path
    )


def _entries(folder: Path) -> list[Path]:
    # A temporary folder inside the working directory must not be copied into itself.
    return [path for path in folder.iterdir() if not path.name.startswith("leanstep-sandbox-")]


def _size(folder: Path, seen: set[str]) -> int:
    real = os.path.realpath(folder)
    if real in seen:
        return 0
    seen.add(real)
    total = 0
    with contextlib.suppress(OSError):
        for path in _entries(folder):
            total += _size(path, seen) if path.is_dir() else path.stat().st_size if path.is_file() else 0
    return total


def _copy(source: Path, target: Path, home: Path, copy: Path) -> None:
    """Copy a folder. Links inside it remain links; targets of other links are copied."""
    target.mkdir()
    for path in _entries(source):
        there = target / path.name
        real = Path(os.path.realpath(path))
        if path.is_symlink() and real.is_relative_to(home):
            there.symlink_to(copy / real.relative_to(home))
        elif path.is_dir() and not home.is_relative_to(real):
            _copy(path, there, home, copy)
        elif path.is_file():
            shutil.copy2(path, there)
