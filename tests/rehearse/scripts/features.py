"""Features that stopped a rehearsal once: each says what it saw."""

import functools
import importlib.metadata
import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

seen = {}
model = nn.Linear(16, 16).cuda()

# A tensor made on the device inside backward, in a thread of autograd.


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        same = torch.equal(grad, torch.tensor(1.0, device=grad.device))
        seen["equal in backward"] = bool(same)
        return grad * 2


Scaled.apply(model(torch.randn(4, 16, device="cuda")).sum()).backward()


@torch.compile(fullgraph=True)
def with_pinned(x, scale):
    return model(x) * torch.tensor(scale, pin_memory=True).to("cuda", non_blocking=True)


torch.compiler.cudagraph_mark_step_begin()
seen["pinned in a compiled function"] = list(with_pinned(torch.randn(4, 16, device="cuda"), 3).shape)

# Blocks of one class, each compiled.
cached = torch._dynamo.eval_frame.cached_backends
before = set(cached)
for _ in range(3):
    torch.compile(torch.nn.Linear(16, 16, device="cuda"))(torch.randn(4, 16, device="cuda"))
of_blocks = [cached[number].compiler_fn for number in set(cached) - before]
seen["backends of three blocks"] = [len(of_blocks), len(set(of_blocks))]

# Convolutions keep the layout of their input.
image = torch.randn(2, 8, 6, 6, device="cuda")
filters = torch.randn(4, 8, 3, 3, device="cuda")
layouts = (torch.contiguous_format, torch.channels_last)
results = [torch.nn.functional.conv2d(image.contiguous(memory_format=m), filters) for m in layouts]
seen["channels last"] = [y.is_contiguous(memory_format=torch.channels_last) for y in results]

heads = torch.randn(2, 4, 64, 32, device="cuda", dtype=torch.bfloat16)
allowed = torch.ones(64, 64, dtype=torch.bool, device="cuda")
torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=allowed)  # MARK masked

loaded = torch.load(sys.argv[1], map_location="cuda")["weight"]
seen["loaded"] = [loaded.device.type, loaded[:2].tolist()]

a, b = torch.empty(4, device="cuda"), torch.empty(4, device="cuda")
same = a[1:].untyped_storage().data_ptr() == a.untyped_storage().data_ptr()
seen["storages"] = [same, a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()]

generator = torch.cuda.default_generators[0]
generator.manual_seed(3)
seen["generator"] = [generator.initial_seed(), list(torch.randn(3, device="cuda", generator=generator).shape)]

from flash_attn.bert_padding import pad_input, unpad_input  # noqa: E402

hidden = torch.randn(2, 5, 8, device="cuda")
mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).cuda()
rows, indices, offsets, longest, lengths = unpad_input(hidden, mask)
seen["unpadded"] = [list(rows.shape), indices.tolist(), offsets.tolist(), longest, lengths.tolist()]
seen["padded"] = list(pad_input(rows, indices, 2, 5).shape)
seen["flash-attn"] = [
    importlib.metadata.version("flash_attn"),
    "flash-attn" in importlib.metadata.packages_distributions()["flash_attn"],
]

dist.init_process_group("nccl")
wrap = functools.partial(FullyShardedDataParallel, use_orig_params=True)
sharded = wrap(nn.Sequential(*[wrap(nn.Linear(64, 64).cuda()) for _ in range(3)]))
optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
for _ in range(2):
    sharded(torch.randn(4, 64, device="cuda")).sum().backward()
    sharded.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
seen["shards"] = sum(p.numel() for p in sharded.parameters())
print(json.dumps(seen), flush=True)
