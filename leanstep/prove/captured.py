"""Records of a capture: updates by parameter name, and how parameters are named."""

from __future__ import annotations

import gc
import hashlib
import random
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from leanstep.prove.sketches import Sketch
from leanstep.prove.watch import Value

# Wrappers insert these before or between the user's module names.
_WRAPPERS = re.compile(r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")


@dataclass
class Update:
    """One update: sketches of all tensors, by parameter name.

    Args:
        losses: the values that `backward()` was called on, one per call.
        tokens: number of ids passed to the largest embedding; None without an embedding or if it is compiled.
        ids: how often each of them occurs; `read`: the same with forwards that reach no backward.
        first_input: (elements, sum) of the first layer's input.
        draws: a fingerprint of the random number generators when the optimizer stepped.
        gradients: after backward, before clipping.
        clipped: after clipping, if the program clips.
        options: the optimizer's class and options, by parameter; `frozen`: parameters that need no gradient.
        changes: parameters after the step minus before it, entries weighted by `sketches.sketch`.
        parts: the gradient that each backward call added, if requested; `counts` has the token counts.
        targets: ids passed to losses and to gathers from the vocabulary; recorded together with `parts`.
        functions: autograd Functions in the graphs of the losses; `drawn`: lines that draw random numbers
            between the first layer and a backward; `random`: line, size and norm of every draw before one.
            Recorded together with `parts`.
        values, terms: values with their lines, and the gradient of each summand of the loss, if requested.
    """

    number: int
    losses: list[float] = field(default_factory=list)
    tokens: int | None = None
    ids: Counter[int] = field(default_factory=Counter)
    read: Counter[int] = field(default_factory=Counter)
    first_input: tuple[int, float] | None = None
    draws: str = ""
    optimizer_steps: int = 0
    gradients: dict[str, Sketch] = field(default_factory=dict)
    clipped: dict[str, Sketch] = field(default_factory=dict)
    changes: dict[str, Sketch] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    frozen: list[str] = field(default_factory=list)
    parts: list[dict[str, Sketch]] = field(default_factory=list)
    counts: list[dict[str, float]] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    drawn: list[str] = field(default_factory=list)
    random: list[tuple[str, int, float]] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    terms: list[tuple[str, dict[str, Sketch]]] = field(default_factory=list)

    def drop_full(self) -> None:
        """Free the full tensors; the sketches remain."""
        for sketches in (self.gradients, self.changes):
            sketches.update({name: value.with_full(None) for name, value in sketches.items()})

    def add(self, part: Update) -> None:
        """Add the part of another optimizer that stepped later in the same update."""
        self.losses += part.losses
        self.first_input = self.first_input or part.first_input
        self.draws = part.draws or self.draws
        self.optimizer_steps += part.optimizer_steps
        self.gradients = {**part.gradients, **self.gradients}
        self.clipped = {**part.clipped, **self.clipped}
        self.changes = {**part.changes, **self.changes}
        self.options = {**part.options, **self.options}
        self.frozen += part.frozen
        self.parts += part.parts
        self.counts += part.counts
        self.targets += part.targets
        self.functions += [name for name in part.functions if name not in self.functions]
        self.drawn += part.drawn
        self.random += part.random
        self.values += part.values
        self.terms += part.terms

    @property
    def backward_calls(self) -> int:
        return len(self.losses)

    @property
    def loss(self) -> float:
        """The sum over the backward calls: the function whose gradient the optimizer receives."""
        return float(sum(self.losses))


@dataclass
class Captured:
    """All updates of a run, in order; `order` lists the parameters in the order of the forward pass.

    `iterations`: number of rollouts before the updates, 0 if there were none. `is_lost`: the process ended
    without returning its capture; `error` says how it ended. `clips_late`: it clips gradients after a step.
    `overlaid`: it loaded a module from the folders that only its job has on sys.path.
    """

    updates: list[Update] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    initial: dict[str, Sketch] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    error: str | None = None
    said: str = ""
    iterations: int = 0
    rank: int = 0
    world_size: int = 1
    is_lost: bool = False
    clips_late: bool = False
    overlaid: bool = False

    @property
    def last(self) -> Update:
        if not self.updates:
            raise ValueError("update: no optimizer stepped inside the block")
        return self.updates[-1]

    def __getattr__(self, name: str) -> Any:
        # `u.gradients` of a block with one update reads better than `u.updates[-1].gradients`.
        if name in Update.__dataclass_fields__ or name in ("loss", "backward_calls"):
            return getattr(self.last, name)
        raise AttributeError(name)


def same_tokens(mine: Counter[int], theirs: Counter[int]) -> bool:
    """Return whether two scripts read the same tokens, equally often or a whole batch more often."""
    a, b = mine.total(), theirs.total()
    return set(mine) == set(theirs) and all(mine[i] * b == theirs[i] * a for i in mine)


def names_by_owner(keys: set[int]) -> dict[int, str]:
    """Return the name of each parameter in the largest module that owns it, without wrapper prefixes."""
    # type(), not isinstance: isinstance would load lazy objects of other packages.
    modules = [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]
    inner = {id(child) for module in modules for child in module._modules.values() if child is not None}
    roots = [module for module in modules if id(module) not in inner] or modules
    owned = [(list(module.named_parameters(remove_duplicate=True)), module) for module in roots]
    names: dict[int, str] = {}
    prefixes = Counter(
        type(module).__name__ for named, module in owned if any(id(p) in keys for _, p in named)
    )
    for named, module in sorted(owned, key=lambda entry: -len(entry[0])):
        for name, parameter in named:
            if id(parameter) in keys and id(parameter) not in names:
                clean = _WRAPPERS.sub("", name).lstrip(".")
                # Several models in one program: add the model's class to the name.
                names[id(parameter)] = f"{type(module).__name__}.{clean}" if len(prefixes) > 1 else clean
    return names


def generators() -> str:
    """Return a fingerprint of the states of torch's, numpy's and Python's random number generators."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(bytes(torch.get_rng_state().tolist()))
    digest.update(repr(random.getstate()[1][-5:]).encode())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state(legacy=True)
        digest.update(repr((state[2], state[1][:4].tolist())).encode())
    return digest.hexdigest()
