"""What the host may read of the device, which objects survive a move, how optimizers launch. Prints JSON."""

import json

import torch
from torch import nn

seen = {}

# Values that came from the host are read back as they are.
labels = torch.tensor([[1, -100, 3, 4], [-100, 6, -100, 8]])
device_labels = labels.to("cuda")
seen["count"] = device_labels.ne(-100).sum().item()
seen["selected"] = list(torch.randn(2, 4, 3, device="cuda")[device_labels != -100].shape)
lengths = torch.tensor([3, 5, 2]).cuda()
seen["cu_seqlens"] = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).tolist()
seen["longest"] = int(lengths.max())
seen["nonzero"] = list(device_labels.eq(-100).nonzero().shape)
seen["unique"] = torch.unique(torch.tensor([3, 3, 1]).cuda()).tolist()
flags = torch.zeros(4, dtype=torch.bool, device="cuda")
flags[1:3] = True  # through a view
seen["flags"] = flags.tolist()

# Unknown values written into a storage end what was known of these elements, through every view.
known = torch.arange(10, 16).cuda()
view = known[2:4]
unknown = torch.empty(2, 4, device="cuda")
view.copy_(unknown[0, :2].long())
seen["overwritten"] = known.tolist()
seen["overwritten_sum"] = known.sum().item()
seen["known_part"] = known[4:].tolist()
known[2:4] = torch.tensor([9, 8]).cuda()
seen["written_again"] = known.tolist()
many = torch.arange(10, 10_010).cuda()
many[2:4].copy_(unknown[0, :2].long())
seen["overwritten_large"] = many[4:6].tolist()
mask = torch.empty(5, 7, device="cuda") > 0
seen["assumed_rows"] = list(torch.ones(5, 7, device="cuda")[mask].shape)
seen["assumed_item"] = unknown.sum().item()
seen["host_stays_real"] = torch.zeros(3).copy_(torch.tensor([1.0, 2.0, 3.0]).cuda()).tolist()
seen["absorbing"] = bool((torch.empty(3, device="cuda") > 0).logical_or(torch.ones(3).bool().cuda()).all())

# Identity across the move.
model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11, bias=False))
model[1].weight = model[0].weight
before = list(model.parameters())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = torch.cuda.memory_allocated()
model.to("cuda")
seen["same_objects"] = all(a is b for a, b in zip(before, model.parameters(), strict=True))
seen["tied"] = model[1].weight is model[0].weight and len(before) == 1
seen["tied_bytes"] = torch.cuda.memory_allocated() - state
seen["moved"] = str(before[0].device)
model(torch.tensor([1, 2]).cuda()).sum().backward()
optimizer.step()
seen["updated"] = optimizer.param_groups[0]["params"][0].grad.device.type
gate = nn.Parameter(torch.tensor(0.25)).data.to("cuda")
seen["known_parameter"] = gate.item()
torch.manual_seed(3)
drawn = torch.rand(2).tolist()
torch.manual_seed(3)
torch.randn(100, device="cuda")
seen["host_randomness"] = torch.rand(2).tolist() == drawn
seen["pinned"] = [torch.ones(2).is_pinned(), torch.ones(2).pin_memory().is_pinned()]
seen["generator"] = list(torch.rand(3, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).shape)
seen["nccl"] = torch.distributed.is_nccl_available() and torch.cuda.nccl.version() >= (2, 10)
stats = torch.cuda.memory_stats()
seen["active"] = stats["active_bytes.all.peak"] == stats["allocated_bytes.all.peak"] > 0
seen["props"] = [torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).multi_processor_count]

# 130 tensors of 100 elements and one of 40 million: launches of one update, for each way to do it.
small = [nn.Parameter(torch.zeros(100)) for _ in range(130)]
large = nn.Parameter(torch.empty(40_000_000))
holder = nn.ParameterList([*small, large]).to("cuda")
for p in holder:
    p.grad = torch.zeros_like(p)
ways = [{"foreach": True}, {"fused": True}, {"foreach": False}]
updates = [torch.optim.AdamW(holder.parameters(), lr=1e-3, **way) for way in ways]
for update in updates:
    update.step()  # makes the state
updates[0].step()  # MARK foreach
updates[1].step()  # MARK fused
updates[2].step()  # MARK per tensor
print(json.dumps(seen))
