"""Forty layers are no storm; the loop over samples in the same function is."""
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(40)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
x, weights = torch.randn(40, 16), torch.rand(40)


def train_step():
    optimizer.zero_grad()
    out = model(x).unbind(0)
    loss = torch.zeros(())
    for i in range(40):
        loss = loss + weights[i] * out[i].square().mean()  # expect: op-storm count=160
    loss.backward()
    optimizer.step()


for _ in range(4):
    train_step()
