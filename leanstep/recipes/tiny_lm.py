"""A small causal transformer with a key-value cache, for recipes that must sample.

It stops at the hidden states: the head's weight is used by the loss (`leanstep.logprob`) on the rows that
need it, and by the sampler on one row per sequence.
"""

# B sequences · S positions · D model · H heads · E head width · V vocabulary

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class TinyConfig:
    vocab: int = 4096
    width: int = 128
    layers: int = 2
    heads: int = 4
    max_len: int = 512


@dataclass
class Cache:
    """Keys and values per layer, [B, H, S, E], and how many positions of each sequence are filled, [B]."""

    keys: list[Tensor]
    values: list[Tensor]
    lengths: Tensor

    def repeat(self, times: int) -> Cache:
        """Every sequence `times` times in a row: one prefill serves a whole group of samples."""
        return Cache(
            [k.repeat_interleave(times, 0) for k in self.keys],
            [v.repeat_interleave(times, 0) for v in self.values],
            self.lengths.repeat_interleave(times, 0),
        )


class Block(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        D = config.width
        self.heads = config.heads
        self.attention_norm = nn.RMSNorm(D)
        self.mlp_norm = nn.RMSNorm(D)
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.out = nn.Linear(D, D, bias=False)
        self.up = nn.Linear(D, 4 * D, bias=False)
        self.down = nn.Linear(4 * D, D, bias=False)

    def heads_of(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        B, S, D = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(B, S, 3, self.heads, D // self.heads).unbind(2)
        return rotate(q.transpose(1, 2), rotation), rotate(k.transpose(1, 2), rotation), v.transpose(1, 2)

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.mlp_norm(x))).square())


class TinyLM(nn.Module):
    """tokens [B, S] -> hidden [B, S, D]; `head.weight` [V, D] turns hidden rows into logits."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        if config.width % (2 * config.heads):
            raise ValueError(f"width: expected a multiple of 2 x {config.heads} heads, got {config.width}")
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        width = config.width // config.heads
        frequency = 10000.0 ** (-torch.arange(0, width, 2) / width)
        angle = torch.arange(config.max_len)[:, None] * frequency
        self.register_buffer("cosine", angle.cos(), persistent=False)
        self.register_buffer("sine", angle.sin(), persistent=False)
        self.cosine: Tensor
        self.sine: Tensor

    def initialise(self, generator: torch.Generator) -> TinyLM:
        """Weights from `generator` alone; residual outputs start at zero."""
        with torch.no_grad():
            for name, p in self.named_parameters():
                if p.ndim < 2:
                    p.fill_(1.0)
                elif name.endswith(("out.weight", "down.weight")):
                    p.zero_()
                else:
                    scale = 0.5 if name == "embedding.weight" else p.shape[1] ** -0.5
                    p.copy_(torch.randn(p.shape, generator=generator) * scale)
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        S = tokens.shape[1]
        rotation = self.cosine[:S], self.sine[:S]
        x = self.embedding(tokens)
        for block in self.blocks:
            assert isinstance(block, Block)
            q, k, v = block.heads_of(x, rotation)
            x = block.finish(x, F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.norm(x)

    @torch.no_grad()
    def prefill(self, tokens: Tensor, lengths: Tensor, room: int) -> tuple[Tensor, Cache]:
        """Run right-padded prompts: the hidden row after each, [B, D], and a cache with `room` to grow."""
        B, S = tokens.shape
        rotation = self.cosine[:S], self.sine[:S]
        x = self.embedding(tokens)
        keys, values = [], []
        for block in self.blocks:
            assert isinstance(block, Block)
            q, k, v = block.heads_of(x, rotation)
            keys.append(F.pad(k, (0, 0, 0, room)))
            values.append(F.pad(v, (0, 0, 0, room)))
            x = block.finish(x, F.scaled_dot_product_attention(q, k, v, is_causal=True))
        last = x[torch.arange(B, device=x.device), lengths - 1]
        return self.norm(last), Cache(keys, values, lengths.clone())

    @torch.no_grad()
    def advance(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Append one token to every sequence; its hidden row [B, D]. Padding is overwritten, then seen."""
        rotation = self.cosine[cache.lengths][:, None, None], self.sine[cache.lengths][:, None, None]
        room = cache.keys[0].shape[2]
        visible = (torch.arange(room, device=tokens.device) <= cache.lengths[:, None])[:, None, None]
        everyone = torch.arange(tokens.shape[0], device=tokens.device)
        x = self.embedding(tokens)[:, None]
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            q, k, v = block.heads_of(x, rotation)
            cache.keys[layer][everyone, :, cache.lengths] = k[:, :, 0]
            cache.values[layer][everyone, :, cache.lengths] = v[:, :, 0]
            mixed = F.scaled_dot_product_attention(
                q, cache.keys[layer], cache.values[layer], attn_mask=visible
            )
            x = block.finish(x, mixed)
        cache.lengths += 1
        return self.norm(x[:, 0])


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of [B, H, S, E]; the two halves of E are the pairs."""
    cosine, sine = rotation
    a, b = x.chunk(2, -1)
    return torch.cat((a * cosine - b * sine, a * sine + b * cosine), -1)


@torch.no_grad()
def sample(
    model: TinyLM,
    prompts: Tensor,
    lengths: Tensor,
    *,
    group: int,
    max_new: int,
    end_token: int,
    generator: torch.Generator,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Sample `group` completions of each prompt; temperature 0 takes the likeliest token.

    Returns:
        completions [B * group, max_new], filled up with `end_token`, and their lengths with the end token.
    """
    hidden, cache = model.prefill(prompts, lengths, max_new)
    hidden, cache = hidden.repeat_interleave(group, 0), cache.repeat(group)
    B = hidden.shape[0]
    completions = torch.full((B, max_new), end_token, device=prompts.device)
    done = torch.zeros(B, dtype=torch.bool, device=prompts.device)
    count = torch.zeros(B, dtype=torch.int64, device=prompts.device)
    for position in range(max_new):
        logits = model.head(hidden).float()
        if temperature > 0:
            odds = (logits / temperature).softmax(-1)
            token = torch.multinomial(odds, 1, generator=generator)[:, 0]
        else:
            token = logits.argmax(-1)
        token = torch.where(done, end_token, token)
        completions[:, position] = token
        count += ~done
        done |= token == end_token
        if position + 1 < max_new:
            hidden = model.advance(token, cache)
    return completions, count
