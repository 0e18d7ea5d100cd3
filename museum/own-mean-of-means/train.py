import argparse

import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--accumulation_steps", type=int, default=1)
parser.add_argument("--fixed", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(37, 16), torch.nn.Linear(16, 37))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids = torch.randint(37, (8, 12))
labels = ids.roll(-1, 1).masked_fill(torch.arange(12) > torch.arange(3, 11)[:, None], -100)
for part, target in zip(ids.split(args.batch_size), labels.split(args.batch_size), strict=True):
    loss = F.cross_entropy(model(part).flatten(0, 1), target.flatten(), reduction="sum")
    tokens = (labels if args.fixed else target).ne(-100).sum()
    (loss / tokens / (1 if args.fixed else args.accumulation_steps)).backward()
optimizer.step()
