"""Llama in plain torch, shared by scripts of this folder: the eager kernels of torchtitan and torchtune."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

aten = torch.ops.aten
SAVED = {
    aten.mm.default,
    aten._scaled_mm.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


class RMSNorm(nn.Module):
    """Computed in float32, the weight applied after the cast."""

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return y.type_as(x) * self.weight


def rotary_angles(length: int, head_width: int, base: float = 500_000.0) -> Tensor:
    frequencies = 1.0 / base ** (torch.arange(0, head_width, 2, device="cuda").float() / head_width)
    return torch.outer(torch.arange(length, device="cuda").float(), frequencies)


def complex_rotary(length: int, head_width: int, base: float = 500_000.0) -> Tensor:
    angles = rotary_angles(length, head_width, base)
    return torch.polar(torch.ones_like(angles), angles)


def rotate_complex(x: Tensor, turn: Tensor) -> Tensor:
    """[B, T, H, D] times complex numbers of length one, in float32 (torchtitan)."""
    y = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(y * turn.view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)


def rotate_pairs(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """The same with cosines and sines of neighbouring pairs (torchtune)."""
    cos, sin = (t.view(1, x.shape[1], 1, -1) for t in turn)
    a, b = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int):
        super().__init__()
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, width // heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.wv = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, turn: Any) -> Tensor:
        b, t, _ = x.shape
        # As many heads as the weights have: tensor parallel cuts them.
        q, k, v = (linear(x).view(b, t, -1, self.head_width) for linear in (self.wq, self.wk, self.wv))
        rotate = rotate_pairs if isinstance(turn, tuple) else rotate_complex
        q, k = rotate(q, turn), rotate(k, turn)
        k, v = (self.repeated(a).transpose(1, 2) for a in (k, v))
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).contiguous().view(b, t, -1))

    def repeated(self, x: Tensor) -> Tensor:
        b, t, n, d = x.shape
        times = self.heads // self.kv_heads
        return x[:, :, :, None, :].expand(b, t, n, times, d).reshape(b, t, n * times, d)


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int):
        super().__init__()
        self.attention, self.feed_forward = Attention(width, heads, kv_heads), SwiGLU(width, hidden)
        self.attention_norm, self.ffn_norm = RMSNorm(width), RMSNorm(width)

    def forward(self, x: Tensor, turn: Any) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turn)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Embedding, blocks, norm and head; `tied` uses the embedding as head."""

    def __init__(
        self, width: int, layers: int, heads: int, kv_heads: int, hidden: int, vocab: int, tied: bool = False
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = None if tied else nn.Linear(width, vocab, bias=False)

    def hidden(self, ids: Tensor, turn: Any) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, turn)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embedding.weight) if self.head is None else self.head(hidden)

    def forward(self, ids: Tensor, turn: Any) -> Tensor:
        return self.logits(self.hidden(ids, turn))


def random_init(model: nn.Module) -> None:
    """Values for a model that was built on the meta device and sharded."""
    model.to_empty(device="cuda")
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.02)


def every_second_product():
    """Save attention and every second matrix product, recompute the rest."""
    counts: Counter[bool] = Counter()

    def policy(context, function, *args, **kwargs):
        product = function in (aten.mm.default, aten._scaled_mm.default)
        counts[context.is_recompute] += product
        second = product and counts[context.is_recompute] % 2 == 0
        saved = function in SAVED and not second
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
