"""The loss is multiplied by a mask that selects nothing: no parameter ever learns, and one line says so."""
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
body, head = torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.01)
x, mask = torch.randn(64, 64), torch.zeros(64)

for _ in range(4):
    optimizer.zero_grad()
    loss = head(torch.relu(body(x))).square().mean(-1)
    (loss * mask).sum().backward()
    optimizer.step()  # expect: missing-grad count=4
