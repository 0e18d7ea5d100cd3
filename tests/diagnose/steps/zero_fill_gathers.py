"""Six separate look-ups into one table: each backward makes a table of zeros. A rotary half is no fill."""
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
table = torch.nn.Parameter(torch.randn(2048, 64) / 8)
mix = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD([table, *mix.parameters()], lr=0.1)
ids = torch.randint(0, 2048, (6, 32))


def rotate(x):
    a, b = x[..., :32], x[..., 32:]
    return torch.cat([a * 0.8 - b * 0.6, a * 0.6 + b * 0.8], -1)


for _ in range(4):
    optimizer.zero_grad()
    total = torch.zeros(32, 64)
    for row in ids:
        total = total + table.index_select(0, row)  # expect: zero-fill count=6
    for _ in range(6):
        total = rotate(mix(total))
    total.square().mean().backward()
    optimizer.step()
