"""Which parameter goes to Muon and which to Adam: an explicit table, with the reason of every line.

No names are guessed. A parameter is a matrix for Muon if it has two or more dimensions and is neither the
table of an embedding nor the output head (a layer with as many outputs as an embedding has entries).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

Rule = Callable[[str, nn.Parameter, nn.Module], str | None]


@dataclass(frozen=True)
class Choice:
    """One line of the table."""

    name: str
    shape: tuple[int, ...]
    algorithm: str
    reason: str


class ParamSplit(list):
    """Parameter groups for `NorMuon`; `print` it to see where everything went and why."""

    def __init__(self, groups: Iterable[dict[str, Any]], choices: Iterable[Choice]) -> None:
        super().__init__(groups)
        self.choices = tuple(choices)

    def __str__(self) -> str:
        name = max([4, *(len(c.name) for c in self.choices)])
        shape = max([5, *(len("x".join(map(str, c.shape))) for c in self.choices)])
        lines = [f"{'name':{name}}  {'shape':{shape}}  algorithm  reason"]
        for c in self.choices:
            lines.append(
                f"{c.name:{name}}  {'x'.join(map(str, c.shape)):{shape}}  {c.algorithm:9}  {c.reason}"
            )
        return "\n".join(lines)


def split_params(
    model: nn.Module,
    rule: Rule | None = None,
    *,
    muon: dict[str, Any] | None = None,
    adam: dict[str, Any] | None = None,
    algorithm: str = "normuon",
) -> ParamSplit:
    """Sort the trainable parameters of `model` into a Muon group and an Adam group.

    Args:
        rule: (name, parameter, owning module) -> "normuon", "muon", "adam", or None for the default.
        muon, adam: options of the two groups, e.g. muon={"momentum": 0.9}.
        algorithm: what matrices get by default, normuon or muon.

    Returns:
        a list of one or two groups, ready for `NorMuon`; tied parameters appear once, frozen ones not.
    """
    if algorithm not in ("normuon", "muon"):
        raise ValueError(f"algorithm: expected 'normuon' or 'muon', got {algorithm!r}")
    owners = _owners(model)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    vocabularies = {
        m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)
    }
    choices, groups = [], {"normuon": [], "muon": [], "adam": []}
    for name, param in model.named_parameters():
        owner = owners[id(param)]
        chosen = rule(name, param, owner) if rule and param.requires_grad else None
        if not param.requires_grad:
            chosen, reason = "frozen", "does not require a gradient"
        elif chosen is not None:
            if chosen not in groups:
                raise ValueError(f"rule: expected normuon, muon, adam or None for {name}, got {chosen!r}")
            reason = "the rule says so"
        elif param.ndim < 2:
            chosen, reason = "adam", f"{param.ndim}-D"
        elif id(param) in embeddings:
            chosen, reason = "adam", "embedding table"
        elif isinstance(owner, nn.Linear) and owner.out_features in vocabularies:
            chosen, reason = (
                "adam",
                f"output head: {owner.out_features} outputs, as many as an embedding has entries",
            )
        else:
            chosen, reason = algorithm, f"matrix of {type(owner).__name__}"
            if param.ndim > 2:
                reason = f"bank of {param.numel() // (param.size(-1) * param.size(-2))} matrices"
                if isinstance(owner, nn.modules.conv._ConvNd):
                    chosen, reason = "adam", "convolution; a group with flatten='conv' takes it as a matrix"
        choices.append(Choice(name, tuple(param.shape), chosen, reason))
        if chosen in groups:
            groups[chosen].append((name, param))
    if not any(groups.values()):
        raise ValueError("model: expected at least one trainable parameter, got none")
    options = {"normuon": muon or {}, "muon": muon or {}, "adam": adam or {}}
    return ParamSplit(
        ({"params": params, "algorithm": kind, **options[kind]} for kind, params in groups.items() if params),
        choices,
    )


def _owners(model: nn.Module) -> dict[int, nn.Module]:
    owners: dict[int, nn.Module] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            owners.setdefault(id(param), module)
    return owners
