"""Delete each barrier, mask and bound from each kernel and see whether the tests of CI notice.

    python dev/mutate_kernels.py                 every mutant; appends to results/kernel-mutants.jsonl
    python dev/mutate_kernels.py --list          only list them
    python dev/mutate_kernels.py muon/kernel     mutants of files or kernels whose name contains this

A mutant is a copy of the package with one change in one kernel file. First the memory checks of that file's
kernels run on it, then the tests that compare the kernels' values. It is killed when one of them fails.
EQUIVALENT lists mutants that cannot matter, with the reason. A tool, not a test: it takes an hour.

A second run judges only what the file of results does not have: other mutants, survivors, and mutants of
kernels that changed (comments do not count). `--all` judges everything again.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = ("leanstep/heads/kernels.py", "leanstep/muon/kernel.py", "recipes/speedrun/kernels.py")
RESULTS = ROOT / "results" / "kernel-mutants.jsonl"
PASSES, PRODUCTS = "tests/heads/test_kernels.py", "tests/muon/test_kernel.py"
# Kernels (and functions that they call) -> launches in tests/dev, then tests that compare values.
CHECKS: dict[tuple[str, ...], tuple[str, str, str]] = {
    ("stats_kernel", "_logits"): (
        "stats_kernel or tiles_of_logits",
        PASSES,
        "passes_equal or gpus_path",
    ),
    ("grads_kernel",): ("grads_kernel or tiles_of_logits", PASSES, "passes_equal or gpus_path"),
    ("softcap_rows_kernel", "_tanh"): (
        "softcap_rows or capped_rows",
        "tests/recipes/speedrun/test_kernels.py",
        "rows_kernel",
    ),
    ("relu_product_kernel",): (
        "relu_product or squares",
        "tests/recipes/speedrun/test_kernels.py",
        "relu_squared",
    ),
    ("xxt_kernel", "xtx_kernel", "_tile_of", "_store_both"): (
        "xxt_kernel or xtx_kernel or symmetric_products",
        PRODUCTS,
        "products or epilogue or symmetry or strided",
    ),
    ("transpose_kernel",): ("transpose", PRODUCTS, "test_transposes"),
}


@dataclass(frozen=True)
class Mutant:
    """`old` at one place of a file becomes `new`; `number` counts equal changes of one kernel."""

    file: str
    line: int
    kernel: str
    rule: str
    start: int
    stop: int
    old: str
    new: str
    number: int = 1

    @property
    def name(self) -> str:
        """Does not change with lines and comments elsewhere in the file."""
        again = f" ({self.number})" if self.number > 1 else ""
        change = f"{self.old.strip()} -> {self.new.strip() or 'nothing'}"
        return f"{self.file} {self.kernel} {self.rule}: {change}{again}"


_BELOW = (
    "only elements on or below the diagonal are stored: their column is at most their row, which is inside"
)
_ABOVE = (
    "a tile above the diagonal stores nothing: both masks compare rows with columns; the return saves time"
)
# (kernel, rule, what was replaced) -> why the change cannot matter.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    **{
        ("_store_both", rule, f"{columns} < size - col"): _BELOW
        for rule in ("bound", "one more")
        for columns in ("cols[None, :]", "cols[:, None]")
    },
    ("_store_both", "one more", "row + rows[None, :] > col + cols[:, None]"): (
        "the diagonal is stored twice, with one value"
    ),
    ("xxt_kernel", "early return", "return"): _ABOVE,
    ("xtx_kernel", "early return", "return"): _ABOVE,
}


class Finder(ast.NodeVisitor):
    """Mutants of one kernel function."""

    def __init__(self, file: str, source: str, function: ast.FunctionDef) -> None:
        self.file, self.source, self.function = file, source, function
        self.starts = [0]
        for line in source.encode().splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.mutants: list[Mutant] = []
        self.masks = _mask_names(function)

    def add(
        self, node: ast.AST, rule: str, new: str, *, stop: int | None = None, start: int | None = None
    ) -> None:
        begin, end = self.span(node)
        begin, end = begin if start is None else start, end if stop is None else stop
        old = self.source.encode()[begin:end].decode()
        self.mutants.append(Mutant(self.file, node.lineno, self.function.name, rule, begin, end, old, new))

    def span(self, node: ast.AST) -> tuple[int, int]:
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[
            node.end_lineno - 1
        ] + node.end_col_offset

    def text(self, node: ast.AST) -> str:
        begin, end = self.span(node)
        return self.source.encode()[begin:end].decode()

    def visit_Expr(self, node: ast.Expr) -> None:
        if self.text(node) == "tl.debug_barrier()":
            self.add(node, "barrier", "pass")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if len(node.body) == 1 and isinstance(node.body[0], ast.Return):
            self.add(node.body[0], "early return", "pass")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = self.text(node.func)
        masks = [k for k in node.keywords if k.arg in ("mask", "other")]
        if called in ("tl.load", "tl.store") and masks:
            arguments = [self.text(a) for a in node.args] + [
                self.text(k) for k in node.keywords if k not in masks
            ]
            self.add(node, "mask", f"{called}({', '.join(arguments)})")
        for keyword in masks:
            if keyword.arg == "mask":
                self.bounds(keyword.value)
        if called == "min":
            for argument in node.args:
                self.add(node, "minimum", self.text(argument))
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to" and len(node.args) == 1:
            if self.text(node.args[0]) == "tl.int64":
                self.add(node, "64 bits", self.text(node.func.value))
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        if names & self.masks:
            self.bounds(node.value)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.Mod) and "tl.arange" in self.text(node.left):
            self.add(node, "wrap around", f"({self.text(node.left)})")
        self.generic_visit(node)

    def bounds(self, expression: ast.AST) -> None:
        """Comparisons of a mask: each becomes true, and each strict one takes one element more."""
        for node in ast.walk(expression):
            if isinstance(node, ast.Compare) and len(node.ops) == 1:
                left, right = self.text(node.left), self.text(node.comparators[0])
                if isinstance(node.ops[0], ast.Eq):
                    continue
                self.add(node, "bound", f"({left} == {left})")
                wider = {ast.Lt: "<=", ast.Gt: ">="}.get(type(node.ops[0]))
                if wider:
                    self.add(node, "one more", f"{left} {wider} {right}")
            if isinstance(node, ast.Call) and self.text(node.func) == "tl.where" and len(node.args) == 3:
                self.add(node, "bound", self.text(node.args[1]))


def _mask_names(function: ast.FunctionDef) -> set[str]:
    """Names that masks are made of, through assignments."""

    def names(node: ast.AST) -> set[str]:
        return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}

    calls = [n for n in ast.walk(function) if isinstance(n, ast.Call)]
    masks = set().union(
        *(names(k.value) for c in calls for k in c.keywords if k.arg == "mask"), {"inside", "here"}
    )
    assigned = [n for n in ast.walk(function) if isinstance(n, ast.Assign)]
    # Only names that hold comparisons: not the offsets that are compared.
    return {
        name
        for name in masks
        if name in ("inside", "here", "masked")
        or any(
            name in names(target) and any(isinstance(n, ast.Compare) for n in ast.walk(a.value))
            for a in assigned
            for target in a.targets
        )
    } | {"bound", "real"}


def kernels_in(source: str) -> dict[str, ast.FunctionDef]:
    """Functions of a file that Triton compiles, by name."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    jit = [f for f in functions if any(ast.unparse(d) == "triton.jit" for d in f.decorator_list)]
    return {function.name: function for function in jit}


def mutants_of(path: Path) -> list[Mutant]:
    source = path.read_text()
    name = path.relative_to(ROOT).as_posix()
    mutants: list[Mutant] = []
    for function in kernels_in(source).values():
        finder = Finder(name, source, function)
        finder.visit(function)
        mutants += sorted(set(finder.mutants), key=lambda m: (m.start, m.stop, m.new))
    seen: Counter[str] = Counter()
    numbered = []
    for mutant in mutants:
        seen[mutant.name] += 1
        numbered.append(replace(mutant, number=seen[mutant.name]))
    return numbered


def _pytest(copy: Path, arguments: list[str]) -> int:
    os.chdir(copy)
    with (copy / "pytest.log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    # In place of this folder, whose kernel_checks would hide that of tests/dev.
    sys.path[0] = str(copy)
    import pytest

    options = ["-q", "-x", "-p", "no:cacheprovider", f"--rootdir={copy}"]
    return int(pytest.main([*options, *arguments]))


def run_tests(copy: Path, arguments: list[str], seconds: int = 900) -> bool:
    """Whether the tests pass on the copy, in a child of this process that has torch already."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = _pytest(copy, arguments)
        finally:
            os._exit(status)
    deadline = time.time() + seconds
    while time.time() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.05)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


def reason_if_equivalent(mutant: Mutant) -> str | None:
    line = (ROOT / mutant.file).read_text().splitlines()[mutant.line - 1].strip()
    places = (mutant.old, f"{mutant.old} in {line.split('(')[0]}")
    return next(
        (EQUIVALENT[key] for p in places if (key := (mutant.kernel, mutant.rule, p)) in EQUIVALENT), None
    )


def checks_of(kernel: str) -> tuple[list[str], list[str]]:
    """Arguments of pytest for the memory checks and the value tests of a kernel."""
    (launches, file, chosen), *_ = (checks for names, checks in CHECKS.items() if kernel in names)
    return ["tests/dev/kernel_checks/test_memory.py", "-k", launches], [file, "-k", chosen]


def require_green(copy: Path, tests: tuple[str, ...], known: set[tuple[str, ...]]) -> None:
    """Tests that fail without a mutant kill nothing."""
    if tests not in known and not run_tests(copy, list(tests)):
        print((copy / "pytest.log").read_text(), file=sys.stderr)
        sys.exit(f"{' '.join(tests)}: fails without a mutant")
    known.add(tests)


def judged(mutants: list[Mutant], copy: Path) -> Iterator[tuple[Mutant, str]]:
    """Each mutant with what killed it, or "survived"."""
    green: set[tuple[str, ...]] = set()
    for mutant in mutants:
        source = (ROOT / mutant.file).read_bytes()
        target = copy / mutant.file
        changed = source[: mutant.start] + mutant.new.encode() + source[mutant.stop :]
        outcome = "survived"
        for name, tests in zip(("memory checks", "value tests"), checks_of(mutant.kernel), strict=True):
            target.write_bytes(source)
            require_green(copy, tuple(tests), green)
            target.write_bytes(changed)
            if not run_tests(copy, tests):
                outcome = name
                break
        target.write_bytes(source)
        yield mutant, outcome


def digest_of(source: str, kernel: str) -> str:
    """Of a kernel and the kernels that it calls, without comments and docstrings."""
    functions, needed = kernels_in(source), [kernel]
    for name in needed:
        function = functions[name]
        if ast.get_docstring(function) is not None:
            function.body = function.body[1:]
        called = [n.id for n in ast.walk(function) if isinstance(n, ast.Name) and n.id in functions]
        needed += [name for name in dict.fromkeys(called) if name not in needed]
    text = "\n".join(ast.dump(functions[name]) for name in sorted(needed))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def key_of(mutant: Mutant) -> tuple[str, str]:
    """Of its row in the file of results."""
    return mutant.name, digest_of((ROOT / mutant.file).read_text(), mutant.kernel)


def earlier_results() -> dict[tuple[str, str], dict[str, str]]:
    """Rows of the file of results by mutant and digest of its kernel, without survivors."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    rows = [row for row in map(json.loads, lines) if row["outcome"] != "survived"]
    return {(row["mutant"], row["digest"]): row for row in rows}


def judge_all(mutants: list[Mutant]) -> None:
    """Judge mutants on a copy of the package and append a row for each to the file of results."""
    os.environ |= {"TRITON_INTERPRET": "1", "LEANSTEP_TEST_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    sys.dont_write_bytecode = True
    # Children of this process have these already.
    for name in ("torch._dynamo", "torch.distributed.tensor", "triton.runtime.interpreter"):
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder, RESULTS.open("a") as results:
        copy = Path(folder)
        for name in ("leanstep", "recipes", "dev", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        for number, (mutant, outcome) in enumerate(judged(mutants, copy), 1):
            reason = reason_if_equivalent(mutant)
            if outcome == "survived" and reason:
                outcome = f"equivalent: {reason}"
            row = {"mutant": mutant.name, "kernel": mutant.kernel, "rule": mutant.rule, "outcome": outcome}
            print(json.dumps(row | {"digest": key_of(mutant)[1]}), file=results, flush=True)
            print(f"{number} of {len(mutants)}  {outcome:15}  {mutant.name}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help="parts of the mutants' files or kernels")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--all", action="store_true", help="judge again what the file of results has")
    chosen = parser.parse_args()
    mutants = [
        mutant
        for file in FILES
        for mutant in mutants_of(ROOT / file)
        if any(part in mutant.name for part in chosen.parts or [""])
    ]
    if chosen.list:
        print("\n".join(mutant.name for mutant in mutants))
        print(Counter(m.rule for m in mutants), len(mutants))
        return 0
    earlier = {} if chosen.all else earlier_results()
    judge_all([m for m in mutants if key_of(m) not in earlier])
    known = earlier_results()
    outcomes = [known.get(key_of(m), {"outcome": "survived"})["outcome"] for m in mutants]
    print(Counter(outcome.split(":")[0] for outcome in outcomes))
    return 1 if "survived" in outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
