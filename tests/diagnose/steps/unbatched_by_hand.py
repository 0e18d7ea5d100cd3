"""No optimizer object: a function updates forty parameters one by one. Each loop is one step."""
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(20)))
x = torch.randn(32, 16)


@torch.no_grad()
def update(parameters, rate):
    for p in parameters:
        p.sub_(scaled(p.grad, rate))  # expect: unbatched-optimizer count=40
        p.grad = None


def scaled(gradient, rate):
    return gradient * rate  # expect: unbatched-optimizer count=40


for _ in range(4):
    model(x).square().mean().backward()
    update(model.parameters(), 0.1)
