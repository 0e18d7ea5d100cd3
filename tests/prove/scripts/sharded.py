"""One AdamW update, plain or (`--fsdp`, under ranks) sharded with FSDP2; all ranks see the same data."""

import argparse

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--fsdp", action="store_true")
args = parser.parse_args()
torch.manual_seed(4)
model = nn.Sequential(nn.Embedding(30, 10), nn.Linear(10, 14), nn.Tanh(), nn.Linear(14, 30))
tokens = torch.randint(30, (6, 5))
if args.fsdp:
    from ranks import fully_shard

    dist.init_process_group("gloo")
    mesh = torch.distributed.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[1], model[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
loss.backward()
optimizer.step()
