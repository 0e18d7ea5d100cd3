"""The two sweeps of the fused LM head: statistics forward, recomputed logits and gradients backward.

Neither holds more than one tile of logits, unless the caller has room for more (`KeptLogits`): those are not
recomputed. The backward walks the tiles so that the larger gradient is written once: with fewer rows than
vocabulary, each weight tile is visited once and dW is written tile by tile; a loop over row chunks would
rewrite all of dW for every chunk (2 to 3 times slower at small chunks).
Tile order is fixed and nothing is atomic: two runs give the same bits.

On a CPU with several threads each core takes a part of the vocabulary (`Problem.cores`) with statistics and
a hidden gradient of its own, joined in a fixed order at the end: the cores then meet once per sweep, not
after every operation on a tile.
"""

# R rows of a chunk · W columns of a tile · T' selected rows · D model · V local vocabulary

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leanstep.cores import run_on_cores
from leanstep.logprob.extras import TopK, update_pair_
from leanstep.logprob.gradient import RowGradients, read_targets_
from leanstep.logprob.head import Head, RowSource, tile_buffer
from leanstep.logprob.head_sums import HeadSums
from leanstep.logprob.keep import KeepIds
from leanstep.logprob.kept_logits import KeptLogits
from leanstep.logprob.statistics import FinalStatistics, RowStatistics, merge
from leanstep.logprob.tile_gradient import TileGradient, reference_logits, restricted
from leanstep.logprob.tiles import Tiles, even_slices

# Hidden rows of a chunk, and those of the LoRA branch.
ReadRows = Callable[[slice], tuple[Tensor, Tensor | None]]


@dataclass
class Problem:
    """Everything constant about one call. `low` is the LoRA branch's input, `reference` the KL's head.

    `cores`: how many parts of the vocabulary are swept side by side.
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
    cores: int = 1

    @property
    def num_rows(self) -> int:
        return self.source.num_rows

    @property
    def two_softmaxes(self) -> bool:
        return self.keep is not None and self.moment

    def chunks(self, part: slice) -> tuple[Tensor, Tensor | None]:
        h = self.source.chunk(part, self.head.operand_dtype)
        return h, None if self.low is None else self.low.chunk(part, self.head.operand_dtype)

    def column_parts(self) -> list[list[slice]]:
        """Column slices of the tiles, cut into one run per core."""
        columns = list(self.tiles.column_slices(self.head.columns))
        per_core = max(-(-len(columns) // self.cores), 1)
        return [columns[part] for part in even_slices(len(columns), per_core)] or [[]]

    def buffers(self, count: int) -> list[Tensor]:
        """Flat tiles, made once per sweep."""
        size = self.tiles.rows * self.tiles.columns
        return [
            torch.empty(size, dtype=self.head.dtype, device=self.source.hidden.device) for _ in range(count)
        ]


def forward_sweep(p: Problem, kept_logits: KeptLogits | None = None) -> tuple[RowStatistics, TopK | None]:
    """Statistics of every selected row over this shard's columns; tiles that fit stay in `kept_logits`."""
    best = TopK.empty(p.num_rows, p.top_k, p.head.dtype, p.source.hidden.device) if p.top_k else None
    jobs, swept = [], []
    for columns in p.column_parts():
        swept.append(_empty_statistics(p))
        storage = p.buffers(2 if p.moment else 1)
        jobs.append(functools.partial(_forward_part, p, columns, swept[-1], storage, best, kept_logits))
    _run_parts(p, jobs)
    return functools.reduce(merge, swept), best


def _run_parts(p: Problem, jobs: Sequence[Callable[[ReadRows], None]]) -> None:
    """Run the parts of a sweep, side by side if there are several; each is given a way to read row chunks."""
    read = p.chunks
    if p.num_rows <= p.tiles.rows:
        whole = p.chunks(slice(0, p.num_rows))

        def read(part: slice) -> tuple[Tensor, Tensor | None]:
            return whole

    if len(jobs) == 1:
        jobs[0](read)
    else:
        run_on_cores([lambda core, job=job: job(read) for job in jobs], p.cores)


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
    storage: list[Tensor],
    best: TopK | None,
    kept_logits: KeptLogits | None,
    read: ReadRows,
) -> None:
    for rows in p.tiles.row_slices(p.num_rows):
        h, low_h = read(rows)
        size = rows.stop - rows.start
        part, tokens = stats.rows(rows.start, rows.stop), p.tokens[rows]
        for columns in columns_swept:
            width = columns.stop - columns.start
            first, last = (tile_buffer(s, size, width) for s in (storage[0], storage[-1]))
            z = None if kept_logits is None else kept_logits.new_tile(rows, columns, first)
            z = first if z is None else z
            p.head.logits(h, low_h, p.head.weight_tile(columns), rows, columns, z)
            read_targets_(part.target, z, tokens, p.head.shard, columns)
            if part.total is not None:
                part.total.add_(z.sum(-1))
            if best is not None:
                best.update_(z, rows, columns.start + p.head.shard.start)
            if p.reference is not None:
                update_pair_(part, z, reference_logits(p, rows, columns))
            if p.keep is not None:
                kept = restricted(p, p.keep, z, rows, columns)
                if p.two_softmaxes:
                    part.keep_part().update_(kept, kept)
                else:
                    z = kept
            part.update_(first, last, source=z)


def backward_sweep(
    p: Problem,
    final: FinalStatistics,
    kept_final: FinalStatistics | None,
    gradients: RowGradients,
    sums: HeadSums,
    *,
    first_row: int = 0,
    divergences: Sequence[Tensor | None] = (),
    kept_logits: KeptLogits | None = None,
) -> None:
    """Recompute the logits tile by tile and push the row gradients through them into `sums`.

    Args:
        kept_final: statistics of the restricted softmax, when `p.keep` is set.
        first_row: where these rows start among the rows of `sums`.
        divergences: kl, reverse_kl, reference max and log-sum per row, when a KL gradient flows.
        kept_logits: tiles that need no recomputing; they are read and not changed.
    """
    jobs, forks = [], []
    for columns in p.column_parts():
        forks.append(sums.fork() if forks else sums)
        gradient = TileGradient(p, final, kept_final, gradients, divergences)
        storage = p.buffers(2 if gradients.entropy is not None else 1)
        part = (p, columns, gradient, storage, forks[-1], first_row, kept_logits)
        jobs.append(functools.partial(_backward_part, *part))
    _run_parts(p, jobs)
    for fork in forks[1:]:
        sums.join(fork)


def _backward_part(
    p: Problem,
    columns_swept: list[slice],
    gradient: TileGradient,
    storage: list[Tensor],
    sums: HeadSums,
    first_row: int,
    kept_logits: KeptLogits | None,
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
        out, work = (tile_buffer(s, size, width) for s in (storage[0], storage[-1]))
        z = None if kept_logits is None else kept_logits.tile(rows, columns)
        if z is None:
            z = head.logits(h, low_h, weight_tile, rows, columns, out)
        du = gradient.tile_(z, out, work, rows, columns)
        placed = slice(rows.start + first_row, rows.stop + first_row)
        sums.add(du, h, low_h, weight_tile, placed, columns)


def _walk(p: Problem, columns: list[slice]) -> Iterator[tuple[slice, slice]]:
    rows = list(p.tiles.row_slices(p.num_rows))
    if p.tiles.order == "rows":
        yield from ((r, c) for r in rows for c in columns)
    else:
        yield from ((r, c) for c in columns for r in rows)
