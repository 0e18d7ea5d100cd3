"""NumPy's float64 comes in as a mask and widens the loss; a softcap of three ops is no GELU by hand."""
import numpy as np
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(64, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(512, 64)
weights = torch.from_numpy(np.random.default_rng(0).random((512, 256)))

for _ in range(4):
    optimizer.zero_grad()
    out = 30 * torch.tanh(model(x) / 30)
    loss = (out * weights).mean()  # expect: float64 count=1
    loss.backward()
    optimizer.step()
