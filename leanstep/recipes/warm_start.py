"""What the recipes with a warm start on a made-up task share: set-up and the update.

In the first part of the steps a base model learns the task; then the part that the recipe is about begins.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from leanstep.recipes.checkpoint import seed_python_generators
from leanstep.recipes.distributed import World


class WarmStarted:
    """The attributes that the loop and both phases read.

    Args:
        settings: a dataclass with `warm_fraction`, the part of the steps spent on the warm start.
        task: a dataclass; both are written into the checkpoint's settings.
    """

    def __init__(self, settings: Any, task: Any, *, seed: int, steps: int, preset: str, world: World) -> None:
        self.options, self.task, self.world, self.seed = settings, task, world, seed
        self.num_steps = steps
        self.warm_steps = round(steps * settings.warm_fraction)
        self.settings: dict[str, Any] = {
            "preset": preset,
            "seed": seed,
            "steps": steps,
            **asdict(settings),
            "task": asdict(task),
        }
        seed_python_generators(seed)
        # Ranks draw different samples, but start from the same weights.
        self.generator = torch.Generator().manual_seed(seed * 1000 + world.rank + 1)

    def update(self, optimizer: torch.optim.Optimizer, lr: float) -> Tensor:
        """Gradients averaged over ranks and clipped, one step at `lr`; returns the norm before clipping."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self.world.size > 1:
            for p in parameters:
                dist.all_reduce(p.grad)
                p.grad /= self.world.size
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        return norm
