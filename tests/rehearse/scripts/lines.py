"""One large storage for each marked line; two host waits and one copy on marked lines; four steps."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

MIB = 2**20


def block(x):
    y = x.exp()  # MARK recomputed
    return y.sin()  # MARK kept


weight = nn.Parameter(torch.zeros(2 * MIB))
weight.data = torch.zeros(2 * MIB, device="cuda")  # MARK weight
optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
for _ in range(4):
    a = weight.exp()  # MARK first
    b = a * a  # MARK second
    c = checkpoint(block, b, use_reentrant=False)
    loss = c.sum()
    if loss.item() > 1e9:  # MARK read
        break
    loss.backward()
    del a, b, c, loss
    torch.cuda.synchronize()  # MARK synchronize
    optimizer.step()  # MARK update
    optimizer.zero_grad()
    torch.save({"weight": weight}, "checkpoint.pt")
