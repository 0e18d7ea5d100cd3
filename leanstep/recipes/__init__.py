"""The trainings end to end: gpt, lens, grpo, on one loop.

A recipe module (`leanstep.recipes.gpt`, `.lens`, `.grpo`) has

    PRESETS: dict[str, str]                         preset name -> one line for the help page
    build(preset, *, seed=0, steps=None, world=World(), **options) -> Recipe

and the loop runs what `build` returns: see `leanstep.recipes.training_loop`.
"""

# ruff: noqa: E402  (first the line that names the extra, then what imports numpy and safetensors)
from leanstep.extras import require

require("train", "train", "numpy", "safetensors")

from leanstep.recipes.distributed import World, current_world, process_group
from leanstep.recipes.training_loop import Cadence, Outcome, Recipe, run

__all__ = ["Cadence", "Outcome", "Recipe", "World", "current_world", "process_group", "run"]
