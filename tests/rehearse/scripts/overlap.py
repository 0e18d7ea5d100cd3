"""Collectives beside kernels: argv chooses fsdp, ddp, tensor, streams or futures.

Products take most of the time.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, LAYERS, ROWS = 4096, 4, 16384
kind = sys.argv[1]
dist.init_process_group("nccl")
blocks = [
    nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    for _ in range(LAYERS)
]
model = nn.Sequential(*blocks).to("cuda", torch.bfloat16)
rows = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
if kind == "fsdp":
    for block in model:
        fully_shard(block)
    fully_shard(model)
elif kind == "ddp":
    model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
elif kind == "tensor":
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for block in model:
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
side = torch.cuda.Stream()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    if kind == "streams":
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            beside = rows @ rows.T  # MARK beside
        loss = model(rows).sum()
        torch.cuda.current_stream().wait_stream(side)
        loss = loss + beside.sum()  # MARK joined
    else:
        loss = model(rows).sum()
    loss.backward()
    if kind == "futures":
        grads = [p.grad for p in model.parameters()]
        futures = [dist.all_reduce(grad, async_op=True).get_future() for grad in grads]
        for grad, future in zip(grads, futures, strict=True):
            future.wait()
            grad.mul_(0.125)
    optimizer.step()
    optimizer.zero_grad()
