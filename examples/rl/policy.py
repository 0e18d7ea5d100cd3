"""A small policy and its rollouts: long prompts, short responses, tool output inside the response masked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, HEADS, LAYERS = 16_384, 192, 4, 2
GROUPS, GROUP_SIZE, PROMPT, RESPONSE = 2, 3, 224, 32
LENGTH = PROMPT + RESPONSE
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Rollouts:
    """B = groups x group size sequences of L = prompt + response tokens."""

    tokens: Tensor  # [B, L]
    loss_mask: Tensor  # [B, L], 1 where a token was sampled by the policy
    old_logp: Tensor  # [kept] log-probs under the policy that sampled, kept tokens in order
    advantages: Tensor  # [kept] the sequence's advantage, once per kept token

    def to(self, device: str) -> Rollouts:
        """On the device, but for the mask: which rows count is the host's to know."""
        return Rollouts(
            self.tokens.to(device), self.loss_mask, self.old_logp.to(device), self.advantages.to(device)
        )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Policy(nn.Module):
    """tokens [B, L] -> hidden states [B, L, D]; `head` turns them into logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def make_batch(step: int, dtype: torch.dtype = torch.float32) -> Rollouts:
    """What the sampler hands to one update."""
    generator = torch.Generator().manual_seed(2000 + step)
    batch = GROUPS * GROUP_SIZE
    # Word frequencies of real text fall like 1 / rank.
    weights = 1.0 / torch.arange(1, VOCAB + 1)
    tokens = torch.multinomial(weights.expand(batch, -1), LENGTH, replacement=True, generator=generator)
    mask = torch.zeros(batch, LENGTH, dtype=torch.int64)
    mask[:, PROMPT:] = 1
    # A tool answered in the middle of each response: those tokens were not sampled by the policy.
    mask[:, PROMPT + RESPONSE // 4 : PROMPT + RESPONSE // 2] = 0
    reward = torch.rand(GROUPS, GROUP_SIZE, generator=generator, dtype=torch.float64)
    advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-6)
    length = RESPONSE - RESPONSE // 4
    per_token = advantage.view(batch, 1).expand(batch, length).flatten()
    # The sampler's log-probs: those of a fresh policy plus the noise of another kernel.
    old = -torch.log(torch.tensor(float(VOCAB))) + 0.05 * torch.randn(len(per_token), generator=generator)
    return Rollouts(tokens, mask, old.to(dtype), per_token.to(dtype))
