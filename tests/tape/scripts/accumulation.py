"""Gradient accumulation: four micro-batches per update."""

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = torch.nn.Linear(16, 4).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
x = torch.randn(4, 8, 16, device=device)
for _ in range(6):
    for micro_batch in x:
        loss = model(micro_batch).square().mean() / len(x)
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    loss.item()  # SYNC
