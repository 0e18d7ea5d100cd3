"""Four equal blocks and a head, trained by AdamW: what changes of a program are tried on."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(512, 64)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


model = Model().to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
while True:
    model(torch.zeros(8, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
