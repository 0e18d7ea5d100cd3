"""GRPO with three updates per rollout: two iterations are six steps."""

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
policy = torch.nn.Sequential(torch.nn.Embedding(32, 16), torch.nn.Linear(16, 32)).to(device)
optimizer = torch.optim.AdamW(policy.parameters(), lr=0.01)
for _ in range(2):
    tokens = torch.randint(0, 32, (8, 1), device=device)
    with torch.no_grad():
        for _ in range(4):
            probabilities = policy(tokens[:, -1]).softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(probabilities, 1)], 1)
        old = policy(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None])
        reward = tokens.float().mean(1, keepdim=True)
        advantage = ((reward - reward.mean()) / (reward.std() + 1e-4))[..., None]
    for _ in range(3):
        new = policy(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None])
        ratio = (new - old).exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # SYNC
