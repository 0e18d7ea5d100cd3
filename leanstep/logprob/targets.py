"""Targets among the columns of one tile: static shapes and no sync, whether the tile holds them or not."""

# R rows · W columns of a tile · K targets per row

from __future__ import annotations

import torch
from torch import Tensor


def tile_ids(tokens: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Column within the tile that begins at id `first`, clamped into it, and whether it holds the token."""
    local = tokens - first
    inside = local.clamp(0, width - 1)
    return inside, inside == local


def read_targets_(target: Tensor, z: Tensor, tokens: Tensor, first: int) -> None:
    """target <- z [R, W] at the targets that this tile holds; the others stay. Shaped like `tokens`."""
    local, held = tile_ids(tokens, first, z.shape[1])
    picked = z.gather(1, local.unsqueeze(-1) if local.dim() == 1 else local)
    torch.where(held, picked.view_as(local), target, out=target)


def add_at_targets_(dz: Tensor, tokens: Tensor, values: Tensor, first: int) -> None:
    """dz[i, y_i] += values[i] where the tile holds column y_i."""
    local, held = tile_ids(tokens, first, dz.shape[1])
    values = values * held
    if local.dim() == 1:
        local, values = local.unsqueeze(-1), values.unsqueeze(-1)
    dz.scatter_add_(1, local, values)
