"""Replaces `cross_entropy(head(h), labels)` with a call that selects the labeled rows before the head.

    logits = head(hidden)
    loss = F.cross_entropy(logits.view(-1, V), labels.view(-1), ignore_index=-100)

becomes `linear_cross_entropy(hidden, head, labels, shift=0)`. If `head` is not a linear layer, that call
raises, the proof fails and nothing is offered.
"""

from __future__ import annotations

import libcst as cst
import torch

from leanstep.fix.source_edits import (
    Edit,
    NotUnderstood,
    Repair,
    Source,
    Statement,
    is_plain,
    keyword,
    method_call,
)

# Keywords that mean the same in both functions.
_KEPT = ("ignore_index", "reduction", "label_smoothing")
_RESHAPES = ("view", "reshape", "flatten", "contiguous", "float")
_BY_HAND = "linear_cross_entropy(hidden, head, labels)"


def cross_entropy_of_a_head(source: Source, statement: Statement) -> list[Repair]:
    """Return the repair of a finding on the line of the head or of the loss."""
    losses = [
        call for call in source.all(cst.Call) if "torch.nn.functional.cross_entropy" in source.qualified(call)
    ]
    if not losses:
        raise NotUnderstood("no call of torch.nn.functional.cross_entropy in this file", is_other_code=True)
    here = [loss for loss in losses if source.holds(statement, loss)]
    for loss in here:
        scored, slices = _stripped(source, _argument(loss, 0, "input"))
        if not isinstance(scored, cst.Name):
            return [_replaced(source, loss, scored, slices, [])]
    for loss in here or losses:
        repair = _head_on_another_line(source, statement, loss)
        if repair is not None:
            return [repair]
    scope = source.enclosing(statement, cst.FunctionDef)
    if any(source.enclosing(loss, cst.FunctionDef) is scope for loss in losses):
        raise NotUnderstood(
            "the logits are renamed or returned before their loss: by hand at the head's input, "
            f"{_BY_HAND} or masked_token_logprobs(hidden, head, tokens, mask), if no caller needs them"
        )
    raise NotUnderstood(
        f"the head and its cross_entropy are not in one function: {_BY_HAND} needs the head's input",
        is_other_code=not here,
    )


def _head_on_another_line(source: Source, statement: Statement, loss: cst.Call) -> Repair | None:
    """Return the repair of `logits = head(h)` and `cross_entropy(logits, y)`; None for another loss."""
    function = source.enclosing(loss, (cst.FunctionDef, cst.Module))
    shown = _argument(loss, 0, "input")
    is_meant = source.holds(statement, loss) or any(
        source.is_stored(name) and source.uses(name.value, shown) for name in source.all(cst.Name, statement)
    )
    try:
        scored, slices = _stripped(source, shown)
    except NotUnderstood:
        if is_meant:
            raise
        return None
    if not isinstance(scored, cst.Name):
        if is_meant:
            raise NotUnderstood(f"cross_entropy gets {source.text(shown)[:60]}, not the rows of the logits")
        return None
    name = scored.value
    stored = [
        use
        for use in source.uses(name, function)
        if source.is_stored(use) and isinstance(source.parent(use), cst.AssignTarget)
    ]
    assigning = [source.enclosing(use, cst.SimpleStatementLine) for use in stored]
    if source.holds(statement, loss):
        if len(assigning) != 1:
            raise NotUnderstood(
                f"{name} is assigned {len(assigning)} times in the function of the loss: {_BY_HAND} by hand "
                "on the branch of the loss"
            )
        statement = assigning[0]
    elif statement not in assigning:
        return None
    assign = source.only_one(statement, cst.Assign)
    if len(assign.targets) != 1:
        raise NotUnderstood("the logits are assigned to several names")
    if not isinstance(assign.value, cst.Call) or not is_plain(assign.value.func):
        raise NotUnderstood(f"{name} is not head(hidden): {source.text(assign.value)[:60]}")
    uses = [use for use in source.uses(name, function) if use is not stored[0]]
    outside = [use for use in uses if not source.holds(shown, use)]
    if outside:
        line = source.text(source.enclosing(outside[0], cst.BaseSmallStatement)).partition("\n")[0]
        raise NotUnderstood(
            f"{name} is used outside the loss as well ({line[:50]}): {_BY_HAND} by hand if no caller needs it"
        )
    _refuse_changes_between(source, statement, loss, assign.value)
    return _replaced(source, loss, assign.value, slices, [source.delete_line(statement)])


def _replaced(source: Source, loss: cst.Call, product: cst.CSTNode, slices: str, edits: list[Edit]) -> Repair:
    if not isinstance(product, cst.Call) or not is_plain(product.func) or len(product.args) != 1:
        raise NotUnderstood(f"the logits are not head(hidden): {source.text(product)[:60]}")
    head, hidden = product.func, product.args[0]
    is_method = isinstance(head, cst.Attribute) and hasattr(torch.Tensor, head.attr.value)
    of_torch = any(name.startswith(("torch.", "builtins.")) for name in source.qualified(product))
    if hidden.keyword is not None or hidden.star or is_method or of_torch:
        raise NotUnderstood(f"the logits are not head(hidden): {source.text(product)[:60]}")
    labels, label_slices = _stripped(source, _argument(loss, 1, "target"), labels=True)
    options = []
    for number, arg in enumerate(loss.args):
        name = arg.keyword.value if arg.keyword is not None else None
        if arg.star or (name is None and number > 1):
            raise NotUnderstood("cross_entropy gets more than logits, labels and keywords")
        if name in _KEPT:
            options.append(f"{name}={source.text(arg.value)}")
        elif name not in (None, "input", "target"):
            raise NotUnderstood(f"cross_entropy has {name}=, which linear_cross_entropy does not take")
    reduction = keyword(loss, "reduction")
    if reduction is not None and source.text(reduction.value).strip("\"'") not in ("mean", "sum"):
        raise NotUnderstood("the loss is not reduced: its shape would be that of the labels")
    if any(isinstance(node, cst.NamedExpr) for arg in loss.args for node in source.all(cst.NamedExpr, arg)):
        raise NotUnderstood("the arguments of cross_entropy assign a name")
    if source.all(cst.Comment, loss):
        raise NotUnderstood("there are comments inside the call of cross_entropy")
    shown = _in_brackets(source, hidden.value) + slices, _in_brackets(source, labels) + label_slices
    call = ", ".join([shown[0], source.text(head), shown[1], "shift=0", *options])
    title = f"select rows before {source.text(head)}: linear_cross_entropy"
    edits = [*edits, source.replace(loss, f"linear_cross_entropy({call})")]
    return Repair(title, (*edits, *source.import_line("linear_cross_entropy")))


def _in_brackets(source: Source, node: cst.CSTNode) -> str:
    text = source.text(node)
    if isinstance(node, (cst.Name, cst.Attribute, cst.Call, cst.Subscript)):
        return text
    # The brackets of an expression are part of its text.
    return text if getattr(node, "lpar", ()) else f"({text})"


def _argument(call: cst.Call, position: int, name: str) -> cst.BaseExpression:
    argument = keyword(call, name)
    if argument is not None:
        return argument.value
    if len(call.args) > position and call.args[position].keyword is None and not call.args[position].star:
        return call.args[position].value
    raise NotUnderstood(f"cross_entropy without {name}")


def _stripped(source: Source, node: cst.CSTNode, labels: bool = False) -> tuple[cst.CSTNode, str]:
    """Return the expression without flattening, and the slice of positions that it applies."""
    slices = ""
    allowed = ("[:,1:]", "[...,1:]") if labels else ("[:,:-1]", "[:,:-1,:]", "[...,:-1,:]")
    if labels:
        allowed += ("[:,:-1]",)
    while True:
        call = method_call(node, _RESHAPES)
        if call is not None and isinstance(call.func, cst.Attribute):
            name, sizes = call.func.attr.value, [source.text(arg.value) for arg in call.args]
            flattens = {"view": _flattens(sizes, labels), "reshape": _flattens(sizes, labels)}
            flattens["flatten"] = sizes == [] if labels else sizes == ["0", "1"]
            if not flattens.get(name, not (name == "float" and labels)):
                raise NotUnderstood(f"{source.text(node)[:60]} does not flatten the rows")
            if slices and name in flattens:
                raise NotUnderstood(f"{source.text(node)[:60]} is sliced after it was flattened")
            node = call.func.value
        elif isinstance(node, cst.Subscript):
            text = source.text(node)[len(source.text(node.value)) :]
            if text.replace(" ", "") not in allowed or slices:
                raise NotUnderstood(f"{source.text(node)[:60]} is not one slice of positions")
            slices, node = text, node.value
        else:
            return node, slices


def _flattens(sizes: list[str], labels: bool) -> bool:
    """Accept view(-1) of labels and view(-1, V) of logits, but no transposed or regrouped view."""
    return sizes == ["-1"] if labels else len(sizes) == 2 and sizes[0] == "-1"


def _refuse_changes_between(
    source: Source, first: Statement, loss: cst.Call, product: cst.BaseExpression
) -> None:
    """Refuse unless the head can run at the loss: same block, nothing in between touches its inputs."""
    body, index = source.block_of(first)
    assert isinstance(product, cst.Call)
    inputs = {node.value for arg in product.args for node in source.all(cst.Name, arg)}
    if isinstance(product.func, cst.Name):
        inputs.add(product.func.value)
    for number, later in enumerate(body[index + 1 :]):
        if source.holds(later, loss):
            inner = (cst.IfExp, cst.Lambda, cst.BooleanOperation, cst.CompFor, cst.FunctionDef)
            if not isinstance(later, cst.SimpleStatementLine) or any(
                isinstance(outer, inner) and source.holds(later, outer) for outer in source.around(loss)
            ):
                raise NotUnderstood("the loss is computed under a condition")
            if number and any(source.all(cst.Call, arg) for arg in product.args):
                raise NotUnderstood("the head's input is computed on the line of the head")
            return
        if any(source.uses(name, later) for name in inputs) or _writes_in_place(source, later):
            raise NotUnderstood("the hidden states may change between the head and the loss")
        if source.text(product.func) in {source.text(node) for node in source.all(cst.Attribute, later)}:
            raise NotUnderstood("the head may change before the loss")
    raise NotUnderstood("the head and its loss are in different blocks")


def _writes_in_place(source: Source, statement: cst.CSTNode) -> bool:
    """Return whether a statement may write into a tensor: x.mul_(2), inplace=True, out=, x[i] = y, x += y."""
    for call in source.all(cst.Call, statement):
        name = source.text(call.func).rpartition(".")[2]
        if (
            (name.endswith("_") and not name.endswith("__"))
            or keyword(call, "inplace")
            or keyword(call, "out")
        ):
            return True
    targets = source.all(cst.AssignTarget, statement)
    return bool(source.all(cst.AugAssign, statement)) or any(
        isinstance(target.target, cst.Subscript) for target in targets
    )
