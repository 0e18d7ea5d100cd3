"""Attention by hand keeps a T x T matrix per head; GELU by hand is eight ops over the activation."""
import math

import torch

torch.manual_seed(0)
torch.set_num_threads(1)
BATCH, TIME, HEADS, DIM = 4, 256, 4, 32


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(DIM, 3 * DIM), torch.nn.Linear(DIM, DIM)
        self.up, self.down = torch.nn.Linear(DIM, 4 * DIM), torch.nn.Linear(4 * DIM, DIM)
        self.register_buffer("mask", torch.ones(TIME, TIME, dtype=torch.bool).tril())

    def forward(self, x):
        q, k, v = self.qkv(x).view(BATCH, TIME, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(DIM // HEADS)
        weights = torch.softmax(scores.masked_fill(~self.mask, -1e9), -1)  # expect: attention-matrix count=1
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        h = self.up(x)
        h = 0.5 * h * (1 + torch.tanh(0.797885 * (h + 0.044715 * torch.pow(h, 3))))  # expect: gelu-by-hand count=8
        return x + self.down(h)


model = Block()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(BATCH, TIME, DIM)
for _ in range(4):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
