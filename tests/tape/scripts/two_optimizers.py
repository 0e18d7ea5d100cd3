"""Two optimizers, each with its own backward."""

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
body, head = torch.nn.Linear(16, 16).to(device), torch.nn.Linear(16, 4).to(device)
optimizers = [torch.optim.SGD(module.parameters(), lr=0.01) for module in (body, head)]
x = torch.randn(8, 16, device=device)
for _ in range(6):
    for optimizer in optimizers:
        optimizer.zero_grad()
        loss = head(body(x)).square().mean()
        loss.backward()
        optimizer.step()
    loss.item()  # SYNC
