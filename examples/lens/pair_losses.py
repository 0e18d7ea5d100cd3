"""The controller's objective as it is usually first written: pair after pair, entry after entry.

Per pair of contexts: which entries of the worse one should be expanded or collapsed to resemble the better
one (targets), then a logistic preference term, a ranking term and a budget term over those entries.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

RANK_WEIGHT, MARGIN, BUDGET_WEIGHT, MAX_PAIRS = 0.5, 0.1, 0.1, 8


def preference_pairs(losses: Tensor) -> list[tuple[int, int, float]]:
    """(better, worse, difference) for every two variants of one sample, those with the best one first."""
    order = sorted(range(len(losses)), key=lambda v: losses[v].item())
    pairs = []
    for i in range(len(order)):
        for j in range(i + 1, len(order)):
            pairs.append((order[i], order[j], losses[order[j]].item() - losses[order[i]].item()))
    primary = sorted((p for p in pairs if p[0] == order[0]), key=lambda p: -p[2])
    others = sorted((p for p in pairs if p[0] != order[0]), key=lambda p: -p[2])
    return (primary + others)[:MAX_PAIRS]


def lod_lookup(positions: Tensor, lods: Tensor) -> dict[int, int]:
    """Position -> level of detail of one context."""
    lookup = {}
    for position, lod in zip(positions, lods, strict=True):
        lookup[position.item()] = lod.item()
    return lookup


def pair_targets(lookup: dict[int, int], positions: Tensor, lods: Tensor, block: int, max_lod: int) -> Tensor:
    """+1 expand, -1 collapse, 0 no opinion for every entry of the worse context."""
    targets = torch.zeros(len(positions))
    collapse = set()
    for j in range(len(positions)):
        position, lod = positions[j].item(), lods[j].item()
        wanted = lookup.get(position, lod)
        if wanted < lod:
            targets[j] = 1.0
        elif wanted > lod and lod < max_lod:
            collapse.add((lod, position // block ** (lod + 1)))
    for j in range(len(positions)):
        lod = lods[j].item()
        if (lod, positions[j].item() // block ** (lod + 1)) in collapse:
            targets[j] = -1.0
    return targets


def controller_loss(
    scores: Tensor, positions: Tensor, lods: Tensor, losses: Tensor, block: int = 32, max_lod: int = 2
) -> Tensor:
    """Mean over all pairs that have a target of preference + rank + budget."""
    variants = losses.shape[1]
    totals = []
    for sample in range(losses.shape[0]):
        for better, worse, delta in preference_pairs(losses[sample]):
            row = sample * variants + worse
            lookup = lod_lookup(positions[sample * variants + better], lods[sample * variants + better])
            target = pair_targets(lookup, positions[row], lods[row], block, max_lod)
            if delta <= 0 or not target.any():
                continue
            mask = target != 0
            sign, score, span = target[mask].to(scores.dtype), scores[row][mask], block ** lods[row][mask]
            preference = (F.softplus(-sign * score * max(1.0, delta)) * math.tanh(delta)).mean()
            rank = score.new_zeros(())
            if (sign > 0).any() and (sign < 0).any():
                rank = F.relu(MARGIN - (score[sign > 0].mean() - score[sign < 0].mean()))
            grow, shrink = (span * F.relu(score)).sum(), (span * F.relu(-score)).sum()
            budget = ((grow - shrink) / (grow + shrink + 1e-6)) ** 2
            totals.append(preference + RANK_WEIGHT * rank + BUDGET_WEIGHT * budget)
    if not totals:
        return scores.sum() * 0
    return torch.stack(totals).mean()
