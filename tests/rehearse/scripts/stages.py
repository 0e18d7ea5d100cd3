"""A pipeline of unequal stages: the last one has a wide output and the loss."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("nccl")
rank, ranks = dist.get_rank(), dist.get_world_size()
width = 64 * (rank + 2)
module = nn.Linear(64 * (rank + 1) if rank else 64, width).cuda()
stage = PipelineStage(module, rank, ranks, torch.device("cuda", int(os.environ["LOCAL_RANK"])))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
for _ in range(3):
    if rank == 0:
        schedule.step(torch.randn(32, 64, device="cuda"))
    elif rank == ranks - 1:
        schedule.step(target=torch.randn(32, width, device="cuda"), losses=[])
    else:
        schedule.step()
    optimizer.step()
    optimizer.zero_grad()
