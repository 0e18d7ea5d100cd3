"""An average of eight 1 MiB weights made anew in every step; the teacher outputs that are kept are no churn."""
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(8)))
average = {name: p.detach().clone() for name, p in model.named_parameters()}
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, kept = torch.randn(64, 512), []

for _ in range(4):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        for name, p in model.named_parameters():
            average[name] = 0.99 * average[name] + 0.01 * p  # expect: alloc-churn count=24
        kept.extend(p + 1 for p in list(model.parameters()) * 2)
