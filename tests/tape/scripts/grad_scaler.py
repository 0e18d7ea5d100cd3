"""A GradScaler whose first steps overflow and are skipped."""

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = torch.nn.Linear(16, 4, bias=False).to(device)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
scaler = torch.amp.GradScaler(device, init_scale=2.0**127, growth_interval=1000)
x = 100 + torch.randn(8, 16, device=device)
for _ in range(6):
    loss = model(x).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # SYNC
    scaler.update()
    optimizer.zero_grad()
    loss.item()  # SYNC
