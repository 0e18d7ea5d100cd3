"""Allowed ids per row (top-p and top-k replay): a second softmax over them, read from the same tiles.

Its maximum is its own: allowed logits may be so far below the row's that they would underflow. The pairs of
a row and one of its allowed ids are the only memory; there is no [N, V] mask.
"""

# N rows · M allowed ids of all rows

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from leanstep.heads import passes
from leanstep.heads.head import check_range, describe
from leanstep.heads.layout import to_device


class AllowedIds(NamedTuple):
    """ids [M] on the device; offsets [N + 1] on the host; has_set [N]: False leaves a row unrestricted."""

    ids: Tensor
    offsets: Tensor
    has_set: Tensor


def check_allowed(allowed: Any, targets: Tensor, vocab: int) -> AllowedIds | None:
    """Check (ids, offsets) or (ids, offsets, has_set). Offsets on a GPU cost one host sync."""
    if allowed is None:
        return None
    if not isinstance(allowed, (tuple, list)) or len(allowed) not in (2, 3):
        got = f"{len(allowed)} values" if isinstance(allowed, (tuple, list)) else type(allowed).__name__
        raise ValueError(f"allowed: expected (ids, offsets) or (ids, offsets, has_set), got {got}")
    ids, offsets = allowed[:2]
    has_set = allowed[2] if len(allowed) == 3 else None
    for name, value in (("ids", ids), ("offsets", offsets)):
        if value.dtype not in (torch.int32, torch.int64) or value.dim() != 1:
            raise ValueError(f"allowed: expected one-dimensional int {name}, got {describe(value)}")
    n, device = len(targets), targets.device
    if len(offsets) != n + 1:
        raise ValueError(f"allowed: expected {n + 1} offsets for {n} rows, got {len(offsets)}")
    offsets = offsets.cpu().long()
    if offsets[0] != 0 or offsets[-1] != len(ids) or bool((offsets.diff() < 0).any()):
        got = f"{offsets[0]} to {offsets[-1]}"
        raise ValueError(f"allowed: expected offsets that rise from 0 to {len(ids)}, got {got}")
    if has_set is None:
        has_set = torch.ones(n, dtype=torch.bool, device=device)
    if has_set.dtype != torch.bool or has_set.shape != (n,):
        raise ValueError(f"allowed: expected has_set bool [{n}], got {describe(has_set)}")
    ids = to_device(ids, device).long()
    check_range("allowed ids", ids, vocab)
    return AllowedIds(ids, offsets, to_device(has_set, device))


class AllowedPairs:
    """The M + N pairs of a row and an allowed id or the row's target, in the order of rows.

    A pair counts if it is this rank's, its row has a set, and it is no repetition of the one before it. A CPU
    sorts the pairs by tiles. A GPU looks at all pairs of a tile's rows instead, which needs no host sync.
    """

    def __init__(
        self, sets: AllowedIds, targets: Tensor, k: Tensor, first_id: int, width: int, tiles: Any
    ) -> None:
        n, device = len(targets), targets.device
        self.has_set, self.tiles, self.first_id = sets.has_set, tiles, first_id
        # Row i's pairs, with one more for the target, begin at starts[i].
        starts = sets.offsets + torch.arange(n + 1)
        self.starts, on_device = starts.tolist(), to_device(starts, device)
        self.lengths = on_device.diff()
        self.rows = torch.repeat_interleave(self.lengths, output_size=len(sets.ids) + n)
        ids = torch.empty_like(self.rows)
        is_target = torch.zeros_like(self.rows, dtype=torch.bool).index_fill_(0, on_device[1:] - 1, True)
        places = torch.arange(len(ids), device=device) - self.rows
        ids = torch.where(is_target, targets[self.rows], torch.cat([sets.ids, targets[:1]])[places])
        # Sorting by row and id leaves every row where it is.
        stride = 1 << 32
        keys = (self.rows * stride + ids).sort().values
        self.columns = keys - self.rows * stride - first_id
        repeated = torch.zeros_like(is_target)
        repeated[1:] = keys[1:] == keys[:-1]
        self.counts = sets.has_set[self.rows] & ~repeated & (self.columns >= 0) & (self.columns < width)
        self.logits: Tensor | None = k.new_full((len(self.rows),), -torch.inf)
        self.order: Tensor | None = None
        if not passes.on_gpu(device):
            counted = self.counts.nonzero().flatten()
            row_tile = self.rows[counted] // tiles.high
            tile = self.columns[counted] // tiles.wide * len(tiles.rows) + row_tile
            self.order = counted[torch.argsort(tile, stable=True)]
            num_tiles = -(-max(width, 1) // tiles.wide) * len(tiles.rows)
            self.bounds = [0, *torch.bincount(tile, minlength=num_tiles).cumsum(0).tolist()]

    def _in_tile(self, rows: slice, cols: slice) -> tuple[Any, Tensor, Tensor, Tensor]:
        """Return pairs of a tile, their rows and columns in it, and which of them count."""
        if self.order is None:
            pairs: Any = slice(self.starts[rows.start], self.starts[rows.stop])
        else:
            tile = cols.start // self.tiles.wide * len(self.tiles.rows) + rows.start // self.tiles.high
            pairs = self.order[self.bounds[tile] : self.bounds[tile + 1]]
        row, column = self.rows[pairs] - rows.start, self.columns[pairs] - cols.start
        width = cols.stop - cols.start
        here = self.counts[pairs] & (column >= 0) & (column < width)
        return pairs, row, column.clamp(0, max(width - 1, 0)), here

    def read(self, z: Tensor, rows: slice, cols: slice) -> None:
        """Copy the logits of a tile's pairs."""
        pairs, row, column, here = self._in_tile(rows, cols)
        assert self.logits is not None
        self.logits[pairs] = torch.where(here, z[row, column].to(self.logits.dtype), self.logits[pairs])

    def statistics(self, k: Tensor) -> Tensor:
        """Return the maximum logit and the sum of e^(k (z - max)) over each row's pairs, [2, N]."""
        z, self.logits = self.logits, None
        assert z is not None
        top = torch.segment_reduce(z, "max", lengths=self.lengths, initial=-torch.inf, unsafe=True)
        finite = top.masked_fill(top == -torch.inf, 0)
        e = ((z - finite[self.rows]) * k[self.rows]).clamp_(min=-800).exp_()
        return torch.stack(
            [top, torch.segment_reduce(e, "sum", lengths=self.lengths, initial=0, unsafe=True)]
        )

    def gradients(
        self, z: Tensor, rows: slice, cols: slice, own: tuple[Tensor, ...], inv_cap: float
    ) -> Tensor:
        """Return -g p slope of a tile's pairs, p of the softmax over the allowed ids; before z changes."""
        pairs, row, column, here = self._in_tile(rows, cols)
        k, m, log_s, g = (v[self.rows[pairs]] for v in own)
        u = z[row, column].to(k.dtype)
        gradient = ((u - m) * k - log_s).clamp_(min=-800).exp_().mul_(-g)
        gradient = gradient * (1 - u * inv_cap) * (1 + u * inv_cap) if inv_cap else gradient
        return torch.where(here, gradient, 0)

    def add(self, du: Tensor, rows: slice, cols: slice, gradient: Tensor) -> None:
        _, row, column, _ = self._in_tile(rows, cols)
        du.index_put_((row, column), gradient.to(du.dtype), accumulate=True)
