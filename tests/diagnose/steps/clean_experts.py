"""Experts that no token reached have no gradient; the router sends each token to one of those at hand."""  # expect: nothing
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
WIDTH, EXPERTS = 32, 8


class Expert(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 64), torch.nn.Linear(64, WIDTH)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Mixture(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.router = torch.nn.Linear(WIDTH, EXPERTS)

    def forward(self, x, rows):
        out = torch.zeros_like(x)
        for expert, mine in zip(self.experts, rows):
            if len(mine):
                out = out.index_add(0, mine, expert(x[mine]))
        return x + out * self.router(x).softmax(-1).amax(-1, keepdim=True)


model, head = Mixture(), torch.nn.Linear(WIDTH, 8)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.01)
x = torch.randn(64, WIDTH)
# What a router would choose; experts 5 to 7 get nothing.
choice = torch.arange(64).square() % 5
rows = [torch.arange(64)[choice == i] for i in range(EXPERTS)]

for _ in range(5):
    optimizer.zero_grad()
    head(model(x, rows)).square().mean().backward()
    optimizer.step()
