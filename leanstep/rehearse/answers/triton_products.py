"""FLOPs of the matrix products in a Triton kernel that the script brings: its source, read with shapes.

The kernel's scalar code runs with its real arguments for a few programs of the grid; a block of values has
only a shape. Each `tl.dot` adds 2 M N K. A kernel that this cannot follow has unknown products.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import operator
import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

# Programs of a grid that are followed; the others cost their mean.
_PROGRAMS = 512
_BINARY: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Div: operator.truediv,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
}
_COMPARE: dict[type, Any] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


class _Block(NamedTuple):
    shape: tuple[int, ...]


class _Descriptor(NamedTuple):
    block: tuple[int, ...]


class _Unknown(Exception):
    pass


class _Return(Exception):
    pass


def has_products(function: Any) -> bool:
    """Return whether the source of a kernel, or of a function that it calls, contains `tl.dot`."""
    return any(
        isinstance(node, ast.Attribute) and node.attr in ("dot", "dot_scaled")
        for node in ast.walk(_tree(function))
    )


def product_flops(
    function: Any, arguments: Mapping[str, Any], grid: tuple[int, ...], blocks: Mapping[str, tuple[int, ...]]
) -> float | None:
    """Return the FLOPs of all programs of a launch; None if the source cannot be followed.

    blocks: name of an argument that is a TMA descriptor -> its block shape.
    """
    numbers = tuple((k, v) for k, v in arguments.items() if isinstance(v, int | float | str | bool))
    key = (function, numbers, grid, tuple(sorted(blocks.items())))
    if key not in _known:
        _known[key] = _mean_flops(function, arguments, grid, blocks)
    return _known[key]


_known: dict[Any, float | None] = {}


def _mean_flops(function: Any, arguments: Mapping[str, Any], grid: Any, blocks: Any) -> float | None:
    total = math.prod(grid)
    every = max(1, total // _PROGRAMS) | 1  # odd: all remainders of a power of two are visited
    chosen = range(0, total, every)
    try:
        return total / len(chosen) * sum(_flops(function, arguments, grid, n, blocks) for n in chosen)
    except (_Unknown, ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None


def _flops(function: Any, arguments: Mapping[str, Any], grid: Any, number: int, blocks: Any) -> float:
    x, y = grid[0], grid[1] if len(grid) > 1 else 1
    program = _Program((number % x, number // x % y, number // (x * y)), (*grid, 1, 1))
    values = {k: _Descriptor(tuple(blocks[k])) if k in blocks else v for k, v in arguments.items()}
    values = {k: _Block(()) if hasattr(v, "stride") else v for k, v in values.items()}
    program.call(function, values)
    return program.flops


@functools.cache
def _tree(function: Any) -> ast.FunctionDef:
    plain = getattr(function, "fn", function)
    tree = ast.parse(textwrap.dedent(inspect.getsource(plain)))
    return next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


class _Program:
    """One program of the grid: names of the kernel -> numbers, or blocks without values."""

    def __init__(self, place: tuple[int, ...], grid: tuple[int, ...]) -> None:
        self.place, self.grid, self.flops = place, grid, 0.0

    def call(self, function: Any, values: dict[str, Any]) -> Any:
        tree = _tree(function)
        names = [a.arg for a in tree.args.args]
        defaults = dict(zip(names[len(names) - len(tree.args.defaults) :], tree.args.defaults, strict=True))
        around = inspect.unwrap(getattr(function, "fn", function)).__globals__
        scope = {"": around}
        scope |= {name: self.value(node, scope) for name, node in defaults.items() if name not in values}
        scope |= values
        try:
            self.run(tree.body, scope)
        except _Return as back:
            return back.args[0]
        return None

    def run(self, body: list[ast.stmt], scope: dict[str, Any]) -> None:
        for node in body:
            if isinstance(node, ast.Assign):
                value = self.value(node.value, scope)
                for target in node.targets:
                    self.assign(target, value, scope)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self.assign(node.target, self.value(node.value, scope), scope)
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                both = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
                scope[node.target.id] = self.value(both, scope)
            elif isinstance(node, ast.If):
                test = self.value(node.test, scope)
                if isinstance(test, _Block):
                    raise _Unknown
                self.run(node.body if test else node.orelse, scope)
            elif isinstance(node, ast.For):
                self.loop(node, scope)
            elif isinstance(node, ast.Return):
                raise _Return(self.value(node.value, scope) if node.value is not None else None)
            elif isinstance(node, ast.Expr):
                self.value(node.value, scope)
            elif not isinstance(node, ast.Pass | ast.Assert):
                raise _Unknown

    def loop(self, node: ast.For, scope: dict[str, Any]) -> None:
        """Run the first iterations; the others cost as much as the last of them."""
        numbers = self.value(node.iter, scope)
        if not isinstance(numbers, range):
            raise _Unknown
        for count, number in enumerate(numbers):
            before = self.flops
            self.assign(node.target, number, scope)
            self.run(node.body, scope)
            if count == 2:
                self.flops += (len(numbers) - 3) * (self.flops - before)
                return

    def assign(self, target: ast.expr, value: Any, scope: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            scope[target.id] = value
        elif isinstance(target, ast.Tuple):
            for part, entry in zip(target.elts, value, strict=True):
                self.assign(part, entry, scope)
        else:
            raise _Unknown

    def value(self, node: ast.expr, scope: dict[str, Any]) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            bound = scope[node.id] if node.id in scope else scope[""].get(node.id, node.id)
            return getattr(bound, "value", bound)  # tl.constexpr
        if isinstance(node, ast.Tuple | ast.List):
            return tuple(self.value(part, scope) for part in node.elts)
        if isinstance(node, ast.BinOp):
            return self.both(_BINARY[type(node.op)], node.left, node.right, scope)
        if isinstance(node, ast.Compare):
            (op,), (right,) = node.ops, node.comparators
            return self.both(_COMPARE[type(op)], node.left, right, scope)
        if isinstance(node, ast.UnaryOp):
            value = self.value(node.operand, scope)
            if isinstance(value, _Block):
                return value
            return not value if isinstance(node.op, ast.Not) else -value
        if isinstance(node, ast.BoolOp):
            values = [self.value(part, scope) for part in node.values]
            if any(isinstance(v, _Block) for v in values):
                raise _Unknown
            return all(values) if isinstance(node.op, ast.And) else any(values)
        if isinstance(node, ast.IfExp):
            return self.value(node.body if self.value(node.test, scope) else node.orelse, scope)
        if isinstance(node, ast.Subscript):
            return self.index(node, scope)
        if isinstance(node, ast.Attribute):
            value = self.value(node.value, scope)
            if node.attr == "T":
                return _Block(value.shape[::-1])
            return value if isinstance(value, _Block) else node.attr
        if isinstance(node, ast.Call):
            return self.called(node, scope)
        raise _Unknown

    def both(self, op: Any, left: ast.expr, right: ast.expr, scope: dict[str, Any]) -> Any:
        a, b = self.value(left, scope), self.value(right, scope)
        if isinstance(a, _Block) or isinstance(b, _Block):
            shapes = [v.shape for v in (a, b) if isinstance(v, _Block)]
            return _Block(_broadcast(*shapes))
        return op(a, b)

    def index(self, node: ast.Subscript, scope: dict[str, Any]) -> Any:
        value = self.value(node.value, scope)
        if not isinstance(value, _Block):
            return value[self.value(node.slice, scope)]
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        sizes, shape = iter(value.shape), []
        for part in parts:
            shape.append(next(sizes) if isinstance(part, ast.Slice) else 1)
        return _Block(tuple(shape))

    def called(self, node: ast.Call, scope: dict[str, Any]) -> Any:
        named = {k.arg: k.value for k in node.keywords}
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        owner = self.value(node.func.value, scope) if isinstance(node.func, ast.Attribute) else None

        def at(i: int) -> Any:
            return self.value(node.args[i], scope)

        if isinstance(owner, _Descriptor):
            return _Block(owner.block) if name == "load" else None
        if isinstance(owner, _Block):  # x.to(dtype), x.store(...)
            return _Block(owner.shape[::-1]) if name == "trans" else owner
        function = scope[""].get(name) if not isinstance(node.func, ast.Attribute) else None
        if hasattr(function, "fn"):
            names = [a.arg for a in _tree(function).args.args]
            values = dict(zip(names, (self.value(a, scope) for a in node.args), strict=False))
            return self.call(function, values | {k: self.value(v, scope) for k, v in named.items() if k})
        if name == "program_id":
            return self.place[at(0) if node.args else self.value(named["axis"], scope)]
        if name == "num_programs":
            return self.grid[at(0)]
        if name == "cdiv":
            return -(-at(0) // at(1))
        if name in ("range", "static_range"):
            return range(*(at(i) for i in range(len(node.args))))
        if name in ("min", "max", "minimum", "maximum"):
            values = [self.value(a, scope) for a in node.args]
            blocks = [v.shape for v in values if isinstance(v, _Block)]
            return _Block(_broadcast(*blocks)) if blocks else {"i": min, "a": max}[name[1]](values)
        if name == "arange":
            return _Block((at(1) - at(0),))
        if name in ("zeros", "full"):
            return _Block(at(0) if node.args else self.value(named["shape"], scope))
        if name == "trans":
            return _Block(at(0).shape[::-1])
        if name == "dot":
            a, b = at(0).shape, at(1).shape
            self.flops += 2.0 * math.prod(a) * b[-1]
            return _Block((*a[:-1], b[-1]))
        if name == "make_tensor_descriptor":
            return _Descriptor(self.value(named["block_shape"], scope) if "block_shape" in named else at(3))
        if name in _SAME_SHAPE:
            return at(0)
        if name in _NOTHING:
            return None
        raise _Unknown


_SAME_SHAPE = frozenset(
    "load exp exp2 log log2 sqrt rsqrt abs sigmoid cast multiple_of max_contiguous int32 int64 clamp".split()
)
_NOTHING = frozenset("store atomic_add assume static_assert static_print debug_barrier device_print".split())


def _broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    length = max(map(len, shapes))
    padded = [(1,) * (length - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(max(sizes) for sizes in zip(*padded, strict=True))
