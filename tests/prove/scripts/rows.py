"""A model of elementwise ops, which keep a row's bits on every machine; `--fault` plants another."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--fault", default="")
args = parser.parse_args()


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
                x = (x[..., :, None].double() * self.weight.double()).sum(-2).float()  # FAULT product branch
            else:
                x = self.product(x)
        if args.fault == "statistic":
            mean = x.mean((0, 1))  # FAULT statistic
            x = torch.sin(x - mean)
        if args.fault == "chunks":
            size = max(1, 33 // len(x))
            parts = [part.sum(-1) for part in x.split(size, -1)]
            total = sum(parts[1:], parts[0])  # FAULT chunks
            x = x * total[..., None]
        if args.fault == "padding":
            wide = x.shape[1] % 8 == 0
            x = x * 0.1 * 0.3 if wide else x * (0.1 * 0.3)  # FAULT padding
        return torch.sin(x * 3)


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tokens = torch.randint(50, (5, 9))
model(tokens).square().mean().backward()
optimizer.step()
