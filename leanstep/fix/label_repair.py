"""Adds `apply_leanstep(model)` after a transformers model is created, for losses computed from labels."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from leanstep.fix.source_edits import Edit, NotUnderstood, Source

_MAKERS = ("from_pretrained", "from_config")
_DOOR = ("leanstep.integrations.transformers", "apply_leanstep")


def apply_where_the_model_is_made(sources: Sequence[Source]) -> tuple[str, tuple[Edit, ...]]:
    """Add a call after every assignment of a causal LM. The proof shows whether any was missed."""
    edits: list[Edit] = []
    for source in sources:
        places = [
            (statement, name)
            for statement in source.all(cst.SimpleStatementLine)
            if (name := _name_of_model(source, statement)) is not None
        ]
        if places:
            edits += source.import_line(*_DOOR)
            edits += [
                source.insert_line_after(statement, f"{_DOOR[1]}({name})") for statement, name in places
            ]
    if not edits:
        raise NotUnderstood("no assignment of a transformers causal LM: call apply_leanstep(model) by hand")
    return "loss from labels without the logits: apply_leanstep", tuple(edits)


def _name_of_model(source: Source, statement: cst.SimpleStatementLine) -> str | None:
    """Return `model` from `model = AutoModelForCausalLM.from_pretrained(...)`; also `self.model`."""
    small = statement.body[0]
    if len(statement.body) != 1 or not isinstance(small, cst.Assign) or len(small.targets) != 1:
        return None
    target, value = small.targets[0].target, small.value
    if not isinstance(value, cst.Call) or not isinstance(target, (cst.Name, cst.Attribute)):
        return None
    for name in source.qualified(value):
        owner, _, last = name.rpartition(".")
        class_name = owner if last in _MAKERS else name
        if class_name.startswith("transformers.") and class_name.endswith("ForCausalLM"):
            return source.text(target)
    return None
