"""Change one operator, constant or condition at a time: does `make test` notice?

    python dev/mutants.py                  what results/mutants.jsonl does not have; appends to it
    python dev/mutants.py --list           only list them
    python dev/mutants.py --only heads     mutants of one group

Every place of the listed functions where a listed operator applies is a candidate. A fixed seed draws
`PER_GROUP` of each group by a hash of the change and its function, so that changes elsewhere draw no others.
A mutant is one changed file in a copy of the clone. The tests that `make test` selects from the group's
folder run on it; where all pass, the other tests of the folder follow when every mutant had its turn. The
unchanged clone runs first and must pass. REASONS says why a mutant may survive. A result holds as long as
its function stays as it is.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent import futures
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "mutants.jsonl"
SEED, PER_GROUP = 50, 13
# Tests that take longer hang: the mutant is killed. Of a process, so that a busy machine kills none.
CPU_LIMIT_S, LIMIT_S = 300, 3600
# group -> modules (all their functions, or those that are named), folder of tests.
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
# Name of a survivor -> why no test needs to notice the change.
REASONS: dict[str, str] = {
    "leanstep/muon/polar.py iterate, comparison: rows > cols -> rows >= cols": (
        "a square matrix may be multiplied from either side"
    ),
    "leanstep/muon/polar.py symmetric, boolean:"
    ' a.device.type != "cpu" or torch.compiler.is_compiling() or a.dtype in HALF or side < MIN_PANEL_SIDE'
    ' -> ((a.device.type != "cpu") and (torch.compiler.is_compiling()) and (a.dtype in HALF)'
    " and (side < MIN_PANEL_SIDE))": "both products are right: which one runs is a matter of speed",
    "leanstep/muon/update.py update, constant: 1 -> (1 + 1) (5)": (
        "how many matrices are stacked is a matter of speed and memory"
    ),
    'leanstep/prove/functions.py _run, condition: layout == "strided" and drawn.dim() > 1'
    ' -> (not (layout == "strided" and drawn.dim() > 1))': (
        "the other layouts get the strided upstream gradients: the same functions fail"
    ),
    "leanstep/prove/functions.py _judge, constant: 0.0 -> (0.0 + 1) (3)": (
        "the bound of a gradient that should not exist decides nothing"
    ),
    "leanstep/prove/invariance.py _variants, constant: 0 -> (0 + 1)": ("any row alone is as good a variant"),
    "leanstep/rehearse/cuda_allocator.py memory_of, constant: 240 -> (240 + 1)": (
        "how many points a chart has is free"
    ),
    "leanstep/rehearse/cuda_allocator.py _timeline, constant: 1 -> (1 + 1) (3)": (
        "the height before the first event: any number below zero"
    ),
    "leanstep/rehearse/cuda_allocator.py _timeline, comparison: now > best[0] -> now >= best[0]": (
        "of equal peaks any one will do"
    ),
}


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
    # Equal changes of a function before this one, and the function's syntax.
    earlier: int
    code: str

    @property
    def name(self) -> str:
        again = f" ({self.earlier + 1})" if self.earlier else ""
        return f"{self.file} {self.function}, {self.rule}: {self.old} -> {self.new}{again}"


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class Finder(ast.NodeVisitor):
    """Candidates in the functions of one module; messages, annotations and docstrings are left out."""

    def __init__(self, group: str, file: str, wanted: str) -> None:
        self.group, self.file, self.wanted = group, file, wanted.split()
        self.source = (ROOT / file).read_bytes()
        self.starts = [0]
        for line in self.source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.functions: list[str] = []
        self.code = ""
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
            change = (".".join(self.functions), rule, self.text(node), new)
            earlier = sum((m.function, m.rule, m.old, m.new) == change for m in self.mutants)
            place = (self.group, self.file, node.lineno)
            self.mutants.append(Mutant(*place, *change[:2], start, stop, *change[2:], earlier, self.code))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if not self.functions:
            self.code = digest(ast.dump(node))
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
    """Return `PER_GROUP` mutants of each group."""
    chosen = []
    for group, (modules, _) in GROUPS.items():
        candidates = [
            m
            for module, wanted in modules.items()
            for m in Finder(group, f"leanstep/{module}.py", wanted).mutants
        ]
        by_hash = sorted(candidates, key=lambda m: digest(f"{SEED} {m.name}"))
        chosen += sorted(by_hash[:PER_GROUP], key=lambda m: (m.file, m.start))
    return [m for m in chosen if only in m.group]


def judge(task: tuple[Mutant, str, Path]) -> tuple[Mutant, str, str | None]:
    """Run a selection of the group's tests on one mutant, in this worker's copy of the clone."""
    mutant, selection, folder = task
    copy = folder / str(os.getpid())
    if not copy.exists():
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        for name in filter(None, files.decode().split("\0")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    path, original = copy / mutant.file, (ROOT / mutant.file).read_bytes()
    path.write_bytes(original[: mutant.start] + mutant.new.encode() + original[mutant.stop :])
    # Bytecode is known by its source's length and second of change, which two mutants may share.
    shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)
    try:
        return mutant, selection, first_failure(copy, GROUPS[mutant.group][1], selection)
    finally:
        path.write_bytes(original)
        shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)


def first_failure(copy: Path, tests: str, selection: str) -> str | None:
    """Return the first line of what failed, None if every test passed."""
    log = copy.with_suffix(".log")
    child = os.fork()
    if not child:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))
        descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.chdir(copy)
        os.environ["PYTHONPATH"] = str(copy)
        sys.path.insert(0, str(copy))
        options = ["-x", "-q", "-m", selection, "-p", "no:cacheprovider", "-o", "timeout=0"]
        code = 3
        try:
            code = pytest.main([*options, *tests.split()])
            sys.stdout.flush()
        finally:
            os._exit(int(code))
    deadline = time.monotonic() + LIMIT_S
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.02)
    # 5: nothing selected.
    if os.waitstatus_to_exitcode(ended[1]) in (0, 5):
        return None
    lines = log.read_text(errors="replace").strip().splitlines()
    return next((line for line in lines if line.startswith(("FAILED", "ERROR"))), (lines or ["killed"])[-1])[
        :200
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", default="", help="groups whose name contains this")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    mutants = drawn(options.only)
    if options.list:
        for mutant in mutants:
            print(f"{mutant.file}:{mutant.line}: {mutant.name}")
        return 0
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    # Results of functions that changed, and of mutants that are drawn no more, go.
    valid = {(m.name, m.code) for m in drawn()}
    rows = [row for row in rows if (row["mutant"], row["code"]) in valid]
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    judged = {(row["mutant"], row["selection"]): row["failed"] for row in rows}
    with (
        tempfile.TemporaryDirectory() as folder,
        # Not a Pool, whose daemons may not start the ranks of a test.
        futures.ProcessPoolExecutor(options.jobs, multiprocessing.get_context("fork")) as pool,
    ):
        controls = {m.group: replace(m, new=m.old) for m in mutants}.values()
        for control, _, failed in pool.map(judge, [(m, "quick", Path(folder)) for m in controls]):
            if failed:
                print(f"{control.group}: a test fails without a change: {failed}", file=sys.stderr)
                return 2
        for selection in ("quick", "not quick"):
            # A mutant that failed one selection needs no other.
            left = [m for m in mutants if not any(judged.get((m.name, s)) for s in ("quick", "not quick"))]
            tasks = [(m, selection, Path(folder)) for m in left if (m.name, selection) not in judged]
            for done in futures.as_completed([pool.submit(judge, task) for task in tasks]):
                mutant, _, failed = done.result()
                judged[mutant.name, selection] = failed
                print(f"{'killed' if failed else 'SURVIVED':9} {selection:10} {mutant.name}", flush=True)
                row = {"mutant": mutant.name, "code": mutant.code, "selection": selection, "failed": failed}
                with RESULTS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    counts: Counter[str] = Counter()
    for mutant in mutants:
        by = [s for s in ("quick", "not quick") if judged.get((mutant.name, s))]
        counts[
            {"quick": "killed by make test", "not quick": "killed only by make test-all"}[by[0]]
            if by
            else "survived"
        ] += 1
        if not by:
            print(f"{mutant.name}: {REASONS.get(mutant.name, 'no reason')}")
    print(f"{len(mutants)} mutants:", ", ".join(f"{number} {name}" for name, number in counts.items()))
    return 0


if __name__ == "__main__":
    # Imported once and forked for each run: seconds each. The variables are those of `make test`.
    os.environ["OMP_NUM_THREADS"] = "1"
    import pytest
    import torch.distributed.tensor  # noqa: F401

    sys.exit(main())
