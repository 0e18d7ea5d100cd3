"""GPT-2 124M's step at full width and batch with one and with two blocks, in fp32, TF32 and bf16.

Two depths give the time of a block, and so that of twelve: one optimizer holds the parameters of both models,
and those without a gradient are skipped. Each variant runs twice; the second step is the steady one.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, VOCAB, BATCH, LENGTH = 768, 12, 50257, 16, 1024
DEVICE = "cuda"


class Block(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.fused = fused
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        allowed = torch.tril(torch.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH)
        self.register_buffer("allowed", allowed)

    def attend(self, x):
        b, t, d = x.shape
        q, k, v = (y.view(b, t, HEADS, d // HEADS).transpose(1, 2) for y in self.qkv(x).split(d, dim=2))
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (d // HEADS) ** -0.5
            scores = scores.masked_fill(self.allowed[:, :, :t, :t] == 0, float("-inf"))
            mixed = F.softmax(scores, dim=-1) @ v
        return self.out(mixed.transpose(1, 2).contiguous().view(b, t, d))

    def forward(self, x):
        x = x + self.attend(self.before(x))
        return x + self.down(F.gelu(self.up(self.between(x)), approximate="tanh"))


class Model(nn.Module):
    def __init__(self, depth, fused):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(fused) for _ in range(depth))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.last(x))
        return F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))


models = [Model(depth, fused=len(sys.argv) > 1).to(DEVICE) for depth in (1, 2)]
optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()], lr=3e-4)
text = torch.randint(0, VOCAB, (BATCH * LENGTH + 1,))
for precision in ("highest", "high", "bfloat16"):
    for model in models:
        for _ in range(2):
            torch.set_float32_matmul_precision("high" if precision == "bfloat16" else precision)
            x = text[:-1].view(BATCH, LENGTH).to(DEVICE)
            y = text[1:].view(BATCH, LENGTH).to(DEVICE)
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "bfloat16"):
                loss = model(x, y)
            loss.backward()
            optimizer.step()
