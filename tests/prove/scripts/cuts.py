"""One update of a tiny language model on four samples, split in different ways; `--bug`: a known mistake.

The mistakes, each from a public thread, in words of our own:
  verl-7200          every micro-batch divides by its own tokens, and the results are added
  transformers-2024  a mean over micro-batches of means over tokens
  verl-3332          the loss of a micro-batch is not divided by the number of micro-batches
  unsloth-zoo-1023   divided by the tokens of the batch, and by the number of micro-batches as well
  prime-rl-2562      every rank divides by its own tokens, and ranks are averaged
  verl-5366          divided by the tokens of all ranks, then averaged over ranks
  DiffCSE-25         padding counts as an ordinary class in the loss
  axolotl-3735       tokens attend to padding
  nanoVLM-204        packed samples attend to each other
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--bug", default="")
parser.add_argument("--micro", type=int, default=1, help="micro-batches per rank")
parser.add_argument("--packed", action="store_true")
parser.add_argument("--width", type=int, default=0, help="pad to at least this many tokens")
parser.add_argument("--dropout", type=float, default=0.0)
args = parser.parse_args()
V, D = 41, 12
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if "RANK" in os.environ:
    dist.init_process_group("gloo")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, V)

    def forward(self, tokens, document, position):
        x = self.embed(tokens) + torch.sin(position[..., None] / 7.0)
        q = self.mix(x)
        allowed = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool)[None]
        if args.bug not in ("axolotl-3735", "DiffCSE-25"):
            allowed = allowed.tril()
        if args.bug != "nanoVLM-204":
            allowed = allowed & (document[:, :, None] == document[:, None, :])
        if args.bug == "DiffCSE-25":
            allowed = (document[:, None, :] > 0) | torch.eye(tokens.shape[1], dtype=torch.bool)
        if args.bug == "axolotl-3735":
            allowed = torch.ones_like(allowed)
        scores = (q @ x.transpose(1, 2)).masked_fill(~allowed, float("-inf"))
        return self.head(F.dropout(x + scores.softmax(-1) @ x, args.dropout))


def batch_of(samples):
    """tokens, labels (-100: none), document numbers (0: padding), positions; padded or packed."""
    rows = [torch.cat(samples)] if args.packed else samples
    numbers = [torch.full((len(s),), n + 1) for n, s in enumerate(samples)]
    documents = [torch.cat(numbers)] if args.packed else numbers
    places = [torch.arange(len(s)) for s in samples]
    positions = [torch.cat(places)] if args.packed else places
    width = max(args.width, *(len(row) for row in rows))
    pad = lambda parts, value: torch.stack([F.pad(p, (0, width - len(p)), value=value) for p in parts])  # noqa: E731
    tokens, document, position = pad(rows, 0), pad(documents, 0), pad(positions, 0)
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    last = document != document.roll(-1, 1)
    labels[(document == 0) | last] = -100
    if args.bug == "DiffCSE-25":
        labels = torch.where(document == 0, 0, tokens % 2)
    return tokens, labels, document, position


torch.manual_seed(0)
model = Model()
wrapped = nn.parallel.DistributedDataParallel(model) if "RANK" in os.environ else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(9)
samples = [torch.randint(1, V, (length,), generator=generator) for length in (5, 11, 7, 3)]
all_tokens = sum(len(s) - 1 for s in samples)
mine = samples[rank * 4 // world : (rank + 1) * 4 // world]
my_tokens = sum(len(s) - 1 for s in mine)
for part in range(args.micro):
    tokens, labels, document, position = batch_of(
        mine[part * len(mine) // args.micro : (part + 1) * len(mine) // args.micro]
    )
    logits = wrapped(tokens, document, position)
    means = args.bug in ("verl-7200", "transformers-2024")
    reduction = "mean" if means else "sum"
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction=reduction)
    if args.bug == "transformers-2024":
        loss = loss / args.micro
    elif args.bug == "prime-rl-2562":
        loss = loss / my_tokens
    elif args.bug == "verl-5366":
        loss = loss / all_tokens
    elif not means:
        loss = loss / all_tokens * world
    if args.bug == "verl-3332":
        loss = loss * args.micro
    if args.bug == "unsloth-zoo-1023":
        loss = loss / args.micro
    loss.backward()
optimizer.step()
