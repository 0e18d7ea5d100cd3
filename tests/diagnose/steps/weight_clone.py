"""The weights of the step before are copied to measure how far it went, and the graph is kept for nothing."""
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(16, 256)

for _ in range(4):
    optimizer.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]  # expect: weight-clone count=2
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)  # expect: retain-graph count=1
    optimizer.step()
