"""Moves reads of a loss from every step to the script's logging interval.

Two patterns. A value is read on every step but used only under an `if`: the read moves into the `if`. A sum
of read values is used only now and then: the sum stays on the device and is read where it is used.
"""

from __future__ import annotations

from typing import Any

import libcst as cst

from leanstep.fix.source_edits import (
    LOOPS,
    Edit,
    NotUnderstood,
    Source,
    Statement,
    method_call,
)

Found = tuple[str, tuple[Edit, ...]]
# Methods that may be applied before the read: none of them reads or writes anything else.
_HARMLESS = ("item", "detach", "float", "double", "cpu", "mean", "sum", "tolist")


def keep_on_the_device(source: Source, statement: Statement) -> list[Found]:
    """Return ways to read less often on this line."""
    is_line = isinstance(statement, cst.SimpleStatementLine)
    if is_line and isinstance(statement.body[0], cst.AugAssign):
        return [_sum_on_the_device(source, statement)]
    return [_move_into_if(source, statement)]


def _move_into_if(source: Source, statement: Statement) -> Found:
    assign = source.only_one(statement, cst.Assign)
    target = assign.targets[0].target
    if len(assign.targets) != 1 or not isinstance(target, cst.Name):
        raise NotUnderstood("the read is not assigned to one name")
    if not _reads(source, assign.value):
        raise NotUnderstood("no .item() or float() of a plain value")
    name = target.value
    names = _plain_names(source, assign.value)
    body, index = source.block_of(statement)
    loads = [use for use in _own_uses(source, statement, name) if use is not target]
    if not loads or any(source.is_stored(use) for use in loads):
        raise NotUnderstood(f"{name} is assigned elsewhere, or never used")
    for later in body[index + 1 :]:
        if isinstance(later, cst.If) and all(source.holds(later.body, use) for use in loads):
            if not isinstance(later.body, cst.IndentedBlock) or not later.body.body:
                break
            edits = (
                source.delete_line(statement),
                source.insert_line_before(later.body.body[0], source.text(assign)),
            )
            return f"read {name} under `if {source.text(later.test)}`", edits
        if any(source.is_changed(other, later) for other in names):
            raise NotUnderstood(f"{', '.join(names)} changes before it is used")
    raise NotUnderstood(f"{name} is not used under one `if` only")


def _sum_on_the_device(source: Source, statement: Statement) -> Found:
    added = source.only_one(statement, cst.AugAssign)
    if not isinstance(added.operator, cst.AddAssign) or not isinstance(added.target, cst.Name):
        raise NotUnderstood("no sum, and no value that is used under one `if` only")
    total = added.target.value
    reads = _reads(source, added.value)
    if len(reads) != 1 or not isinstance(reads[0].func, cst.Attribute):
        raise NotUnderstood("not one .item() in the sum")
    loop = source.enclosing(statement, LOOPS)
    if loop is None:
        raise NotUnderstood("no loop around the sum")
    edits = [source.replace(reads[0], f"{source.text(reads[0].func.value)}.detach()")]
    looks = 0
    for use in _own_uses(source, statement, total):
        if use is added.target:
            continue
        if source.is_stored(use):
            _refuse_unless_number(source, use)
            continue
        if not _now_and_then(source, use, loop):
            raise NotUnderstood(f"{total} is used on every step")
        looks += 1
        outer = source.parent(use)
        call: Any = source.parent(outer) if outer is not None else None
        if isinstance(call, cst.Call) and source.text(call.func) == "float":
            continue
        edits.append(source.replace(use, f"float({total})"))
    if not looks:
        raise NotUnderstood(f"{total} is never used")
    return f"sum {total} on the device, read it where it is used", tuple(edits)


def _now_and_then(source: Source, use: cst.Name, loop: cst.CSTNode) -> bool:
    """Return whether the use is outside the loop, or inside it under an `if`."""
    for outer in source.around(use):
        if outer is loop:
            return False
        if isinstance(outer, cst.If) and source.holds(outer.body, use):
            return True
    return True


def _refuse_unless_number(source: Source, use: cst.Name) -> None:
    assign = source.enclosing(use, (cst.Assign, cst.SimpleStatementLine))
    if not isinstance(assign, cst.Assign) or not isinstance(assign.value, (cst.Integer, cst.Float)):
        raise NotUnderstood(f"{use.value} is set to something other than a number")


def _own_uses(source: Source, statement: Statement, name: str) -> list[cst.Name]:
    """Return mentions of a name in the function of the statement, not in other functions."""
    kinds = (cst.FunctionDef, cst.ClassDef, cst.Lambda)
    scope = source.enclosing(statement, kinds)
    uses = source.uses(name, scope)
    inner = {source.enclosing(use, kinds) for use in uses}
    if len(inner) > 1 or any(isinstance(source.parent(use), cst.NameItem) for use in uses):
        raise NotUnderstood(f"{name} is shared between functions")
    return uses


def _reads(source: Source, value: cst.BaseExpression) -> list[cst.Call]:
    """Return `x.item()` and `float(x)` in an expression."""
    reads = []
    for call in source.all(cst.Call, value):
        is_float = isinstance(call.func, cst.Name) and call.func.value == "float" and len(call.args) == 1
        if method_call(call, ("item",)) or is_float:
            reads.append(call)
    return reads


def _plain_names(source: Source, value: cst.BaseExpression) -> set[str]:
    """Return the names in an expression of pure calls and arithmetic; anything else is refused."""
    names: set[str] = set()
    for node in source.all(cst.BaseExpression, value):
        if isinstance(node, cst.Call):
            if method_call(node, _HARMLESS) or source.text(node.func) == "float":
                continue
            raise NotUnderstood(f"{source.text(node.func)}(...) may do more than read")
        if isinstance(node, cst.Attribute):
            outer = source.parent(node)
            if isinstance(outer, cst.Call) and outer.func is node:
                continue
            raise NotUnderstood(f"{source.text(node)} may change before it is used")
        if isinstance(node, cst.Name):
            outer = source.parent(node)
            if not (isinstance(outer, cst.Attribute) and outer.attr is node) and node.value != "float":
                names.add(node.value)
        elif not isinstance(node, (cst.BinaryOperation, cst.UnaryOperation, cst.Integer, cst.Float)):
            raise NotUnderstood(f"{source.text(node)} is not a plain value")
    return names
