"""A detach cuts the encoder off, the forward never calls a module, and an auxiliary loss has the weight zero."""
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
encoder, body, forgotten = (torch.nn.Linear(64, 64) for _ in range(3))
head, aux = torch.nn.Linear(64, 8), torch.nn.Linear(64, 4)
modules = [encoder, body, forgotten, head, aux]
optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.01)
x = torch.randn(64, 64)

for _ in range(4):
    optimizer.zero_grad()
    h = torch.relu(encoder(x))  # expect: missing-grad count=2
    h = torch.relu(body(h.detach()))
    extra = aux(h).square().mean()  # expect: missing-grad count=2
    (head(h).square().mean() + 0.0 * extra).backward()
    optimizer.step()  # expect: missing-grad count=2
