"""The table of repairs: the edits that would remove a finding.

A repair reads the line and the code around it. If that code does not match the pattern it handles, it
raises `NotUnderstood` with the reason and edits nothing. Variants are tried in order; the proof in
`offers.py` decides whether one of them is right. No repair moves, removes or re-types a host read.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import libcst as cst

from leanstep.diagnose.advice import APPLY
from leanstep.diagnose.findings import Finding
from leanstep.diagnose.rules import RULES
from leanstep.fix.head_repair import cross_entropy_of_a_head
from leanstep.fix.logprob_repair import log_probs_of_tokens
from leanstep.fix.source_edits import (
    Edit,
    NotUnderstood,
    Repair,
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
# Code inside one of these may not run, or may run later.
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
# Files that a project has in its top folder.
MARKERS = (".git", "pyproject.toml", "setup.py", "setup.cfg", "requirements.txt")


class Project:
    """The user's files that the script ran, each read once. Files outside its project are never edited."""

    def __init__(self, script: Path, files: list[Path]) -> None:
        self.root = project_root(script)
        self.files = [path for path in files if path.is_relative_to(self.root)]
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


def project_root(script: Path) -> Path:
    """Return the folder of the project: the nearest with a marker, else the one above the script's."""
    whole = (Path(script.anchor), Path.home(), Path(tempfile.gettempdir()))
    for folder in script.parents:
        if folder in whole:
            break
        if any((folder / marker).exists() for marker in MARKERS):
            return folder
    return script.parent if script.parent in whole or script.parent.parent in whole else script.parent.parent


def repairs_of(project: Project, finding: Finding) -> list[Repair]:
    """Return ways to repair a finding, best first; raise NotUnderstood with the reason if there is none."""
    if finding.leanstep is not None and finding.leanstep.startswith(APPLY.rpartition(".")[0]):
        return _apply_where_the_model_is_made(project)
    repair = EDITS.get(RULES[finding.rule].edit or "")
    if repair is None:
        raise NotUnderstood(f"no edit is safe without you; by hand: {finding.short_fix}")
    path = Path(os.path.abspath(finding.line.file))  # noqa: PTH100  without `..`, links as they are
    if finding.line.library:
        raise NotUnderstood(f"in an installed package; by hand: {finding.short_fix}")
    if path not in project.files:
        raise NotUnderstood(f"the file is outside the script's project {project.root}")
    source = project.source(path)
    return repair(project, source, source.statement_at(finding.line.number))


# Optimizers.


def _optimizer(project: Project, source: Source, statement: Statement) -> list[Repair]:
    calls = source.all(cst.Call, statement) if isinstance(statement, cst.SimpleStatementLine) else []
    for call in calls:
        if method_call(call, ("zero_grad",)):
            first = call.args[0] if call.args and call.args[0].keyword is None else None
            argument = keyword(call, "set_to_none") or first
            if argument is not None and is_name(argument.value, "False"):
                return [Repair("zero_grad(set_to_none=True)", (source.replace(argument.value, "True"),))]
        if source.qualified(call) & {
            f"torch.nn.utils.{place}clip_grad_{kind}_"
            for place in ("", "clip_grad.")
            for kind in ("norm", "value")
        }:
            return [Repair("foreach=True", (_switched_on(source, call, "foreach"),))]
    stepped = [call for call in calls if method_call(call, ("step",)) is not None]
    if stepped:
        function = stepped[0].func
        assert isinstance(function, cst.Attribute)
        return _batched(project, source.text(function.value))
    if any(method_call(call, ("zero_grad",)) for call in calls):
        raise NotUnderstood("zero_grad() sets gradients to None already")
    raise NotUnderstood(
        "the update is written by hand: a torch.optim optimizer with fused=True, or torch._foreach_*"
    )


def _batched(project: Project, receiver: str) -> list[Repair]:
    """Switch on fused or foreach where torch optimizers are made, preferably those of the name that steps."""
    optimizers: list[tuple[Source, cst.Call, str, bool]] = []
    is_set = None
    for source in project.sources():
        for call in source.all(cst.Call):
            names = {
                name.split(".")[-1] for name in source.qualified(call) if name.startswith("torch.optim.")
            }
            options = [(name, keyword(call, name)) for name in ("fused", "foreach")]
            on = next(
                (name for name, value in options if value is not None and is_name(value.value, "True")), None
            )
            for name in names & (FUSED | FOREACH):
                if on is not None:
                    is_set = f"{name} has {on}=True already"
                    continue
                assigned = source.enclosing(call, cst.Assign)
                own = assigned is not None and any(
                    source.text(target.target).split(".")[-1] == receiver.split(".")[-1]
                    for target in assigned.targets
                )
                optimizers.append((source, call, name, own))
    if any(own for *_, own in optimizers):
        optimizers = [entry for entry in optimizers if entry[-1]]
    if not optimizers:
        raise NotUnderstood(is_set or f"no torch.optim call in the project's files creates {receiver}")
    repairs = []
    for option in ("fused", "foreach"):
        taking = [
            (source, call) for source, call, name, _ in optimizers if option == "foreach" or name in FUSED
        ]
        if taking:
            edits = tuple(_switched_on(source, call, option) for source, call in taking)
            repairs.append(Repair(f"{option}=True", edits))
    return repairs


def _switched_on(source: Source, call: cst.Call, name: str) -> Edit:
    """Add `name=True` to a call, or set it."""
    if not call.args or any(arg.star for arg in call.args):
        raise NotUnderstood(
            f"the arguments of {source.text(call.func)} are unpacked with *: add {name}=True there"
        )
    last = call.args[-1].value
    if isinstance(last, cst.GeneratorExp) and not last.lpar:
        raise NotUnderstood(f"{source.text(call.func)} gets a generator without brackets")
    for other in {"fused", "foreach", "differentiable"} - {name}:
        argument = keyword(call, other)
        if argument is not None and not _is_off(argument.value):
            raise NotUnderstood(f"{source.text(call.func)} has {other}={source.text(argument.value)}")
    argument = keyword(call, name)
    if argument is None:
        return source.insert_after(call.args[-1], f", {name}=True")
    if not _is_off(argument.value):
        raise NotUnderstood(f"{name} is set to {source.text(argument.value)}")
    return source.replace(argument.value, "True")


def _is_off(node: cst.CSTNode) -> bool:
    return is_name(node, "False") or is_name(node, "None")


# Pieces of a tensor in a loop.


def _one_unbind(project: Project, source: Source, statement: Statement) -> list[Repair]:
    """Replace `bank[i]` in a loop over i with one unbind before it, whose backward writes each piece once."""
    unbinds: list[tuple[str, tuple[Edit, ...]]] = []
    pieces_here = (
        source.all(cst.Subscript, statement) if isinstance(statement, cst.SimpleStatementLine) else []
    )
    for piece in pieces_here:
        taken = _piece(piece)
        if taken is None or not is_plain(piece.value):
            continue
        index, dim = taken
        name = source.text(piece.value)
        loop = next(
            (o for o in source.around(piece) if isinstance(o, cst.For) and _counts(source, o, index)), None
        )
        if loop is None or any(title == name for title, _ in unbinds):
            continue
        if source.is_changed(name.split(".")[0], loop.body) or source.is_changed(index, loop.body):
            continue
        same = [
            other
            for other in source.all(cst.Subscript, loop.body)
            if source.text(other.value) == name and _piece(other) == taken
        ]
        if any(_may_not_run(source, other, loop) for other in same):
            continue
        pieces = source.fresh(f"{name.split('.')[-1].strip('_')}_pieces")
        edits = (
            source.insert_line_before(loop, f"{pieces} = {name}.unbind({dim})"),
            *(source.replace(other, f"{pieces}[{index}]{_rest(source, other, dim)}") for other in same),
        )
        unbinds.append((name, edits))
    if not unbinds:
        raise NotUnderstood("no piece x[i] of one tensor in a loop over i that runs for every i")
    single = [Repair(f"one {name}.unbind before the loop", edits) for name, edits in unbinds]
    if len(unbinds) > 1:
        title = " and ".join(name for name, _ in unbinds)
        together = tuple(edit for _, edits in unbinds for edit in edits)
        single.append(Repair(f"one unbind of {title} before the loop", together))
    return single


def _may_not_run(source: Source, piece: cst.CSTNode, loop: cst.CSTNode) -> bool:
    """Return whether code between the loop and the piece skips it, delays it or switches gradients."""
    for outer in source.around(piece):
        if outer is loop:
            return False
        if isinstance(outer, SOMETIMES):
            return True
        if isinstance(outer, cst.With) and any("grad" in source.text(item) for item in outer.items):
            return True
    return False


def _piece(piece: cst.Subscript) -> tuple[str, int] | None:
    """Return (index, dim) of x[i], x[i, j], x[:, i], x[:, :, i]: the first index that is no whole slice."""
    for dim, part in enumerate(piece.slice):
        if isinstance(part.slice, cst.Slice):
            if (part.slice.lower, part.slice.upper, part.slice.step) != (None, None, None):
                return None
        elif isinstance(part.slice, cst.Index) and isinstance(part.slice.value, cst.Name):
            # Behind a whole slice the others would index another dimension.
            return (part.slice.value.value, dim) if dim == 0 or dim == len(piece.slice) - 1 else None
        else:
            return None
    return None


def _rest(source: Source, piece: cst.Subscript, dim: int) -> str:
    """Return the indices behind the first as an index of the piece: `[j]` of `x[i, j]`."""
    others = [source.text(part.slice) for part in piece.slice[dim + 1 :]]
    return f"[{', '.join(others)}]" if others else ""


def _counts(source: Source, loop: cst.For, index: str) -> bool:
    """Return whether it loops over numbers: `for i in range(...)`, `for i, x in enumerate(...)`."""
    if not isinstance(loop.iter, cst.Call):
        return False
    names, target = source.qualified(loop.iter), loop.target
    if names == {"builtins.enumerate"} and len(loop.iter.args) == 1 and isinstance(target, cst.Tuple):
        return is_name(target.elements[0].value, index)
    return names == {"builtins.range"} and is_name(target, index)


# Graphs that are kept.


def _no_retain(project: Project, source: Source, statement: Statement) -> list[Repair]:
    for call in source.all(cst.Call, statement):
        argument = keyword(call, "retain_graph")
        if method_call(call, ("backward",)) and argument is not None and is_name(argument.value, "True"):
            _refuse_a_backward_now_and_then(source, call)
            return [Repair("retain_graph=False", (source.replace(argument.value, "False"),))]
    raise NotUnderstood("no backward(retain_graph=True) on this line")


def _refuse_a_backward_now_and_then(source: Source, call: cst.Call) -> None:
    """Refuse if another backward may need the graph on steps that the proof does not run."""
    scope = source.enclosing(call, (cst.FunctionDef, cst.Module))
    for other in source.all(cst.Call, scope):
        is_backward = method_call(other, ("backward", "grad")) or "torch.autograd.grad" in source.qualified(
            other
        )
        if other is call or not is_backward:
            continue
        conditions = [
            outer for outer in source.around(other) if isinstance(outer, SOMETIMES) and outer is not scope
        ]
        if any(source.holds(scope, outer) and not source.holds(outer, call) for outer in conditions):
            raise NotUnderstood("another backward under a condition may need the graph")


# Models of transformers.


def _apply_where_the_model_is_made(project: Project) -> list[Repair]:
    """Add a call after every assignment of a causal LM. The proof shows whether any was missed."""
    edits: list[Edit] = []
    for source in project.sources():
        places = [
            (statement, name)
            for statement in source.all(cst.SimpleStatementLine)
            if (name := _name_of_model(source, statement)) is not None
        ]
        if places:
            edits += source.import_line("apply_leanstep")
            edits += [
                source.insert_line_after(statement, f"apply_leanstep({name})") for statement, name in places
            ]
    if not edits:
        raise NotUnderstood(
            "no line of the project assigns a causal LM of transformers to a name: apply_leanstep(model) "
            "by hand"
        )
    return [Repair("loss from labels without the logits: apply_leanstep", tuple(edits))]


_MOVES = ("to", "cuda", "cpu", "train", "eval", "float", "half", "bfloat16")


def _name_of_model(source: Source, statement: cst.SimpleStatementLine) -> str | None:
    """Return `model` from `model = LlamaForCausalLM.from_pretrained(...).to(device)`; also `self.model`."""
    small = statement.body[0]
    if len(statement.body) != 1 or not isinstance(small, cst.Assign) or len(small.targets) != 1:
        return None
    target, value = small.targets[0].target, small.value
    while (moved := method_call(value, _MOVES)) is not None and isinstance(moved.func, cst.Attribute):
        value = moved.func.value
    if not isinstance(value, cst.Call) or not is_plain(target):
        return None
    for name in source.qualified(value):
        owner, _, last = name.rpartition(".")
        class_name = owner if last in ("from_pretrained", "from_config") else name
        if class_name.startswith("transformers.") and class_name.endswith("ForCausalLM"):
            return source.text(target)
    return None


# The head of a language model.


def _head(project: Project, source: Source, statement: Statement) -> list[Repair]:
    """Try the loss first, then log-probs; of two reasons the one about what the file does is given."""
    try:
        return cross_entropy_of_a_head(source, statement)
    except NotUnderstood as of_loss:
        try:
            return log_probs_of_tokens(project.sources(), source, statement)
        except NotUnderstood as of_log_probs:
            raise (of_log_probs if of_loss.is_other_code else of_loss) from None


# `Rule.edit` -> the edits.
EDITS: dict[str, Callable[[Project, Source, Statement], list[Repair]]] = {
    "optimizer": _optimizer,
    "unbind": _one_unbind,
    "retain": _no_retain,
    "head": _head,
}
