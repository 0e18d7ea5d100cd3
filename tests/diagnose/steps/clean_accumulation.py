"""Four accumulated batches over twelve layers, clipped, with a schedule and a fused optimizer."""  # expect: nothing
import torch
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 2 * width - 1), torch.nn.Linear(2 * width - 1, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


model = torch.nn.Sequential(*(Block(24) for _ in range(12)), torch.nn.Linear(24, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)
data, labels = torch.randn(4, 16, 24), torch.randint(0, 8, (4, 16))
for _ in range(4):
    for x, y in zip(data, labels):
        (F.cross_entropy(model(x), y) / 4).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
