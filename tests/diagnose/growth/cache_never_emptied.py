"""A cache has a new key in every step; the rows that are logged hold whole batches as well."""

import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
cache, shown = {}, []

for step in range(40):
    x = torch.randn(32, 64)
    if step not in cache:
        cache[step] = x * 2  # expect: growing-memory bytes
    h = model(cache[step])  # expect: growing-memory bytes
    h.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    shown.append(h.detach()[0])
