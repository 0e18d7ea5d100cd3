"""A hand-written recurrent cell: the same two weights in every one of 64 time steps."""
import torch

torch.manual_seed(0)
torch.set_num_threads(1)


class Cell(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.input, self.state = torch.nn.Linear(width, width), torch.nn.Linear(width, width)

    def forward(self, x, h):
        return torch.tanh(self.input(x) + self.state(h))  # expect: op-storm count=256


class Reader(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.cell, self.out = Cell(width), torch.nn.Linear(width, 4)

    def forward(self, x):
        h = x.new_zeros(x.shape[0], x.shape[2])
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.out(h)


model = Reader(24)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
x = torch.randn(8, 64, 24)
for _ in range(4):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
