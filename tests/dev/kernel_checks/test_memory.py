"""Kernels stay within their tensors, and have no races between programs or between lanes."""

from __future__ import annotations

import importlib

import pytest
import torch

pytest.importorskip("triton")

from kernel_checks import toy_kernels
from kernel_checks.large_launches import LARGE
from kernel_checks.small_launches import LAUNCHES

from dev.kernel_checks.aot import KERNEL_MODULES
from dev.kernel_checks.memory_checks import checked_launches

# The interpreter is numpy, which warns of branches that are not taken.
pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered"),
]
FUNCTIONS = list(dict.fromkeys(function for functions in LAUNCHES.values() for function in functions))
NAMES = [f"{i} {', '.join(k for k, v in LAUNCHES.items() if f in v)}" for i, f in enumerate(FUNCTIONS)]


@pytest.mark.parametrize("function", FUNCTIONS, ids=NAMES)
def test_small_launches(function):
    with checked_launches(stop_at_first=True) as checked:
        function()
    assert not checked.problems
    wanted = {name for name, functions in LAUNCHES.items() if function in functions}
    assert wanted <= set(checked.launches)


def test_every_kernel_has_small_launches():
    names = {
        name
        for module in KERNEL_MODULES
        for name in vars(importlib.import_module(module))
        if name.endswith("_kernel")
    }
    assert names == set(LAUNCHES)


@pytest.mark.parametrize("function", LARGE, ids=lambda f: f.__name__)
def test_offsets_beyond_32_bits(function):
    """Tensors with more than 2^31 elements, in reserved memory that is never filled; a few programs."""
    with checked_launches(most_programs=8, stop_at_first=True) as checked:
        function()
    assert checked.launches and not checked.problems


def problems_of(name: str, *arguments, programs: int = 1, **constants) -> list[str]:
    with checked_launches() as checked:
        getattr(toy_kernels, f"{name}_kernel")[(programs,)](*arguments, **constants)
    assert checked.launches == {f"{name}_kernel": 1}
    return [problem.what for problem in checked.problems]


def test_a_step_out_of_bounds_is_reported_and_not_made():
    behind = torch.zeros(20)
    x = torch.ones(18)
    assert problems_of("double", x, 18, programs=3, BLOCK=8, MASK=True) == []
    assert problems_of("double", x, 18, programs=3, BLOCK=8, MASK=False) == [
        "load out of bounds",
        "store out of bounds",
    ]
    assert torch.equal(x, torch.full((18,), 4.0)) and not behind.any()


BARRIERS = {
    "reverse": "a lane stores where another lane loaded, with no barrier between",
    "pass_on": "a lane loads what another lane stored, with no barrier between",
    "scalar_then_block": "a lane stores where another lane loaded, with no barrier between",
}


@pytest.mark.parametrize("name", BARRIERS)
def test_lanes_need_a_barrier(name):
    tensors = [torch.arange(16, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)]
    tensors = tensors[:1] if name == "reverse" else tensors
    assert problems_of(name, *tensors, BLOCK=16, BARRIER=True) == []
    assert problems_of(name, *tensors, BLOCK=16, BARRIER=False) == [BARRIERS[name]]


def test_programs_may_share_an_address_only_by_atomics():
    x, out = torch.zeros(4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)

    def problems(kind: str) -> set[str]:
        return set(problems_of("all_programs", x, out, programs=4, KIND=kind))

    assert problems("atomic") == set() and out.item() == 6
    assert problems("store") == {"store where another program stores"}
    assert problems("atomic and load") & {
        "load where another program has an atomic",
        "atomic where another program loads",
    }
    assert problems("neighbour") <= {
        "load where another program stores",
        "store where another program loads",
    } and problems("neighbour")
