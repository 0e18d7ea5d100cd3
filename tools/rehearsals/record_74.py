"""Steps of `record-74` on the device, on tokens that mean nothing.

    record_74.py STEP [STEP ...] [evaluation] [captured]

The engine cuts at the optimizer's steps. `evaluation` makes two batches of it before one more step;
`captured` runs the steps as CUDA graphs.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from token_files import write_tokens

from leanstep.recipes.distributed import World
from leanstep.recipes.gpt import build

steps = [int(word) for word in sys.argv[1:] if word.isdigit()]
ranks = int(os.environ.get("WORLD_SIZE", "1"))
if ranks > 1:
    dist.init_process_group("nccl")
# Without the gloo group of a real run, which a rehearsal does not have.
world = World(size=ranks, device=torch.device("cuda", 0))
with tempfile.TemporaryDirectory() as folder:
    write_tokens(Path(folder))
    training = build("record-74", data=folder, world=world, cuda_graph="captured" in sys.argv)
    if steps[0] > training.schedule.untie_step:
        training.model.untie()
    for step in steps:
        training.step(step)
    if "evaluation" in sys.argv:
        training.validation_tokens = 2 * training.validation_batch
        training.completed = training.num_steps
        training.evaluate()
        training.step(steps[-1] + 2)
