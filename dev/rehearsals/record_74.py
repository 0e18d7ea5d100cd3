"""Steps of `record-74` on the device, on tokens that mean nothing.

    record_74.py STEP [STEP ...] [evaluation]

The engine cuts at the optimizer's steps. `evaluation` makes two batches of it before one more step.
"""

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from token_files import write_tokens

from recipes.speedrun.train import PRESETS, SIZES, Settings, Training

steps = [int(word) for word in sys.argv[1:] if word.isdigit()]
ranks = int(os.environ.get("WORLD_SIZE", "1"))
if ranks > 1:
    dist.init_process_group("cpu:gloo,cuda:nccl")
size = SIZES["record-74"]
with tempfile.TemporaryDirectory() as folder:
    write_tokens(Path(folder))
    settings = Settings(**PRESETS["record-74"], data=folder)
    size = replace(size, validation_tokens=2 * size.validation_batch)
    training = Training(settings, "cuda", 0, ranks, size=size)
    training.model.tied = steps[0] <= training.schedule.untie_step
    for step in steps:
        training.step(step)
    if "evaluation" in sys.argv:
        training.completed = training.schedule.num_steps
        training.evaluate()
        training.step(steps[-1] + 2)
