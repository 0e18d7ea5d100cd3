"""Greedy tokens without a KV cache: nothing is sampled, the input grows by one position per call."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
policy = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 64)).to(device)
judge = nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 1)).to(device)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
for _ in range(6):
    with torch.no_grad():
        tokens = torch.randint(0, 64, (4, 8), device=device)
        for _ in range(18):
            tokens = torch.cat([tokens, policy(tokens)[:, -1].argmax(-1, keepdim=True)], 1)
        reward = judge(tokens).mean(1)
    scores = policy(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    (scores.mean(1, keepdim=True) * reward).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
