"""`record-74` on the device: every stage, untying, the evaluation; on tokens that mean nothing.

Cut at the optimizer's steps: two of each stage, one of them with Adam's turn, then a step with an evaluation
of two batches before it.
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from leanstep.gpt.data import write_shard
from leanstep.recipes.distributed import World
from leanstep.recipes.gpt import build

BOS, VOCAB, TOKENS = 50_256, 50_257, 1 << 22
FIRST_STEPS = (1, 483, 967, 1450)


def write_tokens(folder: Path) -> None:
    """Documents of 20 to 2,000 tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(BOS, (TOKENS,), generator=generator)
    lengths = torch.randint(20, 2000, (TOKENS // 500,), generator=generator)
    starts = lengths.cumsum(0)
    tokens[starts[starts < TOKENS]] = BOS
    tokens[0] = BOS
    write_shard(folder / "train_0.bin", tokens)
    write_shard(folder / "val_0.bin", tokens[: 1 << 20])


ranks = int(os.environ.get("WORLD_SIZE", "1"))
if ranks > 1:
    dist.init_process_group("nccl")
# Without the gloo group of a real run, which a rehearsal does not have.
world = World(size=ranks, device=torch.device("cuda", 0))
with tempfile.TemporaryDirectory() as folder:
    write_tokens(Path(folder))
    training = build("record-74", data=folder, world=world)
    training.validation_tokens = 2 * training.validation_batch
    for first in FIRST_STEPS:
        for step in range(first, first + 2):
            training.step(step)
    training.completed = training.num_steps
    training.evaluate()
    training.step(FIRST_STEPS[-1] + 2)
