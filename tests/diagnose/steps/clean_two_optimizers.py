"""Two optimizers back to back, an average kept with one foreach op, batches from a shuffling loader."""  # expect: nothing
import copy

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)
embed, body = torch.nn.Embedding(100, 32), torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
average = copy.deepcopy(body)
optimizers = [torch.optim.SGD(embed.parameters(), lr=0.1), torch.optim.AdamW(body.parameters(), lr=1e-3, fused=True)]
loader = DataLoader(TensorDataset(torch.randint(0, 100, (64, 6)), torch.randint(0, 8, (64,))), batch_size=16, shuffle=True)

for ids, labels in loader:
    for optimizer in optimizers:
        optimizer.zero_grad()
    torch.nn.functional.cross_entropy(body(embed(ids).mean(1)), labels).backward()
    for optimizer in optimizers:
        optimizer.step()
    with torch.no_grad():
        torch._foreach_lerp_(list(average.parameters()), list(body.parameters()), 0.01)
