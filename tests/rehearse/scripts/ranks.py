"""One process of many: FSDP2 around a model built without memory, statistics over ranks. Prints JSON."""

import json

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

seen = {}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(256)
        self.up, self.down = nn.Linear(256, 1_024), nn.Linear(1_024, 256)
        self.register_buffer("scale", torch.ones(256), persistent=False)

    def init_weights(self) -> None:
        nn.init.normal_(self.up.weight)
        nn.init.trunc_normal_(self.down.weight, std=0.02)
        nn.init.zeros_(self.up.bias)
        self.norm.reset_parameters()
        with torch.device(self.up.weight.device):
            self.scale = torch.ones(256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)))) * self.scale


mesh = init_device_mesh("cuda", (8,))  # starts the process group
seen["world"] = [dist.get_rank(), dist.get_world_size(), torch.cuda.device_count()]
with torch.device("meta"):
    model = nn.Sequential(*[Block() for _ in range(4)])
seen["built_on"] = sorted({p.device.type for p in model.parameters()})
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model:
    fully_shard(block, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
seen["sharded_bytes"] = torch.cuda.memory_allocated()
model.to_empty(device="cuda")
seen["empty_bytes"] = torch.cuda.memory_allocated()
with torch.no_grad():
    for block in model:
        block.init_weights()
seen["shard"] = [*model[0].up.weight.to_local().shape, model[0].up.weight.device.type]
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(2):
    loss = model(torch.randn(8, 128, 256, device="cuda")).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

# A loss that nobody knows beside counts that the host knows.
statistics = torch.tensor([0.0, 3.0, 5.0], device="cuda")
statistics[0] = loss.detach()
dist.all_reduce(statistics)
seen["sums"] = [statistics[1].item(), statistics[2].item()]
seen["read"] = statistics.tolist()
dist.all_reduce(statistics, op=dist.ReduceOp.MAX)
seen["largest"] = statistics[2].item()
lengths = torch.tensor([4, 7], device="cuda")
everywhere = torch.empty(2 * dist.get_world_size(), dtype=torch.int64, device="cuda")
dist.all_gather_into_tensor(everywhere, lengths)
seen["gathered"] = everywhere.tolist()
apart = [torch.empty_like(lengths) for _ in range(dist.get_world_size())]
dist.all_gather(apart, lengths)
seen["apart"] = [t.tolist() for t in apart]
objects = [None] * dist.get_world_size()
dist.all_gather_object(objects, {"loss": 1.5})
seen["objects"] = objects
with torch.inference_mode():  # autograd does not take calls apart here
    seen["inferred"] = torch.tensor([1.0, 2.0]).to("cuda").mul(2).tolist()

# A mesh of 2 x 4: each collective has the size of its own group.
mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "model"))
payload = torch.randn(1_024, device="cuda")
dist.all_reduce(payload, group=mesh["data"].get_group())  # MARK over two
functional.all_gather_tensor(payload, 0, mesh["model"]).add_(1)  # MARK over four
dist.send(payload, 4)  # MARK sent
paired = nn.Linear(64, 64, device="cuda")
paired = nn.parallel.DistributedDataParallel(paired, process_group=mesh["data"].get_group())
paired(torch.randn(8, 64, device="cuda")).sum().backward()  # MARK paired
seen["another_ranks"] = str(torch.zeros(1, device="cuda:3").device)
print(json.dumps(seen))
