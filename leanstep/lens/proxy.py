"""A cheaper, pointwise objective: each score against its own target, on all entries or a few of them."""

from __future__ import annotations

import torch
from torch import Tensor

from leanstep.lens.batch import LensBatch
from leanstep.lens.config import LensConfig
from leanstep.lens.loss import build_pairs, build_targets, level_grid


def aggregate_targets(
    batch: LensBatch, config: LensConfig, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return each entry's mean target over the pairs that give it one [V, W], and whether any does [V, W].

    The target of a pair is tanh(delta) to expand and -tanh(delta) to collapse.

    Example:
        target, masked = aggregate_targets(batch, config)
    """
    pairs = build_pairs(batch.loss, batch.row, config)
    level_VT = level_grid(batch, config)
    up_PT, down_PT = build_targets(level_VT, pairs, config, dtype)
    target_PT = (up_PT - down_PT) * pairs.delta.tanh().to(dtype)[:, None]
    zeros_VT = torch.zeros(level_VT.shape, dtype=dtype, device=level_VT.device)
    total_VT = zeros_VT.index_add(0, pairs.worse, target_PT)
    count_VT = zeros_VT.index_add(0, pairs.worse, up_PT + down_PT)
    start_VW = batch.pos.where(batch.valid, 0)
    count = count_VT.gather(1, start_VW).where(batch.valid, 0)
    return total_VT.gather(1, start_VW).where(batch.valid, 0) / count.clamp(min=1), count > 0


def proxy_loss(
    scores: Tensor,
    batch: LensBatch,
    config: LensConfig,
    kind: str = "l2",
    *,
    teacher: Tensor | None = None,
    entries_per_context: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Compute a pointwise loss instead of the pairwise one: a mean within each context, then over contexts.

    Equivalent to, for kind "l2":
        target, masked = aggregate_targets(batch, config)        # [V, W] both
        square = torch.where(masked, (scores - target) ** 2, 0).sum(1) / masked.sum(1).clamp(min=1)
        loss = square[masked.any(1)].mean()

    Args:
        scores: [V, W].
        kind: `l2`: (x - t)^2 against the aggregated targets t of the entries that have one; `hinge`:
            relu(|t| - sign(t) x) on the same; `distill`: (x - teacher)^2 on all valid entries.
        teacher: [V, W] scores of another controller, for `distill`; they receive no gradient.
        entries_per_context: draw that many entries of each context uniformly; None = all.
    """
    if tuple(scores.shape) != tuple(batch.pos.shape):
        raise ValueError(f"scores: expected shape {tuple(batch.pos.shape)}, got {tuple(scores.shape)}")
    x = scores if scores.dtype == torch.float64 else scores.float()
    with torch.no_grad():
        if kind == "distill":
            if teacher is None or teacher.shape != scores.shape:
                raise ValueError(f"teacher: expected scores of shape {tuple(scores.shape)} for distill")
            target, chosen = teacher.detach().to(x.dtype), batch.valid
        elif kind in ("l2", "hinge"):
            target, chosen = aggregate_targets(batch, config, x.dtype)
        else:
            raise ValueError(f"kind: expected l2, hinge or distill, got {kind!r}")
        if entries_per_context is not None:
            device = x.device if generator is None else generator.device
            key = torch.rand(x.shape, generator=generator, device=device).to(x.device, non_blocking=True)
            chosen = chosen & (key.where(chosen, 2.0).argsort(1).argsort(1) < entries_per_context)
    x, target = x.where(chosen, 0), target.where(chosen, 0)
    cost = torch.relu(target.abs() - target.sign() * x) if kind == "hinge" else (x - target) ** 2
    count = chosen.sum(1)
    return (cost.sum(1) / count.clamp(min=1)).sum() / (count > 0).sum().clamp(min=1)
