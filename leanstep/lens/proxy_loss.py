"""A cheaper, pointwise alternative to the pairwise objective: each score against its own target."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from leanstep.lens.batch import LensBatch
from leanstep.lens.lens_config import LensConfig
from leanstep.lens.lens_terms import compute_dtype
from leanstep.lens.pairs import build_pairs, build_targets

KINDS = ("l2", "hinge", "distill")


def aggregate_targets(
    batch: LensBatch, config: LensConfig, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return each entry's mean target over the pairs that give it one [V, W], and whether any does [V, W].

    Equivalent to, for context v:
        pairs = build_pairs(batch.loss, batch.row, config)
        target = build_targets(batch, pairs, config) * torch.tanh(pairs.delta)[:, None]
        mine = target[pairs.worse == v].float()
        mean = mine.sum(0) / (mine != 0).sum(0).clamp(min=1)
    """
    pairs = build_pairs(batch.loss, batch.row, config)
    sign = build_targets(batch, pairs, config)
    strength = torch.tanh(pairs.delta).to(dtype)[:, None]
    zeros = torch.zeros(batch.pos.shape, dtype=dtype, device=batch.pos.device)
    total = zeros.index_add(0, pairs.worse, sign.to(dtype) * strength)
    count = zeros.index_add(0, pairs.worse, (sign != 0).to(dtype))
    return total / count.clamp(min=1), count > 0


class ProxyLoss(nn.Module):
    """A pointwise loss instead of the pairwise one.

    `l2`: (x - t)^2 against the aggregated target t of the masked entries. `hinge`: relu(|t| - sign(t) x).
    `distill`: (x - teacher)^2 over all valid entries. `entries_per_context` draws that many entries of each
    context uniformly. The loss is a mean within each context, then over the contexts that have entries.

    Equivalent to, for kind "l2":
        target, masked = aggregate_targets(batch, config)        # [V, W] both
        square = torch.where(masked, (scores - target) ** 2, 0).sum(1) / masked.sum(1).clamp(min=1)
        loss = square[masked.any(1)].mean()
    """

    def __init__(
        self, config: LensConfig, kind: str = "l2", *, entries_per_context: int | None = None
    ) -> None:
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
        if entries_per_context is not None and entries_per_context < 1:
            raise ValueError(f"entries_per_context: expected at least 1, got {entries_per_context}")
        self.config, self.kind, self.entries_per_context = config, kind, entries_per_context

    def forward(
        self,
        scores: Tensor,
        batch: LensBatch,
        *,
        teacher: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return the scalar loss of scores [V, W]; `teacher` [V, W] for `distill` receives no gradient."""
        if tuple(scores.shape) != tuple(batch.pos.shape):
            raise ValueError(f"scores: expected shape {tuple(batch.pos.shape)}, got {tuple(scores.shape)}")
        x = scores.to(compute_dtype(scores))
        with torch.no_grad():
            if self.kind == "distill":
                if teacher is None or teacher.shape != scores.shape:
                    raise ValueError(f"teacher: expected scores of shape {tuple(scores.shape)} for distill")
                target, chosen = teacher.detach().to(x.dtype), batch.valid
            else:
                target, chosen = aggregate_targets(batch, self.config, x.dtype)
            if self.entries_per_context is not None:
                device = generator.device if generator is not None else x.device
                key = torch.rand(x.shape, generator=generator, device=device).to(x.device)
                rank = torch.where(chosen, key, 2.0).argsort(1).argsort(1)
                chosen = chosen & (rank < self.entries_per_context)
        difference = torch.where(chosen, x, 0) - torch.where(chosen, target, 0)
        if self.kind == "hinge":
            cost = torch.relu(target.abs() - torch.sign(target) * torch.where(chosen, x, 0))
        else:
            cost = difference * difference
        count = chosen.sum(1)
        per_context = torch.where(chosen, cost, 0).sum(1) / count.clamp(min=1)
        return per_context.sum() / (count > 0).sum().clamp(min=1)
