"""Only the entries that can carry a target: the gists of the worse context and the blocks under the better one's gists.

A raw token gets a target only when the better context holds a gist in its block, and gists are few: at 2,048 tokens
and 1,831 entries there are 7, so 231 entries per pair are looked at instead of 1,831. All look-ups run in token space,
where an aligned block is one contiguous row.

V contexts · W padded length · G gists per context · P pairs · M = G + G * b entries per pair · N blocks per context
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .batch import LensBatch
from .config import LensConfig
from .pairs import Pairs
from .targets import span_table


@dataclass
class CompactEntries:
    """M candidate entries of each pair, and the way back to [V, W]."""

    x: Tensor
    sign: Tensor
    span: Tensor
    pos: Tensor
    gist_cell: Tensor
    block_row: Tensor
    num_blocks: int
    block_size: int

    def scatter_back(self, grad: Tensor) -> Tensor:
        """[V, W] from [P, M]: summed over pairs in a fixed order."""
        num_gists = self.gist_cell.shape[1]
        cells = grad.new_zeros(self.pos.shape[0] * self.num_blocks, self.block_size)
        cells.index_add_(0, self.block_row, grad[:, num_gists:].reshape(-1, self.block_size))
        cells.view(-1).index_add_(0, self.gist_cell.view(-1), grad[:, :num_gists].reshape(-1))
        return cells.view(self.pos.shape[0], -1).gather(1, self.pos)


def can_compact(batch: LensBatch, config: LensConfig) -> bool:
    """True when the gist lists are known and short enough to pay."""
    if batch.gists is None or batch.pos.numel() == 0:
        return False
    return batch.gists.shape[1] * (config.block_size + 1) <= batch.pos.shape[1] // 2


def compact_entries(scores: Tensor, batch: LensBatch, pairs: Pairs, config: LensConfig) -> CompactEntries:
    """Candidates of every pair with their signs; contexts must not overlap themselves (`list_gists` sees to it)."""
    assert batch.gists is not None
    b, num_contexts = config.block_size, batch.num_contexts
    # One more cell than tokens: padding lands there and never looks like an entry.
    num_blocks = math.ceil((batch.num_tokens + 1) / b)
    width = num_blocks * b
    lods = torch.full((num_contexts, width), -1, dtype=torch.int8, device=scores.device).scatter_(1, batch.pos, batch.lod)
    lods[:, batch.num_tokens :] = -1
    x_tokens = scores.new_zeros(num_contexts, width).scatter_(1, batch.pos, scores)

    lod_gist_VG = lods.gather(1, batch.gists)
    worse, better = pairs.worse, pairs.better
    start_worse, start_better = batch.gists.index_select(0, worse), batch.gists.index_select(0, better)
    lod_worse, lod_better = lod_gist_VG.index_select(0, worse), lod_gist_VG.index_select(0, better)
    lod_cells = lods.view(-1)
    base_worse = (worse * width)[:, None]
    gist_cell = base_worse + start_worse
    # What the other context holds at the same start.
    asked = lod_cells[(better * width)[:, None] + start_worse]
    held = lod_cells[base_worse + start_better]
    request = (held >= 0) & (held < lod_better) & pairs.live[:, None]
    expand = (asked >= 0) & (asked < lod_worse) & pairs.live[:, None]
    sign_gist = expand.to(scores.dtype)
    for level in range(1, config.max_lod):
        parent = b ** (level + 1)
        same = (start_worse // parent)[:, :, None] == (start_better // parent)[:, None, :]
        reached = (same & (request & (held == level))[:, None, :]).any(2)
        sign_gist = torch.where(reached & (lod_worse == level), -1.0, sign_gist)

    block_row = ((worse * num_blocks)[:, None] + start_better // b).view(-1)
    raw = lods.view(-1, b).index_select(0, block_row) == 0
    raw &= (request & (held == 0)).view(-1, 1)
    num_pairs, num_gists = start_worse.shape
    sign_block = raw.to(scores.dtype).neg_().view(num_pairs, num_gists * b)
    x_block = x_tokens.view(-1, b).index_select(0, block_row).view(num_pairs, num_gists * b)
    x_gist = x_tokens.view(-1).index_select(0, gist_cell.view(-1)).view(num_pairs, num_gists)
    spans = span_table(b, config.max_lod, scores.device, scores.dtype)
    span_gist = spans[lod_worse.clamp(min=0).long()]
    return CompactEntries(
        x=torch.cat([x_gist, x_block], 1),
        sign=torch.cat([sign_gist, sign_block], 1),
        span=torch.cat([span_gist, torch.ones_like(x_block)], 1),
        pos=batch.pos,
        gist_cell=gist_cell,
        block_row=block_row,
        num_blocks=num_blocks,
        block_size=b,
    )
