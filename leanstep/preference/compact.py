"""Only the entries that can carry a target: the worse context's gists, and blocks under the better one's.

A raw token gets a target only when the better context holds a gist in its block, and gists are few: at
2,048 tokens and 1,831 entries there are 7, so 231 entries per pair are looked at instead of 1,831. Blocks
are found by binary search: the starts inside an aligned block are consecutive entries.

V contexts · W padded length · G gists per context · P pairs · b block size · M = G + G * b entries per pair
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .batch import GIST_STEP, LensBatch
from .config import LensConfig
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


@lru_cache(maxsize=16)
def _steps(block_size: int, device: torch.device) -> Tensor:
    return torch.arange(block_size, device=device)


def compact_entries(scores: Tensor, batch: LensBatch, pairs: Pairs, config: LensConfig) -> CompactEntries:
    """Candidates of every pair with their signs; `list_gists` has seen to it that nothing overlaps."""
    gists = batch.gists
    assert gists is not None
    b, stride = config.block_size, gists.stride
    worse_rows, better_rows = (
        gists.rows.index_select(0, pairs.worse),
        gists.rows.index_select(0, pairs.better),
    )
    cell_gist, start_worse, lod_worse, span = worse_rows.unbind(1)
    _, start_better, lod_better, _ = better_rows.unbind(1)
    live = pairs.live[:, None]
    in_worse = (pairs.worse * stride)[:, None]
    held_at = in_worse + start_better
    block_at = held_at - start_better % (b * GIST_STEP)
    asked_at = (pairs.better * stride)[:, None] + start_worse
    query = torch.stack([asked_at, held_at, block_at])
    slot = torch.searchsorted(gists.key, query)
    # Key minus query is the LOD when an entry starts exactly there, and at least 8 otherwise.
    asked, held = (gists.key.index_select(0, slot[:2].view(-1)).view(2, *held_at.shape) - query[:2]).unbind(0)
    expand = (asked < lod_worse) & live
    request = (held == 0) & live

    # A block without a request is compared with a far-away start, which matches nothing.
    compare_at = torch.where(request, block_at, -gists.key.shape[0] * stride)
    cell_block = slot[2].unsqueeze(2) + _steps(b, scores.device)
    offset = gists.key.index_select(0, cell_block.view(-1)).view(cell_block.shape) - compare_at.unsqueeze(2)
    if b & (b - 1) == 0:
        raw = (offset & ~((b - 1) * GIST_STEP)) == 0
    else:
        raw = (offset < b * GIST_STEP) & (offset % GIST_STEP == 0)
    num_pairs, num_gists = held_at.shape
    sign_gist = expand.to(scores.dtype)
    for level in range(1, min(config.max_lod, gists.top_level)):
        sign_gist = _collapse_gists(
            sign_gist, start_worse, start_better, lod_worse, lod_better, live, level, b
        )
    cell_block = cell_block.view(num_pairs, num_gists * b).clamp_(max=max(scores.numel() - 1, 0))
    cell = torch.cat([cell_gist, cell_block], 1)
    return CompactEntries(
        cell=cell,
        x=scores.reshape(-1).index_select(0, cell.view(-1)).view(cell.shape),
        sign=torch.cat([sign_gist, raw.view(num_pairs, num_gists * b).to(scores.dtype).neg_()], 1),
        span=span.to(scores.dtype),
    )


def _collapse_gists(
    sign: Tensor,
    start_worse: Tensor,
    start_better: Tensor,
    lod_worse: Tensor,
    lod_better: Tensor,
    live: Tensor,
    level: int,
    block_size: int,
) -> Tensor:
    """Requests between gists: the better context is coarser where the worse holds one of `level`."""
    parent = block_size ** (level + 1) * GIST_STEP
    at_level = lod_worse == level
    same_start = start_worse[:, :, None] == start_better[:, None, :]
    asks = (same_start & at_level[:, :, None]).any(1) & (lod_better > level) & live
    same_parent = (start_worse // parent)[:, :, None] == (start_better // parent)[:, None, :]
    reached = (same_parent & asks[:, None, :]).any(2) & at_level
    return torch.where(reached, -1.0, sign)
