import torch
import torch.nn.functional as F

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(37, 16), torch.nn.Linear(16, 37))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ids = torch.randint(37, (4, 12))
old = F.log_softmax(torch.randn(4, 12, 37), -1).gather(-1, ids[..., None])[..., 0]
old[0, 5] = old[2, 7] = float("-inf")
advantages, mask = torch.randn(4, 1).expand(4, 12), torch.arange(12).expand(4, 12) >= 1
logp = F.log_softmax(model(ids.roll(1, 1)), -1).gather(-1, ids[..., None])[..., 0]
kept = mask & old.isfinite()
ratio = torch.where(kept, logp - old, 0.0).clamp(-10, 10).exp()
loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * kept
(loss.sum() / kept.sum()).backward()
optimizer.step()
