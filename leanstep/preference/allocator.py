"""The focus allocator: turns scores into edits of a working context."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AllocatorConfig:
    """Limits of one round of edits."""

    expand_at: float = 0.1
    collapse_at: float = -0.1
    protected_entries: int = 128
    max_edits: int = 4
    iterations: int = 1


def allocate_focus(
    positions: Tensor,
    lods: Tensor,
    scores: Tensor,
    *,
    block_size: int,
    max_lod: int,
    budget: int,
    num_tokens: int,
    config: AllocatorConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Edit one context by its scores: the strongest first, never beyond `budget` entries.

    An entry expands into its b children if its score reaches `expand_at`, it is above LOD 0 and the result
    fits. It collapses with the b - 1 entries behind it if its score is at most `collapse_at`, it is below
    `max_lod`, and these b entries have the same LOD and touch each other. The last `protected_entries`
    stay; an edit that touches an already edited entry is skipped.

    Args:
        positions, lods, scores: [W] on the host.
        budget: entries allowed after the edits.

    Returns:
        positions and lods of the edited context.
    """
    config = config or AllocatorConfig()
    if not positions.shape == lods.shape == scores.shape or positions.dim() != 1:
        raise ValueError(
            f"positions, lods, scores: expected one shape (W,), got {tuple(positions.shape)}, "
            f"{tuple(lods.shape)}, {tuple(scores.shape)}"
        )
    pos, lod, score = positions.tolist(), lods.tolist(), scores.tolist()
    length = len(pos)
    editable = length - config.protected_entries
    edits: dict[int, str] = {}
    taken = [False] * length
    for j in sorted(range(length), key=lambda i: -abs(score[i])):
        if len(edits) == config.max_edits:
            break
        if j >= editable or taken[j]:
            continue
        if score[j] >= config.expand_at and lod[j] > 0:
            step = block_size ** (lod[j] - 1)
            children = sum(pos[j] + i * step < num_tokens for i in range(block_size))
            if length + children - 1 <= budget:
                edits[j], taken[j] = "expand", True
                length += children - 1
        elif score[j] <= config.collapse_at and lod[j] < max_lod and j + block_size <= editable:
            span, run = block_size ** lod[j], range(j, j + block_size)
            if all(not taken[i] and lod[i] == lod[j] and pos[i] == pos[j] + (i - j) * span for i in run):
                edits[j] = "collapse"
                for i in run:
                    taken[i] = True
                length -= block_size - 1
    new_pos: list[int] = []
    new_lod: list[int] = []
    j = 0
    while j < len(pos):
        edit = edits.get(j)
        if edit == "expand":
            step = block_size ** (lod[j] - 1)
            starts = [pos[j] + i * step for i in range(block_size) if pos[j] + i * step < num_tokens]
            new_pos += starts
            new_lod += [lod[j] - 1] * len(starts)
        else:
            new_pos.append(pos[j])
            new_lod.append(lod[j] + 1 if edit == "collapse" else lod[j])
        j += block_size if edit == "collapse" else 1
    return torch.tensor(new_pos, dtype=positions.dtype), torch.tensor(new_lod, dtype=lods.dtype)
