"""Rows of a table by indexing, whose backward is a general index_put; the embedding beside it is fine."""
import torch
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
table, words = torch.nn.Parameter(torch.randn(500, 64)), torch.nn.Parameter(torch.randn(500, 64))
optimizer = torch.optim.SGD([table, words], lr=0.1)
rows = torch.arange(64)

for _ in range(4):
    ids = torch.randint(0, 500, (32, 64))
    optimizer.zero_grad()
    h = table[ids]  # expect: indexed-weight count=1
    h = h + F.embedding(ids, words)
    h = h + table.detach()[ids]
    # A slice and a boolean mask are other ops.
    (h.square().mean() + table[:8].sum() + h[:, 0].sum()).backward()
    optimizer.step()
