"""Validation without no_grad: its losses are kept, and with them the activations of each."""

import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
held_out = torch.randn(64, 16)
scores = []

for _ in range(40):
    model(torch.randn(32, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    scores.append(model(held_out).square().mean())  # expect: growing-memory bytes
