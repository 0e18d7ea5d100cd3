"""Forty layers, run after an average has read every parameter, with a penalty that reads them once more."""  # expect: nothing
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(40)))
average = [p.detach().clone() for p in model.parameters()]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
x = torch.randn(32, 16)

for _ in range(4):
    with torch.no_grad():
        torch._foreach_lerp_(average, list(model.parameters()), 0.01)
    optimizer.zero_grad()
    penalty = sum(p.square().sum() for p in model.parameters())
    (model(x).square().mean() + 1e-4 * penalty).backward()
    optimizer.step()
