"""A mixture of experts, three ways: masks per expert, sorted tokens in grouped products, expert parallel."""

import json

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

TOKENS, WIDTH, EXPERTS, CHOSEN = 8192, 16, 64, 4  # a mask has 2^21 values
dist.init_process_group("nccl")
ranks = dist.get_world_size()
gate = nn.Linear(WIDTH, EXPERTS).cuda()
experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH, device="cuda"))
optimizer = torch.optim.SGD([*gate.parameters(), experts], lr=0.1)
seen = {}

for _ in range(2):
    x = torch.randn(TOKENS, WIDTH, device="cuda")
    weights, chosen = gate(x).softmax(-1).topk(CHOSEN)  # MARK topk
    masks = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    out = torch.zeros_like(x)
    rows = []
    for number in range(0, EXPERTS, 16):
        position, token = torch.where(masks[number])
        rows.append(token.numel())
        out = out.index_add(0, token, (x[token] @ experts[number]) * weights[token, position, None])
    seen["rows"] = rows

    flat = chosen.flatten()
    counts = torch.histc(flat, bins=EXPERTS, min=0, max=EXPERTS)
    order = flat.argsort(stable=True)
    sends = counts.view(ranks, -1).sum(1).tolist()
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)  # MARK counts
    takes = theirs.view(ranks, -1).sum(1).tolist()
    tokens = all_to_all_single_autograd(x[order // CHOSEN], takes, sends, dist.group.WORLD)
    seen["exchanged"] = [sends, takes, list(tokens.shape)]
    largest = gate(x).argmax(-1)
    seen["largest"] = torch.bincount(largest, minlength=EXPERTS).tolist()
    (out.sum() + tokens.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    print(json.dumps(seen), flush=True)
