"""Mechanical repairs: for each rule, the edits that would remove a finding.

A repair reads the line and the code around it. If that code does not match the pattern it handles, it
raises `NotUnderstood` with the reason and edits nothing. Variants are tried in order; the proof in
`offers.py` decides whether one of them is right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import libcst as cst

from leanstep.diagnose.advice import APPLY
from leanstep.diagnose.step_records import Finding
from leanstep.fix.head_repair import rows_before_the_head
from leanstep.fix.label_repair import apply_where_the_model_is_made
from leanstep.fix.logprob_repair import logprobs_of_the_model
from leanstep.fix.read_repairs import keep_on_the_device
from leanstep.fix.source_edits import (
    LOOPS,
    Edit,
    NotUnderstood,
    Source,
    Statement,
    is_name,
    is_plain,
    keyword,
    method_call,
)

# torch's optimizers that update all parameters in one kernel, and those that only take lists of tensors.
FUSED = {"Adagrad", "Adam", "AdamW", "SGD"}
FOREACH = {"ASGD", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"}
# Code inside one of these may not run, or may run later, so it cannot be moved before it.
SOMETIMES = (
    cst.If,
    cst.IfExp,
    cst.BooleanOperation,
    cst.Try,
    cst.While,
    cst.Match,
    cst.FunctionDef,
    cst.Lambda,
)
CASTS = {"float", "half", "bfloat16", "double", "to", "type"}


@dataclass(frozen=True)
class Variant:
    """One way to repair a finding."""

    title: str
    edits: tuple[Edit, ...]


class Project:
    """The user's files that the script ran, each read once."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self._sources: dict[Path, Source | NotUnderstood] = {}

    def source(self, path: Path) -> Source:
        if path not in self._sources:
            try:
                self._sources[path] = Source(path)
            except NotUnderstood as error:
                self._sources[path] = error
        parsed = self._sources[path]
        if isinstance(parsed, NotUnderstood):
            raise parsed
        return parsed

    def sources(self) -> list[Source]:
        readable = []
        for path in self.files:
            try:
                readable.append(self.source(path))
            except NotUnderstood:
                continue
        return readable


def variants(project: Project, finding: Finding) -> list[Variant]:
    """Return ways to repair a finding, best first; raise NotUnderstood if there is none."""
    repair = REPAIRS.get(finding.rule)
    if repair is None:
        raise NotUnderstood("no mechanical repair")
    if finding.leanstep == APPLY:
        return [Variant(*apply_where_the_model_is_made(project.sources()))]
    path = Path(finding.line.file)
    if path not in project.files:
        raise NotUnderstood("not in one of the script's files")
    source = project.source(path)
    return repair(project, source, source.statement_at(finding.line.number))


# Optimizers.


def _optimizer(project: Project, source: Source, statement: Statement) -> list[Variant]:
    calls = source.all(cst.Call, statement) if isinstance(statement, cst.SimpleStatementLine) else []
    for call in calls:
        if method_call(call, ("zero_grad",)):
            return [_zero_grad(source, call)]
        if any(name.endswith(("clip_grad_norm_", "clip_grad_value_")) for name in source.qualified(call)):
            return [Variant("foreach=True", (_set_keyword(source, call, "foreach"),))]
    for call in calls:
        stepped = method_call(call, ("step",))
        if stepped is not None and isinstance(stepped.func, cst.Attribute):
            return _batched(project, source.text(stepped.func.value))
    raise NotUnderstood("a hand-written update, not optimizer.step()")


def _zero_grad(source: Source, call: cst.Call) -> Variant:
    argument = keyword(call, "set_to_none") or (call.args[0] if call.args else None)
    if argument is None or not is_name(argument.value, "False"):
        raise NotUnderstood("zero_grad() already sets gradients to None")
    return Variant("zero_grad(set_to_none=True)", (source.replace(argument.value, "True"),))


def _batched(project: Project, receiver: str) -> list[Variant]:
    """Return the calls that create torch optimizers, preferably those assigned to the name that steps."""
    optimizers: list[tuple[Source, cst.Call, str, bool]] = []
    for source in project.sources():
        for call in source.all(cst.Call):
            names = {
                name.split(".")[-1] for name in source.qualified(call) if name.startswith("torch.optim.")
            }
            done = [keyword(call, option) for option in ("fused", "foreach")]
            if any(option_value is not None and is_name(option_value.value, "True") for option_value in done):
                continue
            for name in names & (FUSED | FOREACH):
                assigned = source.enclosing(call, cst.Assign)
                own = assigned is not None and any(
                    source.text(target.target).split(".")[-1] == receiver.split(".")[-1]
                    for target in assigned.targets
                )
                optimizers.append((source, call, name, own))
    if any(own for *_, own in optimizers):
        optimizers = [entry for entry in optimizers if entry[-1]]
    if not optimizers:
        raise NotUnderstood("no torch.optim call in these files creates the optimizer")
    variants = []
    for option in ("fused", "foreach"):
        taking = [
            (source, call) for source, call, name, _ in optimizers if option == "foreach" or name in FUSED
        ]
        if taking:
            edits = tuple(_set_keyword(source, call, option) for source, call in taking)
            variants.append(Variant(f"{option}=True", edits))
    return variants


def _set_keyword(source: Source, call: cst.Call, name: str) -> Edit:
    if not call.args or any(arg.star for arg in call.args):
        raise NotUnderstood("arguments are unpacked with *")
    others = ("fused", "foreach", "differentiable")
    if any(
        (other := keyword(call, option)) is not None and not _is_off(other.value)
        for option in others
        if option != name
    ):
        raise NotUnderstood(f"another of {', '.join(others)} is set")
    argument = keyword(call, name)
    if argument is None:
        return source.insert_after(call.args[-1], f", {name}=True")
    if not _is_off(argument.value):
        raise NotUnderstood(f"{name} already has another value")
    return source.replace(argument.value, "True")


def _is_off(node: cst.CSTNode) -> bool:
    return is_name(node, "False") or is_name(node, "None")


# Pieces of a tensor in a loop.


def _one_unbind(project: Project, source: Source, statement: Statement) -> list[Variant]:
    """Replace `bank[i]` in a loop over i with one unbind before it, whose backward writes each piece once."""
    if not isinstance(statement, cst.SimpleStatementLine):
        raise NotUnderstood("not a simple statement")
    unbinds: list[tuple[str, tuple[Edit, ...]]] = []
    for piece in source.all(cst.Subscript, statement):
        taken = _piece(piece)
        if taken is None or not is_plain(piece.value):
            continue
        index, dim = taken
        loop = next(
            (
                outer
                for outer in source.around(piece)
                if isinstance(outer, cst.For) and _counts(source, outer, index)
            ),
            None,
        )
        name = source.text(piece.value)
        root = name.split(".")[0]
        if loop is None or source.is_changed(root, loop.body) or source.is_changed(index, loop.body):
            continue
        if any(isinstance(outer, SOMETIMES) for outer in _between(source, piece, loop)):
            continue
        same = [
            other
            for other in source.all(cst.Subscript, loop.body)
            if source.text(other) == source.text(piece) and _piece(other) == taken
        ]
        pieces = source.fresh(f"{name.split('.')[-1].strip('_')}_pieces")
        edits = (
            source.insert_line_before(loop, f"{pieces} = {name}.unbind({dim})"),
            *(source.replace(other, f"{pieces}[{index}]") for other in same),
        )
        if all(title != name for title, _ in unbinds):
            unbinds.append((name, edits))
    if not unbinds:
        raise NotUnderstood("no piece x[i] of one tensor in a loop over i")
    single = [Variant(f"one {name}.unbind before the loop", edits) for name, edits in unbinds]
    if len(unbinds) > 1:
        title = " and ".join(name for name, _ in unbinds)
        together = tuple(edit for _, edits in unbinds for edit in edits)
        single.append(Variant(f"one unbind of {title} before the loop", together))
    return single


def _piece(piece: cst.Subscript) -> tuple[str, int] | None:
    """Return (index, dim) of x[i], x[:, i], x[:, :, i]."""
    *before, last = piece.slice
    if not all(
        isinstance(part.slice, cst.Slice)
        and (part.slice.lower, part.slice.upper, part.slice.step) == (None, None, None)
        for part in before
    ):
        return None
    if isinstance(last.slice, cst.Index) and isinstance(last.slice.value, cst.Name):
        return last.slice.value.value, len(before)
    return None


def _counts(source: Source, loop: cst.For, index: str) -> bool:
    """Return whether it loops over numbers: `for i in range(...)`, `for i, x in enumerate(...)`."""
    if not isinstance(loop.iter, cst.Call):
        return False
    name = source.text(loop.iter.func)
    target: cst.CSTNode = loop.target
    if name == "enumerate" and isinstance(target, cst.Tuple):
        target = target.elements[0].value
    elif name != "range":
        return False
    return is_name(target, index)


def _between(source: Source, node: cst.CSTNode, outer: cst.CSTNode) -> list[cst.CSTNode]:
    inside = []
    for parent in source.around(node):
        if parent is outer:
            break
        inside.append(parent)
    return inside


# Casts.


def _one_cast(project: Project, source: Source, statement: Statement) -> list[Variant]:
    """Replace repeated casts of an unchanged tensor in a block with one cast before the first use."""
    if not isinstance(statement, cst.SimpleStatementLine):
        raise NotUnderstood("not a simple statement")
    variants = []
    for cast in source.all(cst.Call, statement):
        if method_call(cast, CASTS) is None or not isinstance(cast.func, cst.Attribute):
            continue
        if not isinstance(cast.func.value, cst.Name) or not all(is_plain(arg.value) for arg in cast.args):
            continue
        try:
            variants.append(_hoisted(source, cast, cast.func.value.value))
        except NotUnderstood:
            continue
    if not variants:
        raise NotUnderstood("no cast of a name that is repeated in one block")
    return variants


def _hoisted(source: Source, cast: cst.Call, name: str) -> Variant:
    text = source.text(cast)
    scope = source.enclosing(cast, (cst.FunctionDef, cst.Module))
    same = [
        other
        for other in source.all(cst.Call, scope.body if isinstance(scope, cst.FunctionDef) else scope)
        if source.text(other) == text and source.enclosing(other, (cst.FunctionDef, cst.Module)) is scope
    ]
    block, index = _common_block(source, same)
    last = max(i for i, part in enumerate(block) for other in same if source.holds(part, other))
    for part in block[index : last + 1]:
        if source.is_changed(name, part):
            raise NotUnderstood(f"{name} changes between the casts")
    if any(
        isinstance(outer, SOMETIMES) for outer in (*_between(source, same[0], block[index]), block[index])
    ):
        raise NotUnderstood("the first cast does not always run")
    assert isinstance(cast.func, cst.Attribute)
    kind = cast.func.attr.value
    if kind in ("to", "type"):
        kind = source.text(cast.args[0].value).split(".")[-1] if cast.args else "cast"
    fresh = source.fresh(f"{name}_{kind}")
    return Variant(
        f"{text} once",
        (
            source.insert_line_before(block[index], f"{fresh} = {text}"),
            *(source.replace(other, fresh) for other in same),
        ),
    )


def _common_block(source: Source, nodes: list[cst.Call]) -> tuple[list[Statement], int]:
    """Return the innermost block that contains all nodes, and its statement that contains the first."""
    first = nodes[0]
    for outer in source.around(first):
        if not isinstance(outer, (cst.IndentedBlock, cst.Module)):
            continue
        if all(source.holds(outer, node) for node in nodes):
            body: list[Statement] = list(outer.body)  # type: ignore[arg-type]
            index = next(i for i, part in enumerate(body) if source.holds(part, first))
            if len(nodes) > 1:
                return body, index
            # A single cast in a loop moves before the loop.
            if isinstance(body[index], LOOPS):
                return body, index
    raise NotUnderstood("no block contains all casts")


# Graphs that are kept.


def _no_retain(project: Project, source: Source, statement: Statement) -> list[Variant]:
    for call in source.all(cst.Call, statement):
        argument = keyword(call, "retain_graph")
        if method_call(call, ("backward",)) and argument is not None and is_name(argument.value, "True"):
            return [Variant("retain_graph=False", (source.replace(argument.value, "False"),))]
    raise NotUnderstood("no backward(retain_graph=True)")


def _logprobs(project: Project, source: Source, statement: Statement) -> list[Variant]:
    return [Variant(*repair) for repair in logprobs_of_the_model(project.sources(), source, statement)]


REPAIRS: dict[str, Callable[[Project, Source, Statement], list[Variant]]] = {
    "unbatched-optimizer": _optimizer,
    "alloc-churn": _optimizer,
    "host-sync": lambda project, source, statement: [
        Variant(*repair) for repair in keep_on_the_device(source, statement)
    ],
    "zero-fill": _one_unbind,
    "duplicate-cast": _one_cast,
    "dead-rows": lambda project, source, statement: [
        Variant(*repair) for repair in rows_before_the_head(source, statement)
    ],
    "full-vocab": _logprobs,
    "no-grad-vocab": _logprobs,
    "retain-graph": _no_retain,
}
