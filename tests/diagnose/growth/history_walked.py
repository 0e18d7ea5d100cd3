"""The mean over all batches so far is computed anew in every step."""

import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
means = []

for _ in range(40):
    x = torch.randn(16, 8)
    means.append(x.mean(0))
    centre = sum(means[1:], means[0]) / len(means)  # expect: growing-step work
    model(x - centre).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
