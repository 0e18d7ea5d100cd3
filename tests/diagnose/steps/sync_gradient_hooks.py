"""Gradient hooks that look at values: of a parameter, of a hidden state and of the model's output."""
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def guard_output(grad):
    return grad if torch.isfinite(grad).all() else torch.zeros_like(grad)  # expect: host-sync count=1


def guard_hidden(grad):
    return grad if torch.isfinite(grad).all() else torch.zeros_like(grad)  # expect: host-sync count=1


def guard_parameter(grad):
    return grad if torch.isfinite(grad).all() else torch.zeros_like(grad)  # expect: host-sync count=1


model[0].weight.register_hook(guard_parameter)
x = torch.randn(16, 32)
for _ in range(6):
    optimizer.zero_grad()
    hidden = model[0](x)
    hidden.register_hook(guard_hidden)
    output = model[2](model[1](hidden))
    output.register_hook(guard_output)
    output.square().mean().backward()
    optimizer.step()
