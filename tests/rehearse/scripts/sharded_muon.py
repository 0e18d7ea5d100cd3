"""NorMuon over ranks on the device: FSDP2 and owner-sharded, what test_sharded_muon.py looks at.

sharded_muon.py fsdp|fsdp-mesh|owners: six matrices of three shapes, a bank, an embedding; three steps.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from leanstep.muon import NorMuon, split_params


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1_000, 256)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 1_024, bias=False), nn.ReLU(),
                          nn.Linear(1_024, 256, bias=False))
            for _ in range(2)
        )  # fmt: skip
        self.bank = nn.Parameter(torch.zeros(4, 256, 256))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        for matrix in self.bank:
            x = x @ matrix
        return x.square().mean()


dist.init_process_group("nccl")
model = Model().to("cuda", torch.bfloat16)
how = {}
if sys.argv[1].startswith("fsdp"):
    fully_shard(model)
if sys.argv[1] != "fsdp":
    how["mesh"] = init_device_mesh("cuda", (dist.get_world_size(),))
optimizer = NorMuon(split_params(model), lr=0.02, **how)
for _ in range(3):
    model(torch.randint(1_000, (64,), device="cuda")).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
