"""Adapters are trained; the embedding was forgotten when the base was frozen, and the base bias as well."""
import torch

torch.manual_seed(0)
torch.set_num_threads(1)


class Adapted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.base = torch.nn.Linear(32, 32)
        self.base.weight.requires_grad_(False)
        self.down, self.up = torch.nn.Linear(32, 4, bias=False), torch.nn.Linear(4, 32, bias=False)

    def forward(self, x):
        y = self.base(x)  # expect: unused-grad count=1
        return y + self.up(self.down(x))


embed = torch.nn.Embedding(64, 32)
model = Adapted()
rare = torch.nn.Parameter(torch.zeros(32))
optimizer = torch.optim.SGD([*model.down.parameters(), *model.up.parameters()], lr=0.1)
seldom = torch.optim.SGD([rare], lr=0.1)
ids = torch.randint(0, 64, (16,))
for step in range(5):
    optimizer.zero_grad()
    hidden = embed(ids)  # expect: unused-grad count=1
    (model(hidden) + rare).square().mean().backward()
    optimizer.step()
    if step == 4:
        seldom.step()
