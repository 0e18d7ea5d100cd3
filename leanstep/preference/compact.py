"""Only the entries that can carry a target: the worse context's gists, and blocks under the better one's.

A raw token gets a target only when the better context holds a gist in its block, and gists are few: at
2,048 tokens and 1,831 entries there are 7, so 231 entries per pair are looked at instead of 1,831. Blocks
are found by binary search: the starts inside an aligned block are consecutive entries.

V contexts · W padded length · G gists per context · P pairs · b block size · M = G + G * b entries per pair
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .batch import GIST_STEP, LensBatch
from .config import LensConfig
from .constants import kept
from .pairs import Pairs


@dataclass
class CompactEntries:
    """M candidate entries of each pair.

    Args:
        cell: [P, M] int64 index into the flattened [V, W] scores.
        x: [P, M] their scores.
        sign: [P, M] +1 expand, -1 collapse, 0 none, in the scores' dtype.
        span: [P, G] tokens under the first G columns; the others are raw tokens.
    """

    cell: Tensor
    x: Tensor
    sign: Tensor
    span: Tensor

    def scatter_back(self, grad: Tensor, shape: torch.Size) -> Tensor:
        """[V, W] from [P, M]: summed over pairs in a fixed order."""
        flat = grad.new_zeros(shape.numel())
        return flat.scatter_add_(0, self.cell.view(-1), grad.view(-1)).view(shape)


def can_compact(batch: LensBatch, config: LensConfig) -> bool:
    """True when the gist lists are known and short enough to pay."""
    if batch.gists is None:
        return False
    return batch.gists.rows.shape[2] * (config.block_size + 1) <= batch.pos.shape[1] // 2


@kept
def _constants(
    num_gists: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Steps inside a block [b], and what a hit means [M]: gists expand, raw tokens collapse."""
    signs = [1.0] * num_gists + [-1.0] * (num_gists * block_size)
    return torch.arange(block_size, device=device), torch.tensor(signs, dtype=dtype, device=device)


def compact_entries(scores: Tensor, batch: LensBatch, pairs: Pairs, config: LensConfig) -> CompactEntries:
    """Candidates of every pair with their signs; `list_gists` has seen to it that nothing overlaps."""
    gists = batch.gists
    assert gists is not None
    b, num_pairs, num_gists = config.block_size, pairs.worse.shape[0], gists.rows.shape[2]
    block = b * GIST_STEP
    steps, signs = _constants(num_gists, b, scores.dtype, scores.device)
    # Compared with itself, a context gives no target: that is how dead pairs drop out.
    better = torch.where(pairs.live, pairs.better, pairs.worse)
    both = torch.stack([pairs.worse, better])
    mine = gists.rows.index_select(0, both.view(-1)).view(2, num_pairs, 4, num_gists)
    cell_gist, _, lod_worse, span = mine[0].unbind(1)
    start = mine[:, :, 1]
    # [0]: the worse context's gists looked up in the better; [1]: the other way round.
    query = torch.add(start, both.flip(0)[:, :, None], alpha=gists.stride)
    block_at = query[1] & -block if b & (b - 1) == 0 else query[1] - query[1] % block
    slot = torch.searchsorted(gists.key, torch.cat([query, block_at[None]]))
    # Key minus query is the LOD when an entry starts exactly there, and at least 8 otherwise.
    found = gists.key.index_select(0, slot[:2].view(-1)).view(query.shape) - query
    expand = found[0].view_as(lod_worse) < lod_worse
    # A block without a request is compared with a far-away start, which matches nothing.
    compare_at = torch.where(found[1] == 0, block_at, -(1 << 60))
    cell_block = slot[2].clamp(max=scores.numel() - b).unsqueeze(2) + steps
    offset = gists.key.index_select(0, cell_block.view(-1)).view(cell_block.shape) - compare_at.unsqueeze(2)
    if b & (b - 1) == 0:
        raw = (offset & ~(block - GIST_STEP)) == 0
    else:
        raw = (offset >= 0) & (offset < block) & (offset % GIST_STEP == 0)
    hit = torch.cat([expand, raw.view(num_pairs, num_gists * b)], 1)
    sign = hit * signs
    for level in range(1, min(config.max_lod, gists.top_level)):
        _collapse_gists(sign[:, :num_gists], mine[0], mine[1], level, b)
    cell = torch.cat([cell_gist, cell_block.view(num_pairs, num_gists * b)], 1)
    return CompactEntries(
        cell=cell,
        x=scores.reshape(-1).index_select(0, cell.view(-1)).view(cell.shape),
        sign=sign,
        span=span.to(scores.dtype),
    )


def _collapse_gists(sign: Tensor, worse: Tensor, better: Tensor, level: int, block_size: int) -> None:
    """Requests between gists: the better context is coarser where the worse holds one of `level`."""
    _, start_worse, lod_worse, _ = worse.unbind(1)
    _, start_better, lod_better, _ = better.unbind(1)
    parent = block_size ** (level + 1) * GIST_STEP
    at_level = lod_worse == level
    same_start = start_worse[:, :, None] == start_better[:, None, :]
    asks = (same_start & at_level[:, :, None]).any(1) & (lod_better > level)
    same_parent = (start_worse // parent)[:, :, None] == (start_better // parent)[:, None, :]
    reached = (same_parent & asks[:, None, :]).any(2) & at_level
    sign.masked_fill_(reached, -1.0)
