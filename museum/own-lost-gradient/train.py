import sys

import torch
import torch.nn.functional as F
from head import Fixed, Head

torch.manual_seed(0)
body = torch.nn.Sequential(torch.nn.Embedding(37, 16), torch.nn.Linear(16, 16), torch.nn.Tanh())
head = torch.nn.Linear(16, 37, bias=False)
optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=1e-3)
ids = torch.randint(37, (96,))
hidden, labels = body(ids), ids.roll(-1)
if "--plain" in sys.argv:
    loss = F.cross_entropy(head(hidden), labels)
else:
    loss = (Fixed if "--fixed" in sys.argv else Head).apply(hidden, head.weight, labels)
loss.backward()
optimizer.step()
