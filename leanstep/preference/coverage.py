"""Tokens that a context covers, and those that the asked-for edits would push out of it.

V contexts · W padded length, entries ascending
"""

from __future__ import annotations

import torch
from torch import Tensor

from .batch import LensBatch
from .config import LensConfig
from .targets import span_table


def owned_tokens(batch: LensBatch, config: LensConfig) -> Tensor:
    """[V, W] int64: tokens that each entry is the first to cover; a row sums to the distinct tokens
    covered.
    """
    spans = span_table(config.block_size, config.max_lod, batch.pos.device, torch.int64)
    stop_VW = torch.minimum(batch.pos + spans[batch.lod.long()], batch.tokens[:, None])
    stop_VW = torch.where(batch.valid, stop_VW, 0)
    reach_VW = stop_VW.cummax(1).values if stop_VW.numel() else stop_VW
    before_VW = torch.nn.functional.pad(reach_VW, (1, 0))[:, :-1]
    return torch.where(batch.valid, (stop_VW - torch.maximum(batch.pos, before_VW)).clamp(min=0), 0)


def covered_tokens(batch: LensBatch, config: LensConfig) -> Tensor:
    """[V] int64: distinct tokens covered, by +1 at starts and -1 at ends."""
    width = batch.num_tokens + 1
    spans = span_table(config.block_size, config.max_lod, batch.pos.device, torch.int64)
    limit = batch.tokens[:, None]
    start = torch.where(batch.valid, torch.minimum(batch.pos, limit), limit)
    stop = torch.where(batch.valid, torch.minimum(batch.pos + spans[batch.lod.long()], limit), limit)
    steps = torch.zeros(batch.num_contexts, width, dtype=torch.int64, device=batch.pos.device)
    one = batch.valid.long()
    steps = steps.scatter_add(1, start, one).scatter_add(1, stop, -one)
    return (steps.cumsum(1)[:, :-1] > 0).sum(1)


def expected_lengths(scores: Tensor, batch: LensBatch, config: LensConfig) -> Tensor:
    """[V, W]: entries that each entry becomes, 1/b for a full collapse to b for a full expansion; 0 for
    padding.
    """
    b = config.block_size
    expand = torch.relu(scores).clamp(max=1) * (batch.lod > 0)
    collapse = torch.relu(-scores).clamp(max=1) * (batch.lod < config.max_lod)
    return torch.where(batch.valid, 1 + (b - 1) * expand - (1 - 1 / b) * collapse, 0)


def coverage(scores: Tensor, batch: LensBatch, config: LensConfig) -> Tensor:
    """[V] share of the sequence that the edits would push out beyond what `coverage_target` allows.

    The newest entries stay; the oldest are pushed out first once the expected length exceeds the capacity.
    Zero at scores of zero and for pure collapse, unless the capacity is below the present length.
    """
    scores = torch.where(batch.valid, scores, 0)
    length_VW = expected_lengths(scores, batch, config)
    behind_VW = length_VW.flip(1).cumsum(1).flip(1) - length_VW
    if config.coverage_capacity is None:
        capacity = batch.valid.sum(1, keepdim=True).to(scores.dtype)
    else:
        capacity = torch.full_like(scores[:, :1], config.coverage_capacity)
    share_VW = (capacity - behind_VW) / torch.where(batch.valid, length_VW, 1)
    # Only an entry that is partly pushed out carries a gradient.
    inside = (share_VW > 0) & (share_VW < 1)
    share_VW = torch.where(inside, share_VW, share_VW.detach().clamp(0, 1))
    own_VW = owned_tokens(batch, config).to(scores.dtype)
    tokens = batch.tokens.to(scores.dtype)
    covered = (own_VW.sum(1) / tokens).clamp(max=config.coverage_target)
    return torch.relu(covered - (own_VW * share_VW).sum(1) / tokens)


def coverage_gradient(scores: Tensor, batch: LensBatch, config: LensConfig) -> tuple[Tensor, Tensor]:
    """The penalty [V] and its gradient [V, W] in closed form."""
    b = config.block_size
    scores = torch.where(batch.valid, scores, 0)
    length_VW = expected_lengths(scores, batch, config)
    behind_VW = length_VW.flip(1).cumsum(1).flip(1) - length_VW
    if config.coverage_capacity is None:
        capacity = batch.valid.sum(1, keepdim=True).to(scores.dtype)
    else:
        capacity = torch.full_like(scores[:, :1], config.coverage_capacity)
    safe_VW = torch.where(batch.valid, length_VW, 1)
    share_VW = (capacity - behind_VW) / safe_VW
    own_VW = owned_tokens(batch, config).to(scores.dtype)
    tokens = batch.tokens.to(scores.dtype)
    covered = (own_VW.sum(1) / tokens).clamp(max=config.coverage_target)
    penalty = torch.relu(covered - (own_VW * share_VW.clamp(0, 1)).sum(1) / tokens)
    edge_VW = (share_VW > 0) & (share_VW < 1) & batch.valid
    rate_VW = torch.where(edge_VW, own_VW / (safe_VW * tokens[:, None]), 0)
    # An entry costs every partly pushed out one before it, and itself by its own share.
    slope_VW = rate_VW.cumsum(1) - rate_VW + rate_VW * share_VW
    up = (scores > 0) & (scores <= 1) & (batch.lod > 0)
    down = (scores < 0) & (scores >= -1) & (batch.lod < config.max_lod)
    growth_VW = (b - 1) * up.to(scores.dtype) + (1 - 1 / b) * down.to(scores.dtype)
    alive = (penalty > 0).to(scores.dtype)[:, None]
    return penalty, alive * slope_VW * growth_VW * batch.valid
