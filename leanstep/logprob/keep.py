"""Softmax restricted to kept ids (top-p or top-k replay): which columns of a tile take part.

A row's log-prob runs over its kept ids plus its target, always; entropy never looks at the restriction.
The mask exists for one tile at a time: [N, V] booleans would cost N V bytes.
"""

# N rows · M kept ids of all rows · W columns of a tile

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from leanstep.logprob.outputs import check_range
from leanstep.logprob.targets import tile_ids

Keep = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]


@dataclass
class KeepIds:
    """Ragged lists of global ids, one per row.

    Args:
        ids: [M] int64, all rows' ids in row order.
        row_of: [M] int64, the row of each id.
        starts: host copy of the offsets, N + 1 numbers.
        has_set: [N] bool; False leaves a row unrestricted.
    """

    ids: Tensor
    row_of: Tensor
    starts: list[int]
    has_set: Tensor

    @property
    def mean_size(self) -> float:
        return len(self.ids) / max(len(self.starts) - 1, 1)

    def mask(self, rows: slice, tokens: Tensor, first: int, width: int) -> Tensor:
        """[R, W] bool: True where a column of the tile, from id `first` on, is in the row's log-prob."""
        unrestricted = ~self.has_set[rows]
        # One spare column receives every id that lies outside the tile: static shapes, no sync.
        mask = unrestricted.unsqueeze(-1).expand(-1, width + 1).contiguous()
        pairs = slice(self.starts[rows.start], self.starts[rows.stop])
        local, held = tile_ids(self.ids[pairs], first, width)
        mask[self.row_of[pairs] - rows.start, torch.where(held, local, width)] = True
        local, held = tile_ids(tokens, first, width)
        mask.scatter_(1, torch.where(held, local, width).unsqueeze(-1), True)
        return mask[:, :width]

    def unique_pairs(self, tokens: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
        """(row, id) of every kept id and every target, each once, in row order."""
        rows = torch.cat([self.row_of, torch.arange(len(tokens), device=tokens.device)])
        keys = torch.cat([self.ids, tokens]) + rows * vocabulary
        keys = torch.unique(keys)
        return keys // vocabulary, keys % vocabulary


def checked_keep(
    keep: Keep | None, num_rows: int, vocabulary: int | None, device: torch.device
) -> KeepIds | None:
    """Validate `(ids, offsets[, has_set])`. Reads the offsets on the host: one sync on a GPU."""
    if keep is None:
        return None
    if not isinstance(keep, (tuple, list)) or len(keep) not in (2, 3):
        got = f"{len(keep)} values" if isinstance(keep, (tuple, list)) else type(keep).__name__
        raise ValueError(f"keep: expected (ids, offsets) or (ids, offsets, has_set), got {got}")
    ids, offsets = keep[0], keep[1]
    for name, value in (("ids", ids), ("offsets", offsets)):
        if value.dtype not in (torch.int32, torch.int64) or value.dim() != 1:
            got = f"{value.dtype} {tuple(value.shape)}"
            raise ValueError(f"keep: expected one-dimensional int {name}, got {got}")
    if offsets.shape[0] != num_rows + 1:
        raise ValueError(f"keep: expected {num_rows + 1} offsets for {num_rows} rows, got {offsets.shape[0]}")
    starts = offsets.tolist()
    rising = all(a <= b for a, b in pairwise(starts))
    if not rising or starts[0] != 0 or starts[-1] != ids.shape[0]:
        got = f"{starts[0]} to {starts[-1]}" + ("" if rising else ", not rising")
        raise ValueError(f"keep: expected offsets that rise from 0 to {ids.shape[0]}, got {got}")
    has_set = torch.ones(num_rows, dtype=torch.bool, device=device) if len(keep) == 2 else keep[2]
    if has_set.dtype != torch.bool or has_set.shape != (num_rows,):
        got = f"{has_set.dtype} {tuple(has_set.shape)}"
        raise ValueError(f"keep: expected has_set bool [{num_rows}], got {got}")
    ids = ids.to(device=device, dtype=torch.int64)
    if ids.numel() and vocabulary is not None:
        check_range("keep ids", ids, vocabulary)
    lengths = offsets.to(device=device, dtype=torch.int64).diff()
    row_of = torch.repeat_interleave(lengths, output_size=ids.shape[0])
    return KeepIds(ids, row_of, starts, has_set.to(device))
