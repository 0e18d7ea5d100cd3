"""Gradients without a storage of their own: sparse rows of an embedding."""

import torch

torch.manual_seed(0)
torch.set_num_threads(1)
words, head = torch.nn.Embedding(500, 32, sparse=True), torch.nn.Linear(32, 8)
optimizers = [torch.optim.SparseAdam(words.parameters()), torch.optim.SGD(head.parameters(), lr=0.01)]

for _ in range(40):
    ids = torch.randint(0, 500, (16, 32))
    head(words(ids)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
