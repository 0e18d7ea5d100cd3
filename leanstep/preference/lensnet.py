"""LensNet: a small transformer that reads a working context and scores every entry in [-1, 1].

V contexts · W entries · D width
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class Block(nn.Module):
    """Attention and a feed-forward layer, both on normalised input."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def start_as_identity(self) -> None:
        last = self.mlp[-1]
        assert isinstance(last, nn.Linear)
        for parameter in (self.out.weight, last.weight, last.bias):
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor, mask: Tensor | None, *, causal: bool = False) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and mask is None)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_mlp(x))


class LensNet(nn.Module):
    """One score per entry: above 0 = expand me into my children, below 0 = collapse me with my siblings.

    Args:
        input_width: width of the entry embeddings.
        width: width of the controller.
        max_lod, block_size: geometry of the tree.
        num_blocks, num_heads: depth and heads.
    """

    def __init__(
        self,
        input_width: int,
        width: int = 64,
        *,
        max_lod: int = 2,
        block_size: int = 32,
        num_blocks: int = 2,
        num_heads: int = 2,
    ) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"num_heads: expected a divisor of width {width}, got {num_heads}")
        self.block_size, self.max_lod = block_size, max_lod
        self.embed = nn.Linear(input_width, width)
        self.level = nn.Embedding(max_lod + 1, width)
        self.features = nn.Linear(3, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)
        # Untrained, the controller has no opinion on levels, distances or neighbours.
        for parameter in (self.level.weight, self.features.weight, self.embed.bias, self.head.bias):
            nn.init.zeros_(parameter)
        for block in self.blocks:
            assert isinstance(block, Block)
            block.start_as_identity()

    def forward(
        self, embeddings: Tensor, pos: Tensor, lod: Tensor, valid: Tensor, num_tokens: Tensor | int
    ) -> Tensor:
        """Scores [V, W] from embeddings [V, W, D], positions, levels and the padding mask; 0 where not valid.

        Args:
            num_tokens: tokens in the sequence, one number or [V]; distances are measured from its end.
        """
        if embeddings.dim() != 3 or embeddings.shape[:2] != pos.shape:
            raise ValueError(f"embeddings: expected shape {(*pos.shape, 'D')}, got {tuple(embeddings.shape)}")
        dtype = embeddings.dtype
        level = lod.long()
        total = num_tokens[:, None] if isinstance(num_tokens, Tensor) else num_tokens
        distance = (total - pos).clamp(min=0).to(dtype)
        span = torch.full_like(distance, self.block_size) ** level
        features = torch.stack(
            [torch.log1p(span) / math.log(self.block_size), torch.log1p(distance) / 8, distance / 2048], -1
        )
        x = self.embed(embeddings) + self.level(level) + self.features(features)
        mask = valid[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask)
        scores = torch.tanh(self.head(self.norm(x)).squeeze(-1))
        return torch.where(valid, scores, 0)
