"""What grpo and lens share: presets with replaced values, the settings that name a run, the update."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from leanstep.recipes.checkpoint import random_state
from leanstep.recipes.distributed import World
from leanstep.recipes.settings import from_preset
from leanstep.recipes.tasks import WarmStarted


@dataclass(frozen=True)
class Settings:
    lr: float = 0.5
    warm_fraction: float = 0.3


@dataclass(frozen=True)
class Task:
    words: int = 7


SIZES = {"tiny": (Settings(), Task(), 10), "small": (Settings(lr=0.1), Task(words=9), 100)}


def test_given_values_replace_the_presets():
    assert from_preset(SIZES, "small", None, {"lr": None}) == (Settings(lr=0.1), Task(words=9), 100)
    assert from_preset(SIZES, "tiny", 4, {"lr": 0.0}) == (Settings(lr=0.0), Task(), 4)
    with pytest.raises(ValueError, match="preset: expected one of tiny, small, got 'huge'"):
        from_preset(SIZES, "huge", None, {})


def test_python_and_numpy_generators_start_from_the_seed():
    states = []
    for before, seed in ((1, 5), (2, 5), (2, 6)):
        random.seed(before)
        np.random.seed(before)
        WarmStarted(Settings(), Task(), seed=seed, steps=10, preset="tiny", world=World())
        states.append(random_state())
    for name in ("python", "numpy"):
        assert states[0][name] == states[1][name] != states[2][name]


def test_settings_name_the_run_and_ranks_draw_different_samples():
    first, second = (
        WarmStarted(Settings(), Task(), seed=2, steps=10, preset="tiny", world=World(rank=rank, size=2))
        for rank in range(2)
    )
    assert first.warm_steps == 3
    assert first.settings == second.settings
    assert first.settings == {
        "preset": "tiny",
        "seed": 2,
        "steps": 10,
        "lr": 0.5,
        "warm_fraction": 0.3,
        "task": {"words": 7},
    }
    assert torch.rand(1, generator=first.generator) != torch.rand(1, generator=second.generator)


def test_an_update_clips_steps_at_the_given_rate_and_forgets_the_gradient():
    recipe = WarmStarted(Settings(), Task(), seed=0, steps=10, preset="tiny", world=World())
    weight, unused = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = torch.optim.SGD([weight, unused], lr=9.0)
    weight.grad = torch.tensor([3.0, 4.0])
    assert recipe.update(optimizer, 0.5).item() == pytest.approx(5.0)
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.3, -0.4]), rtol=1e-5, atol=1e-6)
    assert not unused.any() and weight.grad is None
