"""Python goes through everything that was ever seen, and torch does the same in every step."""

import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
seen = []

for _ in range(40):
    seen += range(20_000)
    weight = 1.0 / (1 + sum(number % 7 for number in seen))
    (weight * model(torch.randn(16, 8)).square().mean()).backward()
    optimizer.step()  # expect: growing-step time
    optimizer.zero_grad()
