"""Checkpointed GPT blocks with causal attention, updated by an optimizer that multiplies matrices.

multiplying.py [autocast]: trains on the device. `build(device, autocast)` gives one step of the same program.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

BATCH, LENGTH, WIDTH, HEADS, BLOCKS, VOCAB = 2, 24, 32, 4, 2, 96


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (y.view(BATCH, LENGTH, HEADS, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x):
        x = self.first(x)  # whose input needs no gradient: its backward is one product, not two
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Multiplying(torch.optim.Optimizer):
    """Muon's habit: an update by the product of a gradient with itself."""

    def __init__(self, params):
        super().__init__([p for p in params if p.ndim == 2], {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad @ p.grad.mT @ p.grad, alpha=-1e-3)


def build(device, autocast):
    model = Model().to(device)
    optimizer = Multiplying(model.parameters())
    x = torch.randn(BATCH, LENGTH, WIDTH, device=device)
    targets = torch.zeros(BATCH * LENGTH, dtype=torch.long, device=device)

    def step():
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(x).view(-1, VOCAB).float(), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    train = build("cuda", "autocast" in sys.argv)
    while True:
        train()
