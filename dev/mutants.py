"""Change one operator, constant or condition at a time: does `make test` notice?

    python dev/mutants.py --out results/mutants.jsonl      draw, run, append one line per mutant
    python dev/mutants.py --list                           only list them
    python dev/mutants.py --only heads                     mutants of one group

Every place of the listed functions where a listed operator applies is a candidate; a fixed seed draws `PER_GROUP` of
each group. A mutant is one changed file in a copy of the clone. The tests that `make test` selects from the group's
folders run on it, then, if all pass, the others of these folders. EQUIVALENT gives reasons for mutants that cannot
matter.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SEED, PER_GROUP = 50, 15
# A test that takes longer hangs: the mutant is killed.
TIMEOUT_S = 120
# group -> modules (all their functions, or those that are named), folders and files of tests.
GROUPS: dict[str, tuple[dict[str, str], str]] = {
    "heads": (
        {
            **dict.fromkeys(
                ("heads/logprob", "heads/losses", "heads/rowwise", "heads/rows", "heads/allowed"), ""
            ),
            **dict.fromkeys(("heads/head", "heads/layout", "heads/padded"), ""),
            "heads/passes": "torch_stats torch_grads _in_tile passes_for",
        },
        "tests/heads",
    ),
    "muon": (
        dict.fromkeys(
            ("muon/polar", "muon/step", "muon/update", "muon/optimizer", "muon/groups", "muon/banks"), ""
        ),
        "tests/muon",
    ),
    "lens": (
        dict.fromkeys(
            ("lens/loss", "lens/batch", "lens/objective", "lens/metrics", "lens/offline", "lens/proxy"), ""
        ),
        "tests/lens",
    ),
    "prove": (
        dict.fromkeys(("prove/compare", "prove/difference", "prove/invariance", "prove/interpret"), "")
        | {"prove/functions": "", "prove/splits": ""},
        "tests/prove",
    ),
    "rehearse": (
        dict.fromkeys(("rehearse/cuda_allocator", "rehearse/out_of_memory"), ""),
        "tests/rehearse",
    ),
}
COMPARED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
COMPARED |= {ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}
COMPUTED = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Pow: "*"}
CALLED = {"min": "max", "max": "min", "any": "all", "all": "any", "amax": "amin", "amin": "amax"}
# Mutant's name -> why the change cannot matter.
EQUIVALENT: dict[str, str] = {}


@dataclass(frozen=True)
class Mutant:
    """Bytes `start:stop` of a file become `new`."""

    group: str
    file: str
    line: int
    function: str
    rule: str
    start: int
    stop: int
    old: str
    new: str

    @property
    def name(self) -> str:
        return f"{self.file} {self.function} {self.rule}: {self.old} -> {self.new}"


class Finder(ast.NodeVisitor):
    """Candidates in the functions of one module; messages, annotations and docstrings are left out."""

    def __init__(self, group: str, file: str, wanted: str) -> None:
        self.group, self.file, self.wanted = group, file, wanted.split()
        self.source = (ROOT / file).read_bytes()
        self.starts = [0]
        for line in self.source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.functions: list[str] = []
        self.mutants: list[Mutant] = []
        self.visit(ast.parse(self.source))

    def span(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.starts[node.lineno - 1] + node.col_offset, (
            self.starts[node.end_lineno - 1] + node.end_col_offset
        )

    def text(self, node: ast.expr) -> str:
        start, stop = self.span(node)
        return self.source[start:stop].decode()

    def add(self, node: ast.expr, rule: str, new: str) -> None:
        if self.functions and (not self.wanted or self.functions[0] in self.wanted):
            start, stop = self.span(node)
            old, function = self.text(node), ".".join(self.functions)
            self.mutants.append(
                Mutant(self.group, self.file, node.lineno, function, rule, start, stop, old, new)
            )

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.functions.append(node.name)
        for child in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
            self.visit(child)
        self.functions.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Left out: the text of an error."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Left out: what never fails."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Left out: texts."""

    def visit_Compare(self, node: ast.Compare) -> None:
        new = COMPARED.get(type(node.ops[0]))
        if new and len(node.ops) == 1:
            (right,) = node.comparators
            self.add(node, "comparison", f"{self.text(node.left)} {new} {self.text(right)}")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        new = COMPUTED.get(type(node.op))
        if new and not isinstance(node.left, ast.Constant | ast.JoinedStr):
            self.add(node, "arithmetic", f"({self.text(node.left)}) {new} ({self.text(node.right)})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = " or " if isinstance(node.op, ast.And) else " and "
        self.add(node, "boolean", "(" + word.join(f"({self.text(value)})" for value in node.values) + ")")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            self.add(node, "sign", self.text(node.operand))
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        self.add(node.test, "condition", f"not ({self.text(node.test)})")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.add(node.test, "condition", f"(not ({self.text(node.test)}))")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in CALLED:
            self.add(node.func, "function", self.text(node.func)[: -len(name)] + CALLED[name])
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add(node, "constant", str(not node.value))
        elif isinstance(node.value, int | float):
            self.add(node, "constant", f"({node.value} + 1)")


def drawn(only: str = "") -> list[Mutant]:
    """Return `PER_GROUP` mutants of each group; those of a group do not depend on the others."""
    chosen = []
    for group, (modules, _) in GROUPS.items():
        found = [
            m for module, wanted in modules.items() for m in Finder(group, f"leanstep/{module}.py", wanted).mutants
        ]
        chosen += sorted(random.Random(f"{SEED} {group}").sample(found, PER_GROUP), key=lambda m: (m.file, m.start))
    return [m for m in chosen if only in m.group]


class Copies:
    """Copies of the clone, one per thread."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.local = folder, threading.local()

    def get(self) -> Path:
        if not hasattr(self.local, "path"):
            self.local.path = self.folder / f"copy-{threading.get_ident()}"
            files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
            for name in filter(None, files.decode().split("\0")):
                target = self.local.path / name
                target.parent.mkdir(parents=True, exist_ok=True)
                if (ROOT / name).exists():
                    shutil.copy2(ROOT / name, target)
        return self.local.path


def judge(mutant: Mutant, copies: Copies) -> dict:
    """Run the tests on one mutant: killed by `make test`, by `make test-all` only, or by nothing."""
    copy = copies.get()
    path, original = copy / mutant.file, (ROOT / mutant.file).read_bytes()
    path.write_bytes(original[: mutant.start] + mutant.new.encode() + original[mutant.stop :])
    try:
        row = {"mutant": mutant.name, "line": mutant.line, "group": mutant.group, "killed": None, "by": None}
        for make, selection in (("test", "quick"), ("test-all", "not quick")):
            failed = first_failure(copy, GROUPS[mutant.group][1], selection)
            if failed:
                return row | {"killed": make, "by": failed}
        return row | {"why": EQUIVALENT.get(mutant.name)}
    finally:
        path.write_bytes(original)


def first_failure(copy: Path, tests: str, selection: str) -> str | None:
    """Return the first line of what failed, None if every test passed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", selection, "-p", "no:cacheprovider"]
    # The same length and second of change would let Python load the unchanged file's bytecode.
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*command, "-o", f"timeout={TIMEOUT_S}", *tests.split()],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    # 5: nothing selected.
    if done.returncode in (0, 5):
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0][:200] if lines else (done.stdout + done.stderr).strip()[-200:]


def rows_of(mutants: list[Mutant], jobs: int) -> Iterator[dict]:
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        copies = Copies(Path(folder))
        yield from pool.map(lambda mutant: judge(mutant, copies), mutants)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", default="", help="groups whose name contains this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    mutants = drawn(options.only)
    if options.list:
        for mutant in mutants:
            print(f"{mutant.file}:{mutant.line} {mutant.name}")
        return 0
    counts: Counter[str] = Counter()
    for row in rows_of(mutants, options.jobs):
        counts[row["killed"] or "survived"] += 1
        print(f"{row['killed'] or 'SURVIVED':9} {row['mutant']}", flush=True)
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    print(", ".join(f"{name}: {number}" for name, number in counts.items()), f"of {len(mutants)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
