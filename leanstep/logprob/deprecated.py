"""Argument names of version 0.1: they work for one more release, with a warning that names the new
spelling."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from leanstep.logprob.inputs import LMHead, ReferenceHead, Transform, Tuning, VocabShards
from leanstep.logprob.objective import PolicyBatch

P = ParamSpec("P")
R = TypeVar("R")

RECORDS: dict[str, Any] = {
    "weight": LMHead,
    "transform": Transform,
    "reference": ReferenceHead,
    "shards": VocabShards,
    "tuning": Tuning,
    "batch": PolicyBatch,
}

# Old name -> new parameter, or a field of the record that the new parameter takes.
OLD_NAMES = {
    "tokens": "targets",
    "keep": "allowed",
    "extras": "outputs",
    "bias": "weight.bias",
    "lora": "weight.lora",
    "scale": "transform.scale",
    "softcap": "transform.softcap",
    "label_smoothing": "transform.label_smoothing",
    "ref_weight": "reference.weight",
    "ref_hidden": "reference.hidden",
    "ref_bias": "reference.bias",
    "group": "shards.group",
    "vocab_start": "shards.start",
    "vocab_total": "shards.total",
    "sequence_parallel": "shards.sequence_parallel",
    "reduce_grad": "shards.reduce_grad",
    "budget": "tuning.budget",
    "tile": "tuning.tile",
    "main_grad": "tuning.main_grad",
    "logits_in_grad": "tuning.save_logits",
    "logit_bytes": "tuning.save_logits",
    "chunk_rows": "tuning.tile",
    "return_lse": "outputs",
    "entropy_metric": "entropy",
    "old_logp": "batch.old_logp",
    "advantages": "batch.advantages",
    "mask": "batch.mask",
    "ref_logp": "batch.ref_logp",
    "sequence_lengths": "batch.sequence_lengths",
}


def spelling(old: str) -> str:
    """How the old argument is written now: targets=, or transform=Transform(scale=)."""
    parameter, _, field = OLD_NAMES[old].partition(".")
    return f"{parameter}={RECORDS[parameter].__name__}({field}=)" if field else f"{parameter}="


def accepts_old_names(*names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function be called with these old names (several in a string) as well, each with a warning."""
    names = tuple(" ".join(names).split())

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = tuple(inspect.signature(function).parameters)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not any(name in kwargs for name in names):
                return function(*args, **kwargs)
            given: dict[str, Any] = {**dict(zip(parameters, args, strict=False)), **kwargs}
            old = {name: given.pop(name) for name in names if name in given}
            for name in old:
                text = f"{function.__name__}: {name}= is deprecated, use {spelling(name)}"
                warnings.warn(text, DeprecationWarning, stacklevel=2)
            return function(**_translated(given, old))  # type: ignore[arg-type]

        return call

    return decorate


def _translated(given: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """The new arguments that `given` and `old` stand for together."""
    if "logits_in_grad" in old or "logit_bytes" in old:
        in_gradient, num_bytes = old.pop("logits_in_grad", True), old.pop("logit_bytes", 0)
        old["logit_bytes"] = ("grad" if in_gradient else "none", num_bytes)
    if "chunk_rows" in old:
        rows = old.pop("chunk_rows")
        if rows is not None:
            old["chunk_rows"] = (None if rows == -1 else rows, None)
    if "return_lse" in old:
        old["return_lse"] = ("lse",) if old["return_lse"] else ()
    if "entropy_metric" in old:
        old["entropy_metric"] = "metric" if old["entropy_metric"] else "none"
    new, fields = dict(given), {}
    for name, value in old.items():
        parameter, _, field = OLD_NAMES[name].partition(".")
        if field:
            fields.setdefault(parameter, {})[field] = value
        else:
            new[parameter] = value
    for parameter, values in fields.items():
        record, current = RECORDS[parameter], new.get(parameter)
        if current is not None and isinstance(current, record):
            new[parameter] = replace(current, **values)
        else:
            new[parameter] = record(**values) if current is None else record(current, **values)
    return new
