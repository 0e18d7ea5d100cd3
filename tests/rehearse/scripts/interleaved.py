"""Two ranks with two equal stages each; the products take almost all of the time."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

WIDTH, MICROBATCHES = 8192, 4
dist.init_process_group("nccl")
rank, ranks = dist.get_rank(), dist.get_world_size()
parts = [nn.Linear(WIDTH, WIDTH, bias=False, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
stages = [
    PipelineStage(part, rank + ranks * index, 2 * ranks, torch.device("cuda"))
    for index, part in enumerate(parts)
]
schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.1)
rows = torch.randn(MICROBATCHES * 8192, WIDTH, device="cuda", dtype=torch.bfloat16)
for _ in range(4):
    schedule.step(rows)
    optimizer.step()
    optimizer.zero_grad()
