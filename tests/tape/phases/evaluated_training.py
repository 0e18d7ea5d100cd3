"""Supervised training with an evaluation in every step: no rollout."""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 64)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(6):
    tokens = torch.randint(0, 64, (4, 17), device=device)
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        total = 0.0
        for _ in range(12):
            held_out = torch.randint(0, 64, (4, 17), device=device)
            total = total + (model(held_out[:, :-1]).argmax(-1) == held_out[:, 1:]).float().mean()
