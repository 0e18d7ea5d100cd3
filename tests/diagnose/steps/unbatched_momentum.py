"""Momentum walks over 24 parameters with three small ops each."""
import torch

torch.manual_seed(0)
torch.set_num_threads(1)


def make_model():
    layers = []
    for _ in range(12):
        layers += [torch.nn.Linear(24, 24), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers)


def train(model, optimizer, x, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()  # expect: unbatched-optimizer count=72


model = make_model()
train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.randn(32, 24), 4)
