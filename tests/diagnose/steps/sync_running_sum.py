"""A running sum of losses: read on every step, looked at every two hundredth."""
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(64, 32)


def train(steps):
    total = 0.0
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        total += loss.item()  # expect: host-sync count=1
        if step % 200 == 0 and step > 0:
            print(f"step {step}: mean loss {total / 200:.3f}")
            total = 0.0
    return total


train(4)
