"""The global random states (torch, CUDA, python, numpy): taken, put back, and saved per rank."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from leanstep.recipes.distributed import World


def random_state() -> dict[str, Any]:
    """The global random states of this process, in a form that a checkpoint can hold."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, keys.tolist(), *rest]
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put `random_state()` back."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        import numpy

        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))


def restore_random_state(states: list[Mapping[str, Any]], world: World, say: Callable[[str], None]) -> None:
    """Each rank takes its own state back; with another number of ranks all take that of rank 0."""
    if len(states) != world.size:
        say(f"checkpoint of {len(states)} ranks, run of {world.size}: all take the random state of rank 0")
    set_random_state(states[world.rank] if len(states) == world.size else states[0])
