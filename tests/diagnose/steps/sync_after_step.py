"""Values that the step computed are read after a mean of its loss, which extends its graph."""
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(64, 32)

for _ in range(4):
    optimizer.zero_grad()
    losses = model(x).square().mean(-1)
    worst, spread = losses.detach().max(), losses.detach().std()
    losses.mean().backward()
    optimizer.step()
    print(losses.detach().min().item())  # expect: host-sync count=1
    print((losses.mean() * 2).item())  # expect: host-sync count=1
    print(worst.item(), spread.item())  # expect: host-sync count=2
