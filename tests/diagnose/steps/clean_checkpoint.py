"""Chunks of the head recomputed in the backward, and blocks under checkpointing: nothing wide is kept."""  # expect: nothing
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
torch.set_num_threads(1)
ROWS, DIM, VOCAB, CHUNK = 1024, 32, 8192, 128
blocks = torch.nn.ModuleList(torch.nn.Linear(DIM, DIM) for _ in range(3))
head = torch.nn.Linear(DIM, VOCAB, bias=False)
optimizer = torch.optim.SGD([*blocks.parameters(), *head.parameters()], lr=0.1)
x, targets = torch.randn(ROWS, DIM), torch.randint(0, VOCAB, (ROWS,))


def chunk_loss(hidden, labels):
    return F.cross_entropy(head(hidden), labels, reduction="sum")


for _ in range(4):
    optimizer.zero_grad()
    h = x
    for block in blocks:
        h = h + checkpoint(lambda value, block=block: torch.tanh(block(value)), h, use_reentrant=False)
    loss = sum(checkpoint(chunk_loss, a, b, use_reentrant=False) for a, b in zip(h.split(CHUNK), targets.split(CHUNK)))
    (loss / ROWS).backward()
    optimizer.step()
