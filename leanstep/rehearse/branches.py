"""Branches that depend on an unknown value: where they are, and whether they decide an update.

A host read of an unknown value is looked up in the program's source: an `if`, `while`, `assert` or `for` that
contains it, or a later one that tests the variable it is assigned to. A number returned by `.item()` reports
every comparison it is used in, wherever the program passes it.
"""

from __future__ import annotations

import ast
import functools
import linecache
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from leanstep.rehearse.events import Branch
from leanstep.tape.lines import Line

# The rehearsal stops after this many decisions of one branch without a backward, or without an update.
MOST_SKIPPED, MOST_DECIDED = 100, 1000
_UPDATES = re.compile(r"(^|_)(steps?|backward|update|train\w*|optimi[sz]e)(_|$)")
_READS = frozenset("bool float int item tolist any all isfinite isnan isinf".split())
_COMPARES = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__bool__")
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_COMPUTES = [f"__{side}{name}__" for name in _ARITHMETIC for side in ("", "r")]
_COMPUTES += ["__neg__", "__pos__", "__abs__"]
_ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)
_TESTS = (ast.If, ast.While, ast.IfExp, ast.Assert)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)


class NoUpdate(BaseException):
    """The program makes no update. No `except Exception` of the program catches it."""

    def __init__(self, line: Line | None, reason: str) -> None:
        super().__init__(reason)
        self.line = line


class Condition(NamedTuple):
    """A branch in the source. decides_update: one of its paths skips an update."""

    line: Line
    code: str
    decides_update: bool


class Branches:
    """Decisions that the program made from assumed values."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[Condition, str]] = Counter()
        self._since_update: Counter[Condition] = Counter()
        self._since_backward: Counter[Condition] = Counter()

    def read(self, line: Line | None, value: object) -> None:
        """Record that the host read an assumed value at this line, if a branch depends on it."""
        condition = condition_at(line) if line is not None else None
        if condition is not None:
            self._note(condition, value)

    def compared(self, line: Line | None, outcome: object) -> None:
        """Record a comparison at this line that has an assumed number on one side."""
        if line is not None:
            self._note(condition_at(line) or Condition(line, line.statement, False), outcome)

    def _note(self, condition: Condition, value: object) -> None:
        self._counts[condition, str(value)] += 1
        if not condition.decides_update:
            return
        self._since_update[condition] += 1
        self._since_backward[condition] += 1
        decided, skipped = self._since_update[condition], self._since_backward[condition]
        if decided >= MOST_DECIDED or skipped >= MOST_SKIPPED:
            times = f"after {max(decided, skipped)} evaluations of this branch"
            raise NoUpdate(condition.line, f"no update {times}: {self.responsible()}")

    def responsible(self) -> str:
        """Describe the branch that was evaluated most often since the last update; empty if there is none."""
        if not self._since_update:
            return ""
        condition = self._since_update.most_common(1)[0][0]
        value = max((n, value) for (other, value), n in self._counts.items() if other == condition)[1]
        return f"{condition.line} `{condition.code}` decides it, from an assumed value ({value})"

    def backward_began(self) -> None:
        self._since_backward.clear()

    def updated(self) -> None:
        self._since_update.clear()
        self._since_backward.clear()

    def listed(self) -> list[Branch]:
        """Return the branches: those that decide an update first, then by count."""
        branches = [
            Branch(c.line, c.code, value, count, c.decides_update)
            for (c, value), count in self._counts.items()
        ]
        return sorted(branches, key=lambda branch: (not branch.decides_update, -branch.count))


# Numbers that report their comparisons ------------------------------------------------------------------


def assumed_numbers(branches: Branches, here: Callable[[], Line | None]) -> Callable[[Any], Any]:
    """Turn a float or int into one that reports its comparisons; results of arithmetic with it do too."""
    kinds: dict[type, type] = {}

    def wrap(value: Any) -> Any:
        kind = kinds.get(type(value))
        return value if kind is None else kind(value)

    def compares(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def compare(x: Any, *others: Any) -> Any:
            outcome = plain(x, *others)
            if outcome is not NotImplemented and isinstance(x, tuple(kinds.values())):
                branches.compared(here(), outcome)
            return outcome

        return compare

    def computes(plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, *others: wrap(plain(x, *others))

    for number in (float, int):
        members: dict[str, Any] = {"__hash__": number.__hash__, "__slots__": ()}
        members |= {name: compares(getattr(number, name)) for name in _COMPARES}
        members |= {name: computes(getattr(number, name)) for name in _COMPUTES}
        kinds[number] = type(f"assumed_{number.__name__}", (number,), members)
    for name in ("isfinite", "isnan", "isinf"):
        setattr(math, name, compares(getattr(math, name)))
    return wrap


# The source ---------------------------------------------------------------------------------------------


@functools.cache
def condition_at(line: Line) -> Condition | None:
    """Return the branch that a read at this line decides; None if the source shows none."""
    source = _source(line.file)
    if source is None:
        return None
    parents, tests = source
    around = [(node, test) for node, test in tests if _spans(test, line)]
    node, _ = min(around, key=lambda pair: pair[1].end_lineno - pair[1].lineno, default=(None, None))
    node = node or _later_test(parents, tests, line)
    if node is None:
        return None
    # A multi-line test begins on the first line of its statement.
    at = line._replace(number=getattr(node, "lineno", line.number))
    return Condition(at, at.statement, _decides_update(node, parents))


@functools.cache
def _source(file: str) -> tuple[dict[ast.AST, ast.AST], list[tuple[Any, Any]]] | None:
    """Return the parent of each node of a file, and its branches with the expressions that they test."""
    try:
        nodes = list(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except (SyntaxError, ValueError):
        return None
    parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
    tests = [(node, node.test) for node in nodes if isinstance(node, _TESTS)]
    return parents, [
        *tests,
        *((node, node.iter) for node in nodes if isinstance(node, ast.For | ast.AsyncFor)),
    ]


def _spans(node: Any, line: Line) -> bool:
    return node.lineno <= line.number <= node.end_lineno


def _later_test(parents: dict[ast.AST, ast.AST], tests: list[tuple[Any, Any]], line: Line) -> Any:
    """For `ok = bool(loss.isfinite())`, return the first later branch of this function that tests `ok`."""
    assigned = [node for node in parents if isinstance(node, _ASSIGNMENTS)]
    assigned = [node for node in assigned if _spans(node, line) and _is_read(node.value)]
    if not assigned:
        return None
    statement = assigned[-1]
    names = {
        n.id
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
        for n in ast.walk(target)
        if isinstance(n, ast.Name)
    }
    scope = set(ast.walk(next(node for node in _outwards(statement, parents) if isinstance(node, _SCOPES))))
    later = [
        (test.lineno, node)
        for node, test in tests
        if node in scope
        and test.lineno > line.number
        and names & {n.id for n in ast.walk(test) if isinstance(n, ast.Name)}
    ]
    return min(later, key=lambda pair: pair[0], default=(0, None))[1]


def _is_read(value: ast.expr | None) -> bool:
    """Whether an expression itself reads or compares; a call may read a value that it does not return."""
    nodes = list(ast.walk(value)) if value is not None else []
    called = {ast.unparse(node.func).rpartition(".")[2] for node in nodes if isinstance(node, ast.Call)}
    return bool(called & _READS) or any(isinstance(node, ast.Compare) for node in nodes)


def _outwards(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    while node in parents:
        node = parents[node]
        yield node


def _decides_update(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether one of its paths makes an update, or skips one by `continue`, `break`, `return` or `raise`."""
    if not isinstance(node, ast.If | ast.While):
        return False
    ways = [inner for part in (*node.body, *node.orelse) for inner in ast.walk(part)]
    if any(map(_is_update, ways)):
        return True
    around = list(_outwards(node, parents))
    skipped: list[ast.AST] = []
    if any(isinstance(inner, ast.Continue | ast.Break) for inner in ways):
        skipped += [outer for outer in around if isinstance(outer, _LOOPS)][:1]
    if any(isinstance(inner, ast.Return | ast.Raise) for inner in ways):
        skipped += [outer for outer in around if isinstance(outer, _SCOPES)][:1]
    return any(_is_update(inner) for outer in skipped for inner in ast.walk(outer))


def _is_update(node: ast.AST) -> bool:
    """Whether this is `optimizer.step()`, `loss.backward()` or `train_step(...)`; not a scheduler's step."""
    if not isinstance(node, ast.Call):
        return False
    called = ast.unparse(node.func)
    return "sched" not in called.lower() and _UPDATES.search(called.rpartition(".")[2]) is not None
