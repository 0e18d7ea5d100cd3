"""Rules of a room, counted: `python tools/rooms.py` prints the figures and exits 1 where a rule is broken.

At most 12 files a folder (besides `__init__`), at most 450 lines a file, a file name once in the package, at
most 12 parameters a public function, no import hidden under `TYPE_CHECKING`, machine tuning in cpu.py alone.
"""

from __future__ import annotations

import ast
import collections
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

MAX_FILES, MAX_LINES, MAX_PARAMETERS = 12, 450, 12
# The same words mean the same thing in every fast-path folder.
REPEATED = {"__init__", "__main__", "reference", "kernel", "cases", "peers"}
# What tunes a process for one machine: thread counts and C++ builds.
TUNING_CALLS = {"set_num_threads", "set_num_interop_threads", "build_library"}
TUNING_PLACES = {"cpu.py"}


@dataclass(frozen=True)
class Rooms:
    """Lines per file, and one sentence per broken rule."""

    lines: dict[Path, int]
    broken: list[str]

    def figures(self) -> str:
        sizes = [count for path, count in self.lines.items() if path.name != "__init__.py"]
        return (
            f"modules {len(self.lines)}, lines {sum(self.lines.values())}, "
            f"median {statistics.median(sizes):g}, longest {max(sizes)}"
        )


def read_rooms(package: Path) -> Rooms:
    """Walk the package and hold every file against the rules."""
    files = sorted(path for path in package.rglob("*.py") if "examples" not in path.parts)
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    broken = [
        f"{path.relative_to(package)} has {count} lines, at most {MAX_LINES}"
        for path, count in lines.items()
        if count > MAX_LINES
    ]
    folders = collections.Counter(path.parent for path in files if path.name != "__init__.py")
    for folder, count in folders.items():
        if count > MAX_FILES:
            broken.append(f"{folder.name}/ has {count} files, at most {MAX_FILES}")
    names = collections.Counter(path.stem for path in files)
    for name, count in names.items():
        if count > 1 and name not in REPEATED:
            broken.append(f"{name}.py occurs {count} times, once is allowed")
    for path in files:
        broken += _broken_in(path, package)
    return Rooms(lines, broken)


def _broken_in(path: Path, package: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    where = path.relative_to(package)
    found = []
    # A command's options are its parameters; a Triton kernel has one per pointer and stride.
    if "commands" not in where.parts and path.stem != "kernel":
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                count = len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)
                if count > MAX_PARAMETERS:
                    found.append(f"{where}: {node.name} has {count} parameters, at most {MAX_PARAMETERS}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "TYPE_CHECKING":
            found.append(f"{where}:{node.lineno} hides an import under TYPE_CHECKING")
        elif isinstance(node, ast.Attribute) and node.attr in TUNING_CALLS and path.name not in TUNING_PLACES:
            found.append(f"{where}:{node.lineno} calls {node.attr}: machine tuning belongs into cpu.py")
    return found


def main() -> int:
    rooms = read_rooms(Path(__file__).parent.parent / "leanstep")
    print(rooms.figures())
    for sentence in rooms.broken:
        print(f"  {sentence}")
    return 1 if rooms.broken else 0


if __name__ == "__main__":
    sys.exit(main())
