"""A classifier's widest layer is no head: the loss reads ten columns, and every row of them counts."""
import torch
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(
    torch.nn.Linear(32, 2048), torch.nn.GELU(), *(torch.nn.Linear(2048, 32), torch.nn.Linear(32, 2048)) * 4,
    torch.nn.ReLU(), torch.nn.Linear(2048, 10),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(1024, 32), torch.randint(0, 10, (1024,))

for _ in range(4):  # expect: nothing
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
