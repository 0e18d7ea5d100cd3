"""The context gets a few tokens longer in every step."""

import torch

torch.manual_seed(0)
torch.set_num_threads(1)
words, head = torch.nn.Embedding(50, 32), torch.nn.Linear(32, 50)
optimizer = torch.optim.SGD([*words.parameters(), *head.parameters()], lr=0.01)

for step in range(40):
    ids = torch.randint(0, 50, (4, 16 + 4 * step))
    h = words(ids)
    mixed = (h @ h.mT).softmax(-1) @ h  # expect: growing-step work
    head(mixed).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
