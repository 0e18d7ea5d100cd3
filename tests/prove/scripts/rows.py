"""A model of elementwise ops, whose rows have the same bits in every batch; `--fault` plants a fault."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--fault", default="")
args = parser.parse_args()


def in_blocks(x, width):
    total = x[..., :width].sum(-1)  # FAULT helper
    for start in range(width, x.shape[-1], width):
        total = total + x[..., start : start + width].sum(-1)
    return x * total[..., None]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 33)
        self.weight = nn.Parameter(torch.randn(33, 33))

    def product(self, x):
        return (x[..., :, None] * self.weight).sum(-2)

    def forward(self, tokens):
        x = torch.tanh(self.table(tokens))
        if args.fault == "product":
            if len(x) < 3:
                x = (x[..., :, None].double() * self.weight.double()).sum(-2).float()  # FAULT product
            else:
                x = self.product(x)
        if args.fault == "statistic":
            mean = x.mean((0, 1))  # FAULT statistic
            x = torch.sin(x - mean)
        if args.fault == "chunks":
            size = max(1, 33 // len(x))
            parts = [part.sum(-1) for part in x.split(size, -1)]  # FAULT chunks
            total = sum(parts[1:], parts[0])
            x = x * total[..., None]
        if args.fault == "padding":
            wide = x.shape[1] % 8 == 0
            x = x * 0.1 * 0.3 if wide else x * (0.1 * 0.3)  # FAULT padding
        if args.fault == "norm":
            spread = x.var((0, 1))  # FAULT norm
            factor = torch.rsqrt(spread + 1e-5)
            x = x * factor
        if args.fault == "read":
            largest = x.abs().max()  # FAULT read
            x = x / largest.item()
        if args.fault == "branch" and len(x) > 1:
            x = x * 1.5  # FAULT branch
        if args.fault == "helper":
            x = in_blocks(x, 8 if x.shape[0] > 4 else 11)
        if args.fault == "honest":
            # Rows in pairs: other ops for another batch, the same bits for a row.
            x = torch.cat([torch.sin(part * 1.1) for part in x.split(2)])
        return torch.sin(x * 3)


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tokens = torch.randint(50, (5, 9))
model(tokens).square().mean().backward()
optimizer.step()
