"""One process of eight: DDP, FSDP2, a compiled module, a Triton kernel, a binary attention kernel."""

import json

import torch
import torch.distributed as dist
import torch.nn.functional as F
import triton
import triton.language as tl
from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn_interface import flash_attn_func as flash_attn_3_func
from kernels import get_kernel
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from leanstep.rehearse import register_cost
from leanstep.rehearse.events import Kernel

seen = {}
dist.init_process_group("nccl")
seen["world"] = [dist.get_rank(), dist.get_world_size()]
seen["backends"] = [dist.get_backend(), dist.get_backend(dist.new_group(backend="gloo"))]

# A fresh bucket for each 25 MiB; 40 MiB of gradients in 10 matrices.
wide = DistributedDataParallel(
    nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(10))).to("cuda")
)
x = torch.randn(4, 1024, device="cuda")
with wide.no_sync():
    wide(x).sum().backward()  # MARK no sync
wide(x).sum().backward()  # MARK reduced
del wide

before = torch.cuda.memory_allocated()
with torch.device("meta"):
    layers = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False))
for layer in layers:
    fully_shard(layer)
fully_shard(layers)
layers.to_empty(device="cuda")
seen["shards"] = torch.cuda.memory_allocated() - before
optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-3, fused=True)
layers(x).sum().backward()  # MARK sharded
optimizer.step()
seen["sharded state"] = torch.cuda.memory_allocated() - before
del layers, optimizer


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024, bias=False), nn.Linear(1024, 256, bias=False)

    def forward(self, x):
        h = self.up(x)  # MARK up
        return self.down(F.silu(h) * torch.sigmoid(h + 1.0))  # MARK gate


def step_bytes(model):
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    model(torch.randn(4096, 256, device="cuda")).sum().backward()
    return torch.cuda.max_memory_allocated() - start


gate = Gate().to("cuda")
step_bytes(gate)
seen["eager"] = step_bytes(gate)
compiled = torch.compile(gate)
step_bytes(compiled)
seen["compiled"] = step_bytes(compiled)
seen["wrapped"] = next(iter(compiled.state_dict()))


@triton.jit
def double(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)


@triton.jit
def priced(x_ptr, n, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.program_id(0), 0.0)


register_cost(
    "priced", lambda given: Kernel("pointwise", given["n"] * given["grid"][0], dtype=given["x_ptr"].dtype)
)
known = torch.arange(1000).to("cuda")
target = torch.zeros(1000, dtype=torch.int64).to("cuda")
double[(4,)](known, target, 1000, BLOCK=256)  # MARK triton
priced[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](known, 1000, BLOCK=256)  # MARK priced
seen["unknown after a kernel"] = target.sum().item()


@torch.compile(fullgraph=True)
def launches(x):
    out = torch.empty_like(x)
    double[(4,)](x, out, 1000, BLOCK=256)  # MARK captured triton
    return out


seen["shape from a captured kernel"] = list(launches(known).shape)
q = torch.randn(2, 512, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
flash_attn_func(q, q, q, causal=True).sum().backward()  # MARK flash
packed = q.detach().view(1024, 8, 64)
lengths = torch.tensor([0, 256, 1024], dtype=torch.int32).to("cuda")
flash_attn_varlen_func(packed, packed, packed, lengths, lengths, 768, 768)  # MARK varlen
flash_attn_func(q.detach(), q.detach(), q.detach(), causal=True)  # MARK whole
flash_attn_func(q.detach(), q.detach(), q.detach(), causal=True, window_size=(127, 0))  # MARK window


@torch.compile(fullgraph=True)
def captured(x, lengths):
    return flash_attn_varlen_func(x, x, x, lengths, lengths, 768, 768)  # MARK captured


captured(packed.requires_grad_(), lengths).sum().backward()
captured(packed, torch.tensor([0, 512, 1024], dtype=torch.int32).to("cuda"))
captured(packed, torch.empty(3, dtype=torch.int32, device="cuda"))
flash_attn_3_func(q.detach(), q.detach(), q.detach(), causal=True)  # MARK hopper
get_kernel("varunneal/flash-attention-3").flash_attn_func(q, q, q, causal=True)  # MARK hub


@torch.compile(fullgraph=True)
def asks_for_units(x):
    units = torch.cuda.get_device_properties("cuda").multi_processor_count
    # A constant on the device, as modded-nanogpt makes its scales.
    return x.new_tensor(1.0, dtype=torch.float32) * x * torch.tensor(units, device="cuda")


seen["units in a graph"] = asks_for_units(torch.ones(3).to("cuda")).sum().item()


@torch.compile(fullgraph=True)
def loss_of(hidden, weight, targets):
    return F.cross_entropy((hidden @ weight.t()).float() / 2, targets)


hidden, head = (torch.randn(1024, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
targets = torch.zeros(1024, dtype=torch.int64, device="cuda")
torch.cuda.reset_peak_memory_stats()
before = torch.cuda.memory_allocated()
with torch._inductor.config.patch(shape_padding=False):
    loss_of(hidden, head, targets)
seen["compiled loss"] = torch.cuda.max_memory_allocated() - before
print(json.dumps(seen))
