"""`record-74` on the device: every stage, untying, the evaluation; on tokens that mean nothing.

Cut at the optimizer's steps: two of each stage, one of them with Adam's turn, then a step with an evaluation
of two batches before it.
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from token_files import write_tokens

from leanstep.recipes.distributed import World
from leanstep.recipes.gpt import build

# 967 unties head and embedding.
STEPS = (0, 1, 2, 484, 485, 967, 968, 969, 1450, 1451)

ranks = int(os.environ.get("WORLD_SIZE", "1"))
if ranks > 1:
    dist.init_process_group("nccl")
# Without the gloo group of a real run, which a rehearsal does not have.
world = World(size=ranks, device=torch.device("cuda", 0))
with tempfile.TemporaryDirectory() as folder:
    write_tokens(Path(folder))
    training = build("record-74", data=folder, world=world)
    training.validation_tokens = 2 * training.validation_batch
    for step in STEPS:
        training.step(step)
    training.completed = training.num_steps
    training.evaluate()
    training.step(STEPS[-1] + 2)
