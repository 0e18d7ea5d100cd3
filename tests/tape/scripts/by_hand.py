"""An update written by hand, after two micro-batches."""

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).to(device)
x = torch.randn(2, 8, 16, device=device)
for _ in range(6):
    for micro_batch in x:
        loss = model(micro_batch).square().mean()
        loss.backward()
    for p in model.parameters():
        p.data -= 0.01 * p.grad
        p.grad = None
    loss.item()  # SYNC
