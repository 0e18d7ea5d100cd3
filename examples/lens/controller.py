"""The controller and its cached training data: working contexts with the base model's loss on each.

A working context is a sequence of 1,024 tokens in which some runs of 32 tokens are replaced by one summary.
The controller reads the context and gives every entry a score: positive means "expand me into my tokens",
negative "collapse me". It learns from pairs of contexts of the same sequence: the base model read both, one
with less loss than the other. Contexts and losses come from a cache, as in two-stage training.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

TOKENS, BLOCK, MAX_LOD = 1024, 32, 2
SAMPLES, VARIANTS, SUMMARIES = 4, 3, 9
RECENT = 128


@dataclass
class Cached:
    """V = samples x variants contexts of W entries."""

    positions: Tensor  # [V, W] first token of each entry
    lods: Tensor  # [V, W] 0 = a token, 1 = the summary of 32 tokens
    losses: Tensor  # [samples, variants] mean loss of the base model
    rows: Tensor  # [samples, variants] the context of each variant


class Controller(nn.Module):
    """Level and age of each entry, one hidden layer, one score in [-1, 1] per entry."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.level = nn.Embedding(MAX_LOD + 1, width)
        self.age = nn.Embedding(TOKENS // BLOCK, width)
        self.hidden = nn.Linear(width, width)
        self.score = nn.Linear(width, 1)

    def forward(self, batch: Cached) -> Tensor:
        x = self.level(batch.lods) + self.age(batch.positions // BLOCK)
        return torch.tanh(self.score(torch.relu(self.hidden(x))).squeeze(-1))


def make_batch(step: int, dtype: torch.dtype = torch.float32) -> Cached:
    """The cached batch of one step: per sample the plain context and two with random summaries."""
    random = np.random.default_rng(1000 + step)
    width = TOKENS - SUMMARIES * (BLOCK - 1)
    # What summarising a block costs the base model: recent blocks hurt more.
    harm = 0.02 + 0.3 * np.linspace(0, 1, TOKENS // BLOCK) ** 3
    positions, lods, losses = [], [], []
    for _ in range(SAMPLES):
        # The plain context: the last `width` tokens; the oldest ones are lost.
        positions.append(np.arange(TOKENS - width, TOKENS))
        lods.append(np.zeros(width, dtype=np.int64))
        losses.append(3.2 + 0.02 * random.standard_normal())
        for _ in range(1, VARIANTS):
            blocks = random.permutation((TOKENS - RECENT) // BLOCK)[:SUMMARIES]
            inside = (blocks[:, None] * BLOCK + np.arange(1, BLOCK)).ravel()
            positions.append(np.delete(np.arange(TOKENS), inside))
            lods.append(np.isin(positions[-1], blocks * BLOCK).astype(np.int64))
            losses.append(2.6 + harm[blocks].sum() + 0.02 * random.standard_normal())
    rows = torch.arange(SAMPLES * VARIANTS).view(SAMPLES, VARIANTS)
    # Losses stay in double precision: what counts is their difference.
    table = torch.from_numpy(np.array(losses).reshape(SAMPLES, VARIANTS))
    return Cached(torch.from_numpy(np.stack(positions)), torch.from_numpy(np.stack(lods)), table, rows)
