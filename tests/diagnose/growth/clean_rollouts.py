"""Experience is kept for three updates and dropped when the next rollout begins."""

import torch

torch.manual_seed(0)
torch.set_num_threads(1)
words, head = torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64)
policy = torch.nn.Sequential(words, head)
optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)

for _ in range(14):
    experience = []
    ids = torch.randint(0, 64, (8, 4))
    with torch.no_grad():
        for _ in range(12):
            logits = policy(ids[:, -1:])
            ids = torch.cat([ids, torch.multinomial(logits[:, -1].softmax(-1), 1)], 1)
        experience.append((ids, policy(ids).log_softmax(-1)))
    for _ in range(3):
        for ids, old in experience:
            new = policy(ids).log_softmax(-1)
            (new - old).exp().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
