"""A frozen layer in the optimizer, an adapter whose second factor starts at zero, experts used in turn, and a
warm-up whose first learning rate is zero."""  # expect: nothing
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
body, head = torch.nn.Linear(64, 64).requires_grad_(False), torch.nn.Linear(64, 8)
down, up = torch.nn.Linear(64, 4, bias=False), torch.nn.Linear(4, 64, bias=False)
torch.nn.init.zeros_(up.weight)
experts = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(2))
modules = [body, down, up, experts, head]
optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.01)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 4, 1.0))
x = torch.randn(64, 64)

for step in range(5):
    optimizer.zero_grad()
    h = body(x) + up(down(x))
    h = h + experts[step % 2](torch.relu(h))
    head(h).square().mean().backward()
    optimizer.step()
    schedule.step()
