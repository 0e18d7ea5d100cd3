"""torchtune's techniques: Llama 3.2 3B, full fine-tuning in bf16 on one A100, 2 x 4096 packed tokens."""

import sys

import torch
import torch.nn.functional as F
from llama import Llama, rotary_angles
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# args: the techniques, each on top of the one before: packed, compile, chunked, checkpoint, in-backward
PUBLISHED = {
    "source": "https://github.com/pytorch/torchtune#optimization-flags",
    "date": "2024-2025",
    "role": "development",
    "class": "transformer, compiled",
    "device": "a100",
    "per_step": 8192,
    "rows": {
        "torchtune-3b-packed": {
            "args": "packed",
            "class": "transformer, eager",
            "per_s": 7075,
            "allocated_gib": 60.0,
            "note": "the block mask of packed documents is taken as causal",
        },
        "torchtune-3b-compile": {"args": "compile", "per_s": 8998, "allocated_gib": 51.0},
        "torchtune-3b-chunked": {"args": "chunked", "per_s": 9174, "allocated_gib": 42.9},
        "torchtune-3b-checkpoint": {"args": "checkpoint", "per_s": 7210, "allocated_gib": 24.9},
        "torchtune-3b-in-backward": {
            "args": "in-backward",
            "role": "blind",
            "per_s": 7309,
            "allocated_gib": 23.1,
            "note": "blind since 2026-11-19; the script is that of development rows",
        },
    },
}
LEVEL = ["packed", "compile", "chunked", "checkpoint", "in-backward"].index(sys.argv[1])
WIDTH, LAYERS, HEADS, KV_HEADS, HIDDEN, VOCAB, LENGTH, BATCH = 3072, 28, 24, 8, 8192, 128256, 4096, 2
CHUNKS = 8 if LEVEL >= 2 else 1
torch.set_default_dtype(torch.bfloat16)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, turn):
        return checkpoint(self.inner, x, turn, use_reentrant=False)


def chunk_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum")


with torch.device("cuda"):
    model = Llama(WIDTH, LAYERS, HEADS, KV_HEADS, HIDDEN, VOCAB, tied=True)
angles = rotary_angles(LENGTH, WIDTH // HEADS)
turn = (angles.cos(), angles.sin())
whole_loss = nn.CrossEntropyLoss(ignore_index=-100)
if LEVEL >= 1:
    for block in model.blocks:
        block.compile()
    chunk_loss, whole_loss = torch.compile(chunk_loss), torch.compile(whole_loss)
if LEVEL >= 3:
    model.blocks = nn.ModuleList(Checkpointed(block) for block in model.blocks)
if LEVEL < 4:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
else:
    optimizers = {p: torch.optim.AdamW([p], lr=2e-5, fused=True) for p in model.parameters()}

    def update(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
for _ in range(10):
    ids, labels = (torch.randint(0, VOCAB, (BATCH, LENGTH)).cuda() for _ in range(2))
    labels = torch.hstack((labels[..., 1:], torch.full((BATCH, 1), -100, device="cuda")))
    hidden = model.hidden(ids, turn)
    if CHUNKS > 1:
        logits = [model.logits(part) for part in hidden.chunk(CHUNKS, dim=1)]
        total = torch.zeros((), device="cuda")
        for part, targets in zip(logits, labels.chunk(CHUNKS, dim=1), strict=True):
            total = total + chunk_loss(part.reshape(-1, VOCAB), targets.reshape(-1))
        loss = total / (labels != -100).sum()
    else:
        logits = model.logits(hidden).float()
        loss = whole_loss(logits.reshape(-1, VOCAB), labels.reshape(-1))
    del logits, hidden
    loss.backward()
    if LEVEL < 4:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
