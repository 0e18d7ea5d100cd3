"""Gradients are filled with zeros, one by one, and parameters updated, one by one."""
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(24, 24) for _ in range(40)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(32, 24)

for _ in range(4):
    optimizer.zero_grad(set_to_none=False)  # expect: unbatched-optimizer count=80
    model(x).square().mean().backward()
    optimizer.step()  # expect: unbatched-optimizer count=80
