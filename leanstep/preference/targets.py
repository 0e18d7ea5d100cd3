"""Which entries of the worse context should expand or collapse, for all pairs at once.

V contexts · W padded length · T tokens · P pairs · L coarsest level · b block size
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .batch import LensBatch
from .config import LensConfig
from .constants import kept
from .pairs import Pairs

# Above this many bytes the dense table gives way to a binary search in the sorted positions.
TABLE_LIMIT_BYTES = 1 << 30


@kept
def span_table(block_size: int, max_lod: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[L + 1] tokens per entry by LOD."""
    return torch.tensor([block_size**lod for lod in range(max_lod + 1)], dtype=dtype, device=device)


def build_lod_table(batch: LensBatch) -> Tensor:
    """[V, T + 1] int8: LOD of the entry that starts at a token, -1 where none does. Column T takes the
    padding.

    Built once per micro-batch and used by every pair.
    """
    table = torch.full(
        (batch.num_contexts, batch.num_tokens + 1), -1, dtype=torch.int8, device=batch.pos.device
    )
    table = table.scatter(1, batch.pos, batch.lod)
    table[:, batch.num_tokens] = -1
    return table


def desired_lods(batch: LensBatch, pairs: Pairs, *, lookup: str = "auto") -> Tensor:
    """[P, W] int8: LOD that the better context has at exactly the same start, -1 where nothing starts
    there.
    """
    if lookup not in ("auto", "table", "search"):
        raise ValueError(f"lookup: expected auto, table or search, got {lookup!r}")
    if lookup == "auto":
        fits = batch.num_contexts * (batch.num_tokens + 1) <= TABLE_LIMIT_BYTES
        lookup = "table" if fits else "search"
    pos_PW = batch.pos.index_select(0, pairs.worse)
    if lookup == "table":
        return build_lod_table(batch).index_select(0, pairs.better).gather(1, pos_PW)
    # Left padding holds T in front: send it below every position so that rows stay sorted.
    padding_first = torch.where(
        batch.valid, batch.pos, torch.where(batch.valid.cumsum(1) == 0, -1, batch.num_tokens)
    )
    key_PW = padding_first.index_select(0, pairs.better)
    slot = torch.searchsorted(key_PW, pos_PW).clamp_(max=max(key_PW.shape[1] - 1, 0))
    found = (key_PW.gather(1, slot) == pos_PW) & (pos_PW < batch.num_tokens)
    return torch.where(found, batch.lod.index_select(0, pairs.better).gather(1, slot), -1).to(torch.int8)


def build_targets(batch: LensBatch, pairs: Pairs, config: LensConfig, *, lookup: str = "auto") -> Tensor:
    """Sign of the target of every entry of the worse context: +1 expand, -1 collapse, 0 none.

    A collapse request reaches every entry of the same LOD in the same aligned parent block, and wins over
    expand. The target itself is sign * tanh(delta) of the pair.

    Returns:
        [P, W] int8.
    """
    want_PW = desired_lods(batch, pairs, lookup=lookup)
    lod_PW = batch.lod.index_select(0, pairs.worse)
    pos_PW = batch.pos.index_select(0, pairs.worse)
    entry_PW = batch.valid.index_select(0, pairs.worse) & pairs.live[:, None]
    opinion_PW = entry_PW & (want_PW >= 0)
    expand_PW = opinion_PW & (want_PW < lod_PW)
    request_PW = opinion_PW & (want_PW > lod_PW) & (lod_PW < config.max_lod)

    block_PW, num_blocks = block_ids(pos_PW, lod_PW, batch.num_tokens, config)
    slot_PW = torch.where(request_PW, block_PW, num_blocks)
    hits = torch.zeros(pos_PW.shape[0], num_blocks + 1, dtype=torch.int8, device=pos_PW.device)
    hits = hits.scatter(1, slot_PW, 1)
    # Every request writes the same 1 and all others go to the dump slot, so no write is lost.
    reached_PW = hits.gather(1, block_PW.clamp(max=max(num_blocks - 1, 0))) > 0
    collapse_PW = reached_PW & entry_PW & (lod_PW < config.max_lod)
    return torch.where(collapse_PW, -1, expand_PW.to(torch.int8)).to(torch.int8)


def block_ids(pos: Tensor, lod: Tensor, num_tokens: int, config: LensConfig) -> tuple[Tensor, int]:
    """Number of the parent block of each entry, distinct across levels, and how many numbers there are."""
    parents = [config.block_size ** (level + 1) for level in range(config.max_lod)]
    offsets = [0]
    for parent in parents:
        offsets.append(offsets[-1] + math.ceil((num_tokens + 1) / parent))
    ids = torch.full_like(pos, offsets[-1])
    for level, parent in enumerate(parents):
        ids = torch.where(lod == level, pos // parent + offsets[level], ids)
    return ids, offsets[-1]


def lod_histogram(batch: LensBatch, config: LensConfig) -> Tensor:
    """[V, L + 1] int64: entries per level."""
    counts = torch.zeros(batch.num_contexts, config.max_lod + 1, dtype=torch.int64, device=batch.lod.device)
    return counts.scatter_add(1, batch.lod.long(), batch.valid.long())
