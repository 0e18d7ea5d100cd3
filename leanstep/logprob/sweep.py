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

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leanstep.cores import run_on_cores
from leanstep.logprob.extras import TopK, update_pair_
from leanstep.logprob.gradient import RowGradients, read_targets_
from leanstep.logprob.head import Head, RowSource, product, tile_buffer
from leanstep.logprob.keep import KeepIds
from leanstep.logprob.kept_logits import KeptLogits, LentGradient
from leanstep.logprob.parallel import reduce_hidden_grad
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


class HeadGradients(NamedTuple):
    """Gradients of the head's inputs; None where not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    low_hidden: Tensor | None
    low_weight: Tensor | None


class HeadSums:
    """Gradients of the head's inputs while tiles are added to them.

    Args:
        wanted: which of hidden, weight, bias, low_hidden, low_weight need a gradient.
        main_grad: the weight's gradient is added here instead of returned.
        chunk_rows: most rows per `add`, when that is not the tile's height.
        lent: the weight's gradient where it was allocated early.
    """

    def __init__(
        self,
        p: Problem,
        wanted: Sequence[bool],
        main_grad: Tensor | None = None,
        chunk_rows: int | None = None,
        lent: LentGradient | None = None,
    ) -> None:
        head = p.head
        self.p = p
        self.hidden = _HiddenGradient(p.source, p, wanted[0], chunk_rows or p.tiles.rows)
        self.weight = _WeightGradient(head.weight, p, wanted[1], main_grad, lent)
        self.bias = None
        if wanted[2]:
            self.bias = torch.zeros(head.weight.shape[0], dtype=head.dtype, device=head.weight.device)
        self.low_hidden = self.low_weight = None
        if p.low is not None and head.low_weight is not None:
            self.low_hidden = _HiddenGradient(p.low, p, wanted[3], chunk_rows or p.tiles.rows)
            self.low_weight = _WeightGradient(head.low_weight, p, wanted[4], None)

    def add(
        self, du: Tensor, h: Tensor, low_h: Tensor | None, weight_tile: Tensor, rows: slice, columns: slice
    ) -> None:
        """Push the gradient of one tile of u = h W^T + b to every input."""
        head = self.p.head
        if self.bias is not None:
            self.bias[columns].add_(du.sum(0))
        du = du.to(head.operand_dtype)
        self.hidden.add(du, weight_tile, rows, columns)
        self.weight.add(du, h, rows, columns)
        if low_h is not None and self.low_hidden is not None and self.low_weight is not None:
            assert head.low_weight is not None
            self.low_hidden.add(du, head.low_weight[columns].to(du.dtype), rows, columns)
            self.low_weight.add(du, low_h, rows, columns)

    def fork(self) -> HeadSums:
        """The same sums for another core: columns are written where they are, rows into sums of their own."""
        other = copy.copy(self)
        other.hidden, other.weight = self.hidden.fork(), self.weight.fork()
        other.low_hidden = None if self.low_hidden is None else self.low_hidden.fork()
        other.low_weight = None if self.low_weight is None else self.low_weight.fork()
        return other

    def join(self, other: HeadSums) -> None:
        """Add the rows that another core summed up."""
        self.hidden.join(other.hidden)
        if self.low_hidden is not None and other.low_hidden is not None:
            self.low_hidden.join(other.low_hidden)

    def result(self) -> HeadGradients:
        bias = self.p.head.bias
        return HeadGradients(
            self.hidden.result(),
            self.weight.result(),
            None if self.bias is None or bias is None else self.bias.to(bias.dtype),
            None if self.low_hidden is None else self.low_hidden.result(),
            None if self.low_weight is None else self.low_weight.result(),
        )


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


class _HiddenGradient:
    """Rows of d hidden, summed over vocabulary tiles in the accumulation dtype and cast once."""

    def __init__(self, source: RowSource, p: Problem, wanted: bool, chunk_rows: int) -> None:
        self.source, self.p = source, p
        self.out = self.sums = self.chunk = None
        if not wanted:
            return
        hidden, dtype = source.hidden, p.head.dtype
        self.out = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
        if source.rows is None and hidden.dtype == dtype:
            self.sums = self.out
        elif p.tiles.order == "vocab" or p.group is not None:
            self.sums = hidden.new_zeros((source.num_rows, hidden.shape[1]), dtype=dtype)
        else:
            self.chunk = hidden.new_zeros((min(chunk_rows, source.num_rows), hidden.shape[1]), dtype=dtype)

    def fork(self) -> _HiddenGradient:
        """Fresh sums of the same rows, for another core; "vocab" order only."""
        other = copy.copy(self)
        other.sums = None if self.sums is None else torch.zeros_like(self.sums)
        return other

    def join(self, other: _HiddenGradient) -> None:
        if self.sums is not None and other.sums is not None:
            self.sums.add_(other.sums)

    def add(self, du: Tensor, weight_tile: Tensor, rows: slice, columns: slice) -> None:
        if self.sums is not None:
            product(du, weight_tile, self.sums[rows], accumulate=True)
        elif self.chunk is not None:
            sums = self.chunk[: rows.stop - rows.start]
            product(du, weight_tile, sums, accumulate=columns.start > 0)
            if columns.stop == self.p.head.columns:
                self._write(rows, sums)

    def result(self) -> Tensor | None:
        if self.out is None:
            return None
        if self.sums is not None:
            self.sums = reduce_hidden_grad(self.sums, self.p.group, self.p.reduce_grad)  # type: ignore[arg-type]
            if self.sums is not self.out:
                self._write(slice(0, self.source.num_rows), self.sums)
        return self.out

    def _write(self, part: slice, sums: Tensor) -> None:
        assert self.out is not None
        if self.source.rows is None:
            self.out[part] = sums
        else:
            # Adding, not copying: a row may be selected twice.
            self.out.index_add_(0, self.source.rows[part], sums.to(self.out.dtype))


class _WeightGradient:
    """dW, each tile written once in "vocab" order, or summed over row chunks in "rows" order."""

    def __init__(
        self,
        weight: Tensor,
        p: Problem,
        wanted: bool,
        main_grad: Tensor | None,
        lent: LentGradient | None = None,
    ) -> None:
        self.p, self.main_grad = p, main_grad
        self.out = self.sums = self.tile = None
        if not wanted:
            return
        dtype = p.head.dtype
        if main_grad is not None:
            self.sums = main_grad
            return
        if lent is None:
            make = torch.empty_like if p.num_rows and p.head.columns else torch.zeros_like
            self.out = make(weight, memory_format=torch.contiguous_format)
        else:
            self.out = lent.gradient
        self.out[p.head.columns :] = 0.0
        if weight.dtype == dtype:
            self.sums = self.out
        elif p.tiles.order == "rows":
            self.sums = weight.new_zeros(weight.shape, dtype=dtype)
        else:
            self.tile = weight.new_zeros((p.tiles.columns, weight.shape[1]), dtype=dtype)

    def fork(self) -> _WeightGradient:
        """Another core's hand on the same gradient, with a tile of its own to sum in."""
        other = copy.copy(self)
        other.tile = None if self.tile is None else torch.zeros_like(self.tile)
        return other

    def add(self, du: Tensor, h: Tensor, rows: slice, columns: slice) -> None:
        if self.sums is not None:
            accumulate = rows.start > 0 or self.main_grad is not None
            if self.sums.dtype == self.p.head.dtype:
                product(du.t(), h, self.sums[columns], accumulate=accumulate)
            else:
                self.sums[columns] += du.t() @ h
        elif self.tile is not None and self.out is not None:
            sums = self.tile[: columns.stop - columns.start]
            product(du.t(), h, sums, accumulate=rows.start > 0)
            if rows.stop == self.p.num_rows:
                self.out[columns] = sums

    def result(self) -> Tensor | None:
        if self.out is not None and self.sums is not None and self.sums is not self.out:
            self.out.copy_(self.sums)
        return self.out
