import argparse

import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--accumulation_steps", type=int, default=1)
args = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64))
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.randint(64, (8, 12))
labels = ids.roll(-1, 1).masked_fill(torch.arange(12) >= torch.arange(3, 11)[:, None], -100)
for x, y in zip(ids.split(args.batch_size), labels.split(args.batch_size), strict=True):
    (F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / args.accumulation_steps).backward()
optimizer.step()
