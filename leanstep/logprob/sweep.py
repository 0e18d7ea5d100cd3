"""The two sweeps of the fused LM head: statistics forward, recomputed logits and gradients backward.

Neither holds more than one tile of logits, unless the caller has room for more (`KeptLogits`): those are not
recomputed. The backward walks the tiles so that the larger gradient is written once: with fewer rows than
vocabulary, each weight tile is visited once and dW is written tile by tile; a loop over row chunks would
rewrite all of dW for every chunk (2 to 3 times slower at small chunks).
Tile order is fixed and nothing is atomic: two runs give the same bits.

On a CPU with several threads the vocabulary is cut into one part per core, with statistics and a hidden
gradient of their own, joined in a fixed order at the end: cores synchronise once per loop, not after every
operation on a tile.
"""

# R rows of a chunk · W columns of a tile · T' selected rows · D model · V local vocabulary

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor

from leanstep.cpu import run_on_cores
from leanstep.logprob.dispatch import suited
from leanstep.logprob.extras import TopK, update_pair_
from leanstep.logprob.gradient import RowGradients
from leanstep.logprob.head import Head, RowSource, Scratch
from leanstep.logprob.head_sums import HeadSums
from leanstep.logprob.keep import KeepIds
from leanstep.logprob.kept_logits import KeptLogits
from leanstep.logprob.statistics import FinalStatistics, RowStatistics, merge
from leanstep.logprob.tile_gradient import TileGradient, reference_logits, restricted
from leanstep.logprob.tiles import Tiles, choose_tiles, even_slices

# Hidden rows of a chunk, and those of the LoRA branch.
ReadRows = Callable[[slice], tuple[Tensor, Tensor | None]]


@dataclass
class Problem:
    """Everything constant about one call. `low` is the LoRA branch's input, `reference` the KL's head.

    `kernels` make the passes over a tile, if there are some. `cores`: how many tiles are swept side by side.
    """

    head: Head
    source: RowSource
    low: RowSource | None
    tokens: Tensor
    tiles: Tiles
    moment: bool
    keep: KeepIds | None = None
    smoothing: float = 0.0
    top_k: int = 0
    reference: tuple[Head, RowSource] | None = None
    kl: bool = False
    reverse_kl: bool = False
    group: Any = None
    reduce_grad: str = "all_reduce"
    kernels: ModuleType | None = None
    cores: int = 1

    @property
    def num_rows(self) -> int:
        return self.source.num_rows

    @property
    def num_parts(self) -> int:
        """Parts of the vocabulary: one per core."""
        return self.cores

    @property
    def two_softmaxes(self) -> bool:
        return self.keep is not None and self.moment

    def arrange(self, cores: int, num_rows: int, max_rows: int, budget: int | None = None) -> None:
        """Choose cores, kernels that suit them, and tiles for `num_rows` that are at most `max_rows` tall.

        `budget` is for the tiles of all parts; None gives every part the default.
        """
        self.cores, self.kernels = cores, suited(self.kernels, cores)
        self.tiles = choose_tiles(
            num_rows,
            self.head.columns,
            self.source.hidden.shape[1],
            budget=None if budget is None else max(budget // self.num_parts, 1),
            device=self.source.hidden.device,
            kernels=self.kernels is not None,
            max_rows=max_rows,
        )

    def chunks(self, part: slice) -> tuple[Tensor, Tensor | None]:
        h = self.source.chunk(part, self.head.operand_dtype)
        return h, None if self.low is None else self.low.chunk(part, self.head.operand_dtype)

    def column_parts(self) -> list[list[slice]]:
        """Column slices of the tiles, cut into one run per part of the vocabulary."""
        columns = list(self.tiles.column_slices(self.head.columns))
        per_part = max(-(-len(columns) // self.num_parts), 1)
        return [columns[part] for part in even_slices(len(columns), per_part)] or [[]]

    def scratch(self) -> Scratch:
        """Tiles for one part of the vocabulary."""
        return Scratch(self.source.hidden, self.head.dtype, self.tiles.rows * self.tiles.columns)


def forward_sweep(p: Problem, kept_logits: KeptLogits) -> tuple[RowStatistics, TopK | None]:
    """Statistics of every selected row over this shard's columns; tiles that fit stay in `kept_logits`."""
    best = TopK.empty(p.num_rows, p.top_k, p.head.dtype, p.source.hidden.device) if p.top_k else None
    parts = p.column_parts()
    every_column = [columns for part in parts for columns in part]
    kept_logits.reserve((r, c) for r in p.tiles.row_slices(p.num_rows) for c in every_column)
    jobs, swept = [], []
    for columns in parts:
        swept.append(_empty_statistics(p))
        jobs.append(functools.partial(_forward_part, p, columns, swept[-1], p.scratch(), best, kept_logits))
    _run_parts(p, jobs)
    return functools.reduce(merge, swept), best


def _run_parts(p: Problem, parts: Sequence[Callable[[ReadRows], None]]) -> None:
    """Run the parts of a sweep, side by side if there are several; each is given a way to read row chunks."""
    read = p.chunks
    if p.num_rows <= p.tiles.rows:
        whole = p.chunks(slice(0, p.num_rows))

        def read(part: slice) -> tuple[Tensor, Tensor | None]:
            return whole

    if len(parts) == 1:
        parts[0](read)
    else:
        run_on_cores([lambda _core, part=part: part(read) for part in parts], p.cores)


def _empty_statistics(p: Problem) -> RowStatistics:
    return RowStatistics.empty(
        p.num_rows,
        dtype=p.head.dtype,
        device=p.source.hidden.device,
        moment=p.moment,
        num_targets=None if p.tokens.dim() == 1 else p.tokens.shape[1],
        total=p.smoothing > 0,
        keep=p.two_softmaxes,
        reference=p.kl,
        reverse=p.reverse_kl,
    )


def _forward_part(
    p: Problem,
    columns_swept: list[slice],
    stats: RowStatistics,
    scratch: Scratch,
    best: TopK | None,
    kept_logits: KeptLogits,
    read: ReadRows,
) -> None:
    needed = 0 if p.kernels is not None else 1 + p.moment
    for rows in p.tiles.row_slices(p.num_rows):
        h, low_h = read(rows)
        size = rows.stop - rows.start
        part, tokens = stats.rows(rows.start, rows.stop), p.tokens[rows]
        for columns in columns_swept:
            width = columns.stop - columns.start
            z = kept_logits.tile(rows, columns)
            z = scratch.tile(0, size, width) if z is None else z
            p.head.logits(h, low_h, p.head.weight_tile(columns), rows, columns, z)
            if part.total is not None:
                part.total.add_(z.sum(-1))
            if best is not None:
                best.update_(z, rows, columns.start + p.head.shard.start)
            if p.reference is not None:
                update_pair_(part, z, reference_logits(p, rows, columns))
            if p.keep is not None:
                kept = restricted(p, p.keep, z, rows, columns)
                if p.two_softmaxes:
                    part.keep_part().update_(kept, [kept], kernels=p.kernels)
                else:
                    z = kept
            where = (tokens, p.head.shard.start + columns.start)
            part.update_(z, scratch.tiles(needed, size, width), *where, kernels=p.kernels)


def backward_sweep(
    p: Problem,
    final: FinalStatistics,
    kept_final: FinalStatistics | None,
    gradients: RowGradients,
    sums: HeadSums,
    kept_logits: KeptLogits,
    *,
    first_row: int = 0,
    divergences: Sequence[Tensor | None] = (),
) -> None:
    """Recompute the logits tile by tile and push the row gradients through them into `sums`.

    Args:
        kept_final: statistics of the restricted softmax, when `p.keep` is set.
        kept_logits: tiles that need no recomputing; they are read and not changed.
        first_row: where these rows start among the rows of `sums`.
        divergences: kl, reverse_kl, reference max and log-sum per row, when a KL gradient flows.
    """
    jobs, forks = [], []
    for columns in p.column_parts():
        forks.append(sums.fork() if forks else sums)
        gradient = TileGradient(p, final, kept_final, gradients, divergences)
        part = (p, columns, gradient, p.scratch(), forks[-1], first_row, kept_logits)
        jobs.append(functools.partial(_backward_part, *part))
    _run_parts(p, jobs)
    for fork in forks[1:]:
        sums.join(fork)


def _backward_part(
    p: Problem,
    columns_swept: list[slice],
    gradient: TileGradient,
    scratch: Scratch,
    sums: HeadSums,
    first_row: int,
    kept_logits: KeptLogits,
    read: ReadRows,
) -> None:
    head = p.head
    h = low_h = weight_tile = None
    last_rows = last_columns = None
    for rows, columns in _walk(p, columns_swept):
        if rows is not last_rows:
            h, low_h = read(rows)
        if columns is not last_columns:
            weight_tile = head.weight_tile(columns)
        last_rows, last_columns = rows, columns
        assert h is not None and weight_tile is not None
        size, width = rows.stop - rows.start, columns.stop - columns.start
        tiles = scratch.tiles(gradient.scratch_tiles, size, width)
        z = kept_logits.tile(rows, columns)
        if z is None:
            z = head.logits(h, low_h, weight_tile, rows, columns, tiles[0])
        du = gradient.tile(z, tiles, rows, columns)
        placed = slice(rows.start + first_row, rows.stop + first_row)
        sums.add(du, h, low_h, weight_tile, placed, columns)


def _walk(p: Problem, columns: list[slice]) -> Iterator[tuple[slice, slice]]:
    rows = list(p.tiles.row_slices(p.num_rows))
    if p.tiles.order == "rows":
        yield from ((r, c) for r in rows for c in columns)
    else:
        yield from ((r, c) for c in columns for r in rows)
