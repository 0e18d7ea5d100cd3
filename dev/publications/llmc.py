"""GPT-2 124M in torch as llm.c's author timed it: 32 x 1024 tokens, compiled, flash attention, one A100.

Differences: the board is the PCIe version (250 W), the device here the SXM one.
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# args: "autocast" (fp32 weights) or "bf16" (weights in bf16, under autocast)
PUBLISHED = {
    "source": "https://github.com/karpathy/llm.c/pull/323",
    "date": "2024-05",
    "role": "blind",
    "class": "transformer, compiled",
    "device": "a100-40",
    "per_step": 32768,
    "note": "blind since 2026-11-19; published for the PCIe board, rounded to 1,000 tokens per second",
    "rows": {
        "llmc-gpt2-autocast": {"args": "autocast", "per_s": 115000},
        "llmc-gpt2-bf16": {"args": "bf16", "per_s": 118000},
    },
}
WIDTH, LAYERS, HEADS, VOCAB, LENGTH, BATCH = 768, 12, 12, 50257, 1024, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        parts = self.qkv(self.norm_1(x)).split(WIDTH, dim=2)
        q, k, v = (part.view(b, t, HEADS, WIDTH // HEADS).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, WIDTH))
        h = self.up(self.norm_2(x))
        h = 0.5 * h * (1.0 + torch.tanh(0.79788456 * (h + 0.044715 * torch.pow(h, 3.0))))
        return x + self.down(h)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(LENGTH, device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1), ignore_index=-1)


torch.set_float32_matmul_precision("high")
model = Model().cuda()
if sys.argv[1] == "bf16":
    model.to(torch.bfloat16)
compiled = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
ids, targets = (torch.randint(0, VOCAB, (BATCH, LENGTH)).cuda() for _ in range(2))
for _ in range(10):
    with torch.autocast("cuda", torch.bfloat16):
        loss = compiled(ids, targets)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    loss.item()
