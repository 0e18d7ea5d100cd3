"""A script that already uses double precision, in all the ways that scripts set it."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--dropout", type=float)
args = parser.parse_args()
torch.manual_seed(2)
drawn = nn.Linear(7, 5).double()
torch.set_default_dtype(torch.float64)
model = nn.Sequential(drawn, nn.Tanh(), nn.Dropout(args.dropout), nn.Linear(5, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(2):
    x = torch.randn(6, 7) + torch.rand(6, 7, dtype=torch.float64)
    loss = (model(x) - torch.zeros(6, 3, dtype=torch.double).normal_()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
