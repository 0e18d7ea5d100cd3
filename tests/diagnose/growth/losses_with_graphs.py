"""Losses are kept for a plot, with the graph of each; after the backward only its nodes are left."""

import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []

for _ in range(40):
    x = torch.randn(32, 16)
    loss = model(x).square().mean()
    loss.backward()  # expect: growing-memory graphs
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss)
