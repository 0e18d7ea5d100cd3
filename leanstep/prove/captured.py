"""What a capture holds: updates by parameter name, and where those names come from."""

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

# Wrappers put these in front of or between the names that the user gave.
_WRAPPERS = re.compile(r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")


@dataclass
class Update:
    """One update: all tensors by parameter name, as sketches.

    Args:
        losses: what `backward()` was called on, one value per call.
        tokens: ids that went into the largest embedding; None where there is none, or it is compiled.
        first_input: (elements, sum) of what the first layer was given.
        draws: a fingerprint of the random number generators when the optimizer stepped.
        gradients: as backward left them.
        clipped: as the optimizer saw them, where they were clipped.
        changes: parameters after the step minus before it, entries weighted by `sketches.sketch`.
        parts: per backward call the gradient it added, where asked for; `counts` the tokens beside it.
        targets: ids that losses and gathers of the vocabulary were given, beside `parts`.
    """

    number: int
    losses: list[float] = field(default_factory=list)
    tokens: int | None = None
    ids: Counter[int] = field(default_factory=Counter)
    first_input: tuple[int, float] | None = None
    draws: str = ""
    optimizer_steps: int = 0
    gradients: dict[str, Sketch] = field(default_factory=dict)
    clipped: dict[str, Sketch] = field(default_factory=dict)
    changes: dict[str, Sketch] = field(default_factory=dict)
    parts: list[dict[str, Sketch]] = field(default_factory=list)
    counts: list[dict[str, float]] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)

    def drop_full(self) -> None:
        """Let go of the whole tensors; the sketches stay."""
        for kept in (self.gradients, self.changes):
            kept.update({name: value.with_full(None) for name, value in kept.items()})

    def add(self, part: Update) -> None:
        """Take what another optimizer of the same update did after this one."""
        self.losses += part.losses
        self.first_input = self.first_input or part.first_input
        self.draws = part.draws or self.draws
        self.optimizer_steps += part.optimizer_steps
        self.gradients = {**part.gradients, **self.gradients}
        self.clipped = {**part.clipped, **self.clipped}
        self.changes = {**part.changes, **self.changes}
        self.parts += part.parts
        self.counts += part.counts
        self.targets += part.targets

    @property
    def backward_calls(self) -> int:
        return len(self.losses)

    @property
    def loss(self) -> float:
        """The sum over the backward calls: the function whose gradient the optimizer was given."""
        return float(sum(self.losses))


@dataclass
class Captured:
    """All updates of a run, in order; `order` lists the parameters as the forward pass uses them.

    `iterations`: rollouts that the updates followed, 0 where none was seen. `is_lost`: the process ended
    without handing over what it captured; `error` then says how.
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


def names_by_owner(keys: set[int]) -> dict[int, str]:
    """Names from the largest module that holds each parameter; wrappers' prefixes are dropped."""
    # type(), not isinstance: that would wake lazy objects of other packages.
    modules = [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]
    inner = {id(child) for module in modules for child in module._modules.values() if child is not None}
    roots = [module for module in modules if id(module) not in inner] or modules
    owned = [(list(module.named_parameters(remove_duplicate=True)), module) for module in roots]
    found: dict[int, str] = {}
    prefixes = Counter(
        type(module).__name__ for named, module in owned if any(id(p) in keys for _, p in named)
    )
    for named, module in sorted(owned, key=lambda entry: -len(entry[0])):
        for name, parameter in named:
            if id(parameter) in keys and id(parameter) not in found:
                clean = _WRAPPERS.sub("", name).lstrip(".")
                # Two models in one program: say whose parameter it is.
                found[id(parameter)] = f"{type(module).__name__}.{clean}" if len(prefixes) > 1 else clean
    return found


def generators() -> str:
    """A fingerprint of the states of torch's, numpy's and Python's generators."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(bytes(torch.get_rng_state().tolist()))
    digest.update(repr(random.getstate()[1][-5:]).encode())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state(legacy=True)
        digest.update(repr((state[2], state[1][:4].tolist())).encode())
    return digest.hexdigest()
