"""48 narrow layers that share small functions: every line repeats, and every repeat is another layer."""  # expect: nothing
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
WIDTH = 16


def norm(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def gate(x, y):
    return torch.sigmoid(x) * y


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        h = norm(x)
        return x + gate(self.a(h), self.b(h)) * 0.1


model = torch.nn.ModuleList(Block() for _ in range(48))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
x = torch.randn(8, WIDTH)
for _ in range(4):
    optimizer.zero_grad()
    h = x
    for block in model:
        h = block(h)
    h.square().mean().backward()
    optimizer.step()
