"""torch.optim.Muon as a new user would: matrices to Muon, the rest to AdamW."""

import torch
import torch.nn.functional as F

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Embedding(512, 64), *(torch.nn.Linear(64, 64) for _ in range(8)), torch.nn.Linear(64, 512)
)
matrices = [p for m in model[1:-1] for p in m.parameters() if p.ndim == 2]
others = [p for p in model.parameters() if not any(p is q for q in matrices)]
optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-3)]
ids = torch.randint(0, 512, (8, 33))
for step in range(6):
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    print(step, loss.item())
