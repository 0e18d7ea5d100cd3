"""An optimizer that evaluates its closure twice per step, as SAM does."""

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = torch.nn.Linear(16, 4).to(device)
x = torch.randn(8, 16, device=device)


class Twice(torch.optim.SGD):
    def step(self, closure):
        closure()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=1e-3)
        loss = closure()
        super().step()
        return loss


def closure():
    with torch.enable_grad():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss


optimizer = Twice(model.parameters(), lr=0.01)
for _ in range(6):
    loss = optimizer.step(closure)
    loss.item()  # SYNC
