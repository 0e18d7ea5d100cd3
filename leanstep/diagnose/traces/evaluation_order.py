"""The calls and operators of a function in the order in which Python evaluates them.

The profiler's Python frames name the function that ran, but not the line. The lines come from aligning this
order with what ran inside the function; the alignment that skips least wins.
"""

from __future__ import annotations

import ast
import itertools
import sys
from functools import cache
from pathlib import Path

MODULE = "a module's forward"
# A call always leaves a frame; an operator or an index may be one of plain Python numbers.
_SURE, _MAYBE, _FAR = 20, 1, 10**6
_MAX_WORK = 4_000_000
# Bytes of a source file.
_MAX_SOURCE = 4_000_000

_OPERATORS: dict[type, tuple[str, ...]] = {
    ast.Add: ("::add", "::add_", "__radd__"), ast.Sub: ("::sub", "::sub_", "::rsub", "__rsub__"),
    ast.Mult: ("::mul", "::mul_", "__rmul__"), ast.Div: ("::div", "::div_", "__rtruediv__", "__rdiv__"),
    ast.MatMult: ("::matmul", "::mm", "::bmm", "::mv", "::dot", "::linear", "__matmul__", "__rmatmul__"),
    ast.Pow: ("::pow", "::pow_", "__pow__", "__rpow__"), ast.Mod: ("::remainder", "__rmod__", "::fmod"),
    ast.FloorDiv: ("::floor_divide", "__floordiv__", "__rfloordiv__"), ast.USub: ("::neg",),
    ast.BitAnd: ("::bitwise_and", "__and__", "::logical_and"),
    ast.BitOr: ("::bitwise_or", "__or__", "::logical_or"),
    ast.BitXor: ("::bitwise_xor", "__xor__"), ast.Invert: ("::bitwise_not", "::logical_not"),
    ast.Gt: ("::gt", "::lt"), ast.Lt: ("::lt", "::gt"), ast.GtE: ("::ge", "::le"), ast.LtE: ("::le", "::ge"),
    ast.Eq: ("::eq",), ast.NotEq: ("::ne",), ast.In: ("__contains__",), ast.NotIn: ("__contains__",),
}  # fmt: skip
_INDEX = (
    "::select", "::slice", "::index", "::unsqueeze", "::squeeze", "::alias", "::item", "::index_select",
    "::nonzero", "::to", "__getitem__",
)  # fmt: skip
_STORE = (
    *_INDEX, "::copy_", "::fill_", "::index_put_", "::_index_put_impl_", "::lift_fresh", "::masked_fill_",
    "__setitem__",
)  # fmt: skip
_VIEWS = ("T", "mT", "H", "mH", "data", "grad", "real", "imag")
# First events of a call of any name: a class, a module, a decorated function.
_ANY_CALL = ("__init__", "__call__", MODULE, "inner", "wrapper", "decorate_context", "_fn")
_COMPREHENSIONS = {
    ast.ListComp: "<listcomp>", ast.SetComp: "<setcomp>", ast.DictComp: "<dictcomp>",
    ast.GeneratorExp: "<genexpr>",
}  # fmt: skip


class Slots(ast.NodeVisitor):
    """Calls and operators of one function in the order Python evaluates them."""

    def __init__(self, body: list[ast.AST]) -> None:
        self.lines: list[int] = []
        self.keys: dict[str, list[int]] = {}
        self.repeats: set[int] = set()
        self.weights: list[int] = []
        # (first slot, one past the last) of each loop, inner ones first.
        self.loops: list[tuple[int, int]] = []
        for node in body:
            self.visit(node)
        self.before = self._sums()

    def _sums(self) -> list[int]:
        return [0, *itertools.accumulate(self.weights)]

    def _emit(self, line: int, keys: tuple[str, ...], weight: int = _MAYBE, repeats: bool = False) -> None:
        number = len(self.lines)
        self.lines.append(line)
        self.weights.append(weight)
        for key in keys:
            self.keys.setdefault(key, []).append(number)
        if repeats:
            self.repeats.add(number)

    def visit_Call(self, node: ast.Call) -> None:
        name, line = "", node.lineno
        if isinstance(node.func, ast.Attribute):
            self.visit(node.func.value)
            name, line = node.func.attr, node.func.end_lineno or line
        elif isinstance(node.func, ast.Name):
            name = node.func.id
        else:
            self.visit(node.func)
        for part in (*node.args, *node.keywords):
            self.visit(part)
        # A class runs its __init__, a built-in conversion an op without a frame.
        ops = () if isinstance(node.func, ast.Attribute) else {
            "float": ("::item",), "int": ("::item",), "bool": ("::is_nonzero", "::item"),
            "print": ("__repr__",), "str": ("__repr__",), "sum": ("::add",), "list": ("::unbind",),
            "max": ("::gt", "::lt"), "min": ("::gt", "::lt"), "range": ("::item",),
        }.get(name, ())  # fmt: skip
        self._emit(line, (name, f"::{name}", *_ANY_CALL, *ops), _SURE, repeats=bool(ops))

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.visit(node.left)
        self.visit(node.right)
        self._emit(node.lineno, _OPERATORS.get(type(node.op), ()))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        self.visit(node.operand)
        self._emit(node.lineno, _OPERATORS.get(type(node.op), ("::is_nonzero",)))

    def visit_Compare(self, node: ast.Compare) -> None:
        self.visit(node.left)
        for operator, operand in zip(node.ops, node.comparators, strict=True):
            self.visit(operand)
            self._emit(node.lineno, _OPERATORS.get(type(operator), ()))

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for value in node.values:
            self.visit(value)
            self._emit(value.lineno, ("::is_nonzero",))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if not isinstance(node.target, ast.Name):
            self._visit_parts(node.target)
        self.visit(node.value)
        self._emit(node.lineno, _OPERATORS.get(type(node.op), ()))
        if isinstance(node.target, ast.Subscript):
            self._emit(node.lineno, _STORE, repeats=True)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self._visit_parts(node)
        self._emit(node.lineno, _STORE if isinstance(node.ctx, ast.Store) else _INDEX, repeats=True)

    def _visit_parts(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            self.visit(child)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.visit(node.value)
        views = (
            ("::transpose", "::permute", "::t", "::numpy_T", "::detach", "::alias")
            if node.attr in _VIEWS
            else ()
        )
        self._emit(node.end_lineno or node.lineno, (node.attr, "__getattr__", *views))

    def visit_FormattedValue(self, node: ast.FormattedValue) -> None:
        self.visit(node.value)
        self._emit(node.lineno, ("__format__", "__repr__", "::item"))

    def visit_Starred(self, node: ast.Starred) -> None:
        self.visit(node.value)
        self._emit(node.lineno, ("::unbind", "__iter__"))

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        self.visit(node.test)
        self._emit(node.test.lineno, ("::is_nonzero", "::item"))
        for part in (node.body, node.orelse):
            for child in part if isinstance(part, list) else [part]:
                self.visit(child)

    visit_IfExp = visit_If

    def visit_While(self, node: ast.While) -> None:
        first = len(self.lines)
        self.visit(node.test)
        self._emit(node.test.lineno, ("::is_nonzero", "::item"))
        self._loop(first, node.body)
        for child in node.orelse:
            self.visit(child)

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self._emit(node.iter.lineno, ("__iter__", "::unbind"))
        first = len(self.lines)
        self._emit(node.iter.lineno, ("__next__",))
        self.visit(node.target)
        self._loop(first, node.body)
        for child in node.orelse:
            self.visit(child)

    def _loop(self, first: int, body: list[ast.stmt]) -> None:
        for child in body:
            self.visit(child)
        self.loops.append((first, len(self.lines)))

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        self.visit(node.generators[0].iter)
        # Up to Python 3.11 it is a separate function, later it is part of this one.
        self._emit(node.lineno, (_COMPREHENSIONS[type(node)], "__iter__", "::unbind"), repeats=True)
        if sys.version_info >= (3, 12) and not isinstance(node, ast.GeneratorExp):
            self.inner_of(node)

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _comprehension

    def inner_of(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        first = len(self.lines)
        for number, part in enumerate(node.generators):
            if number:
                self.visit(part.iter)
            self._emit(part.iter.lineno, ("__next__",))
            for test in part.ifs:
                self.visit(test)
                self._emit(test.lineno, ("::is_nonzero",))
        for value in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.visit(value)
        self.loops.append((first, len(self.lines)))

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            self.visit(item.context_expr)
            self._emit(item.context_expr.lineno, ("__enter__",), _SURE)
        for child in node.body:
            self.visit(child)
        for item in node.items:
            self._emit(item.context_expr.lineno, ("__exit__",), _SURE)

    def visit_FunctionDef(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
    ) -> None:
        """Skip the body, which runs only when called."""
        for decorator in getattr(node, "decorator_list", ()):
            self.visit(decorator)

    visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = visit_FunctionDef

    def align(self, names: list[str], running: int = 0) -> list[int | None]:
        """Return the line of each event, by the path through the slots that skips least; None where none
        fits.

        `names`: functions that were called, and ops as "::name". `running`: the line on which the function
        already was when the profiler started.
        """
        steps = [(number, self.keys[name]) for number, name in enumerate(names) if name in self.keys]
        if sum(len(a[1]) * len(b[1]) for a, b in itertools.pairwise(steps)) > _MAX_WORK:
            return [None] * len(names)
        costs: dict[int, int] = {sum(line <= running for line in self.lines) - 1: 0}
        back: list[dict[int, int]] = []
        for _, slots in steps:
            reached: dict[int, int] = {}
            came: dict[int, int] = {}
            for slot in slots:
                best, source = min((cost + self._way(at, slot), at) for at, cost in costs.items())
                reached[slot], came[slot] = best, source
            costs = reached
            back.append(came)
        lines: list[int | None] = [None] * len(names)
        slot = min(costs, key=lambda s: costs[s]) if steps else -1
        for (number, _), came in zip(reversed(steps), reversed(back), strict=True):
            lines[number] = self.lines[slot]
            slot = came[slot]
        # Events that no slot explains happened on the current line.
        known = None
        for number, line in enumerate(lines):
            known = line if line is not None else known
            lines[number] = known
        return lines

    def _way(self, at: int, to: int) -> int:
        if at < 0:
            return self.before[to]
        if to > at:
            return self.before[to] - self.before[at + 1]
        if to == at and to in self.repeats:
            return 0
        for first, last in self.loops:
            if first <= to and at < last:
                return self.before[last] - self.before[at + 1] + self.before[to] - self.before[first]
        return _FAR


def is_source(file: str) -> bool:
    """Return whether a file named in a trace is a Python file of plausible size."""
    try:
        return file.endswith(".py") and Path(file).is_file() and Path(file).stat().st_size <= _MAX_SOURCE
    except (OSError, ValueError):
        return False


@cache
def _tree(file: str) -> ast.Module | None:
    if not is_source(file):
        return None
    try:
        return ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


@cache
def slots_of(file: str, number: int, function: str) -> tuple[Slots, int] | None:
    """Return the slots of a function, and its line if it was running when the profiler started."""
    tree = _tree(file)
    if tree is None:
        return None
    if function == "<module>":
        return Slots(list(tree.body)), number if number > 1 else 0
    candidates: list[tuple[ast.AST, int, int]] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == function:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            candidates.append((node, first, node.end_lineno or first))
        elif _COMPREHENSIONS.get(type(node)) == function and isinstance(node, ast.expr):
            candidates.append((node, node.lineno, node.end_lineno or node.lineno))
    inside = [entry for entry in candidates if entry[1] <= number <= entry[2]]
    if not inside:
        return None
    node, first, _ = max(inside, key=lambda entry: entry[1])
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
        slots = Slots([])
        slots.inner_of(node)
        slots.before = slots._sums()
        return slots, 0
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    return Slots(list(node.body)), 0 if first <= number <= node.lineno else number
