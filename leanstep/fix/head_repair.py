"""Replaces `cross_entropy(head(h), labels)` with a call that selects the labelled rows before the head.

    logits = head(hidden)
    loss = F.cross_entropy(logits.view(-1, V), labels.view(-1), ignore_index=-100)

becomes `linear_cross_entropy(hidden, head, labels, shift=0)` from leanstep.objectives. If `head` is not a
linear layer, that call raises, the proof fails and nothing is offered.
"""

from __future__ import annotations

import libcst as cst

from leanstep.fix.source_edits import Edit, NotUnderstood, Source, Statement, is_plain, keyword, method_call

Found = tuple[str, tuple[Edit, ...]]
_DOOR = ("leanstep.objectives", "linear_cross_entropy")
# Keywords that mean the same in both functions.
_KEPT = ("ignore_index", "reduction", "label_smoothing")
_RESHAPES = ("view", "reshape", "flatten", "contiguous", "float")


def rows_before_the_head(source: Source, statement: Statement) -> list[Found]:
    """Return the repair of a dead-rows finding on this line."""
    losses = [
        call
        for call in source.all(cst.Call)
        if any(name == "torch.nn.functional.cross_entropy" for name in source.qualified(call))
    ]
    if not losses:
        raise NotUnderstood("no cross_entropy in the file: select the rows by hand, see diagnose")
    for loss in losses:
        if source.holds(statement, loss):
            product, slices = _stripped(source, _argument(loss, 0, "input"))
            return [_replaced(source, loss, product, slices, [])]
    assign = source.only_one(statement, cst.Assign)
    target = assign.targets[0].target
    if len(assign.targets) != 1 or not isinstance(target, cst.Name):
        raise NotUnderstood("the logits are not assigned to a name")
    scope = source.enclosing(statement, (cst.FunctionDef, cst.Module))
    uses = [use for use in source.uses(target.value, scope) if use is not target]
    for loss in losses:
        try:
            scored, slices = _stripped(source, _argument(loss, 0, "input"))
        except NotUnderstood:
            continue
        if not isinstance(scored, cst.Name) or scored.value != target.value:
            continue
        shown = _argument(loss, 0, "input")
        if not all(source.holds(shown, use) for use in uses):
            raise NotUnderstood(f"{target.value} is used outside the loss as well")
        _refuse_changes_between(source, statement, loss, assign.value)
        return [_replaced(source, loss, assign.value, slices, [source.delete_line(statement)])]
    raise NotUnderstood("the logits are not passed directly to cross_entropy")


def _replaced(source: Source, loss: cst.Call, product: cst.CSTNode, slices: str, edits: list[Edit]) -> Found:
    if not isinstance(product, cst.Call) or not is_plain(product.func) or len(product.args) != 1:
        raise NotUnderstood("the logits are not head(hidden)")
    hidden_arg = product.args[0]
    if hidden_arg.keyword is not None or hidden_arg.star:
        raise NotUnderstood("the logits are not head(hidden)")
    labels, label_slices = _stripped(source, _argument(loss, 1, "target"), labels=True)
    options = []
    for number, arg in enumerate(loss.args):
        name = arg.keyword.value if arg.keyword is not None else None
        if arg.star or (name is None and number > 1):
            raise NotUnderstood("cross_entropy gets more than logits, labels and keywords")
        if name == "weight":
            options.append(f"class_weights={source.text(arg.value)}")
        elif name in _KEPT:
            options.append(f"{name}={source.text(arg.value)}")
        elif name not in (None, "input", "target"):
            raise NotUnderstood(f"cross_entropy({name}=...)")
    hidden = _in_brackets(source, hidden_arg.value) + slices
    shown = _in_brackets(source, labels) + label_slices
    call = ", ".join([hidden, source.text(product.func), shown, "shift=0", *options])
    title = f"select rows before {source.text(product.func)}: linear_cross_entropy"
    return title, (*edits, source.replace(loss, f"{_DOOR[1]}({call})"), *source.import_line(*_DOOR))


def _in_brackets(source: Source, node: cst.CSTNode) -> str:
    text = source.text(node)
    return text if isinstance(node, (cst.Name, cst.Attribute, cst.Call, cst.Subscript)) else f"({text})"


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
    while True:
        call = method_call(node, _RESHAPES)
        if call is not None and isinstance(call.func, cst.Attribute):
            name = call.func.attr.value
            if name in ("view", "reshape") and not _flattens(source, call, labels):
                raise NotUnderstood(f"{source.text(node)} does not flatten rows")
            if name == "flatten" and not labels and [source.text(a.value) for a in call.args] != ["0", "1"]:
                raise NotUnderstood(f"{source.text(node)} does not flatten rows")
            if name == "float" and labels:
                raise NotUnderstood("the labels are cast")
            node = call.func.value
        elif isinstance(node, cst.Subscript):
            text = source.text(node)[len(source.text(node.value)) :].replace(" ", "")
            allowed = {"[:,:-1]", "[:,1:]"} if labels else {"[:,:-1]", "[:,:-1,:]", "[...,:-1,:]"}
            if text == "[...,1:]" and labels:
                text = "[:,1:]"
            elif text not in allowed:
                raise NotUnderstood(f"{source.text(node)} is not a slice of positions")
            if slices:
                raise NotUnderstood("positions are sliced twice")
            slices = "[:, 1:]" if text == "[:,1:]" else "[:, :-1]"
            node = node.value
        else:
            return node, slices


def _flattens(source: Source, call: cst.Call, labels: bool) -> bool:
    """Accept view(-1) of labels and view(-1, V) of logits, but no transposed or regrouped view."""
    sizes = [source.text(arg.value) for arg in call.args]
    return sizes == ["-1"] if labels else len(sizes) == 2 and sizes[0] == "-1"


def _refuse_changes_between(
    source: Source, first: Statement, loss: cst.Call, product: cst.BaseExpression
) -> None:
    body, index = source.block_of(first)
    names = {node.value for node in source.all(cst.Name, product)}
    for later in body[index + 1 :]:
        if source.holds(later, loss):
            if not isinstance(later, cst.SimpleStatementLine):
                raise NotUnderstood("the loss is computed under a condition")
            return
        if any(source.is_changed(name, later) for name in names):
            raise NotUnderstood("the hidden states change before the loss")
    raise NotUnderstood("the loss is computed in a different block")
