"""The loss is read on every step, though every hundredth is printed."""
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(64, 32)

for step in range(4):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    value = loss.item()  # expect: host-sync count=1
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step}: loss {value:.3f}")
